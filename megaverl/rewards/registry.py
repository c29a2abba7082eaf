"""Reward functions by name: the built-in ones, and those that are registered beside them; what a function sees and
gives back, and what its parameters are given: told by their names, or else by how many there are."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

from megaverl.errors import RewardError
from megaverl.plugins import load_module


@dataclass(frozen=True)
class RewardSample:
    """One response with what is known about its prompt.

    Attributes:
        prompt: text, as the model saw it.
        response: text, without special tokens.
        reference: the reference answer of the row, of any JSON type; None if there is none.
        extra: the row's other columns.
        transcript: of an episode of several turns everything after the prompt, the environment's answers too, where
            `response` is the last turn alone; None if not known.
        finish_reason: `stop` (the model ended it) or `length` (it was cut off); None if not known.
        num_tokens: of the response, with its end of sequence; None if not known.
        messages: the conversation that the prompt is, before a chat template; None if not known.
    """

    prompt: str
    response: str
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    num_tokens: int | None = None
    transcript: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a list of samples, in its order.

    Attributes:
        total: the weighted sums of the components: what is trained on. NaN: the sample could not be scored, as where a
            judge gave no answer; it is left out.
        components: each component by name, not weighted.
        correct: what accuracy and pass@k count: the component that the configuration names with `accuracy:
            true`, else the first one, is 1 or more.
    """

    total: list[float]
    components: dict[str, list[float]]
    correct: list[bool]

    def metrics(self, prefix: str = "reward") -> dict[str, float]:
        """Mean, spread and extremes of the total, each component's mean, accuracy, of the samples that are scored."""
        scored = [value for value in self.total if not math.isnan(value)]
        if not scored:
            return {}
        mean = _mean(scored)
        right = [float(value) for value, total in zip(self.correct, self.total, strict=True) if not math.isnan(total)]
        values = {
            f"{prefix}/mean": mean,
            f"{prefix}/std": _mean([(value - mean) ** 2 for value in scored]) ** 0.5,
            f"{prefix}/min": min(scored),
            f"{prefix}/max": max(scored),
            f"{prefix}/accuracy": _mean(right),
        }
        values.update({f"{prefix}/{name}_mean": _mean(scores) for name, scores in self.components.items()})
        return values


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


VALUES = ("prompt", "response", "reference", "extra")
# Parameters without a default whose names say nothing, by their number.
BY_COUNT = {1: ("response",), 2: ("response", "reference"), 3: ("prompt", "response", "reference"), 4: VALUES}
NAMES = {
    "prompt": ("prompt", "question", "query", "instruction", "problem", "input"),
    "response": (
        *("response", "sampled_response", "model_response", "completion", "output", "model_output"),
        *("generation", "generated_text", "prediction", "solution_str"),
    ),
    "reference": (
        *("reference", "reference_answer", "ground_truth", "answer", "correct_answer", "expected_answer"),
        *("gold_answer", "expected", "target", "label", "gold"),
    ),
    "extra": ("extra", "extra_info", "info", "metadata", "row"),
}
_VALUE_OF = {name: value for value, names in NAMES.items() for name in names}
HOW = (
    "A parameter is bound by its name: "
    + "; ".join(f"{names[0]} (or {', '.join(names[1:])})" for names in NAMES.values())
    + ". Where the names say nothing, by their count: 1 is the response, 2 are response and reference, 3 prompt, "
    "response and reference, 4 have extra as well. A first one named sample is the whole RewardSample; what else has a "
    "default, or stands in the options, is an option"
)


