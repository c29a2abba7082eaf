"""Trackers: what is written, what a resume keeps, and that a failing one never stops a run."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from megaverl.errors import ConfigError
from megaverl.monitoring import backends
from megaverl.monitoring.backends import check_backends, read_metrics
from megaverl.monitoring.tracker import WAITING, Queued, Tracker


def steps(run_dir: Path) -> list[int]:
    return [int(record["step"]) for record in read_metrics(run_dir / "metrics.jsonl")]


def test_json_lines_are_written_even_when_not_asked_for(tmp_path: Path) -> None:
    with Tracker(tmp_path, backends=[]) as tracker:
        tracker.log(0, {"reward/mean": 0.5})
        # Flushed at once: whoever looks during the run sees it.
        line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["step"] == 0
    assert line["reward/mean"] == 0.5


def test_numbers_without_a_json_word_survive(tmp_path: Path) -> None:
    with Tracker(tmp_path, backends=["jsonl"]) as tracker:
        tracker.log(
            1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e-300}
        )

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 1e-300)


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Tracker(tmp_path, backends=["csv"]) as tracker:
        for step in range(5):
            tracker.log(step, {"loss": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')  # killed within a write
    with Tracker(tmp_path, backends=["csv"], resume_step=2) as tracker:
        tracker.log(3, {"loss": 30.0})
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"] == 30.0
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["loss"])) for row in rows] == [
        ("0", 0),
        ("1", 1),
        ("2", 2),
        ("3", 30),
    ]


def test_a_fresh_run_keeps_an_older_file_aside(tmp_path: Path) -> None:
    for run in range(3):
        with Tracker(tmp_path, backends=[]) as tracker:
            tracker.log(run, {})
    assert steps(tmp_path) == [2]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"metrics.jsonl", "metrics.1.jsonl", "metrics.2.jsonl"}


def test_csv_takes_a_new_column_later(tmp_path: Path) -> None:
    with Tracker(tmp_path, backends=["csv"]) as tracker:
        tracker.log(0, {"loss": 1.0})
        tracker.log(1, {"loss": 0.5, "validation/accuracy": 0.25})
        tracker.log(2, {"loss": 0.2})
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["validation/accuracy"] for row in rows] == ["", "0.25", ""]
    assert [row["loss"] for row in rows] == ["1.0", "0.5", "0.2"]


def test_tensorboard_shows_the_resumed_run(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    with Tracker(tmp_path) as tracker:
        assert tracker.active == ("jsonl", "tensorboard")
        for step in range(4):
            tracker.log(step, {"reward/mean": float(step)})
    with Tracker(tmp_path, resume_step=1) as tracker:
        tracker.log(2, {"reward/mean": 20.0})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]


class Failing:
    """A backend whose server goes away after the first record."""

    def __init__(self, info: backends.RunInfo) -> None:
        self.written = 0

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        if self.written:
            raise ConnectionError("the server is gone")
        self.written += 1

    def close(self) -> None:
        raise AssertionError("a backend that was left out is not closed again")


def test_a_failing_backend_is_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.BACKENDS, "failing", (Failing, None))
    warnings: list[str] = []
    with Tracker(tmp_path, backends=["failing"], warn=warnings.append) as tracker:
        for step in range(4):
            tracker.log(step, {"loss": 1.0})
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert len(warnings) == 1
    assert (
        "'failing'" in warnings[0]
        and "step 1" in warnings[0]
        and "the server is gone" in warnings[0]
    )


def test_what_is_not_installed_warns_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        backends.BACKENDS, "wandb", (backends.Wandb, "no_such_module_wandb")
    )
    warnings: list[str] = []
    with Tracker(tmp_path, backends=["wandb"], warn=warnings.append) as tracker:
        assert tracker.active == ("jsonl",)
    assert len(warnings) == 1
    assert "'wandb' is not installed: pip install 'megaverl[wandb]'" in warnings[0]


def test_check_lists_every_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        backends.BACKENDS, "wandb", (backends.Wandb, "no_such_module_wandb")
    )
    with pytest.raises(ConfigError) as caught:
        check_backends(["jsonl", "tensorbord", "wandb"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "'tensorbord'" in lines[0] and "tensorboard" in lines[0]
    assert "megaverl[wandb]" in lines[1]
    check_backends(["jsonl", "csv"])


def test_a_value_that_is_not_one_number_is_named(tmp_path: Path) -> None:
    with (
        Tracker(tmp_path, backends=[]) as tracker,
        pytest.raises(TypeError, match="'reward/all'.*list"),
    ):
        tracker.log(0, {"reward/all": [1, 2]})
    assert steps(tmp_path) == []


def test_tensors_of_one_element_are_numbers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with Tracker(tmp_path, backends=[]) as tracker:
        tracker.log(0, {"loss": torch.tensor(0.25), "grad": torch.tensor([3])})
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (record["loss"], record["grad"]) == (0.25, 3.0)


def test_only_some_metrics_go_to_the_trackers(tmp_path: Path) -> None:
    with Tracker(tmp_path, backends=["csv"], only=["reward/*", "*loss"]) as tracker:
        tracker.log(0, {"memory/x": 1.0})
        tracker.log(1, {"reward/mean": 1.0, "actor/loss": 2.0, "memory/x": 3.0})
    with (tmp_path / "metrics.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "time", "reward/mean", "actor/loss"] and [
        row[0] for row in rows
    ] == ["1"]
    assert [
        record["memory/x"] for record in read_metrics(tmp_path / "metrics.jsonl")
    ] == [1.0, 3.0]


OWN = """
class Mine:
    def __init__(self, info):
        self.file = (info.run_dir / "mine.txt").open("a")
        self.file.write(f"{info.name} {info.config['seed']}\\n")

    def write(self, step, seconds, metrics):
        self.file.write(f"{step} {metrics}\\n")

    def close(self):
        self.file.close()
