"""The report: what is read, what is worked out of it, and that the page holds it and loads nothing."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from array import array
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from megaverl.cli.main import main as megaverl
from megaverl.errors import DataError
from megaverl.monitoring.report import ReportServer, write_report
from megaverl.monitoring.report.charts import (
    busy_shares,
    covered,
    gantt,
    idle_share,
    line_chart,
    nice_ticks,
    windows,
)
from megaverl.monitoring.report.run_folder import (
    POINTS,
    Bucket,
    RunRecord,
    Series,
    TraceSpan,
    buckets,
    duration,
    ends,
    read_run,
    short,
)
from megaverl.monitoring.report.summaries import (
    PER_STEP,
    STEPS,
    memory_parts,
    observations,
    settings,
    shown_samples,
    time_parts,
)
from tools.bench_report import STAGES, make_run


def main(arguments: list[str]) -> int:
    """`megaverl report`"""
    return megaverl(["report", *arguments])


STEPS_MADE = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made", STEPS_MADE)


@pytest.fixture(scope="module")
def run(folder: Path) -> RunRecord:
    return read_run(folder)


def series(*values: float) -> Series:
    return Series(array("d", range(1, len(values) + 1)), array("d", values))


def span(
    name: str,
    begin: float,
    duration: float,
    rank: int = 0,
    step: int | None = 0,
    role: str = "actor",
) -> TraceSpan:
    return TraceSpan(rank, name, role, begin, duration, step)


class Page(HTMLParser):
    """The tags of a page, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "data", "action", "xlink:href"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.add(value or "")
        self.open.append(tag)


def test_a_run_is_read_whole(run: RunRecord) -> None:
    assert (run.name, run.command, run.num_steps, run.planned_steps) == (
        "made",
        "train",
        STEPS_MADE,
        STEPS_MADE,
    )
    assert len(run.metrics["reward/mean"].values) == STEPS_MADE
    assert len(run.steps) == STEPS_MADE and len(run.spans) == STEPS_MADE * len(STAGES)
    assert {found.role for found in run.spans} == {role for role, _ in STAGES.values()}
    assert len(run.samples) == 4 * STEPS_MADE
    assert run.warnings == ["warning: a warning of the run itself"]
    assert run.versions["megaverl"]


def test_the_page_loads_nothing_and_is_small(folder: Path, tmp_path: Path) -> None:
    page = write_report([folder], tmp_path / "report.html")
    text = page.read_text()
    parsed = Page(text)
    assert [
        address for address in parsed.addresses if not address.startswith("#")
    ] == []
    assert {address[1:] for address in parsed.addresses} <= parsed.ids
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text
    assert page.stat().st_size < 1_000_000
    for name in (
        "reward",
        "actor_update",
        "a warning of the run itself",
        "trainer.steps",
    ):
        assert name in text


def test_a_longer_run_makes_no_larger_page(run: RunRecord) -> None:
    """What is drawn of 10,000 steps is what is drawn of 400: `POINTS` at most of each curve."""
    long = Series(
        array("d", range(10_000)),
        array("d", (math.sin(step / 500) for step in range(10_000))),
    )
    assert len(buckets(long)) == len(buckets(run.metrics["reward/mean"])) == POINTS


def test_what_a_model_writes_cannot_become_markup(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "<b>x</b>/y": 1.0}\n')
    evil = {
        "step": 1,
        "split": "train",
        "prompt": "</pre><script>alert(1)</script>",
        "response": "\x1b[31m\x00<i>",
    }
    (run / "samples.jsonl").write_text(
        json.dumps({**evil, "reference": "'\"&", "reward": 1.0}) + "\n"
    )
    text = write_report([run], tmp_path / "out.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    assert "<b>x</b>" not in text and "<i>" not in text.replace('<i class="', "")
    assert "\x1b" not in text and "\x00" not in text


def test_two_runs_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "made", 30, seed=1)
    text = write_report([folder, other], tmp_path / "both.html").read_text()
    assert text.count('<section class="summary">') == 2
    assert f"{folder.parent.name}/made" in text and f"{tmp_path.name}/made" in text, (
        "equal names are told apart"
    )
    assert 'class="line c0"' in text and 'class="line c1"' in text
    assert re.search(
        r'class="differs"><td><code>trainer.steps</code></td><td>400</td><td>30</td>',
        text,
    )


def test_settings_shows_what_was_set(folder: Path) -> None:
    run, other = read_run(folder), read_run(folder)
    run.config["actor"]["tp"] = 4
    del other.config["model"]
    found = {setting.key: setting for setting in settings([run, other])}
    assert found["actor.tp"].values == ("4", "1") and found["actor.tp"].differs
    assert "actor.pp" not in found
    assert not found["trainer.steps"].differs, "the same in both, and not the default"
    assert found["model.dtype"].values == ("auto", "")


