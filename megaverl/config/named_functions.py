"""Checks of functions that a configuration names: the name, the inputs that the function reads, and its options.

Signatures are read from the source, so no check imports a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megaverl.config.errors import ConfigIssue
from megaverl.config.section import (
    BOUNDS,
    Fraction,
    Issues,
    NonNegativeFloat,
    PositiveFloat,
    is_number,
)
from megaverl.config.signatures import Registered, registered, user_function_signature
from megaverl.config.wording import did_you_mean, listed, yaml_text

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
LOSS_INPUTS = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "advantages",
    "weights",
    "selected",
)
# Further inputs that a policy loss may have with the default None; see
# megaverl.algorithms.policy_losses.
OPTIONAL_LOSS_INPUTS = ("correction_factors", "importance_weights", "trained_tokens")
SELECTOR_INPUTS = ("log_probs", "advantages", "response_mask", "draws")
VALUE_LOSS_INPUTS = ("values", "old_values", "returns", "weights")
AGGREGATION_INPUTS = ("response_mask", "denominators")
CORRECTION_INPUTS = (
    "old_log_probs",
    "rollout_log_probs",
    "log_probs",
    "advantages",
    "response_mask",
    "weights",
)
KL_INPUTS = ("log_probs", "ref_log_probs")
DIVERGENCE_INPUTS = ("student_log_probs", "teacher_log_probs")
# Tensors that the update on single responses can give a loss. A loss may read no
# others.
SINGLE_INPUTS = (
    "log_probs",
    "ref_log_probs",
    "desirable",
    "reference_kl",
    "reward_shift",
    "weights",
)
# Tensors that the update on pairs can give a loss.
PAIR_INPUTS = (
    "chosen_log_probs",
    "rejected_log_probs",
    "ref_chosen_log_probs",
    "ref_rejected_log_probs",
    "chosen_lengths",
    "rejected_lengths",
    "chosen_log_ratios",
    "rejected_log_ratios",
    "chosen_alignment",
    "rejected_alignment",
    "chosen_matched",
    "rejected_matched",
    "margin_shifts",
    "mean_chosen_length",
    "weights",
)
# Tensors that the update of a reward model can give a loss.
REWARD_INPUTS = ("chosen_rewards", "rejected_rewards", "weights")

# Option name -> allowed range. An option means the same in every function that has it.
RANGES: dict[str, Any] = {
    **dict.fromkeys(("beta", "clip_high", "clip_range", "eps", "limit"), PositiveFloat),
    **dict.fromkeys(
        ("tau", "tau_positive", "tau_negative", "threshold"), PositiveFloat
    ),
    **dict.fromkeys(("ratio_max", "max_weight"), PositiveFloat),
    **dict.fromkeys(
        ("power_positive", "power_negative", "decay_positive", "decay_negative"),
        PositiveFloat,
    ),
    **dict.fromkeys(("gamma", "lam", "penalty", "center_coef"), NonNegativeFloat),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), NonNegativeFloat),
    **dict.fromkeys(
        ("alpha", "covariance_low", "covariance_high", "right_from"),
        Annotated[float, Field()],
    ),
    **dict.fromkeys(("k", "keep"), Annotated[float, Field(ge=1)]),
    "clip_low": Fraction,
    "clip_dual": Annotated[float, Field(gt=1)],
    "fraction": Annotated[float, Field(gt=0, le=1)],
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "epsilon": Annotated[float, Field(gt=0, lt=0.5)],
}
# Pairs of options of which the first must be smaller than the second.
ORDERED = (("covariance_low", "covariance_high"), ("low", "high"))


def out_of_range(name: str, value: Any) -> str | None:
    """Return the allowed range in words if `value` is a number outside the range of the option `name`, else None."""
    kind = RANGES.get(name)
    if kind is None or not is_number(value):
        return None
    try:
        TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        limits = kind.__metadata__[0].metadata
        ends = [
            f"{BOUNDS[bound]} {getattr(limit, bound):g}"
            for limit in limits
            for bound in BOUNDS
            if hasattr(limit, bound)
        ]
        return " and ".join(ends) or "a finite number"
    return None


def out_of_order(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of two options whose values are in the wrong order, or None."""
    for low, high in ORDERED:
        lower, upper = options.get(low), options.get(high)
        if not isinstance(lower, int | float) or not isinstance(upper, int | float):
            continue
        if not lower < upper:
            return low, high
    return None