@dataclass(frozen=True)
class Binding:
    """Which of `VALUES` is given for each parameter: by position, and by keyword."""

    positional: tuple[str, ...]
    keywords: dict[str, str]

    def arguments(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments.

        Args:
            values: in the order of `VALUES`.
        """
        given = dict(zip(VALUES, values, strict=True))
        return [given[value] for value in self.positional], {key: given[value] for key, value in self.keywords.items()}


def bind(function: Callable[..., Any], options: Collection[str], *, batched: bool) -> Binding:
    """How `function` is called.

    Args:
        options: names of the parameters that get their values from the configuration.

    Raises:
        ValueError: it cannot be told; says why, and what can be bound.
    """
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in options]
    if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters):
        return Binding(VALUES, {})
    parameters = [each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    needed = [each for each in parameters if each.default is Parameter.empty]
    if not batched and (lists := [each.name for each in needed if _is_list(each.name)]):
        raise ValueError(f"{', '.join(lists)} is of whole lists, which needs batched: true")
    if any(each.name in ("sample", "samples") for each in needed):
        raise ValueError("sample stands first, or, with batched: true, samples")
    chosen = _by_name(needed) or _by_count(needed)
    for each in parameters:
        value = value_of(each.name)
        sensible = each.default is None or value == each.name
        if each.default is not Parameter.empty and value and sensible and value not in chosen.values():
            chosen[each.name] = value
    first = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY and each.name in chosen]
    keywords = {name: value for name, value in chosen.items() if name not in first}
    return Binding(tuple(chosen[name] for name in first), keywords)


def value_of(name: str) -> str | None:
    """Which of `VALUES` a parameter of this name is, in the singular or the plural."""
    return _VALUE_OF.get(name) or _VALUE_OF.get(name.removesuffix("s"))


def _is_list(name: str) -> bool:
    """Whether a name is the plural of sample, prompt or response; one row may well have several references."""
    return name == "samples" or (name not in _VALUE_OF and value_of(name) in ("prompt", "response"))


def _by_name(needed: list[Parameter]) -> dict[str, str]:
    """Every parameter's value, or nothing where a name is unknown, or two mean the same."""
    found = {each.name: value for each in needed if (value := value_of(each.name))}
    return found if len(set(found.values())) == len(needed) else {}


def _by_count(needed: list[Parameter]) -> dict[str, str]:
    """By position; what can only be given as a keyword has a name that says what it is."""
    places = [each.name for each in needed if each.kind is not Parameter.KEYWORD_ONLY]
    keywords = {each.name: value_of(each.name) for each in needed if each.name not in places}
    if missing := [name for name, value in keywords.items() if value is None]:
        raise ValueError(f"{', '.join(missing)} is neither bound nor among the options")
    if len(places) not in BY_COUNT:
        raise ValueError(f"{len(places)} parameters need a value, and there are {len(VALUES)}: {', '.join(VALUES)}")
    found = {**dict(zip(places, BY_COUNT[len(places)], strict=True)), **{k: v for k, v in keywords.items() if v}}
    wrong = [name for name, value in found.items() if value_of(name) not in (None, value)]
    if wrong or len(set(found.values())) < len(found):
        unknown = [name for name in found if value_of(name) is None] or list(found)
        raise ValueError(f"what {', '.join(unknown)} stands for cannot be told")
    return found


FIRST = {False: "sample", True: "samples"}


@dataclass(frozen=True)
class RewardFunction:
    """A function and how it is called.

    It takes either one `sample` (a `RewardSample`) as its first parameter, or some of prompt, response, reference and
    extra, under these names or others (see `binding`); if `batched`, a list of each. Options follow as keyword
    arguments. It returns a number, or a list of numbers if `batched`.

    Attributes:
        check: called with the options when the reward is built; raises ValueError for one that cannot be
            used.
        may_fail: NaN says that a sample could not be scored; it is then left out.
    """

    name: str
    function: Callable[..., Any]
    batched: bool = False
    check: Callable[..., None] | None = None
    may_fail: bool = False

    @functools.cached_property
    def takes_samples(self) -> bool:
        """Whether its first parameter is named `sample` (`samples`)."""
        return next(iter(inspect.signature(self.function).parameters), None) == FIRST[self.batched]

    def binding(self, options: Collection[str]) -> Binding:
        """Which of prompt, response, reference and extra its parameters are given.

        Raises:
            ValueError: see `bind`.
        """
        return bind(self.function, options, batched=self.batched)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """See that the function can be called with these options.

        Raises:
            RewardError: names what it takes, and what was given.
        """
        signature = inspect.signature(self.function)
        try:
            if self.takes_samples:
                signature.bind(FIRST[self.batched], **options)
            else:
                arguments, keywords = self.binding(options).arguments(VALUES)
                signature.bind(*arguments, **keywords, **options)
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
            raise RewardError(
                f"reward {self.name!r} takes {signature}, and is given {given}: {error}. {HOW}. Change its parameters, "
                "or the options in the configuration."
            ) from error
        if self.check is not None:
            try:
                self.check(**options)
            except ValueError as error:
                raise RewardError(f"reward {self.name!r}: {error}") from error


_REGISTERED: dict[str, RewardFunction] = {}


def register_reward(
    name: str | Callable[..., Any] | None = None,
    *,
    batched: bool = False,
    check: Callable[..., None] | None = None,
    may_fail: bool = False,
) -> Any:
    """Decorator: makes a function known to configurations as `name`, or under its own name; see `RewardFunction`.

    Raises:
        RewardError: another function has the name.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = name if isinstance(name, str) else function.__name__
        if known in _REGISTERED and _place_of(_REGISTERED[known].function) != _place_of(function):
            raise RewardError(f"a reward named {known!r} is registered already; choose another name.")
        _REGISTERED[known] = RewardFunction(known, function, batched, check, may_fail)
        return function

    return register(name) if callable(name) else register


def load_modules(names: Sequence[str]) -> None:
    """Import what registers rewards: modules, or files, of the user's own.

    Raises:
        ConfigError: one that is not there, or cannot be imported.
    """
    for name in names:
        load_module(name, "reward_modules")


def _place_of(function: Callable[..., Any]) -> Any:
    """Where it is defined: a file may be imported as a module, and as a file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (os.path.realpath(code.co_filename), function.__qualname__) if code else function


def reward_names() -> list[str]:
    """Names of all registered rewards."""
    for name in ("rules", "judge", "reasoning_gym"):  # the built-in ones
        importlib.import_module(f"megaverl.rewards.{name}")
    return sorted(_REGISTERED)


def find_reward(name: str) -> RewardFunction:
    """The registered reward `name`.

    Raises:
        RewardError: there is none; the message names the nearest.
    """
    names = reward_names()
    if name not in _REGISTERED:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RewardError(
            f"no reward {name!r}.{hint} There are: {', '.join(names)}. A function of your own is named with "
            "function: module:function, or function: path/to/file.py:function, or registered (@register_reward) by a "
            "module that reward_modules names."
        )
    return _REGISTERED[name]
