"""`preference`, `reward_model`, `mix`: training on pairs of responses, and further updates inside a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megaverl.config.annotations import fits
from megaverl.config.errors import ConfigIssue, did_you_mean, found, listed
from megaverl.config.option_ranges import out_of_range
from megaverl.config.registered import Registered, of_the_users_own, registered
from megaverl.config.roles import CRITIC_OPTIMIZER, TrainedConfig
from megaverl.config.section import NonNegative, Passthrough, Paths, Positive, PositiveFloat, Section, over

if TYPE_CHECKING:
    from megaverl.config.schema import Config

# What a preference loss reads of the reference.
FROZEN = ("ref_chosen_log_probs", "ref_rejected_log_probs", "ref_log_probs", "reference_kl")
SINGLE_INPUTS = ("log_probs", "ref_log_probs", "desirable", "reference_kl", "weights")
PAIR_INPUTS = (
    "chosen_log_probs",
    "rejected_log_probs",
    "ref_chosen_log_probs",
    "ref_rejected_log_probs",
    "chosen_lengths",
    "rejected_lengths",
    "weights",
)
REWARD_INPUTS = ("chosen_rewards", "rejected_rewards", "weights")


class PreferenceConfig(Section):
    """`preference`: pairs of a better and a worse response, of `megaverl dpo` and `megaverl reward`."""

    train: Paths = Field(
        default_factory=list,
        description="Files of rows with a prompt and two responses; for loss: kto also with one and its label.",
    )
    validation: Paths = Field(default_factory=list, description="Files of held-out rows.")
    chosen_key: str = Field(default="chosen", description="Column of the better response: text, or chat messages.")
    rejected_key: str = Field(default="rejected", description="Column of the worse one.")
    completion_key: str = Field(
        default="completion", description="With loss: kto, in rows that have no pair: column of a single response."
    )
    label_key: str = Field(default="label", description="Column of whether that one is desirable: true or false.")
    margin_key: str | None = Field(
        default=None,
        description="Column of how much better it is, of `megaverl reward` (arXiv 2307.09288).",
    )
    loss: str = Field(
        default="dpo", description="Of `megaverl dpo`: dpo, ipo, simpo, orpo, kto, or module:function of your own."
    )
    options: Passthrough = Field(default_factory=dict, description="Options of the loss, such as beta.")
    steps: Positive = Field(default=100, description="Optimizer steps.")
    batch_size: Positive = Field(default=32, description="Rows in one step, over all ranks.")
    lr: PositiveFloat = Field(default=1e-6, description="Highest learning rate.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="How the learning rate falls to 0 after warm-up."
    )
    lr_warmup_steps: NonNegative = Field(default=0, description="Steps in which the learning rate rises from 0.")
    validate_every: NonNegative = Field(default=0, description="Steps between validations; 0: at the end.")
    max_response_tokens: Positive | None = Field(
        default=None, description="Longest response; a longer one is an error. null: rollout.sampling.max_tokens."
    )


class RewardModelConfig(TrainedConfig):
    """`reward_model`: a model that scores responses and is trained; what is left out of its grid is the actor's.

    `megaverl reward` trains one on `preference` pairs; PRIME (`algorithm.name: prime`) trains an implicit one on
    outcomes; `mix` trains one of `reward` on the run's own rollouts.
    """

    path: str | None = Field(default=None, description="Hugging Face folder that it starts from. null: model.path.")
    loss: str = Field(default="bradley_terry", description="Of pairs: bradley_terry, or module:function.")
    options: Passthrough = Field(default_factory=dict, description="Options of the loss, such as center_coef.")
    beta: PositiveFloat = Field(default=0.05, description="Scale of PRIME's implicit rewards.")
    optimizer: Annotated[Passthrough, over(CRITIC_OPTIMIZER)] = Field(
        default_factory=lambda: dict(CRITIC_OPTIMIZER), description="Fields of megatron-core's OptimizerConfig."
    )


class MixConfig(Section):
    """One entry of `mix`: a further update in the training step, on the responses that it has generated and scored."""

    update: Literal["rejection", "preference", "reward_model", "sft"] | None = Field(
        default=None,
        description="rejection: cross-entropy on the best response of each group (RAFT, best-of-n). preference: "
        "`preference.loss` on the best and the worst of each group. reward_model: pairs of the same train the learned "
        "reward. sft: cross-entropy on the prompts' reference answers.",
    )
    every: Positive = Field(default=1, description="In each so-many-th step.")
    weight: PositiveFloat = Field(default=1.0, description="Factor on the loss.")
    judge: str = Field(
        default="reward",
        min_length=1,
        description="What best and worst go by: reward (the weighted sum), accuracy, or one reward by its name.",
    )


def preference_mistakes(config: Config, command: str, check_paths: bool) -> Iterator[ConfigIssue]:
    """Of the pairs of `megaverl dpo` and `megaverl reward`."""
    preference = config.preference
    if not preference.train:
        yield ConfigIssue(
            "preference.train", "is empty. Give one or more JSONL or Parquet files: preference.train=FILE."
        )
    if preference.lr_warmup_steps >= preference.steps:
        yield ConfigIssue(
            "preference.lr_warmup_steps",
            f"found {preference.lr_warmup_steps}; expected below preference.steps={preference.steps}.",
            involves=("preference.steps",),
        )
    if preference.validate_every and not preference.validation:
        yield ConfigIssue(
            "preference.validate_every", "is set, but preference.validation is empty. Give held-out pairs."
        )
    crosses = "reference_kl" in loss_inputs("preference_losses", preference.loss)
    if command == "dpo" and crosses and preference.batch_size < 2:
        yield ConfigIssue(
            "preference.batch_size",
            f"found 1; {preference.loss} compares every prompt with another row's response, and needs at least 2 rows.",
            involves=("preference.loss",),
        )
    if command == "dpo":
        if preference.margin_key is not None:
            yield ConfigIssue("preference.margin_key", "is of `megaverl reward`; no preference loss reads a margin.")
        yield from loss_mistakes("preference", "preference_losses", preference.loss, preference.options)
    if check_paths:
        for key, paths in (("train", preference.train), ("validation", preference.validation)):
            for index, name in enumerate(paths):
                if not any(mark in name for mark in "*?[") and not Path(name).exists():
                    yield ConfigIssue(f"preference.{key}.{index}", f"found {found(name)}, which does not exist.")


def reward_model_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Of the loss of `reward_model`; also of a command that trains none, for what is written there is for another."""
    section = config.reward_model
    has_margins = config.preference.margin_key is not None and (command == "reward" or not config.mixes_reward_model)
    yield from loss_mistakes(
        "reward_model", "reward_model_losses", section.loss, section.options, has_margins=has_margins
    )


