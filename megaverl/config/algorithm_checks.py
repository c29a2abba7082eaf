"""Checks of `algorithm`: names, options and inputs of its functions, and combinations that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megaverl.config.algorithm import AlgorithmConfig, CorrectionPart
from megaverl.config.errors import (
    ConfigIssue,
    divisors,
    listed,
    named_function,
    option_mistakes,
    out_of_order,
    out_of_range,
    yaml_text,
)
from megaverl.config.rollout_checks import dynamic_sampling_mistakes
from megaverl.config.schema import Config
from megaverl.config.signatures import Registered, registered
from megaverl.config.training_checks import bonus_and_filter_mistakes, distillation_mistakes, opponent_mistakes

# Tensors that a training step can give an advantage estimator.
ESTIMATOR_INPUTS = (
    "rewards",
    "token_rewards",
    "component_rewards",
    "component_weights",
    "greedy_rewards",
    "score_norms",
    "values",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "group_ids",
    "turn_ids",
    "implicit_rewards",
    "response_mask",
)
# Tensors that an update can give a policy loss.
LOSS_INPUTS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "weights", "selected")
# Further inputs that a policy loss may have with the default None; see megaverl.algorithms.policy_losses.
OPTIONAL_LOSS_INPUTS = ("correction_factors", "importance_weights", "trained_tokens")
SELECTOR_INPUTS = ("log_probs", "advantages", "response_mask", "draws")
VALUE_LOSS_INPUTS = ("values", "old_values", "returns", "weights")
AGGREGATION_INPUTS = ("response_mask", "denominators")
CORRECTION_INPUTS = ("old_log_probs", "rollout_log_probs", "log_probs", "advantages", "response_mask", "weights")
KL_INPUTS = ("log_probs", "ref_log_probs")

# Keys that choose the estimator, the policy loss and the aggregation: the `involves` of mistakes about them.
BY_NAME = ("algorithm.name", "algorithm.advantage")
BY_LOSS = ("algorithm.name", "algorithm.policy_loss")
BY_AGGREGATION = ("algorithm.name", "algorithm.loss_aggregation")
# Policy losses without a ratio to the sampling policy, and estimators for which that is no problem: raft learns kept
# samples like answers, and none has no advantages.
WITHOUT_RATIO = ("policy_gradient", "gpg")
NOT_OF_SAMPLES = ("raft", "none")
WITH_RATIO = "Use 1, or a policy loss with a ratio, such as importance_sampling or ppo_clip."


def algorithm_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm`, and settings of other sections that cannot be combined with it."""
    algorithm = config.algorithm
    estimator, mistakes = named_function("algorithm.advantage", "advantage_estimators", algorithm.advantage_name)
    yield from mistakes
    loss, mistakes = named_function("algorithm.policy_loss", "policy_losses", algorithm.policy_loss_name)
    yield from mistakes
    key = "algorithm.loss_aggregation"
    name = algorithm.aggregation_name
    aggregation, mistakes = named_function(key, "aggregations", name, AGGREGATION_INPUTS, ("max_tokens",))
    yield from mistakes
    yield from _batches(config)
    yield from _kl(algorithm)
    if estimator is not None:
        yield from _estimator(config, estimator)
        yield from estimator_conflicts(config, estimator)
    if loss is not None:
        yield from _loss(algorithm, loss)
        yield from loss_conflicts(algorithm, loss, aggregation)
    yield from _corrections(algorithm, loss)
    yield from dynamic_sampling_mistakes(config)
    yield from (*distillation_mistakes(config), *opponent_mistakes(config))
    yield from bonus_and_filter_mistakes(config)
    if algorithm.aggregation_name == "fixed_length" and algorithm.loss_length is None:
        yield ConfigIssue(
            "algorithm.loss_length",
            "is not set; fixed_length divides by it. Give rollout.sampling.max_tokens: loss_length: "
            f"{config.rollout.sampling['max_tokens']}.",
            involves=BY_AGGREGATION,
        )


def _batches(config: Config) -> Iterator[ConfigIssue]:
    """Yield a mistake if the mini-batches do not divide the samples of a step."""
    algorithm = config.algorithm
    if config.samples_per_step % algorithm.num_mini_batches:
        yield ConfigIssue(
            "algorithm.num_mini_batches",
            f"found {algorithm.num_mini_batches}, not a divisor of the {config.samples_per_step} samples "
            f"of a step (data.prompts_per_step={config.data.prompts_per_step} x "
            f"algorithm.group_size={algorithm.group_size}). "
            f"Sizes that fit: {listed(divisors(config.samples_per_step))}.",
            involves=("data.prompts_per_step", "algorithm.group_size"),
        )