def find_function(registry: str, name: str) -> Registered | None:
    """Return the signature of a function that the configuration names.

    Returns None if there is no such function, or if only an import could show its
    signature.

    Args:
        registry: registry to search, unless `name` is written module:function.
    """
    if ":" not in name:
        return registered(registry).get(name)
    try:
        return user_function_signature(name)
    except LookupError:
        return None


def function_issues(
    key: str,
    registry: str,
    name: str,
    available: Sequence[str] | None = None,
    settable: Sequence[str] | None = None,
    optional: Sequence[str] = (),
) -> Issues:
    """Yield what is wrong with a function that the configuration names: the name, its inputs, or its options.

    Args:
        key: the key that names it, for messages.
        registry: registry to search, unless `name` is written module:function.
        available: inputs that the caller can supply. None: any.
        settable: options that a key can set. A function must not require others. None: any.
        optional: further inputs that the caller supplies to parameters with the default None.
    """
    try:
        function = (
            user_function_signature(name) if ":" in name else registered(registry)[name]
        )
    except KeyError:
        known = registered(registry)
        text = f"found {yaml_text(name)}; known: {listed(sorted(known), most=40)}, or a function of your own as "
        yield ConfigIssue(key, f"{text}module:function.{did_you_mean(name, known)}")
        return
    except LookupError as error:
        yield ConfigIssue(key, f"found {yaml_text(name)}: {error}.")
        return
    if function is None:
        return
    unknown = [
        parameter
        for parameter in function.inputs
        if available is not None and parameter not in available
    ]
    if unknown:
        text = f"found {yaml_text(name)}, which reads {listed(unknown)}; it is given: {listed(available or ())}"
        further = (
            f"; and, as parameters with the default None: {listed(optional)}"
            if optional
            else ""
        )
        yield ConfigIssue(key, f"{text}{further}.")
    missing = [
        option
        for option in function.required
        if settable is not None and option not in settable
    ]
    if missing:
        only = f"only {listed(settable or ())}" if settable else "none"
        text = f"found {yaml_text(name)}, which needs the option {listed(missing)}, and {only} can be set."
        yield ConfigIssue(key, f"{text} Give a default.")


def option_issues(
    key: str,
    name: str,
    values: Mapping[str, Any],
    function: Registered,
    involves: str = "algorithm.name",
) -> Issues:
    """Yield mistakes in a function's options: unknown, missing, of a wrong type, or out of range.

    Args:
        key: key of the mapping that holds the options.
        name: the function, for messages.
        values: the options as configured.
        involves: key that chose the function.
    """
    options = function.options
    for option, value in values.items():
        if option not in options:
            known = (
                f" It has: {listed(sorted(options))}." if options else " It has none."
            )
            yield ConfigIssue(
                f"{key}.{option}",
                f"{name} has no such option.{did_you_mean(option, options) or known}",
            )
        elif not options[option].accepts(value):
            yield ConfigIssue(
                f"{key}.{option}",
                f"found {yaml_text(value)}; expected {options[option].type_text}.",
            )
        elif expected := out_of_range(option, value):
            yield ConfigIssue(
                f"{key}.{option}", f"found {yaml_text(value)}; expected {expected}."
            )
    if wrong := out_of_order(values):
        low, high = wrong
        yield ConfigIssue(
            f"{key}.{low}",
            f"found {yaml_text(values[low])}; expected below {high}, {yaml_text(values[high])}.",
        )
    for option in function.required:
        if option not in values:
            yield ConfigIssue(
                f"{key}.{option}",
                f"is not set, and {name} needs it.",
                involves=(involves,),
            )


def function_and_option_issues(
    key: str,
    registry: str,
    name: str,
    available: Sequence[str],
    options_key: str,
    options: Mapping[str, Any],
    involves: str = "algorithm.name",
) -> Issues:
    """Yield what is wrong with a function that the configuration names, and with the options for it.

    Options are checked only if the function is found.

    Args:
        key, registry, name, available: see `function_issues`.
        options_key, options: key of the mapping that holds the options, and the options as configured.
        involves: key that chose the function.
    """
    yield from function_issues(key, registry, name, available)
    function = find_function(registry, name)
    if function is not None:
        yield from option_issues(options_key, name, options, function, involves)
