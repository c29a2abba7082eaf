"""One step of GRPO on two ranks with an environment of another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaverl.config import load_config
from megaverl.trainer.quickstart import prepare
from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.rollout.environments.test_runs import CONFIGS, samples

RECIPE = CONFIGS / "turn_grpo_guessing_game.yaml"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def take_grpo_step(
    launch: Launcher, folder: Path, name: str, *overrides: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metrics of a step with two prompts and four episodes each, and its samples.

    Args:
        name: of the environment.
        overrides: its rows (`data.train`) and options.
    """
    run = [
        "run={log_with: jsonl, timeout_minutes: 2, name: run, nproc: 2}",
        f"run.dir={folder}",
    ]
    prepare(load_config(RECIPE, run, command="quickstart", check_paths=False))
    model = folder / "run" / "inputs" / "model"
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [
        "train",
        f"--config={RECIPE}",
        *run,
        "rollout={engine: hf, sampling: {max_tokens: 12}}",
        "trainer={steps: 1, validate_every: 0, save_samples: 99}",
        "data={validation: [], chat_template: auto, prompts_per_step: 2, max_prompt_tokens: 40}",
        "algorithm={name: grpo, group_size: 4, num_mini_batches: 1}",
        f"environment={{name: {name}, max_turns: 2, max_turn_tokens: 6}}",
        "actor.tp=1",
        "checkpoint.export_hf=false",
        *overrides,
    ]
    ended = launch.command(command, ranks=2, logs=folder / "output")
    assert ended.codes == [0, 0], ended.text
    [record, *_] = metrics(folder / "run")
    return record, samples(folder / "run")