def _kl(algorithm: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm.kl`."""
    kl = algorithm.kl
    yield from named_function("algorithm.kl.kind", "kl_estimators", kl.kind_name, KL_INPUTS, ())[1]
    if kl.place == "none" and (kl.coef > 0 or kl.target is not None):
        key = "coef" if kl.coef > 0 else "target"
        yield ConfigIssue(
            "algorithm.kl.in",
            f"found none, yet algorithm.kl.{key} is set. Use in: reward or in: loss, or leave {key} out.",
        )
    if kl.place != "none" and kl.coef == 0:
        yield ConfigIssue("algorithm.kl.coef", f"found 0.0; with algorithm.kl.in={kl.place} it must be above 0.")
    if kl.place == "loss" and kl.kind == "k1" and kl.gradient == "value":
        yield ConfigIssue(
            "algorithm.kl.kind",
            "found 'k1', whose gradient is 0 on average in a loss. Use k2 or k3, or algorithm.kl.straight_through, "
            "importance_weighted or score_function.",
        )
    gradients = kl.changed("straight_through", "importance_weighted", "score_function")
    if kl.place != "loss":
        for key in gradients:
            yield ConfigIssue(f"algorithm.kl.{key}", f"is about gradients, and algorithm.kl.in={kl.place} has none.")
    elif len(gradients) > 1:
        yield ConfigIssue(f"algorithm.kl.{[*gradients][1]}", f"is set, and so is {[*gradients][0]}. Use one of them.")
    elif kl.score_function and kl.kind_name != "k1":
        text = f"found {yaml_text(kl.kind)}; score_function leaves out the gradient of the estimate itself, which is 0 "
        yield ConfigIssue("algorithm.kl.kind", f"{text}on average for k1 alone. Leave it out.")
    # Only registered kinds are known to be biased. A user's own estimator is the user's decision.
    biased = kl.kind_name != "k1" and kl.kind_name in registered("kl_estimators")
    if kl.place == "reward" and biased and not kl.allow_biased:
        yield ConfigIssue(
            "algorithm.kl.kind",
            f"found {yaml_text(kl.kind_name)}; in the reward only k1 has the gradient of the KL on average: that of "
            "others is far too small near the reference, or points elsewhere. Leave it out, use in: loss, or "
            "algorithm.kl.allow_biased: true.",
        )
    if kl.allow_biased and kl.place != "reward":
        yield ConfigIssue("algorithm.kl.allow_biased", f"is about kinds in the reward, and algorithm.kl.in={kl.place}.")
    elif kl.allow_biased and not biased:
        yield ConfigIssue("algorithm.kl.allow_biased", f"found true; {kl.kind_name} needs no permission. Leave it out.")
    if kl.place != "none" and kl.target is None and kl.changed("gain"):
        yield ConfigIssue(
            "algorithm.kl.gain", f"found {kl.gain}, but algorithm.kl.target is null: coef is fixed. Set a target."
        )


def _estimator(config: Config, estimator: Registered) -> Iterator[ConfigIssue]:
    """Yield mistakes in the advantage estimator, such as inputs that a training step does not have."""
    algorithm = config.algorithm
    key = "algorithm.advantage"
    name = algorithm.advantage_name
    inputs = estimator.inputs
    unknown = [other for other in inputs if other not in ESTIMATOR_INPUTS]
    if unknown:
        yield ConfigIssue(
            key,
            f"found {yaml_text(name)}, which reads {listed(unknown)}; a training step has none. It has: "
            f"{listed(ESTIMATOR_INPUTS)}.",
            involves=("algorithm.name",),
        )
    if "turn_ids" in inputs and config.environment.name is None:
        yield ConfigIssue(
            key,
            f"found {yaml_text(name)}, which reads turn_ids; without environment.name a response has no turns. Name an "
            "environment, or use another estimator.",
            involves=("algorithm.name", "environment.name"),
        )
    if "group_ids" in inputs and algorithm.group_size < 2:
        yield ConfigIssue(
            "algorithm.group_size",
            f"found {algorithm.group_size}; {name} compares the responses of a group and needs at least 2.",
            involves=("algorithm.name", key),
        )
    for option, what in (("k", "pass@k needs k responses"), ("keep", "so many responses of a group are kept")):
        count = algorithm.advantage_options.get(option)
        if option in estimator.options and isinstance(count, int) and count > algorithm.group_size > 1:
            yield ConfigIssue(
                f"algorithm.advantage_options.{option}",
                f"found {count}; {what}, and algorithm.group_size={algorithm.group_size}.",
                involves=("algorithm.group_size",),
            )
    if name == "none" and not _learns_otherwise(config):
        yield ConfigIssue(
            key,
            "found 'none', and nothing else trains: no algorithm.distillation, no algorithm.kl in: loss to another "
            "reference, no algorithm.entropy_coef or positive_coef, no mix. Name an estimator, or one of these.",
            involves=("algorithm.name",),
        )
    yield from _value_loss(algorithm) if "values" in inputs else _without_critic(algorithm)
    if "greedy_rewards" in inputs and config.trainer.replay_rollouts is not None:
        yield ConfigIssue(
            key,
            f"found {yaml_text(name)}, whose baseline is a greedy rollout; trainer.replay_rollouts has no engine to "
            "make one. Use another estimator, or generate.",
            involves=("algorithm.name", "trainer.replay_rollouts"),
        )
    if algorithm.kl.place == "reward" and not {"token_rewards", "rewards"} & set(inputs):
        yield ConfigIssue(
            "algorithm.kl.in",
            f"found reward, but {name} reads neither rewards nor token_rewards. Use in: loss.",
            involves=("algorithm.name", key),
        )
    yield from option_mistakes("algorithm.advantage_options", name, algorithm.advantage_options, estimator)


def _learns_otherwise(config: Config) -> bool:
    """Return whether the actor has a loss besides that of the advantages."""
    algorithm = config.algorithm
    # While the actor equals its reference, the KL between them has no gradient.
    differs_from_start = config.reference.path not in (None, config.model.path)
    kl_has_gradient = algorithm.kl.place == "loss" and differs_from_start
    has_entropy_loss = algorithm.entropy_coef > 0 or algorithm.entropy_target is not None
    has_further_loss = algorithm.divergence_name is not None or kl_has_gradient or has_entropy_loss
    return (
        has_further_loss or algorithm.positive_coef > 0 or any(entry.update != "reward_model" for entry in config.mix)
    )


def _without_critic(algorithm: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield settings of the value loss, for an estimator without a critic."""
    keys = ("value_loss", "value_loss_options", "value_loss_coef", "value_clip_range", "critic_warmup_steps")
    for key, value in algorithm.changed(*keys).items():
        yield ConfigIssue(
            f"algorithm.{key}",
            f"found {yaml_text(value)}, but {algorithm.advantage_name} has no critic, and so no value loss. Leave it "
            "out, or use an estimator with one: advantage: gae.",
            involves=BY_NAME,
        )


def _loss(algorithm: AlgorithmConfig, loss: Registered) -> Iterator[ConfigIssue]:
    """Yield mistakes in the policy loss, its token selector, and its clip ranges."""
    name = algorithm.policy_loss_name
    unknown = [other for other in loss.inputs if other not in LOSS_INPUTS]
    if unknown:
        yield ConfigIssue(
            "algorithm.policy_loss",
            f"found {yaml_text(name)}, which reads {listed(unknown)}; an update has: {listed(LOSS_INPUTS)}; and, as "
            f"parameters with the default None: {listed(OPTIONAL_LOSS_INPUTS)}.",
        )
    selector: Registered | None = Registered()
    if "selected" in loss.inputs:
        selector, mistakes = _token_selector(algorithm)
        yield from mistakes
    elif algorithm.token_selector is not None:
        yield ConfigIssue(
            "algorithm.token_selector",
            f"found {yaml_text(algorithm.token_selector)}, but {name} does not read selected. Leave it out.",
            involves=BY_LOSS,
        )
    options = loss.options if selector is None else loss.options | selector.options
    for key, option in (("clip_range", "clip_low"), ("clip_range_high", "clip_high")):
        value = getattr(algorithm, key)
        if value is None:
            continue
        if option not in options:
            text = f"found {value}, but {name} has no {option}. Leave it out; {name} has: "
            yield ConfigIssue(f"algorithm.{key}", f"{text}{listed(sorted(options)) or 'no options'}.", involves=BY_LOSS)
        elif option in algorithm.policy_loss_options:
            yield _set_twice(f"policy_loss_options.{option}", key)
        if option in options and (expected := out_of_range(option, value)):
            yield ConfigIssue(f"algorithm.{key}", f"found {value}; as {option} of {name} expected {expected}.")
    if selector is not None:
        both = replace(loss, options=options, required=(*loss.required, *selector.required))
        yield from option_mistakes("algorithm.policy_loss_options", name, algorithm.policy_loss_options, both)


def _token_selector(algorithm: AlgorithmConfig) -> tuple[Registered | None, list[ConfigIssue]]:
    """Return the token selector's signature (None if unknown) and its mistakes."""
    name = algorithm.token_selector_name
    if algorithm.token_selector is None and name not in registered("token_selectors"):
        key = "algorithm.policy_loss"
        text = f"found {yaml_text(name)}, which reads selected, and has no selector of its "
        return None, [ConfigIssue(key, f"{text}own. Name one: algorithm.token_selector.")]
    return named_function("algorithm.token_selector", "token_selectors", name, SELECTOR_INPUTS)


def _value_loss(algorithm: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield mistakes in the value loss, for an estimator with a critic."""
    name = algorithm.value_loss
    options = algorithm.value_loss_options
    loss, mistakes = named_function("algorithm.value_loss", "value_losses", name, VALUE_LOSS_INPUTS)
    yield from mistakes
    if loss is None:
        return
    yield from option_mistakes("algorithm.value_loss_options", name, options, loss)
    if not algorithm.changed("value_clip_range"):
        return
    if "clip_range" in options:
        yield _set_twice("value_loss_options.clip_range", "value_clip_range")
    elif "clip_range" not in loss.options:
        yield ConfigIssue(
            "algorithm.value_clip_range",
            f"found {yaml_text(algorithm.value_clip_range)}, but {name} has no clip_range. Leave it out.",
            involves=("algorithm.value_loss",),
        )


def _corrections(algorithm: AlgorithmConfig, loss: Registered | None) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm.correction`."""
    correction = algorithm.correction
    key = "algorithm.correction"
    yield from _correction(correction, key)
    for index, part in enumerate(correction.also):
        yield from _correction(part, f"{key}.also.{index}")
        if part.kind == "none":
            yield ConfigIssue(f"{key}.also.{index}.kind", "is none. Name one, or leave the entry out.")
    if correction.also and correction.kind == "none":
        yield ConfigIssue(f"{key}.kind", f"is none, and {key}.also is set. Name the first one here.")
    kinds = {part.kind for part in (correction, *correction.also)} - {"none"}
    if loss is not None and "rollout_log_probs" in loss.inputs and kinds - {"off_policy_mask", "reject"}:
        yield ConfigIssue(
            f"{key}.kind",
            f"found {yaml_text(correction.kind)}; the ratio of {algorithm.policy_loss_name} is to the engine's policy "
            "already. Use none.",
            involves=("algorithm.policy_loss", "algorithm.name"),
        )


def _correction(correction: CorrectionPart, at: str) -> Iterator[ConfigIssue]:
    """Yield mistakes in one correction, at the key `at`."""
    limits = {"low": correction.low, "high": correction.high}
    if correction.kind == "none":
        for key in correction.changed("options", *limits):
            yield ConfigIssue(f"{at}.{key}", f"is set, but {at}.kind is none.")
        return
    signature, mistakes = named_function(f"{at}.kind", "corrections", correction.kind, CORRECTION_INPUTS)
    yield from mistakes
    if signature is None:
        return
    if wrong := out_of_order(limits):
        text = f"found {correction.low}; expected below {wrong[1]}, {correction.high}."
        yield ConfigIssue(f"{at}.low", text, involves=(f"{at}.high",))
    if correction.low is not None and correction.low < 0 and correction.kind != "reject":
        yield ConfigIssue(f"{at}.low", f"found {correction.low}; a ratio is at least 0.")
    for key, limit in limits.items():
        if limit is not None and key not in signature.options:
            yield ConfigIssue(f"{at}.{key}", f"is set, but {correction.kind} has no such limit.")
        if limit is None and key in signature.required:
            yield ConfigIssue(f"{at}.{key}", f"is not set, and {correction.kind} needs it.")
        if key in correction.options:
            yield ConfigIssue(f"{at}.options.{key}", f"is a key of its own: {at}.{key}.")
    other_options = {name: option for name, option in signature.options.items() if name not in limits}
    required = tuple(name for name in signature.required if name not in limits)
    other_values = {name: value for name, value in correction.options.items() if name not in limits}
    yield from option_mistakes(
        f"{at}.options",
        correction.kind,
        other_values,
        replace(signature, options=other_options, required=required),
        f"{at}.kind",
    )


def estimator_conflicts(config: Config, estimator: Registered) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with the advantage estimator."""
    yield from _unread_by_estimator(config.algorithm, estimator)
    algorithm = config.algorithm
    name = config.algorithm.advantage_name
    options = config.algorithm.advantage_options
    if name == "distillation" and config.reference.path in (None, config.model.path):
        yield ConfigIssue(
            "reference.path",
            f"is {'not set' if config.reference.path is None else 'model.path'}; distillation has every token judged "
            "by a teacher, and this one would teach the actor to stay as it is. Name the teacher's folder.",
            involves=BY_NAME,
        )
    if "values" in estimator.inputs and algorithm.critic_warmup_steps >= config.trainer.steps:
        yield ConfigIssue(
            "algorithm.critic_warmup_steps",
            f"found {algorithm.critic_warmup_steps}, and trainer.steps={config.trainer.steps}: the actor would never "
            "be updated. Use fewer.",
            involves=("trainer.steps",),
        )
    thresholds = name == "pass_at_k" or options.get("right_from") is not None
    if "right_from" in estimator.options and thresholds and algorithm.kl.place == "reward":
        yield ConfigIssue(
            "algorithm.kl.in",
            f"found reward, and {name} asks whether a reward reaches right_from: with the penalty in it a right "
            "response counts as wrong. Use in: loss.",
            involves=BY_NAME,
        )
    if name == "raft" and options.get("keep") == algorithm.group_size and options.get("right_from") is None:
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
            involves=("algorithm.group_size", *BY_NAME),
        )


