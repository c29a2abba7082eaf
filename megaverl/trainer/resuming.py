"""How a run goes on from a checkpoint that was written with other settings; and how a person makes it go on.

`megaverl.config.resuming` says what becomes of each changed setting. This module reads the checkpoint's configuration,
refuses or reports the changes, and finds the place in the learning rate's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaverl.checkpoint import read_json
from megaverl.checkpoint.choice import CONFIG_FILE, STATE_FILE, likely_source, saved_config
from megaverl.config import Config
from megaverl.config.errors import InvalidConfig
from megaverl.config.resuming import Change, changes, refusals
from megaverl.errors import INTERRUPTED, SAVED_AND_LEFT, CheckpointError

STAGE_OF = {"train": "train", "quickstart": "train", "sft": "sft", "dpo": "dpo", "reward": "reward_model"}


@dataclass(frozen=True)
class ChangedSettings:
    """What differs between a checkpoint's configuration and that of the run which is resumed from it.

    Attributes:
        before: the checkpoint's configuration; None: the checkpoint does not hold it.
    """

    source: Path | None = None
    before: Mapping[str, Any] | None = None
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def since(cls, folder: Path, before: Mapping[str, Any] | None, config: Config, stage: str) -> ChangedSettings:
        """Compare a run with the checkpoint in `folder`, whose configuration is `before`.

        Raises:
            ConfigError: lists every change that a resumed run cannot follow.
        """
        if before is None:
            return cls(folder)
        found = changes(before, config, stage)
        if mistakes := refusals(found, folder.name):
            raise InvalidConfig(mistakes, f"resumed from {folder}")
        return cls(folder, before, found)

    @property
    def generated_otherwise(self) -> list[Change]:
        """The changes that make responses in the checkpoint differ from those of this run."""
        return [change for change in self.changes if change.shapes_responses]

    def lines(self) -> list[str]:
        """Return what a person must know of the changes, a line each."""
        if self.source is None:
            return []
        if self.before is None:
            return [f"{self.source.name} does not hold its settings: changes of them are not reported"]
        used = [str(change) for change in self.changes if change.outcome == "used"]
        lines = [f"changed since {self.source.name}, used from here on: {'; '.join(used)}"] if used else []
        kept = [change for change in self.changes if change.outcome == "kept"]
        return lines + [f"changed since {self.source.name}, without effect: {change}. {change.why}" for change in kept]

    def moved_updates(self, config: Config, steps: int, role: str) -> int:
        """Return how many updates the schedule's place moves, where a step takes another number of updates now.

        The schedule of the new configuration counts its own updates, so its place after `steps` is not where the old
        configuration's updates have brought it.

        Args:
            steps: training steps that are done.
            role: whose schedule it is. A reward model is updated once a step whatever the settings.
        """
        if self.before is None or role.startswith("reward_model"):
            return 0
        try:
            before = Config.model_validate(dict(self.before))
        except ValidationError:  # written by another version of megaverl
            return 0
        if role.startswith("actor"):  # it was not updated in the first steps
            steps = max(0, steps - before.algorithm.critic_warmup_steps)
        return config.updates_after(steps) - before.updates_after(steps)


def stage_of(state: Mapping[str, Any]) -> str:
    """Return the stage that wrote a checkpoint, from the trainer's state in it."""
    return str(state.get("stage", "train"))


def config_writer(config: Config) -> dict[str, Callable[[Path], None]]:
    """Return the file of a checkpoint that holds its configuration, and what writes it."""
    text = config.to_yaml()

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return {CONFIG_FILE: write}


def check_resume(config: Config, command: str) -> None:
    """Refuse a run that cannot go on from its checkpoint with these settings, before any rank starts.

    The ranks look again at the checkpoint that they load. What is wrong with its files is left to them.

    Raises:
        ConfigError: lists every change that a resumed run cannot follow.
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


@dataclass(frozen=True)
class GoingOn:
    """How a run that saves and leaves is started again.

    Attributes:
        code: exit code: `errors.SAVED_AND_LEFT` where the same command goes on, else `errors.INTERRUPTED`.
        advice: what a person must do.
    """

    code: int
    advice: str

    @classmethod
    def of(cls, config: Config, *, has_saved: bool) -> GoingOn:
        """Return what `checkpoint.resume` makes of a second start.

        Args:
            has_saved: there is a checkpoint of this run; else nothing was trained, and a second start loses nothing.
        """
        resume, own = config.checkpoint.resume, (config.run_dir, config.run_dir / "checkpoints")
        if resume in ("auto", "latest", "unfinished") or Path(resume).resolve() in [path.resolve() for path in own]:
            return cls(SAVED_AND_LEFT, "start the run again to go on.")
        if not has_saved:
            return cls(SAVED_AND_LEFT, "start the run again.")
        return cls(
            INTERRUPTED,
            f"checkpoint.resume={resume} would not go on from there: start it again with checkpoint.resume=latest.",
        )