def test_buckets_keep_means_and_extremes() -> None:
    values = [float(number % 10) for number in range(1000)]
    values[500] = 99.0
    found = buckets(series(*values), 100)
    assert len(found) == 100
    assert (
        max(bucket.high for bucket in found) == 99.0
        and min(bucket.low for bucket in found) == 0.0
    )
    assert sum(bucket.mean for bucket in found) / 100 == pytest.approx(
        sum(values) / 1000, rel=0.05
    )
    few = buckets(series(1.0, math.nan, 3.0))
    assert [(bucket.step, bucket.mean) for bucket in few] == [(1, 1.0), (3, 3.0)]
    assert buckets(series(math.nan)) == [] and buckets(Series()) == []


def test_words_for_numbers() -> None:
    assert [short(v) for v in (0, 0.1234, 1234.5, 56789, 1.5e9, 1e-5)] == [
        "0",
        "0.123",
        "1234",
        "56.8k",
        "1.5G",
        "1.0e-05",
    ]
    assert (short(math.nan), short(math.inf)) == ("–", "∞")
    assert [duration(v) for v in (0.0123, 4.213, 200, 7500)] == [
        "12.3 ms",
        "4.21 s",
        "3 min 20 s",
        "2 h 05 min",
    ]
    assert ends(series(*range(1, 101))) == (3.0, 98.0)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.2, 7.9), (5, 5), (0, 0), (1e-9, 2e-9), (1e6, 3.3e6)]
)
def test_ticks_are_round_and_hold_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 7


@pytest.mark.parametrize(
    ("value", "is_share", "axis"),
    [
        (0.0, True, "0 1"),
        (1.0, True, "0 1"),
        (0.0, False, "0 1"),
        (-2.0, False, "-2.2 -1.8"),
    ],
)
def test_the_axis_of_a_metric_that_stays_the_same(
    value: float, is_share: bool, axis: str
) -> None:
    chart = line_chart(
        "a",
        [("run", [Bucket(step, value, value, value) for step in (1, 2)])],
        is_share=is_share,
    )
    assert f'data-y="{axis}"' in chart


def test_busy_shares_count_overlaps_once() -> None:
    run = RunRecord(Path("x"), "x")
    run.spans = [
        span("a", 0, 60), span("b", 30, 50), span("c", 100, 0.0),
        span("r", 0, 100, rank=1, role="rollout"),
    ]  # fmt: skip
    assert covered(run.spans[:2]) == 80
    shares = {busy.role: busy for busy in busy_shares(run)}
    assert shares["actor"].share == pytest.approx(0.8) and shares[
        "rollout"
    ].share == pytest.approx(1.0)
    assert idle_share(run) == pytest.approx(0.1)