def mix_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Of `mix`, against what the run has."""
    names = ["reward", "accuracy", *(entry.label for entry in config.reward)]
    for index, entry in enumerate(config.mix):
        key = f"mix.{index}"
        if entry.update is None:
            yield ConfigIssue(f"{key}.update", "is not set. Known: rejection, preference, reward_model, sft.")
        if entry.update == "sft" and entry.judge != MixConfig().judge:
            yield ConfigIssue(
                f"{key}.judge", "is set, and sft learns the rows' own answers: nothing is judged. Leave it out."
            )
        elif entry.judge not in names:
            hint = did_you_mean(entry.judge, names)
            yield ConfigIssue(f"{key}.judge", f"found {found(entry.judge)}; there are: {listed(names)}.{hint}")
        if entry.update not in (None, "sft") and config.algorithm.group_size < 2:
            yield ConfigIssue(
                "algorithm.group_size",
                f"found {config.algorithm.group_size}; mix with {entry.update} takes the best response of a group, "
                "which needs at least 2.",
                involves=(f"{key}.update",),
            )
        if entry.update == "preference":
            yield from loss_mistakes(
                "preference", "preference_losses", config.preference.loss, config.preference.options
            )
            if "desirable" in loss_inputs("preference_losses", config.preference.loss):
                text = f"found {found(config.preference.loss)}, which is not of pairs, and mix has pairs. Use dpo."
                yield ConfigIssue("preference.loss", text)
        learned = [each for each in config.reward if each.path is not None and each.engine == "megatron"]
        if entry.update == "reward_model" and len(learned) != 1:
            yield ConfigIssue(
                f"{key}.update",
                f"found 'reward_model', but {len(learned)} entries of reward have a path; it trains the one that has. "
                "Add {name: learned, path: FOLDER} to reward.",
            )
        if entry.update == "reward_model" and config.estimator_reads("implicit_rewards"):
            yield ConfigIssue(
                f"{key}.update",
                f"found 'reward_model', but algorithm.advantage={config.algorithm.advantage_name} trains reward_model "
                "already, as an implicit one. Use one of the two.",
                involves=("algorithm.name", "algorithm.advantage"),
            )
        if entry.update == "reward_model" and learned and entry.judge in ("reward", learned[0].label):
            yield ConfigIssue(
                f"{key}.judge",
                f"found {found(entry.judge)}: the learned reward would be its own judge. Name another reward.",
            )


def loss_mistakes(
    section: str, registry: str, name: str, options: dict[str, Any], *, has_margins: bool = False
) -> Iterator[ConfigIssue]:
    """A loss by its name, its options, and what it reads of a pair."""
    signature: Registered | None
    if ":" in name:
        try:
            signature = of_the_users_own(name)
        except LookupError as error:
            yield ConfigIssue(f"{section}.loss", f"found {found(name)}: {error}.")
            return
    else:
        known = registered(registry)
        signature = known.get(name)
        if signature is None:
            text = f"found {found(name)}; known: {listed(sorted(known))}, or a function of your own as module:function."
            yield ConfigIssue(f"{section}.loss", text + did_you_mean(name, known))
    if signature is None:
        return
    for option, value in options.items():
        if option not in signature.options:
            known_options = f" It has: {listed(sorted(signature.options))}." if signature.options else " It has none."
            hint = did_you_mean(option, signature.options) or known_options
            yield ConfigIssue(f"{section}.options.{option}", f"{name} has no such option.{hint}")
        elif not fits(value, signature.options[option]):
            expected = signature.options[option].type_text
            yield ConfigIssue(f"{section}.options.{option}", f"found {found(value)}; expected {expected}.")
        elif allowed := out_of_range(option, value):
            yield ConfigIssue(f"{section}.options.{option}", f"found {found(value)}; expected {allowed}.")
    for option in signature.required:
        if option not in options:
            yield ConfigIssue(
                f"{section}.options.{option}", f"is not set, and {name} needs it.", involves=(f"{section}.loss",)
            )
    of_policy = SINGLE_INPUTS if "desirable" in signature.inputs else PAIR_INPUTS
    given: tuple[str, ...] = REWARD_INPUTS if registry == "reward_model_losses" else of_policy
    given += ("margins",) if has_margins else ()
    unknown = [each for each in signature.inputs if each not in given]
    if "margins" in unknown and registry == "reward_model_losses":
        yield ConfigIssue(
            "preference.margin_key", f"is not set, and {name} reads margins. Name the column that holds them."
        )
    elif unknown:
        text = f"found {found(name)}, which reads {listed(unknown)}; it is given: {listed(given)}."
        yield ConfigIssue(f"{section}.loss", text)
    if has_margins and "margins" not in signature.inputs + signature.optional_inputs:
        yield ConfigIssue("preference.margin_key", f"is set, and {name} reads no margins. Leave it out.")


def loss_inputs(registry: str, name: str) -> tuple[str, ...]:
    """The inputs of a loss, registered or `module:function`; none where that cannot be told."""
    try:
        signature = of_the_users_own(name) if ":" in name else registered(registry).get(name)
    except LookupError:
        return ()
    return signature.inputs + signature.optional_inputs if signature is not None else ()
