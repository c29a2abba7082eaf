"""Mistakes in a configuration, and the one error that lists them all; among them those of a function that it names: its
name, what it reads, and its options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megaverl.config.section import BOUNDS, Fraction, NonNegativeFloat, PositiveFloat
from megaverl.config.signatures import Registered, of_the_users_own, registered
from megaverl.errors import ConfigError


@dataclass(frozen=True)
class ConfigIssue:
    """One thing to fix.

    Attributes:
        key: dotted, as in the file.
        message: what was found and what is allowed, in one or more sentences.
        where: "file, line n" or "command line"; empty where a default or a missing key is meant.
        involves: further keys that the mistake depends on; one that is itself wrong makes this one moot.
    """

    key: str
    message: str
    where: str = ""
    involves: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.key}{where}: {self.message}"


class InvalidConfig(ConfigError):
    """Carries every mistake of a configuration in `mistakes`; its message lists them."""

    def __init__(self, mistakes: Iterable[ConfigIssue], source: str) -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in the configuration ({source}):"]
        lines += ["  - " + str(mistake).replace("\n", "\n    ") for mistake in self.mistakes]
        super().__init__("\n".join(lines))


def found(value: Any) -> str:
    """How a value is shown in a message: as YAML would write it, cut where it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    assert text is not None
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most likely meant: it begins alike, is close in spelling, or one contains the other."""
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
    """Whether `name` is `other` cut short, part by part: gpu_mem of gpu_memory_utilization."""
    parts, others = (text.lower().replace("-", "_").split("_") for text in (name, other))
    alike = all(whole.startswith(part) for part, whole in zip(parts, others, strict=False))
    return len(name) > 2 and len(parts) <= len(others) and alike


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean `x`?" (with the leading space), or nothing."""
    close = nearest(name, known)
    return f" Did you mean `{close}`?" if close else ""


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def listed(values: Iterable[Any], most: int = 16) -> str:
    """The values with commas between them; a long list is cut."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


SINGLE_INPUTS = ("log_probs", "ref_log_probs", "desirable", "reference_kl", "reward_shift", "weights")
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
REWARD_INPUTS = ("chosen_rewards", "rejected_rewards", "weights")
# Which values an option may have, by its name, which means the same wherever it stands.
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
# The first must be below the second.
ORDERED = (("covariance_low", "covariance_high"), ("low", "high"))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def out_of_range(name: str, value: Any) -> str | None:
    """What is expected of an option's value, where it is a number that does not do; nothing where it does."""
    kind = RANGES.get(name)
    if kind is None or not is_number(value):
        return None
    try:
        TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        limits = kind.__metadata__[0].metadata
        ends = [f"{BOUNDS[at]} {getattr(each, at):g}" for each in limits for at in BOUNDS if hasattr(each, at)]
        return " and ".join(ends) or "a finite number"
    return None


def out_of_order(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Two options, both given, of which the first must be below the second and is not."""
    for low, high in ORDERED:
        both = options.get(low), options.get(high)
        if all(isinstance(value, int | float) for value in both) and not both[0] < both[1]:  # type: ignore[operator]
            return low, high
    return None


def named_function(
    key: str, registry: str, name: str, given: Sequence[str] | None = None, settable: Sequence[str] | None = None
) -> tuple[Registered | None, list[ConfigIssue]]:
    """Its signature, None where that is unknown; and what is wrong with its name, or wanted and not given.

    Args:
        registry: where it is registered, unless it is `module:function`.
        given: the inputs that it may have. settable: the options that a key can give it. None: any.
    """
    try:
        function = of_the_users_own(name) if ":" in name else registered(registry)[name]
    except KeyError:
        known = registered(registry)
        text = f"found {found(name)}; known: {listed(sorted(known), most=40)}, or a function of your own as "
        return None, [ConfigIssue(key, f"{text}module:function.{did_you_mean(name, known)}")]
    except LookupError as error:
        return None, [ConfigIssue(key, f"found {found(name)}: {error}.")]
    mistakes = []
    inputs, required = (function.inputs, function.required) if function else ((), ())
    if given is not None and (unknown := [each for each in inputs if each not in given]):
        text = f"found {found(name)}, which reads {listed(unknown)}; it is given: {listed(given)}."
        mistakes.append(ConfigIssue(key, text))
    if settable is not None and (missing := [each for each in required if each not in settable]):
        only = f"only {listed(settable)}" if settable else "none"
        text = f"found {found(name)}, which needs the option {listed(missing)}, and {only} can be set. Give a default."
        mistakes.append(ConfigIssue(key, text))
    return function, mistakes


def option_mistakes(
    key: str, name: str, given: Mapping[str, Any], function: Registered, involves: str = "algorithm.name"
) -> Iterator[ConfigIssue]:
    """Options that a function does not have, of a wrong type or out of range, and those that it needs."""
    options = function.options
    for option, value in given.items():
        if option not in options:
            known = f" It has: {listed(sorted(options))}." if options else " It has none."
            yield ConfigIssue(f"{key}.{option}", f"{name} has no such option.{did_you_mean(option, options) or known}")
        elif not options[option].accepts(value):
            yield ConfigIssue(f"{key}.{option}", f"found {found(value)}; expected {options[option].type_text}.")
        elif expected := out_of_range(option, value):
            yield ConfigIssue(f"{key}.{option}", f"found {found(value)}; expected {expected}.")
    if wrong := out_of_order(given):
        low, high = wrong
        yield ConfigIssue(f"{key}.{low}", f"found {found(given[low])}; expected below {high}, {found(given[high])}.")
    for option in function.required:
        if option not in given:
            yield ConfigIssue(f"{key}.{option}", f"is not set, and {name} needs it.", involves=(involves,))


def loss_mistakes(
    section: str, registry: str, name: str, options: dict[str, Any], *, has_margins: bool = False
) -> Iterator[ConfigIssue]:
    """A loss of pairs: its name, its options, and what it reads."""
    key = f"{section}.loss"
    signature, mistakes = named_function(key, registry, name)
    yield from mistakes
    if signature is None:
        return
    yield from option_mistakes(f"{section}.options", name, options, signature, key)
    of_policy = SINGLE_INPUTS if "desirable" in signature.inputs else PAIR_INPUTS
    given: tuple[str, ...] = REWARD_INPUTS if registry == "reward_model_losses" else of_policy
    given += ("margins",) if has_margins else ()
    unknown = [each for each in signature.inputs if each not in given]
    if "margins" in unknown and registry == "reward_model_losses":
        yield ConfigIssue(
            "preference.margin_key", f"is not set, and {name} reads margins. Name the column that holds them."
        )
    elif unknown:
        yield ConfigIssue(key, f"found {found(name)}, which reads {listed(unknown)}; it is given: {listed(given)}.")
    if has_margins and "margins" not in signature.reads:
        yield ConfigIssue("preference.margin_key", f"is set, and {name} reads no margins. Leave it out.")
