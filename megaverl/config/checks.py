"""All checks of a configuration: the rules of its sections, and those that span sections, files and ranks.

A rule about one section's fields stands in the class of that section
(`Section.issues`). A rule that spans sections stands in a module that is named by what
it spans. `cross_mistakes` runs both kinds, for one command.
"""

from __future__ import annotations

from megaverl.config.actor_and_critic import shared_backbone_issues
from megaverl.config.actor_and_teacher import teacher_issues
from megaverl.config.algorithm_and_step import algorithm_and_step_issues
from megaverl.config.errors import ConfigIssue
from megaverl.config.files_and_packages import (
    file_issues,
    package_issues,
    read_model,
    run_folder_issues,
)
from megaverl.config.grids import OFFLINE, REINFORCING, grid_mistakes
from megaverl.config.lengths import length_issues
from megaverl.config.preference_and_mix import (
    mix_issues,
    preference_issues,
    reward_model_issues,
)
from megaverl.config.rewards_and_modules import reward_issues
from megaverl.config.roles_and_model import (
    optimizer_issues,
    role_issues,
    stage_optimizer_issues,
)
from megaverl.config.rollout_and_draft import draft_issues
from megaverl.config.rollout_and_training import (
    rollout_and_training_issues,
    server_issues,
    validation_sampling_issues,
)
from megaverl.config.schema import Config
from megaverl.config.section import Issues, Section, entry_issues
from megaverl.config.tinker_and_actor import tinker_issues
from megaverl.config.wording import yaml_text

ALL_COMMANDS = (
    *("train", "quickstart", "sft", "dpo", "reward"),
    *("generate", "eval", "tinker"),
)
# Section -> commands that read it, and so apply its rules. `role_issues` applies those
# of the roles.
READ_BY = {
    "run": ALL_COMMANDS,
    "model": ALL_COMMANDS,
    "alerts": ALL_COMMANDS,
    "algorithm": REINFORCING,
    "environment": REINFORCING,
    "mix": REINFORCING,
    "rollout": (*REINFORCING, "eval", "generate", "tinker"),
    "trainer": (*REINFORCING, "eval"),
    "reward": (*REINFORCING, "eval"),
    "evaluation": ("eval",),
    "sft": ("sft", "quickstart"),
    "preference": ("dpo", "reward"),
    "tinker": ("tinker",),
}


def cross_mistakes(
    config: Config, command: str, check_paths: bool, world_size: int | None
) -> list[ConfigIssue]:
    """Return every mistake that shows only when fields, sections, files and the number of ranks are seen together.

    Args:
        command: command that the configuration must be complete for.
        check_paths: whether to run checks that need files, folders and packages to be present.
        world_size: number of ranks, or None if it is unknown.
    """
    spec, mistakes = read_model(config, command) if check_paths else (None, [])
    mistakes += section_issues(config, command)
    mistakes += role_issues(config, command)
    mistakes += _data_issues(config, command)
    mistakes += length_issues(config, command, spec)
    mistakes += grid_mistakes(config, command, spec, world_size)
    mistakes += reward_model_issues(config, command)
    mistakes += _profile_issues(config, command, world_size)
    if command in REINFORCING:
        mistakes += algorithm_and_step_issues(config)
        mistakes += teacher_issues(config)
        mistakes += mix_issues(config)
        mistakes += shared_backbone_issues(config)
        mistakes += draft_issues(config, spec)
        mistakes += optimizer_issues(config)
        mistakes += rollout_and_training_issues(config, spec)
    if command == "tinker":
        mistakes += tinker_issues(config)
    if command in OFFLINE:
        mistakes += stage_optimizer_issues(config, command)
    if command in ("dpo", "reward"):
        mistakes += preference_issues(config, command, check_paths)
    if command in (*REINFORCING, "eval", "generate"):
        mistakes += server_issues(config)
        mistakes += validation_sampling_issues(config)
    if command in (*REINFORCING, "eval"):
        mistakes += _validation_issues(config)
        # Suites have rewards of their own.
        if command != "eval" or not config.evaluation.has_sets:
            mistakes += reward_issues(config, check_paths)
    if check_paths:
        mistakes += file_issues(config, command)
        mistakes += run_folder_issues(config)
        mistakes += package_issues(config, command)
    return mistakes


def section_issues(config: Config, command: str) -> Issues:
    """Yield what the rules of each section that a command reads find wrong."""
    for name, commands in READ_BY.items():
        section: Section | list[Section] = getattr(config, name)
        if command not in commands:
            continue
        if isinstance(section, Section):
            yield from section.issues(name)
        else:
            yield from entry_issues(section, name)


def _data_issues(config: Config, command: str) -> Issues:
    """Yield data that the command needs and the configuration does not name."""
    data = config.data
    fix = "Give one or more JSONL or Parquet files:"
    if command in REINFORCING and not data.train:
        yield ConfigIssue("data.train", f"is empty. {fix} data.train=FILE.")
    if command == "sft" and not (config.sft.train or data.train):
        yield ConfigIssue(
            "sft.train", f"and data.train are empty. {fix} data.train=FILE."
        )
    if command == "eval" and not (data.validation or config.evaluation.has_sets):
        either = "Or name suites: --suite gsm8k,math."
        yield ConfigIssue(
            "data.validation", f"is empty. {fix} data.validation=FILE. {either}"
        )
    if command in ("dpo", "reward") and not config.preference.train:
        yield ConfigIssue("preference.train", f"is empty. {fix} preference.train=FILE.")


def _validation_issues(config: Config) -> Issues:
    """Yield a mistake for validation without data."""
    every = config.trainer.validate_every
    if every and not (config.data.validation or config.evaluation.tasks):
        text = f"found {every}, but data.validation is empty. Give held-out prompts, or validate_every: 0."
        yield ConfigIssue("trainer.validate_every", text, involves=("data.validation",))


def _profile_issues(config: Config, command: str, world_size: int | None) -> Issues:
    """Yield profiled steps and ranks that the run does not have."""
    profile = config.run.profile
    planned = {
        "sft": config.sft.steps,
        "dpo": config.preference.steps,
        "reward": config.preference.steps,
    }
    steps = planned.get(command, config.trainer.steps)
    late = [step for step in profile.steps if step > steps]
    if late:
        yield ConfigIssue(
            "run.profile.steps", f"found {yaml_text(late)}; the run has {steps} steps."
        )
    if world_size is not None:
        absent = [rank for rank in profile.ranks or () if rank >= world_size]
        if absent:
            text = f"found {yaml_text(absent)}; the ranks are 0 to {world_size - 1}."
            yield ConfigIssue("run.profile.ranks", text)
    if profile.steps and config.trainer.rollout_only:
        yield ConfigIssue(
            "run.profile.steps",
            "is set, and trainer.rollout_only trains no step. Leave it out.",
        )