def test_who_waits_is_not_busy(tmp_path: Path) -> None:
    """For what comes from other ranks, or, ahead of training, for their weights."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1}\n')
    events = [
        {"ph": "X", "pid": 1, "name": name, "ts": 0, "dur": 9}
        for name in ("wait", "pause", "rollout", "reward")
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    assert {busy.role for busy in busy_shares(read_run(tmp_path))} == {
        "rollout",
        "reward",
    }


def test_the_gantt_shows_a_usual_step_and_the_slowest(run: RunRecord) -> None:
    shown = RunRecord(Path("x"), "x")
    shown.steps = [span("step", number * 100, 90, step=number) for number in range(9)]
    shown.steps[7] = span("step", 700, 300, step=7)
    # Of engines apart.
    ahead = [span("step", number * 10, 5, step=number, rank=3) for number in range(9)]
    shown.steps = [*ahead, *shown.steps]
    shown.spans = [
        span("actor_update", number * 100, 80, step=number) for number in range(9)
    ]
    titles = [title for title, *_ in windows(shown)]
    assert titles[0].startswith("steps 5 and 6 ") and titles[1].startswith(
        "the slowest, step 8 ("
    )
    picture = gantt(run, *windows(run)[0][1:])
    roles = {role for role, _ in STAGES.values()}
    assert all(f">{role}</text>" in picture for role in roles)
    assert "<title>actor_update: " in picture


def test_where_time_and_memory_went() -> None:
    run = RunRecord(Path("x"), "x")
    run.metrics = {
        "time/rollout_ms": series(10, 30, 20),
        "time/actor_update_ms": series(60, 60, 60),
        "time/step_ms": series(90, 90, 90),
        "memory/actor_gpu_mem_mb": series(10, 90, 20),
    }
    parts = time_parts(run)
    assert [(part.name, part.median, part.share) for part in parts] == [
        ("actor_update", 60, 0.75),
        ("rollout", 20, 0.25),
    ]
    assert memory_parts(run)[0][:5] == ("actor", 10, 90, 2, 20)
    colours = {"rollout": 0}  # of another run on the page
    assert [part.colour for part in time_parts(run, colours)] == [1, 0]


def test_what_a_look_at_the_numbers_finds() -> None:
    run = RunRecord(Path("x"), "x", config={"trainer": {"steps": 30}}, command="train")
    run.metrics = {
        "actor/loss": series(1, math.nan, math.inf),
        "train/step_time_ms": series(*[100.0] * 20, 900.0),
        "rollout/logprob_diff_mean": series(*[1e-6] * 20, *[0.1] * 5),
        "reward/std": series(1, *[0.0] * 6),
    }
    text = "\n".join(observations(run))
    assert "actor/loss is not a finite number at step 2 and 1 more" in text
    assert "25 of 30 steps" in text
    assert "the slowest is step 21 with 900 ms" in text
    assert "drift" in text and "they give no gradient" in text


def test_samples_from_the_first_step_to_the_last(run: RunRecord) -> None:
    found = shown_samples(run)
    assert len(found) == STEPS and all(
        len(group.samples) == PER_STEP for group in found
    )
    assert (found[0].step, found[-1].step) == (1, STEPS_MADE)
    assert {sample.level for group in found for sample in group.samples} == {0, 4}


def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    assert main([str(tmp_path)]) == 1
    assert "metrics.jsonl, line 2: not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "metrics.jsonl",
            '{"a": 1}\n',
            r"metrics.jsonl, line 1: not a record of metrics \(KeyError\('step'\)",
        ),
        ("metrics.jsonl", "[1]\n", r"metrics.jsonl, line 1: not a record \(\[1\]\)"),
        (
            "metrics.jsonl",
            '{"step": 1, "a": "b"}\n',
            "metrics.jsonl, line 1: not a record of metrics",
        ),
        ("versions.json", "{", "versions.json: cannot be read"),
        ("train.yaml", "a: [", "train.yaml: cannot be read"),
        ("train.yaml", "7", "train.yaml: holds a int; expected a mapping"),
        (
            "timeline.json",
            '{"traceEvents": [{"ph": "X"}]}',
            "timeline.json: not a Chrome trace",
        ),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, file: str, text: str, words: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1}\n')
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=words):
        read_run(tmp_path)


def test_a_run_that_is_still_going(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torn last lines, no timeline, no samples."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 5.0, "sft/loss": "NaN"}\n{"step": 2, "ti'
    )
    assert main([str(tmp_path)]) == 0
    assert "report.html (" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text()
    assert (
        "There is no timeline.json" in text
        and "sft/loss is not a finite number at step 1" in text
    )


def test_a_page_is_served_while_the_run_goes_on(tmp_path: Path, folder: Path) -> None:
    """On loopback to everybody here; elsewhere to whoever has the token."""
    run = tmp_path / "run"
    run.mkdir()
    line = '{{"step": {0}, "time": {0}, "reward/mean": {0}}}\n'
    (run / "metrics.jsonl").write_text(line.format(1))
    with (
        ReportServer([run], "127.0.0.1", 0, "secret") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(server.serve_forever, 0.05)
        try:
            plain = server.address.partition("?")[0]
            assert (
                httpx.get(plain).status_code
                == httpx.get(f"{plain}?token=other").status_code
                == 403
            )
            first = httpx.get(server.address)
            assert (
                first.status_code == 200
                and first.headers["content-type"] == "text/html; charset=utf-8"
            )
            assert first.text == httpx.get(server.address).text, "made once"
            with (run / "metrics.jsonl").open("a") as file:
                file.write(line.format(2))
            os.utime(run / "metrics.jsonl", (9, 9))
            assert httpx.get(server.address).text != first.text
            assert httpx.get(f"{plain}etc/passwd?token=secret").status_code == 404
            (run / "metrics.jsonl").write_text("{\n")
            assert httpx.get(server.address).status_code == 503
        finally:
            server.shutdown()
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())):
        with ReportServer([folder], host, 0, None) as server:
            assert server.address == f"http://{shown}:{server.server_port}/"


def test_serving_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert (
            main([str(tmp_path), "--serve", "--port", str(taken.getsockname()[1])]) == 1
        )
    assert "Choose another --port" in capsys.readouterr().err
    assert main([str(tmp_path), "--serve", "--port", "0"]) == 1
    assert "no metrics.jsonl" in capsys.readouterr().err