"""


def test_a_tracker_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    warnings: list[str] = []
    own, wrong = f"{tmp_path / 'own.py'}:Mine", f"{tmp_path / 'own.py'}:Yours"
    with Tracker(
        tmp_path, [own, wrong], name="me", config={"seed": 3}, warn=warnings.append
    ) as tracker:
        tracker.log(1, {"a": 1.0})
        tracker.log(2, {"a": 2.0})
    assert (tmp_path / "mine.txt").read_text().splitlines() == [
        "me 3",
        "1 {'a': 1.0}",
        "2 {'a': 2.0}",
    ]
    assert len(warnings) == 1 and "has no 'Yours'" in warnings[0]


class Stuck:
    """A tracker whose server does not answer."""

    released = threading.Event()

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self.released.wait()

    def close(self) -> None: ...


def test_training_never_waits_for_a_tracker() -> None:
    said: list[str] = []
    tracker = Queued("stuck", Stuck, said.append)
    try:
        for step in range(WAITING + 5):
            tracker.write(step, 0.0, {"a": 1.0})
        assert (
            len(said) == 1 and "has not taken the last" in said[0] and not tracker.works
        )
        other = Queued("stuck", Stuck, said.append)
        other.write(1, 0.0, {})
        other.close(seconds=0.05)
        assert "not finished within" in said[1]
    finally:
        Stuck.released.set()


def test_a_tracker_that_wants_to_end_the_program_is_left_out() -> None:
    def make() -> Stuck:
        raise SystemExit("no login")

    said: list[str] = []
    tracker = Queued("rude", make, said.append)
    tracker.close()
    tracker.write(1, 0.0, {})
    assert said == ["could not start, it is left out now: SystemExit: no login"]


METRICS = {"reward/mean": 0.5, "validation/pass@1": 0.25, "actor/loss": float("nan")}


@pytest.fixture
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_URI",
        "SWANLAB_MODE",
        "SWANLAB_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


SAMPLES = [
    {"prompt": "1 + 1 =", "response": "2", "reward": 1.0},
    {"prompt": "p | q", "response": "<b>\n|</b>", "reward": None, "turns": [1, 2]},
]


def test_samples_are_a_table_in_tensorboard(tmp_path: Path) -> None:
    """What a model wrote stays text there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    with Tracker(tmp_path, ["tensorboard", "csv"], warn=warnings.append) as tracker:
        tracker.log_samples(4, "validation", SAMPLES)
        tracker.log_samples(5, "validation", [])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/validation/text_summary")
    assert (warnings, event.step) == ([], 4)
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | response | reward | turns |",
        "| --- | --- | --- | --- |",
        "| <code>1 + 1 =</code> | <code>2</code> | 1.0 |  |",
        "| <code>p &#124; q</code> | <code>&lt;b&gt;<br>&#124;&lt;/b&gt;</code> |  | <code>[1, 2]</code> |",
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_services_keep_what_they_get_offline(
    tmp_path: Path, nobody_logged_in: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real libraries, without a login and without a question, in the run's folder; and a second start goes on."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"pip install 'megaverl[{name}]'")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    warnings: list[str] = []
    for resume_step in (None, 1):
        with Tracker(
            tmp_path,
            [name],
            name="a run",
            config={"a": {"b": 1}},
            warn=warnings.append,
            resume_step=resume_step,
        ) as tracker:
            step = 1 if resume_step is None else 2
            tracker.log(step, METRICS)
            tracker.log_samples(step, "train", SAMPLES)
    assert warnings == []
    assert list(elsewhere.iterdir()) == []
    files = {"wandb": "wandb", "mlflow": "mlflow_run_id", "swanlab": "swanlog"}
    assert (tmp_path / files.get(name, name)).exists()
    if name == "mlflow":
        import mlflow

        run = mlflow.get_run((tmp_path / "mlflow_run_id").read_text())
        history = mlflow.MlflowClient().get_metric_history(
            run.info.run_id, "validation/pass_1"
        )
        assert [point.step for point in history] == [1, 2], "both starts are one run"
        table = mlflow.load_table("samples_train.json", run_ids=[run.info.run_id])
        assert [*table["step"]] == [1, 1, 2, 2] and table["response"][1] == SAMPLES[1][
            "response"
        ]
        assert "config.json" in [
            file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)
        ]
    if name == "wandb":
        files = [
            path for path in (tmp_path / "wandb").rglob("samples/train_*.table.json")
        ]
        tables = [json.loads(path.read_text()) for path in files]
        assert [table["columns"] for table in tables] == [
            ["prompt", "response", "reward", "turns"]
        ] * 2
        assert tables[0]["data"][1] == ["p | q", "<b>\n|</b>", None, "[1, 2]"]
        (kept,) = {
            folder.name.split("-")[3]
            for folder in (tmp_path / "wandb").glob("offline-run-*")
        }
        assert kept == (tmp_path / "wandb_run_id").read_text(), (
            "both starts are one run"
        )
        with Tracker(tmp_path, [name], name="a run", warn=warnings.append):
            pass
        assert (tmp_path / "wandb_run_id").read_text() != kept, "a fresh one is another"
