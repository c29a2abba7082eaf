"""What a reward function's parameters are given: told by their names, or else by how many there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

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
