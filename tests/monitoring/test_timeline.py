"""Spans: what is summed, how they nest, and the trace that they leave."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from megaverl.monitoring import timeline as module
from megaverl.monitoring.timeline import Timeline, merge_traces


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances one millisecond at each reading."""
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(ticks) * 1_000_000)


def test_sums_of_a_step(clock: None) -> None:
    timeline = Timeline()
    with timeline.step(0):  # reads 1
        for _ in range(2):
            with timeline.span("rollout"):  # reads 2 3, then 4 5
                assert timeline is not None
        with timeline.span("update"), timeline.span("forward"):  # reads 6 (7 8) 9
            assert timeline is not None
    # the step ends at 10
    assert timeline.step_metrics() == {
        "time/forward_ms": 1.0,
        "time/rollout_ms": 2.0,
        "time/update_ms": 3.0,
        "time/step_ms": 9.0,
        "time/other_ms": 4.0,
    }


@pytest.mark.parametrize("number", [0, 1])
def test_a_new_step_starts_at_zero(clock: None, number: int) -> None:
    """One of the same number too, which is done again."""
    timeline = Timeline()
    with timeline.step(0), timeline.span("only in the first"):
        assert timeline is not None
    with timeline.step(number):
        assert timeline is not None
    assert timeline.step_metrics() == {"time/step_ms": 1.0, "time/other_ms": 1.0}


def test_a_span_closes_when_its_block_raises(clock: None) -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.step(0), timeline.span("broken"):
        raise KeyError("x")
    with timeline.step(1), timeline.span("outermost again"):
        assert timeline is not None
    assert timeline.step_metrics()["time/other_ms"] == 2.0


def test_other_threads_do_not_count_as_the_steps_own_time() -> None:
    timeline = Timeline()

    def work() -> None:
        with timeline.span("reward"):
            threading.Event().wait(0.001)

    with timeline.step(0):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    metrics = timeline.step_metrics()
    assert (
        metrics["time/other_ms"]
        == metrics["time/step_ms"]
        >= metrics["time/reward_ms"]
        > 0
    )


def test_the_trace_of_two_ranks_is_one_file(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        timeline = Timeline(rank=rank)
        with timeline.step(7), timeline.span("outer"), timeline.span("inner"):
            assert timeline is not None
        paths.append(timeline.export(tmp_path / f"trace_{rank}.json"))
    merged = merge_traces(paths, tmp_path / "trace.json")
    events = [
        e for e in json.loads(merged.read_text())["traceEvents"] if e["ph"] == "X"
    ]
    assert {(e["pid"], e["name"]) for e in events} == set(
        itertools.product((0, 1), ("step", "outer", "inner"))
    )
    first = {e["name"]: e for e in events if e["pid"] == 0}
    assert (
        all(e["args"]["step"] == 7 for e in events)
        and "processor_us" not in first["step"]["args"]
    )
    assert (
        0
        <= first["inner"]["args"]["processor_us"]
        <= first["outer"]["args"]["processor_us"]
    )
    assert first["step"]["ts"] <= first["outer"]["ts"] <= first["inner"]["ts"]
    # microseconds since the epoch, so that ranks share an axis
    assert abs(events[0]["ts"] - events[-1]["ts"]) < 60e6
    assert {path.name for path in tmp_path.iterdir()} == {
        "trace_0.json",
        "trace_1.json",
        "trace.json",
    }


def test_only_the_last_events_are_kept() -> None:
    timeline = Timeline(max_events=3)
    for number in range(10):
        with timeline.span(str(number)):
            assert timeline is not None
    assert [e["name"] for e in timeline.trace_events() if e["ph"] == "X"] == [
        "7",
        "8",
        "9",
    ]
    assert len(timeline.step_metrics()) == 10


def test_busy_shares_by_role() -> None:
    timeline = Timeline()
    timeline.roles = {
        "rollout": "rollout",
        "reshard": "rollout",
        "update": "actor",
        "values": "critic",
    }
    with timeline.step(0):
        for name in ("rollout", "update", "reshard"):
            with timeline.span(name):
                pass
    timeline._totals.update({"rollout": 30, "reshard": 20, "update": 500})
    timeline._step_ns = 100
    metrics = timeline.step_metrics()
    assert {key: metrics[key] for key in metrics if key.startswith("busy/")} == {
        "busy/rollout": 0.5,
        "busy/actor": 1.0,
        "busy/critic": 0.0,
    }
    spans = {
        event["name"]: event for event in timeline.trace_events() if event["ph"] == "X"
    }
    assert spans["reshard"]["args"].keys() == {"step", "role", "processor_us"}
    assert (spans["reshard"]["args"]["step"], spans["reshard"]["args"]["role"]) == (
        0,
        "rollout",
    )


def test_a_process_that_loses_its_processor_between_two_clocks_shifts_no_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but one of the readings that tie the clocks are torn by a millisecond, before the wall clock's or after."""
    elapsed, readings = itertools.count(), itertools.count()
    lost = [0]

    def now(beginning: int) -> int:
        lost[0] += (
            1_000_000 if next(readings) in {*range(1, 30, 3), *range(35, 48, 3)} else 0
        )
        return beginning + next(elapsed) + lost[0]

    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: now(0))
    monkeypatch.setattr(module.time, "time_ns", lambda: now(10**18))
    timeline = Timeline()
    with timeline.span("rollout"):
        began = 10**18 + 49 + lost[0]
    assert timeline.trace_events()[1]["ts"] == pytest.approx(began / 1e3, abs=0.05)
