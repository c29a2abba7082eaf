"""Rules that span the losses of pairs, the rewards, and the commands and `mix` entries that train with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaverl.config.errors import ConfigIssue
from megaverl.config.named_functions import (
    PAIR_INPUTS,
    REWARD_INPUTS,
    SINGLE_INPUTS,
    find_function,
    function_and_option_issues,
)
from megaverl.config.run import MixConfig
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.signatures import signature_of
from megaverl.config.wording import did_you_mean, listed, yaml_text


def preference_issues(config: Config, command: str, check_paths: bool) -> Issues:
    """Yield mistakes in the data and the loss of `preference`, for `megaverl dpo` and `megaverl reward`."""
    preference = config.preference
    if command == "dpo":
        compares_rows = (
            "reference_kl" in signature_of("preference_losses", preference.loss).reads
        )
        if compares_rows and preference.batch_size < 2:
            text = (
                f"found 1; {preference.loss} compares every prompt with another row's "
                "response, and needs at least 2 "
            )
            yield ConfigIssue(
                "preference.batch_size", f"{text}rows.", involves=("preference.loss",)
            )
        if preference.margin_key is not None:
            yield ConfigIssue(
                "preference.margin_key",
                "is of `megaverl reward`; no preference loss reads a margin.",
            )
        yield from _preference_loss_issues(config)
    if check_paths:
        for key, paths in (
            ("train", preference.train),
            ("validation", preference.validation),
        ):
            for index, name in enumerate(paths):
                is_pattern = any(mark in name for mark in "*?[")
                if not is_pattern and not Path(name).exists():
                    yield ConfigIssue(
                        f"preference.{key}.{index}",
                        f"found {yaml_text(name)}, which does not exist.",
                    )


def _preference_loss_issues(config: Config) -> Issues:
    """Yield mistakes in the preference loss: its name, its options, and the inputs that it reads."""
    name = config.preference.loss
    key = "preference.loss"
    loss = find_function("preference_losses", name)
    is_of_singles = loss is not None and "desirable" in loss.inputs
    available = SINGLE_INPUTS if is_of_singles else PAIR_INPUTS
    options = config.preference.options
    yield from function_and_option_issues(
        key, "preference_losses", name, available, "preference.options", options, key
    )


def reward_model_issues(config: Config, command: str) -> Issues:
    """Yield mistakes in the loss of `reward_model`, and in the column of margins that it reads.

    Checked for every command, since one file serves several commands.
    """
    name = config.reward_model.loss
    options: dict[str, Any] = config.reward_model.options
    margin_key = "preference.margin_key"
    has_margins = config.preference.margin_key is not None and (
        command == "reward" or not config.mixes_reward_model
    )
    key = "reward_model.loss"
    available = (*REWARD_INPUTS, "margins")
    yield from function_and_option_issues(
        key,
        "reward_model_losses",
        name,
        available,
        "reward_model.options",
        options,
        key,
    )
    loss = find_function("reward_model_losses", name)
    if loss is None:
        return
    if "margins" in loss.inputs and not has_margins:
        yield ConfigIssue(
            margin_key,
            f"is not set, and {name} reads margins. Name the column that holds them.",
        )
    if "margins" not in loss.reads and has_margins:
        yield ConfigIssue(
            margin_key, f"is set, and {name} reads no margins. Leave it out."
        )


def mix_issues(config: Config) -> Issues:
    """Yield mistakes in how the entries of `mix` fit the rewards, the groups and the losses."""
    judges = ["reward", "accuracy", *(entry.label for entry in config.reward)]
    for index, entry in enumerate(config.mix):
        key = f"mix.{index}"
        if entry.update != "sft" and entry.judge not in judges:
            hint = did_you_mean(entry.judge, judges)
            yield ConfigIssue(
                f"{key}.judge",
                f"found {yaml_text(entry.judge)}; there are: {listed(judges)}.{hint}",
            )
        size = config.algorithm.group_size
        if entry.update not in (None, "sft") and size < 2:
            text = f"found {size}; mix with {entry.update} takes the best response of a group, which needs at least 2."
            yield ConfigIssue("algorithm.group_size", text, involves=(f"{key}.update",))
        if entry.update == "preference":
            yield from _preference_loss_issues(config)
            if (
                "desirable"
                in signature_of("preference_losses", config.preference.loss).reads
            ):
                text = f"found {yaml_text(config.preference.loss)}, which is not of pairs, and mix has pairs. Use dpo."
                yield ConfigIssue("preference.loss", text)
        if entry.update == "reward_model":
            yield from _trained_reward_issues(config, key, entry)


def _trained_reward_issues(config: Config, key: str, entry: MixConfig) -> Issues:
    """Yield mistakes in an entry of `mix` that trains a reward model: which one, and who judges it."""
    learned = [
        reward
        for reward in config.reward
        if reward.path is not None and reward.engine == "megatron"
    ]
    if len(learned) != 1:
        text = f"found 'reward_model', but {len(learned)} entries of reward have a path; it trains the one that has. "
        yield ConfigIssue(
            f"{key}.update", f"{text}Add {{name: learned, path: FOLDER}} to reward."
        )
    if config.estimator_reads("implicit_rewards"):
        name = config.algorithm.advantage_name
        text = f"found 'reward_model', but algorithm.advantage={name} trains reward_model already, as an implicit one. "
        involves = ("algorithm.name", "algorithm.advantage")
        yield ConfigIssue(
            f"{key}.update", f"{text}Use one of the two.", involves=involves
        )
    if learned and entry.judge in ("reward", learned[0].label):
        text = f"found {yaml_text(entry.judge)}: the learned reward would be its own judge. Name another reward."
        yield ConfigIssue(f"{key}.judge", text)
