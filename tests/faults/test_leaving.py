"""SIGTERM and SIGUSR1: save and leave with the documented exit code, from wherever the run is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megaverl.errors import SAVED_AND_LEFT
from tests.faults.injector import Fault
from tests.faults.points import finish, hit
from tests.faults.runs import Remains, arguments
from tests.launcher import Launcher

ASKED = [
    (Fault("term", 1, "validation"), "", "SIGTERM: nothing was trained yet"),
    (
        Fault("term", 1, "rollout", 2),
        "",
        "SIGTERM: saved after 1 of 4 steps, inside step 2",
    ),
    (
        Fault("usr1", 0, "actor_update", 3),
        "step_00000001_inside",
        "SIGUSR1: saved after 3 of 4 steps",
    ),
]


def test_saved_and_left(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """Before the first step, inside a step (what was generated is not generated again), and between two."""
    for fault, source, said in ASKED:
        found = hit(launch, inputs, tmp_path, fault)
        assert found.ended.codes == [SAVED_AND_LEFT] * 2, found.ended.output
        assert found.resumed_from == source
        assert (
            said in found.ended.text
            and "start the run again to go on" in found.ended.text
        )
        assert "error" not in found.ended.text
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended
    assert "resumed from" in ended.text and "3 of 4 steps are done" in ended.text


def test_interrupted(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    """Ctrl-C: what started the ranks says so, and they nothing; nor does one that is too busy to hear the signal."""
    both = {
        0: Fault("stall", 0, "rollout", 2).environment(),
        1: Fault("int", 1, "rollout", 2).environment(),
    }
    ended = launch.command(
        arguments(inputs, tmp_path), logs=tmp_path / "output", on_rank=both
    )
    assert ended.codes == [1, 130], ended.text
    assert "error" not in ended.text and "nterrupt" not in ended.text


def test_what_to_resume_from(
    launch: Launcher, inputs: Path, expected: Remains, undisturbed: Path, tmp_path: Path
) -> None:
    """`latest` must be there; a folder is taken as it is."""
    ended, _ = finish(launch, inputs, tmp_path, expected, "--resume", "latest")
    assert ended.codes == [1, 1]
    assert (
        "checkpoint.resume=latest" in ended.text and "holds no checkpoint" in ended.text
    )
    milestone = undisturbed / "run" / "checkpoints" / "step_00000003"
    ended, wrong = finish(
        launch, inputs, tmp_path, expected, "--resume", str(milestone)
    )
    assert ended.codes == [0, 0], ended.output
    assert f"resumed from {milestone}: 3 of 4" in ended.text
    assert set(wrong) <= {"metrics", "samples", "kept"}, (
        "the steps before are in the other run's folder"
    )


def test_generation_keeps_the_memory_that_it_had(
    launch: Launcher, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """... though one rank alone has twice as much of the machine's."""
    milestone = undisturbed / "run" / "checkpoints" / "step_00000003"
    more = ("actor.tp=1", "critic.pp=1", "--resume", str(milestone))
    ended = launch.command(
        arguments(inputs, tmp_path, *more), logs=tmp_path / "output", ranks=1
    )
    assert ended.codes == [0], ended.output
    checkpoints = milestone, tmp_path / "run" / "checkpoints" / "step_00000004"
    before, after = (
        json.loads((folder / "state.json").read_text())["generation_budget"]
        for folder in checkpoints
    )
    assert before == after > 2**20


def test_another_tokenizer_is_refused(
    launch: Launcher, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The prompts come out the same here, but need not elsewhere."""
    other = Path(shutil.copytree(inputs / "model", tmp_path / "tokenizer"))
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "{{ messages[0]['content'] }}"})
    )
    source = undisturbed / "run" / "checkpoints" / "step_00000003"
    more = (f"model.tokenizer={other}", "--resume", str(source))
    ended = launch.command(arguments(inputs, tmp_path, *more), logs=tmp_path / "output")
    assert ended.codes == [1, 1]
    assert (
        f"{source}: it was made with another tokenizer" in ended.text
        and "model.tokenizer" in ended.text
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
