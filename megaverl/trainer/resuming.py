"""Resuming a run from a checkpoint that was written with other settings.

`megaverl.config.resuming` defines the outcome of each changed setting. This module
reads the checkpoint's configuration, refuses or reports the changes, and computes the
position in the learning-rate schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaverl.checkpoint import read_json
from megaverl.checkpoint.choice import (
    CONFIG_FILE,
    STATE_FILE,
    likely_source,
    saved_config,
)
from megaverl.config import Config
from megaverl.config.errors import InvalidConfig
from megaverl.config.resuming import Change, changes, refusals
from megaverl.errors import INTERRUPTED, SAVED_AND_LEFT, CheckpointError

STAGE_OF = {
    "train": "train",
    "quickstart": "train",
    "sft": "sft",
    "dpo": "dpo",
    "reward": "reward_model",
}


@dataclass(frozen=True)
class ChangedSettings:
    """Settings in which a resumed run differs from its checkpoint.

    Attributes:
        source: folder of the checkpoint.
        before: configuration of the checkpoint, or None if the checkpoint does not contain it.
    """

    source: Path | None = None
    before: Mapping[str, Any] | None = None
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def since(
        cls, folder: Path, before: Mapping[str, Any] | None, config: Config, stage: str
    ) -> ChangedSettings:
        """Compare a run with the checkpoint in `folder`, whose configuration is `before`.

        Raises:
            InvalidConfig: lists every change that a resumed run cannot follow.
        """
        if before is None:
            return cls(folder)
        changed = changes(before, config, stage)
        if mistakes := refusals(changed, folder.name):
            raise InvalidConfig(mistakes, f"resumed from {folder}")
        return cls(folder, before, changed)

    @property
    def generated_otherwise(self) -> list[Change]:
        """Return the changes after which responses in the checkpoint differ from newly generated ones."""
        return [change for change in self.changes if change.shapes_responses]

    def lines(self) -> list[str]:
        """Return a line of text for each group of changes, for the console."""
        if self.source is None:
            return []
        if self.before is None:
            return [
                f"{self.source.name} does not hold its settings: changes of them are not reported"
            ]
        used = [str(change) for change in self.changes if change.outcome == "used"]
        lines = (
            [f"changed since {self.source.name}, used from here on: {'; '.join(used)}"]
            if used
            else []
        )
        kept = [change for change in self.changes if change.outcome == "kept"]
        return lines + [
            f"changed since {self.source.name}, without effect: {change}. {change.reason}"
            for change in kept
        ]

    def moved_updates(self, config: Config, steps: int, role: str) -> int:
        """Return by how many updates the schedule's position moves if a step now has another number of updates.

        The schedule of the new configuration counts its own updates. Its position after
        `steps` steps therefore differs from the number of updates that the old
        configuration made.

        Args:
            steps: number of completed training steps.
            role: role whose schedule it is. A reward model is updated once in each step, whatever the settings.
        """
        if self.before is None or role.startswith("reward_model"):
            return 0
        try:
            before = Config.model_validate(dict(self.before))
        except ValidationError:  # written by another version of megaverl
            return 0
        if role.startswith("actor"):  # not updated while only the critic warmed up
            steps = max(0, steps - before.algorithm.critic_warmup_steps)
        return config.updates_after(steps) - before.updates_after(steps)


def stage_of(state: Mapping[str, Any]) -> str:
    """Return the stage that wrote a checkpoint, from the trainer's state in it."""
    return str(state.get("stage", "train"))


def config_writer(config: Config) -> dict[str, Callable[[Path], None]]:
    """Return the name of a checkpoint's configuration file, mapped to the function that writes it."""
    text = config.to_yaml()

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return {CONFIG_FILE: write}


def check_resume(config: Config, command: str) -> None:
    """Refuse a run that cannot resume from its checkpoint with these settings, before any rank starts.

    The ranks repeat the check with the checkpoint that they load. Damaged files are
    left to them.

    Raises:
        InvalidConfig: lists every change that a resumed run cannot follow.
    """
    stage = STAGE_OF.get(command)
    if stage is None or config.trainer.rollout_only:
        return
    try:
        source = likely_source(config.checkpoint.resume, config.run_dir)
        if source is not None and stage_of(read_json(source / STATE_FILE)) == stage:
            ChangedSettings.since(source, saved_config(source), config, stage)
    except CheckpointError:
        return


def how_to_go_on(config: Config, *, has_saved: bool) -> tuple[int, str]:
    """Return the exit code of a run that saves and leaves, and how the user continues it.

    The code is `errors.SAVED_AND_LEFT` if the same command continues the run according
    to `checkpoint.resume`, else `errors.INTERRUPTED`.

    Args:
        has_saved: whether this run has a checkpoint. If not, nothing was trained, and a second start loses nothing.
    """
    resume, folders = (
        config.checkpoint.resume,
        (config.run_dir, config.run_dir / "checkpoints"),
    )
    if resume in ("auto", "latest", "unfinished") or Path(resume).resolve() in [
        path.resolve() for path in folders
    ]:
        return SAVED_AND_LEFT, "start the run again to go on."
    if not has_saved:
        return SAVED_AND_LEFT, "start the run again."
    return (
        INTERRUPTED,
        f"checkpoint.resume={resume} would not go on from there: start it again with checkpoint.resume=latest.",
    )
