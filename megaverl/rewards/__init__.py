"""Rewards: built-in rules, functions of the user's own, and the reward of a run: a weighted sum of functions, each of
which is checked for what it returns."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import ConfigError, RewardError
from megaverl.plugins import load_object
from megaverl.rewards.registry import (
    Binding,
    RewardFunction,
    RewardOutput,
    RewardSample,
    find_reward,
    load_modules,
    register_reward,
    reward_names,
)

__all__ = [
    "Component",
    "Reward",
    "RewardFunction",
    "RewardOutput",
    "RewardSample",
    "build_reward",
    "find_reward",
    "load_modules",
    "register_reward",
    "reward_names",
]


SPEC_KEYS = ("name", "function", "weight", "options", "batched", "accuracy", "only_if", "shape", "clip")


@dataclass(frozen=True)
class Component:
    """One term of the sum.

    Attributes:
        only_if: another component, before this one: where that is less than 1, this one is not asked, and is 0.
        shape: what becomes of the function's number. clip: the least and the most that it can be then.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    accuracy: bool = False
    only_if: str | None = None
    shape: Callable[[float], Any] | None = None
    clip: tuple[float, float] | None = None

    def shaped(self, samples: Sequence[RewardSample], gate: Sequence[float] | None = None) -> list[float]:
        """`score`, shaped and clipped; of those samples alone whose `gate` is at least 1 (NaN where that is NaN)."""
        rows = [row for row in range(len(samples)) if gate is None or gate[row] >= 1.0]
        found = [math.nan if gate is not None and math.isnan(gate[row]) else 0.0 for row in range(len(samples))]
        for row, value in zip(rows, self.score([samples[row] for row in rows]) if rows else (), strict=True):
            if self.shape is not None and not math.isnan(value):
                value = self._number(self.shape(value), f"what shape makes of {value}")
            if self.clip is not None and not math.isnan(value):
                value = min(max(value, self.clip[0]), self.clip[1])
            found[row] = value
        return found

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite number for every sample; NaN of a function that may fail.

        Raises:
            RewardError: the function raises, or returns something else; names the sample.
        """
        if self.function.batched:
            return self._score_batch(samples)
        return [self._score_one(sample, number, len(samples)) for number, sample in enumerate(samples)]

    def _score_one(self, sample: RewardSample, number: int, count: int) -> float:
        where = f"sample {number} of {count} (prompt: {_excerpt(sample.prompt)})"
        values = (sample.prompt, sample.response, sample.reference, dict(sample.extra))
        try:
            value = self._call(sample, values)
        except Exception as error:  # a user's function may raise anything; the run ends with its name
            raise self._raised(error, where) from error
        return self._number(value, where)

    def _score_batch(self, samples: Sequence[RewardSample]) -> list[float]:
        where = f"a batch of {len(samples)} samples"
        columns = (
            [sample.prompt for sample in samples],
            [sample.response for sample in samples],
            [sample.reference for sample in samples],
            [dict(sample.extra) for sample in samples],
        )
        try:
            values = self._call(list(samples), columns)
        except Exception as error:  # as above
            raise self._raised(error, where) from error
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple):
            raise RewardError(
                f"reward {self.name!r} returned {_shown(values)} for {where}; being batched, it must return "
                f"a list of {len(samples)} numbers."
            )
        if len(values) != len(samples):
            raise RewardError(
                f"reward {self.name!r} returned {len(values)} numbers for {where}; it must return one for "
                "each, in their order."
            )
        return [
            self._number(value, f"sample {number} of {len(samples)} (prompt: {_excerpt(sample.prompt)})")
            for number, (value, sample) in enumerate(zip(values, samples, strict=True))
        ]

    def _call(self, whole: Any, values: Sequence[Any]) -> Any:
        """The function's result for a sample, or for a list of them: given `whole`, or what it takes of `values`."""
        if self.function.takes_samples:
            return self.function.function(whole, **self.options)
        arguments, keywords = self._binding.arguments(values)
        return self.function.function(*arguments, **keywords, **self.options)

    @functools.cached_property
    def _binding(self) -> Binding:
        return self.function.binding(self.options)

    def _number(self, value: Any, where: str) -> float:
        if hasattr(value, "item"):  # a scalar of numpy or torch
            try:
                value = value.item()
            except (ValueError, RuntimeError) as error:
                raise RewardError(
                    f"reward {self.name!r} returned {_shown(value)} for {where}; it must return one number."
                ) from error
        if not isinstance(value, numbers.Real):
            missing = " Does every path through the function return one?" if value is None else ""
            raise RewardError(
                f"reward {self.name!r} returned {_shown(value)} for {where}; it must return one number.{missing}"
            )
        if not math.isfinite(value) and not (self.function.may_fail and math.isnan(value)):
            raise RewardError(
                f"reward {self.name!r} returned {float(value)} for {where}; it must be finite. Return a "
                "number, such as 0, where the response cannot be scored."
            )
        return float(value)

    def _raised(self, error: Exception, where: str) -> RewardError:
        return RewardError(
            f"reward {self.name!r} raised {type(error).__name__}: {error}, on {where}. Correct the function or "
            "the row; a response that cannot be scored should get a number such as 0."
        )