def _unread_by_estimator(algorithm: AlgorithmConfig, estimator: Registered) -> Iterator[ConfigIssue]:
    """Yield keys that this estimator does not read, and options that are set by a key of `algorithm` too."""
    name = algorithm.advantage_name
    options = estimator.options
    readers = {"gamma": "gamma" in options, "lam": "lam" in options, "normalize_by_std": "normalize_std" in options}
    readers["normalize_advantages"] = "values" in estimator.inputs
    readers["bootstrap_truncated"] = "last_values" in estimator.optional_inputs
    for key, value in algorithm.changed(*readers).items():
        option = "normalize_std" if key == "normalize_by_std" else key
        if not readers[key]:
            yield ConfigIssue(
                f"algorithm.{key}",
                f"found {yaml_text(value)}, which {name} does not read. Leave it out, or use another estimator.",
                involves=BY_NAME,
            )
        elif option in algorithm.advantage_options:
            yield _set_twice(f"advantage_options.{option}", key)


def loss_conflicts(
    algorithm: AlgorithmConfig,
    loss: Registered,
    aggregation: Registered | None,
) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with the policy loss or the aggregation."""
    name = algorithm.policy_loss_name
    options = algorithm.policy_loss_options
    if "clip_dual" in loss.options:
        high = options.get("clip_high", algorithm.clip_range_high or algorithm.clip_range or 0.2)
        dual = options.get("clip_dual", 3.0)
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
            involves=BY_LOSS,
        )
    if algorithm.loss_length is not None and aggregation is not None and "max_tokens" not in aggregation.options:
        yield ConfigIssue(
            "algorithm.loss_length",
            f"found {algorithm.loss_length}, which {algorithm.aggregation_name} does not read. Leave it out, or use "
            "loss_aggregation: fixed_length.",
            involves=BY_AGGREGATION,
        )


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Yield warnings about settings that work but are probably not meant."""
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
    """Return whether the policy loss is correct only for samples of the current policy."""
    return algorithm.policy_loss_name in WITHOUT_RATIO and algorithm.advantage_name not in NOT_OF_SAMPLES


def _set_twice(option: str, key: str) -> ConfigIssue:
    """Return a mistake for an option that is also set by a key of `algorithm`."""
    return ConfigIssue(f"algorithm.{option}", f"is set, and so is algorithm.{key}. Use one of the two.")
