"""Configuration mistakes, the exception that lists them all, and checks of functions that a configuration names.

The checks cover a function's name, the inputs that it reads, and its options.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megaverl.config.section import BOUNDS, Fraction, NonNegativeFloat, PositiveFloat
from megaverl.config.signatures import Registered, registered, user_function_signature
from megaverl.errors import ConfigError


@dataclass(frozen=True)
class ConfigIssue:
    """One mistake for the user to fix.

    Attributes:
        key: dotted key, as in the file.
        message: what was found and what is allowed, in one or more sentences.
        where: "file, line n" or "command line". Empty for a default or a missing key.
        involves: further keys that the mistake depends on. If one of them is itself wrong, this mistake is dropped.
    """

    key: str
    message: str
    where: str = ""
    involves: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.key}{where}: {self.message}"


class InvalidConfig(ConfigError):
    """Raised for an invalid configuration. `mistakes` holds all of them, and the message lists them."""

    def __init__(self, mistakes: Iterable[ConfigIssue], source: str) -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in the configuration ({source}):"]
        lines += ["  - " + str(mistake).replace("\n", "\n    ") for mistake in self.mistakes]
        super().__init__("\n".join(lines))


def yaml_text(value: Any) -> str:
    """Return `value` as YAML would write it, cut to 80 characters, for a message."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    assert text is not None
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely means, or None.

    Tried in order: an abbreviation part by part, a close spelling, one name contained in the other, a loosely similar
    spelling.
    """
    known = sorted(set(known))
    if alike := [other for other in known if _shortens(name, other)]:
        return min(alike, key=len)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    folded = name.lower().replace("-", "_")
    containing = [
        other for other in known if len(folded) > 2 and len(other) > 2 and (folded in other or other in folded)
    ]
    if containing:
        return min(containing, key=lambda other: abs(len(other) - len(folded)))
    loose = difflib.get_close_matches(folded, known, n=1, cutoff=0.55)
    return loose[0] if loose else None


def _shortens(name: str, other: str) -> bool:
    """Return whether `name` abbreviates `other` part by part, as gpu_mem does gpu_memory_utilization."""
    parts, others = (text.lower().replace("-", "_").split("_") for text in (name, other))
    alike = all(whole.startswith(part) for part, whole in zip(parts, others, strict=False))
    return len(name) > 2 and len(parts) <= len(others) and alike


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean `x`?" with a leading space, or "" if no known name is close."""
    close = nearest(name, known)
    return f" Did you mean `{close}`?" if close else ""


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def listed(values: Iterable[Any], most: int = 16) -> str:
    """Return the values joined by commas, cut after `most` of them."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


# Tensors that the update on single responses can give a loss. A loss may read no others.
SINGLE_INPUTS = ("log_probs", "ref_log_probs", "desirable", "reference_kl", "reward_shift", "weights")
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
    **dict.fromkeys(("tau", "tau_positive", "tau_negative", "threshold"), PositiveFloat),
    **dict.fromkeys(("ratio_max", "max_weight"), PositiveFloat),
    **dict.fromkeys(("power_positive", "power_negative", "decay_positive", "decay_negative"), PositiveFloat),
    **dict.fromkeys(("gamma", "lam", "penalty", "center_coef"), NonNegativeFloat),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), NonNegativeFloat),
    **dict.fromkeys(("alpha", "covariance_low", "covariance_high", "right_from"), Annotated[float, Field()]),
    **dict.fromkeys(("k", "keep"), Annotated[float, Field(ge=1)]),
    "clip_low": Fraction,
    "clip_dual": Annotated[float, Field(gt=1)],
    "fraction": Annotated[float, Field(gt=0, le=1)],
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "epsilon": Annotated[float, Field(gt=0, lt=0.5)],
}
# Pairs of options of which the first must be smaller than the second.
ORDERED = (("covariance_low", "covariance_high"), ("low", "high"))


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or a float. Booleans, which are ints in Python, are not numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        both = options.get(low), options.get(high)
        if all(isinstance(value, int | float) for value in both) and not both[0] < both[1]:  # type: ignore[operator]
            return low, high
    return None


def named_function(
    key: str,
    registry: str,
    name: str,
    available: Sequence[str] | None = None,
    settable: Sequence[str] | None = None,
) -> tuple[Registered | None, list[ConfigIssue]]:
    """Look up a function that the configuration names, and check what it reads.

    Args:
        key: the key that names it, for messages.
        registry: registry to search, unless `name` is written module:function.
        available: inputs that the caller can supply. None: any.
        settable: options that a key can set. A function must not require others. None: any.

    Returns:
        The function's signature, or None if it is unknown; and the mistakes.
    """
    try:
        function = user_function_signature(name) if ":" in name else registered(registry)[name]
    except KeyError:
        known = registered(registry)
        text = f"found {yaml_text(name)}; known: {listed(sorted(known), most=40)}, or a function of your own as "
        return None, [ConfigIssue(key, f"{text}module:function.{did_you_mean(name, known)}")]
    except LookupError as error:
        return None, [ConfigIssue(key, f"found {yaml_text(name)}: {error}.")]
    mistakes = []
    inputs, required = (function.inputs, function.required) if function else ((), ())
    if available is not None and (unknown := [parameter for parameter in inputs if parameter not in available]):
        text = f"found {yaml_text(name)}, which reads {listed(unknown)}; it is given: {listed(available)}."
        mistakes.append(ConfigIssue(key, text))
    if settable is not None and (missing := [parameter for parameter in required if parameter not in settable]):
        only = f"only {listed(settable)}" if settable else "none"
        text = (
            f"found {yaml_text(name)}, which needs the option {listed(missing)}, and {only} can be set. Give a default."
        )
        mistakes.append(ConfigIssue(key, text))
    return function, mistakes


def option_mistakes(
    key: str,
    name: str,
    values: Mapping[str, Any],
    function: Registered,
    involves: str = "algorithm.name",
) -> Iterator[ConfigIssue]:
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
            known = f" It has: {listed(sorted(options))}." if options else " It has none."
            yield ConfigIssue(f"{key}.{option}", f"{name} has no such option.{did_you_mean(option, options) or known}")
        elif not options[option].accepts(value):
            yield ConfigIssue(f"{key}.{option}", f"found {yaml_text(value)}; expected {options[option].type_text}.")
        elif expected := out_of_range(option, value):
            yield ConfigIssue(f"{key}.{option}", f"found {yaml_text(value)}; expected {expected}.")
    if wrong := out_of_order(values):
        low, high = wrong
        yield ConfigIssue(
            f"{key}.{low}", f"found {yaml_text(values[low])}; expected below {high}, {yaml_text(values[high])}."
        )
    for option in function.required:
        if option not in values:
            yield ConfigIssue(f"{key}.{option}", f"is not set, and {name} needs it.", involves=(involves,))


def loss_mistakes(
    section: str,
    registry: str,
    name: str,
    options: dict[str, Any],
    *,
    has_margins: bool = False,
) -> Iterator[ConfigIssue]:
    """Yield mistakes in a preference or reward-model loss: its name, its options, and the inputs that it reads.

    Args:
        section: section with the keys `loss` and `options`.
        registry: "preference_losses" or "reward_model_losses".
        has_margins: whether the data has a column of margins.
    """
    key = f"{section}.loss"
    signature, mistakes = named_function(key, registry, name)
    yield from mistakes
    if signature is None:
        return
    yield from option_mistakes(f"{section}.options", name, options, signature, key)
    policy_inputs = SINGLE_INPUTS if "desirable" in signature.inputs else PAIR_INPUTS
    available: tuple[str, ...] = REWARD_INPUTS if registry == "reward_model_losses" else policy_inputs
    available += ("margins",) if has_margins else ()
    unknown = [parameter for parameter in signature.inputs if parameter not in available]
    if "margins" in unknown and registry == "reward_model_losses":
        yield ConfigIssue(
            "preference.margin_key", f"is not set, and {name} reads margins. Name the column that holds them."
        )
    elif unknown:
        yield ConfigIssue(
            key, f"found {yaml_text(name)}, which reads {listed(unknown)}; it is given: {listed(available)}."
        )
    if has_margins and "margins" not in signature.reads:
        yield ConfigIssue("preference.margin_key", f"is set, and {name} reads no margins. Leave it out.")
