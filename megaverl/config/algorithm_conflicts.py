"""`algorithm`: what is set and read by nothing, said twice, or cannot work beside something else."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config.algorithm import AlgorithmConfig, KLConfig
from megaverl.config.errors import ConfigIssue, found
from megaverl.config.option_ranges import out_of_range
from megaverl.config.registered import Registered
from megaverl.config.schema import Config

_DEFAULTS = AlgorithmConfig()
# Losses without a ratio to the policy that sampled, and estimators whose samples need not be the policy's own: what is
# kept is learned like an answer, or nothing is.
WITHOUT_RATIO, NOT_OF_SAMPLES = ("policy_gradient", "gpg"), ("raft", "none")
WITH_RATIO = "Use 1, or a policy loss with a ratio, such as importance_sampling or ppo_clip."


def estimator_conflicts(config: Config, estimator: Registered) -> Iterator[ConfigIssue]:
    """Between an advantage estimator and the rest of the configuration."""
    yield from _unread_by_estimator(config.algorithm, estimator)
    algorithm, name, given = config.algorithm, config.algorithm.advantage_name, config.algorithm.advantage_options
    involves = ("algorithm.name", "algorithm.advantage")
    if name == "distillation" and config.reference.path in (None, config.model.path):
        yield ConfigIssue(
            "reference.path",
            f"is {'not set' if config.reference.path is None else 'model.path'}; distillation has every token judged "
            "by a teacher, and this one would teach the actor to stay as it is. Name the teacher's folder.",
            involves=involves,
        )
    if "values" in estimator.inputs and algorithm.critic_warmup_steps >= config.trainer.steps:
        yield ConfigIssue(
            "algorithm.critic_warmup_steps",
            f"found {algorithm.critic_warmup_steps}, and trainer.steps={config.trainer.steps}: the actor would never "
            "be updated. Use fewer.",
            involves=("trainer.steps",),
        )
    thresholds = name == "pass_at_k" or given.get("right_from") is not None
    if "right_from" in estimator.options and thresholds and algorithm.kl.place == "reward":
        yield ConfigIssue(
            "algorithm.kl.in",
            f"found reward, and {name} asks whether a reward reaches right_from: with the penalty in it a right "
            "response counts as wrong. Use in: loss.",
            involves=involves,
        )
    if name == "raft" and given.get("keep") == algorithm.group_size and given.get("right_from") is None:
        yield ConfigIssue(
            "algorithm.advantage_options.keep",
            f"found {algorithm.group_size}, all of the group: nothing is rejected, and the policy learns to stay as "
            "it is. Keep fewer, or set right_from.",
            involves=("algorithm.group_size",),
        )
    if name == "reinforce_plus_plus" and config.samples_per_step < 2:
        yield ConfigIssue(
            "data.prompts_per_step",
            "found 1; reinforce_plus_plus compares a response with the others of its step, and needs at least 2.",
            involves=("algorithm.group_size", *involves),
        )


def _unread_by_estimator(algorithm: AlgorithmConfig, estimator: Registered) -> Iterator[ConfigIssue]:
    """Keys that belong to other estimators, and options that a key of their own has set already."""
    name, options = algorithm.advantage_name, estimator.options
    readers = {"gamma": "gamma" in options, "lam": "lam" in options, "normalize_by_std": "normalize_std" in options}
    readers["normalize_advantages"] = "values" in estimator.inputs
    readers["bootstrap_truncated"] = "last_values" in estimator.optional_inputs
    for key, is_read in readers.items():
        value = getattr(algorithm, key)
        if value == getattr(_DEFAULTS, key):
            continue
        option = "normalize_std" if key == "normalize_by_std" else key
        if not is_read:
            yield ConfigIssue(
                f"algorithm.{key}",
                f"found {found(value)}, which {name} does not read. Leave it out, or use another estimator.",
                involves=("algorithm.name", "algorithm.advantage"),
            )
        elif option in algorithm.advantage_options:
            yield ConfigIssue(
                f"algorithm.advantage_options.{option}", f"is set, and so is algorithm.{key}. Use one of the two."
            )


def loss_conflicts(
    algorithm: AlgorithmConfig, loss: Registered, aggregation: Registered | None
) -> Iterator[ConfigIssue]:
    """Between a policy loss, or the aggregation of losses, and the keys that set their options."""
    name, given = algorithm.policy_loss_name, algorithm.policy_loss_options
    for key, option in (("clip_range", "clip_low"), ("clip_range_high", "clip_high")):
        value = getattr(algorithm, key)
        if value is None or option not in loss.options:
            continue
        if option in given:
            yield ConfigIssue(
                f"algorithm.policy_loss_options.{option}", f"is set, and so is algorithm.{key}. Use one of the two."
            )
        if expected := out_of_range(option, value):
            yield ConfigIssue(f"algorithm.{key}", f"found {value}; as {option} of {name} expected {expected}.")
    if "clip_dual" in loss.options:
        high = given.get("clip_high", algorithm.clip_range_high or algorithm.clip_range or 0.2)
        dual = given.get("clip_dual", 3.0)
        if isinstance(dual, int | float) and isinstance(high, int | float) and dual <= 1.0 + high:
            yield ConfigIssue(
                "algorithm.policy_loss_options.clip_dual",
                f"found {dual}; expected above 1 + clip_high, {1.0 + high:g}: below it the floor would cut off tokens "
                "that the clip lets through.",
                involves=("algorithm.clip_range", "algorithm.clip_range_high"),
            )
    if _wants_on_policy(algorithm) and algorithm.num_epochs > 1:
        yield ConfigIssue(
            "algorithm.num_epochs",
            f"found {algorithm.num_epochs}, but {name} has no ratio to the policy that sampled: in a second pass its "
            f"gradient is no longer that of the expected reward, and nothing bounds how far it goes. {WITH_RATIO}",
            involves=("algorithm.name", "algorithm.policy_loss"),
        )
    if algorithm.loss_length is not None and aggregation is not None and "max_tokens" not in aggregation.options:
        yield ConfigIssue(
            "algorithm.loss_length",
            f"found {algorithm.loss_length}, which {algorithm.aggregation_name} does not read. Leave it out, or use "
            "loss_aggregation: fixed_length.",
            involves=("algorithm.name", "algorithm.loss_aggregation"),
        )


def algorithm_warnings(config: Config) -> Iterator[str]:
    """What is done, and may not be meant."""
    algorithm = config.algorithm
    if _wants_on_policy(algorithm) and algorithm.num_mini_batches > 1:
        yield (
            f"algorithm.num_mini_batches={algorithm.num_mini_batches}: {algorithm.policy_loss_name} has no ratio to "
            "the policy that sampled, so from the second update of a step on its gradient is off-policy and nothing "
            f"corrects it. {WITH_RATIO}"
        )
    if algorithm.bootstrap_truncated and algorithm.gamma == 1.0:
        yield (
            "algorithm.bootstrap_truncated=true with algorithm.gamma=1: a response that is cut off earns its score and "
            "the value of what follows it, so values grow without bound once responses learn to be cut off. Lower "
            "gamma, or leave it out."
        )


def _wants_on_policy(algorithm: AlgorithmConfig) -> bool:
    return algorithm.policy_loss_name in WITHOUT_RATIO and algorithm.advantage_name not in NOT_OF_SAMPLES


def kl_conflicts(algorithm: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Settings of a KL penalty whose coefficient does not move."""
    kl = algorithm.kl
    if kl.place != "none" and kl.target is None and kl.gain != KLConfig().gain:
        yield ConfigIssue(
            "algorithm.kl.gain", f"found {kl.gain}, but algorithm.kl.target is null: coef is fixed. Set a target."
        )
