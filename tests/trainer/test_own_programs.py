"""Steps of one's own (`trainer.program`): the shipped examples, and what is said where one is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megaverl.config import load_config
from megaverl.config.errors import InvalidConfig
from megaverl.errors import ConfigError, TrainingStopped
from megaverl.trainer.own_program import load_step
from megaverl.trainer.program import RunLeft
from tests.docs.pages import ROOT
from tests.faults.runs import remains
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments
from tests.trainer.test_end_to_end import metrics_of

PROGRAMS = ROOT / "configs" / "programs"
GRPO = "algorithm={name: grpo, group_size: 4}"
DEBATE = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 1}",
    "trainer={steps: 3, validate_every: 0}",
    "checkpoint={save_interval: 0, export_hf: false}",
]


def run(
    launch: Launcher, inputs: Path, folder: Path, ranks: int, *more: str
) -> dict[str, Any]:
    arguments = [
        *command_arguments(inputs, folder),
        GRPO,
        "trainer={steps: 3, validate_every: 0}",
        *more,
    ]
    ended = launch.command(["train", *arguments], logs=folder / "logs", ranks=ranks)
    assert ended.codes == [0] * ranks, ended.text
    return remains(folder / "run")


def test_grpo_written_out_computes_what_the_built_in_step_does(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    built_in = run(launch, inputs, tmp_path / "built_in", 2)
    own = run(
        launch,
        inputs,
        tmp_path / "own",
        2,
        f"trainer.program={PROGRAMS / 'grpo.py'}:step",
    )
    assert own["weights"] == built_in["weights"]
    assert own["samples"] == built_in["samples"]


def test_one_step_off_policy_written_out_is_the_asynchronous_run(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    apart = ["placement={rollout: 0, actor: 1}", "actor.tp=1", "run.nproc=2"]
    ahead = "rollout={async_rollout: true, max_staleness: 1, sampling: {max_tokens: 6}}"
    built_in = run(launch, inputs, tmp_path / "built_in", 2, *apart, ahead)
    program = f"trainer.program={PROGRAMS / 'one_step_off_policy.py'}:step"
    own = run(launch, inputs, tmp_path / "own", 2, *apart, ahead, program)
    assert own["weights"] == built_in["weights"]
    assert own["samples"] == built_in["samples"]


def test_two_actors_debate_and_learn_in_turn(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    debate = PROGRAMS / "debate.py"
    game = f"environment={{name: '{debate}:Debate', agents: own, max_turns: 1, max_turn_tokens: 3}}"
    arguments = [
        *command_arguments(inputs, tmp_path),
        *DEBATE,
        game,
        f"trainer.program={debate}:step",
    ]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    learns = [
        [side for side in ("first", "second") if f"{side}/actor/loss" in measured]
        for measured in metrics_of(tmp_path / "run").values()
    ]
    assert learns == [["first"], ["second"], ["first"]]


@pytest.mark.parametrize(
    "example", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem
)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40


def test_what_a_program_raises_ends_the_run_with_its_words(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Also where it is SystemExit, which would end the process without a word."""
    own = tmp_path / "own.py"
    own.write_text("import sys\nasync def step(run, step):\n    sys.exit(0)\n")
    arguments = [
        *command_arguments(inputs, tmp_path / "runs"),
        GRPO,
        f"trainer.program={own}:step",
    ]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs")
    assert ended.codes == [1, 1], ended.text
    assert (
        f"trainer.program: {own}:step raised SystemExit: 0 ({own}, line 3) in step 1."
        in ended.text
    )


def write_program(folder: Path, body: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(body)
    return f"{path}:step"


async def call(name: str) -> Any:
    run: Any = None
    return await load_step(name)(run, 4)


def test_a_program_must_be_awaitable_and_return_its_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not declared with `async def`"):
        load_step(
            write_program(tmp_path / "plain", "def step(run, step):\n    return None\n")
        )
    name = write_program(
        tmp_path / "other", "async def step(run, step):\n    return 3\n"
    )
    with pytest.raises(
        TrainingStopped, match="returned int 3 in step 5; expected the samples"
    ):
        asyncio.run(call(name))


def test_errors_of_megaverl_and_the_end_of_the_run_pass_through_a_program(
    tmp_path: Path,
) -> None:
    body = "from megaverl.trainer.program import RunLeft\nasync def step(run, step):\n    raise RunLeft\n"
    with pytest.raises(RunLeft):
        asyncio.run(call(write_program(tmp_path, body)))


def test_a_program_that_is_cancelled_is_cancelled(tmp_path: Path) -> None:
    name = write_program(
        tmp_path,
        "import asyncio\nasync def step(run, step):\n    await asyncio.sleep(1000)\n",
    )

    async def cancel() -> None:
        task = asyncio.ensure_future(call(name))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ("trainer.operators=['own.py:add']", "trainer.operators"),
        ("trainer.rollout_only=true", "trainer.rollout_only"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, inputs: Path, other: str, key: str
) -> None:
    arguments = [
        *command_arguments(inputs, tmp_path)[1:],
        GRPO,
        "placement={rollout: 0, actor: 1}",
        "trainer.program=own.py:step",
        other,
    ]
    with pytest.raises(InvalidConfig) as error:
        load_config(inputs / "run.yaml", arguments)
    assert any(
        mistake.key == key and "trainer.program" in mistake.message
        for mistake in error.value.mistakes
    )
