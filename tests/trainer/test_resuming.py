"""Runs that are resumed with other settings: each change is used, or refused in words, and none goes without a word."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.checkpoint.choice import is_finished, likely_source
from megaverl.config import Config, load_config
from megaverl.data.batch import RolloutBatch
from megaverl.errors import INTERRUPTED, MISTAKE, SAVED_AND_LEFT, ConfigError
from megaverl.rollout.engine import Generation
from megaverl.trainer.loop import Trainer
from megaverl.trainer.resuming import ChangedSettings, check_resume, how_to_go_on
from megaverl.trainer.stored_rollouts import StoredRollouts
from megaverl.trainer.validation import Validation
from tests.faults.injector import Fault
from tests.faults.runs import metrics
from tests.launcher import Launcher


def run_config(tmp_path: Path, *overrides: str) -> Config:
    given = [
        "model.path=m",
        "data.train=t.jsonl",
        "reward=exact_match",
        f"run.dir={tmp_path}",
        *overrides,
    ]
    return load_config(None, given, check_paths=False)


def test_more_steps_and_another_rate_are_trained_at_the_new_schedule(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """A run of 2 steps, linear to 0, goes on to 4: not at 0, but where a run of 4 steps has its third."""

    def sft(*more: str) -> list[str]:
        paths = [
            f"model.path={inputs / 'model'}",
            f"data.train={inputs / 'train.jsonl'}",
            f"run.dir={tmp_path}",
        ]
        small = [
            "run={name: run, nproc: 1, log_with: jsonl}",
            "checkpoint={save_interval: 2, export_hf: false}",
        ]
        stage = "sft={steps: 2, batch_size: 4, lr: 1.0e-2, lr_decay_style: linear, max_answer_tokens: 8}"
        return ["sft", *paths, *small, stage, *more]

    def run(*more: str) -> tuple[list[int], str]:
        ended = launch.command(sft(*more), ranks=1, logs=tmp_path / "logs")
        return ended.codes, ended.text

    codes, text = run()
    assert codes == [0], text
    codes, text = run("sft.steps=4", "sft.lr=2.0e-2", "run.seed=7", "sft.batch_size=2")
    assert codes == [MISTAKE], text
    assert (
        "run.seed: was 0 in step_00000002, is 7." in text
        and "sft.batch_size: was 4 in step_00000002" in text
    )
    codes, text = run("sft.steps=4", "sft.lr=2.0e-2")
    assert codes == [0], text
    assert (
        "changed since step_00000002, used from here on: sft.steps: 2 -> 4; sft.lr: 0.01 -> 0.02"
        in text
    )
    assert "learning rate of the next update: actor 0.01\n" in text
    rates = [record["sft/lr"] for record in metrics(tmp_path / "run")]
    assert rates == pytest.approx([1e-2, 5e-3, 2e-2 * 2 / 4, 2e-2 / 4])
    saved = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert is_finished(saved) and "lr: 0.02" in (saved / "config.yaml").read_text()


RL = [
    "rollout.engine=hf",
    "run={nproc: 1, log_with: jsonl}",
    "algorithm={name: grpo, group_size: 2}",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}, scheduler: {lr_decay_style: linear}}",
    "trainer={steps: 4, validate_every: 0}",
    "checkpoint={export_hf: false}",
]


def test_a_run_that_left_inside_a_step_goes_on_with_other_settings(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    """The schedule stands where the new one would, and what was generated before is used and named."""
    fault = Fault("term", 0, "rollout", 3)
    left = launch.command(
        ["train", *arguments, *RL, "checkpoint.resume=never"],
        ranks=1,
        logs=tmp_path / "logs",
        environment=fault.environment(),
    )
    assert left.codes == [INTERRUPTED], left.text
    said = "saved after 2 of 4 steps, inside step 3; checkpoint.resume=never would not go on from there"
    assert said in left.text and "checkpoint.resume=latest" in left.text
    more = [
        "rollout.sampling.temperature=0.5",
        "algorithm.num_mini_batches=2",
        "model.init=random",
    ]
    ended = launch.command(
        ["train", *arguments, *RL, *more], ranks=1, logs=tmp_path / "logs"
    )
    assert ended.codes == [0], ended.text
    said = "responses of step 3 are trained on as they were generated before rollout.sampling.temperature changed"
    assert said in ended.text
    assert (
        "without effect: model.init: 'weights' -> 'random'. Trained weights come from the checkpoint."
        in ended.text
    )
    found = metrics(tmp_path / "runs" / "run")
    # of 8 updates in 4 steps the third step takes the fifth and sixth
    assert [record["actor/lr"] for record in found[:2]] == pytest.approx(
        [1e-3, 0.75e-3]
    )
    assert found[2]["actor/lr"] == pytest.approx(3 / 8 * 1e-3), "of the last one"


def test_responses_from_before_keep_the_temperature_that_drew_them() -> None:
    batch = RolloutBatch.from_generations(
        [[1, 2]] * 2, [Generation([3], [0.0], "stop")] * 2
    )
    stored = StoredRollouts(2, 1, batch)
    now = stored.drawn_with({"temperature": 0.5, "max_tokens": 4})
    assert now.batch["temperatures"].tolist() == [0.5, 0.5] and (
        now.step,
        now.weight_version,
    ) == (2, 1)
    assert now.drawn_with({"temperature": 0.25, "max_tokens": 4}) is now


def checkpoint(run_dir: Path, config: Config, *, done: int, steps: int) -> Path:
    """A folder with what is read of a checkpoint before any rank starts."""
    from megaverl.checkpoint import Manifest, write_json

    folder = run_dir / "checkpoints" / f"step_{done:08d}"
    folder.mkdir(parents=True)
    write_json(folder / "state.json", {"next_step": done, "steps": steps})
    (folder / "config.yaml").write_text(config.to_yaml())
    Manifest(2, done, done, 1, "", {}, {}, {}).write(folder)
    return folder


def test_what_cannot_go_on_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    before = run_config(tmp_path, "run.seed=1")
    saved = checkpoint(before.run_dir, before, done=2, steps=4)
    check_resume(before, "train")
    with pytest.raises(
        ConfigError, match=r"run\.seed: was 1 in step_00000002, is 2"
    ) as error:
        check_resume(run_config(tmp_path, "run.seed=2"), "train")
    assert str(saved) in str(error.value)
    check_resume(run_config(tmp_path, "run.seed=2", "checkpoint.resume=never"), "train")
    check_resume(run_config(tmp_path, "run.seed=2", "run.name=other"), "train")
    (saved / "config.yaml").unlink()  # written by an older version
    check_resume(run_config(tmp_path, "run.seed=2"), "train")


def test_unfinished_goes_on_and_finished_starts_anew(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    saved = checkpoint(config.run_dir, config, done=2, steps=4)
    assert [
        likely_source(word, config.run_dir)
        for word in ("auto", "latest", "unfinished", "never")
    ] == [
        *[saved] * 3,
        None,
    ]
    last = checkpoint(config.run_dir, config, done=4, steps=4)
    assert [likely_source(word, config.run_dir) for word in ("auto", "unfinished")] == [
        last,
        None,
    ]
    assert likely_source(str(saved), config.run_dir) == saved
    assert likely_source(str(config.run_dir), config.run_dir) == last


@pytest.mark.parametrize(
    ("resume", "code", "advice"),
    [
        ("auto", SAVED_AND_LEFT, "start the run again to go on."),
        ("latest", SAVED_AND_LEFT, "start the run again to go on."),
        ("unfinished", SAVED_AND_LEFT, "start the run again to go on."),
        ("never", INTERRUPTED, "checkpoint.resume=latest"),
        ("{run}", SAVED_AND_LEFT, "start the run again to go on."),
        ("{run}/checkpoints/step_00000002", INTERRUPTED, "checkpoint.resume=latest"),
    ],
)
def test_no_message_promises_what_the_configuration_forbids(
    tmp_path: Path, resume: str, code: int, advice: str
) -> None:
    resume = resume.format(run=tmp_path / "run")
    found_code, found_advice = how_to_go_on(
        run_config(tmp_path, f"checkpoint.resume={resume}"), has_saved=True
    )
    assert found_code == code and advice in found_advice
    if code != SAVED_AND_LEFT:
        assert "again to go on" not in found_advice


@pytest.mark.parametrize(
    ("before", "now", "role", "expected"),
    [
        ([], ["algorithm.num_epochs=2"], "actor", 5),
        ([], ["algorithm.num_epochs=2"], "reward_model", 0),
        (["algorithm.num_mini_batches=4"], [], "critic", -15),
        (["algorithm.critic_warmup_steps=2"], ["algorithm.num_epochs=2"], "actor", 3),
        (["algorithm.critic_warmup_steps=2"], ["algorithm.num_epochs=2"], "critic", 5),
        ([], ["mix=[{update: rejection, every: 2}]"], "actor", 2),
        ([], ["trainer.steps=77"], "actor", 0),
    ],
)
def test_the_schedule_moves_with_the_updates_of_a_step(
    tmp_path: Path, before: list[str], now: list[str], role: str, expected: int
) -> None:
    plain = ["algorithm.group_size=2", "data.prompts_per_step=8"]
    old, new = run_config(tmp_path, *plain, *before), run_config(tmp_path, *plain, *now)
    changed = ChangedSettings.since(
        tmp_path, json.loads(json.dumps(old.to_dict())), new, "train"
    )
    assert changed.moved_updates(new, 5, role) == expected


def test_a_best_validation_on_other_rows_is_forgotten() -> None:
    """The scores before and after are of other prompts; a checkpoint of an older megaverl does not hold the digest."""

    def take_up(saved: dict[str, Any]) -> tuple[list[str], int]:
        data: Any = SimpleNamespace(fingerprint="now")
        validation = Validation(None, data, None, None)  # type: ignore[arg-type]
        saving = SimpleNamespace(changed=SimpleNamespace(changes=[]))
        loop: Any = SimpleNamespace(validation=validation, saving=saving)
        notes = Trainer._take_up_best(
            loop, {"step": 4, "value": 0.5, "tie": 0.0, **saved}
        )
        assert validation.state_dict()["data"] == "now"
        return notes, validation.best.step

    assert take_up({"data": "now"}) == ([], 4)
    assert take_up({}) == ([], 4)
    notes, step = take_up({"data": "before"})
    assert notes == [
        "the best validation so far is forgotten: the rows of data.validation have changed"
    ]
    assert step == -1
