"""Rules that span the entries of `reward`, and the user's modules in which rewards are registered by name."""

from __future__ import annotations

import os
from typing import Any

from megaverl.child_checks import probe_modules
from megaverl.config.errors import ConfigIssue
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.wording import did_you_mean, listed, yaml_text
from megaverl.errors import MegaverlError, RewardError
from megaverl.rewards import find_reward, load_modules, reward_names


def reward_issues(config: Config, check_paths: bool) -> Issues:
    """Yield mistakes in `reward_modules`, and in how the entries of `reward` refer to them and to each other.

    Reward modules register rewards by name, so they must be imported before names are
    checked. They run the user's code: with `check_paths`, a child process tries the
    import first.
    """
    # Only the launching process probes. A rank that torchrun started would repeat the
    # probe in every process.
    if check_paths and "RANK" not in os.environ:
        # Importing the modules here could end or block this process.
        problems = probe_modules(config.reward_modules)
        for index, problem in enumerate(problems):
            if problem:
                yield ConfigIssue(f"reward_modules.{index}", problem)
        if any(problems):
            return
    names_are_known = True
    for index, module in enumerate(config.reward_modules):
        try:
            load_modules([module])
        except MegaverlError as error:
            names_are_known = False
            if check_paths:
                yield ConfigIssue(
                    f"reward_modules.{index}",
                    str(error).removeprefix("reward_modules: "),
                )
    if not config.reward and config.environment.name is None:
        yield ConfigIssue(
            "reward",
            "is empty. Name a built-in reward or a function of your own: reward=exact_match.",
        )
    yield from _label_issues(config)
    for index, entry in enumerate(config.reward):
        is_registered = (
            entry.path is None and entry.function is None and entry.engine == "megatron"
        )
        if (
            is_registered
            and entry.name is not None
            and (names_are_known or entry.name in reward_names())
        ):
            yield from _named(f"reward.{index}", entry.name, entry.options)


def _label_issues(config: Config) -> Issues:
    """Yield mistakes in the names by which entries of `reward` refer to each other."""
    labels = [entry.label for entry in config.reward]
    for index, entry in enumerate(config.reward):
        if entry.path is not None and entry.label in labels[:index]:
            first = labels.index(entry.label)
            text = f"is {entry.label!r}, and so is reward.{first}'s. Give each a name of its own."
            yield ConfigIssue(f"reward.{index}.name", text)
        earlier = [
            preceding.label
            for preceding in config.reward[:index]
            if preceding.path is None
        ]
        if (
            entry.only_if is not None
            and entry.path is None
            and entry.only_if not in earlier
        ):
            candidates = (
                f"before it stand {listed(earlier)}"
                if earlier
                else "no rule or function stands before it"
            )
            yield ConfigIssue(
                f"reward.{index}.only_if",
                f"found {yaml_text(entry.only_if)}; {candidates}.",
            )


def _named(key: str, name: str, options: dict[str, Any]) -> Issues:
    """Yield mistakes in the name or the options of one built-in or registered reward."""
    names = reward_names()
    if name not in names:
        hint = did_you_mean(name, names)
        own_hint = (
            ""
            if hint
            else " One of your own is registered (@register_reward) by a module in reward_modules."
        )
        yield ConfigIssue(
            f"{key}.name",
            f"found {yaml_text(name)}; there are {listed(names)}.{hint}{own_hint}",
        )
        return
    try:
        find_reward(name).check_options(options)
    except RewardError as error:
        yield ConfigIssue(f"{key}.options", str(error))