class Reward:
    """Scores samples by the weighted sum of `components`.

    Args:
        may_be_empty: an environment or a model gives rewards too, so there need be none here.
    """

    def __init__(self, components: Sequence[Component], *, may_be_empty: bool = False) -> None:
        if not components and not may_be_empty:
            raise RewardError("no reward is configured. Add one, for example reward: [{name: exact_match}].")
        self.components = list(components)
        names = [component.name for component in components]
        for place, component in enumerate(components):
            if component.only_if is not None and component.only_if not in names[:place]:
                raise RewardError(
                    f"reward {component.name!r}: only_if names {component.only_if!r}, and no reward of that name "
                    f"stands before it; there are: {', '.join(names[:place]) or 'none'}."
                )
        marked = [component.name for component in components if component.accuracy]
        if len(marked) > 1:
            raise RewardError(f"accuracy: true stands at {', '.join(marked)}; only one reward can decide accuracy.")
        self.accuracy_component: str | None = marked[0] if marked else components[0].name if components else None

    def score(self, samples: Sequence[RewardSample]) -> RewardOutput:
        """Totals, components and correctness of `samples`, in their order; NaN where one could not be scored.

        Raises:
            RewardError: a function raises, or returns anything but one finite number for each sample.
        """
        scores: dict[str, list[float]] = {}
        for component in self.components:
            gate = None if component.only_if is None else scores[component.only_if]
            scores[component.name] = component.shaped(samples, gate)
        total = [
            math.fsum(component.weight * scores[component.name][number] for component in self.components)
            for number in range(len(samples))
        ]
        decisive = scores[self.accuracy_component] if self.accuracy_component else [0.0] * len(samples)
        correct = [value >= 1.0 for value in decisive]
        return RewardOutput(total, scores, correct)


def build_reward(specs: Any, *, may_be_empty: bool = False, modules: Sequence[str] = ()) -> Reward:
    """The reward that a configuration describes.

    Args:
        specs: one entry or a list of entries; an entry is a built-in reward's name, or a mapping or object
            with `name` (a built-in reward, or a label beside `function`), `function` (`module:function` or
            `path/to/file.py:function`), `weight` (1), `options` (keyword arguments), `batched` (whether
            `function` takes lists), `accuracy` (whether this one decides what counts as correct), and `only_if`,
            `shape` (a function, named as `function`) and `clip`, see `Component`. Further
            keys of a mapping are options too; `batched` and `accuracy` may also stand among the options.
        may_be_empty: see `Reward`.
        modules: of the user's own, imported first, so that what they register is known by name.

    Raises:
        ConfigError: a module that cannot be imported.
        RewardError: an entry that names nothing known, or options that the function does not take.
    """
    load_modules(modules)
    entries = [specs] if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence) else specs
    components: list[Component] = []
    taken: dict[str, int] = {}
    for entry in entries:
        component = _build_component(_as_mapping(entry))
        taken[component.name] = taken.get(component.name, 0) + 1
        if taken[component.name] > 1:
            component = Component(**{**vars(component), "name": f"{component.name}_{taken[component.name]}"})
        components.append(component)
    return Reward(components, may_be_empty=may_be_empty)


def _as_mapping(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"name": entry}
    if not isinstance(entry, Mapping):
        return {key: getattr(entry, key) for key in SPEC_KEYS if getattr(entry, key, None) is not None}
    options = {
        **(entry.get("options") or {}),
        **{key: value for key, value in entry.items() if key not in SPEC_KEYS},
    }
    return {**{key: value for key, value in entry.items() if key in SPEC_KEYS}, "options": options}


def _build_component(entry: Mapping[str, Any]) -> Component:
    options = dict(entry.get("options") or {})
    batched = bool(entry.get("batched", options.pop("batched", False)))
    accuracy = bool(entry.get("accuracy", options.pop("accuracy", False)))
    name, target = entry.get("name"), entry.get("function")
    if target:
        label = name or target.rpartition(":")[2]
        function = RewardFunction(label, _own_function(target), batched)
    elif name:
        label = name
        function = find_reward(name)
    else:
        raise RewardError(f"a reward needs a name or a function; found {dict(entry)!r}.")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardError(f"reward {label!r}: weight is {weight!r}; it must be a finite number.")
    function.check_options(options)
    shape = _own_function(entry["shape"], "reward.shape") if entry.get("shape") else None
    clip = tuple(float(value) for value in entry["clip"]) if entry.get("clip") else None
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise RewardError(f"reward {label!r}: clip is {list(clip)}; it is the least and the most that it can be.")
    return Component(label, function, float(weight), options, accuracy, entry.get("only_if"), shape, clip)


def _own_function(target: str, key: str = "reward.function") -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = load_object(target, key)
    except ConfigError as error:
        raise RewardError(str(error)) from error
    if not callable(function):
        raise RewardError(f"{key}: {target} is {type(function).__name__}; expected a function.")
    return function


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]} ... {text[-35:]}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
