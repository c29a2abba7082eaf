"""Steps that are profiled: what each rank writes, and the one trace of all of them. With real tools, in one process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.cli.main import main
from megaverl.config.watching import ProfileConfig, py_spy
from megaverl.errors import ConfigError, DataError
from megaverl.monitoring.profiler import (
    Profiler,
    profiled_steps,
    step_folder,
    write_step_trace,
)
from megaverl.monitoring.timeline import Timeline


def profile_steps(
    folder: Path, rank: int, *steps: int, products: int = 1, **chosen: Any
) -> list[str]:
    """Steps with a stage that multiplies matrices, on a rank; the warnings."""
    warnings: list[str] = []
    timeline = Timeline(rank)
    profiler = Profiler(
        ProfileConfig(**chosen), folder, rank, timeline, warnings.append
    )
    for step in steps:
        profiler.begin(step)
        profiler.begin(step)  # a program's own loop says it twice
        with timeline.step(step - 1), timeline.span("actor_update"):
            for _ in range(products):
                torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end(step)
    profiler.close()
    timeline.export(folder / "timeline.json")
    return warnings


def events_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    found: list[dict[str, Any]] = json.loads(
        gzip.decompress(data) if path.suffix == ".gz" else data
    )["traceEvents"]
    return found


def test_all_ranks_stand_in_one_trace_inside_of_their_stages(tmp_path: Path) -> None:
    for rank in range(2):
        assert profile_steps(tmp_path, rank, 1, 2, 3, steps=[2]) == []
    assert profiled_steps(tmp_path) == [2]
    path, others = write_step_trace(tmp_path)
    assert (path, others) == (tmp_path / "trace_2.json.gz", [])
    events = events_of(path)
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == "process_name"
    }
    assert sorted(names)[:1] == [0] and {
        name.split(":")[0] for name in names.values()
    } == {"rank 0", "rank 1"}
    assert min(event["ts"] for event in events) == 0
    for rank in range(2):
        mine = [
            event
            for event in events
            if event["ph"] == "X" and event["pid"] // 1000 == rank
        ]
        (stage,) = (event for event in mine if event["name"] == "actor_update")
        (product,) = (event for event in mine if event["name"] == "aten::mm")
        assert stage["pid"] == rank * 1000 and product["pid"] > stage["pid"]
        assert (
            stage["ts"] <= product["ts"]
            and product["ts"] + product["dur"] <= stage["ts"] + stage["dur"]
        )
        assert len([event for event in mine if event["name"] == "step"]) == 1


def test_what_is_inside_stays_inside(tmp_path: Path) -> None:
    """To the nanosecond: a viewer that finds a call ending after its caller draws it elsewhere."""
    profile_steps(tmp_path, 0, 1, steps=1)
    source = json.loads(
        gzip.decompress(
            (step_folder(tmp_path, 1) / "rank_0.torch.json.gz").read_bytes()
        )
    )["traceEvents"]
    joined = [
        event
        for event in events_of(write_step_trace(tmp_path, 1)[0])
        if event["ph"] == "X" and event["pid"]
    ]
    before = [event for event in source if event["ph"] == "X"]
    assert len(before) == len(joined) > 2
    for one, other in zip(before, joined, strict=True):
        assert other["ts"] - joined[0]["ts"] == pytest.approx(
            one["ts"] - before[0]["ts"], abs=2e-3
        )


def test_a_run_that_profiles_nothing_writes_nothing(tmp_path: Path) -> None:
    assert (
        profile_steps(tmp_path, 0, 1, 2)
        == profile_steps(tmp_path, 3, 1, steps=[1], ranks=[0, 2])
        == []
    )
    assert not (tmp_path / "profile").exists()


def test_of_a_step_that_was_not_profiled_there_are_stages(tmp_path: Path) -> None:
    profile_steps(tmp_path, 0, 1, 2, steps=[1])
    events = events_of(write_step_trace(tmp_path, 2, tmp_path / "two.json")[0])
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "step",
        "actor_update",
    }
    with pytest.raises(DataError, match="nothing of step 7; profiled were 1"):
        write_step_trace(tmp_path, 7)
    (step_folder(tmp_path, 1) / "rank_0.stages.json").write_text("{")
    with pytest.raises(DataError, match=r"rank_0.stages.json: not a trace"):
        write_step_trace(tmp_path, 1)


def test_a_tool_that_fails_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    (warning,) = profile_steps(tmp_path, 0, 1, steps=[1])
    assert warning.startswith("run.profile: ") and "step 1 is not profiled" in warning
    (tmp_path / "profile").unlink()
    (step_folder(tmp_path, 1) / "rank_0.torch.json.gz").mkdir(parents=True)
    (warning,) = profile_steps(tmp_path, 0, 1, steps=[1])
    assert warning.startswith(
        "run.profile: torch of step 1 is not written: IsADirectoryError"
    )
    assert (step_folder(tmp_path, 1) / "rank_0.stages.json").is_file()


@pytest.mark.skipif(py_spy() is None, reason="pip install 'megaverl[profile]'")
def test_python_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        profile_steps(tmp_path, 0, 4, products=20_000, steps=[4], tools=["py_spy"])
        == []
    )
    assert main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "trace_4.json.gz" in shown
        and "rank_0.speedscope.json: open it at https://www.speedscope.app" in shown
    )
    assert json.loads(
        (step_folder(tmp_path, 4) / "rank_0.speedscope.json").read_text()
    )["profiles"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_tools_of_cuda_are_refused_without_one(tmp_path: Path) -> None:
    profile_steps(tmp_path, 0, 1, tools=["memory"])  # of no step
    with pytest.raises(ConfigError, match=r"run.profile.tools: nvtx, cuda: of CUDA"):
        profile_steps(tmp_path, 0, 1, steps=[1], tools=["nvtx", "cuda", "torch"])


def test_stages_are_marked_where_they_open_and_close() -> None:
    """What NVTX's ranges are made by."""
    timeline, said = Timeline(), list[str]()

    def mark(name: str) -> Any:
        said.append(f"{name} opens")
        return lambda: said.append(f"{name} closes")

    with timeline.span("before"):
        timeline.mark = mark
        with timeline.span("outer"), timeline.span("inner"):
            timeline.mark = None
    assert said == ["outer opens", "inner opens", "inner closes", "outer closes"]
