"""Rewards of samples: components and their weighted sum, which checks what every function returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megaverl.errors import ConfigError, RewardError
from megaverl.plugins import load_function
from megaverl.rewards.binding import (
    COLUMN,
    LOG_EXTRA,
    LOG_METRIC,
    TOKEN_IDS,
    TRAINER_STATE,
    TRL_PROMPT,
    TRL_RESPONSE,
    Binding,
    RowNames,
    missing_columns,
)
from megaverl.rewards.registry import (
    RewardFunction,
    RewardOutput,
    RewardSample,
    find_reward,
    finished,
    load_modules,
)
from megaverl.rewards.trl import CallContext, TrainerState, conversation_of
from megaverl.user_code import describe, show, user_code

SPEC_KEYS = (
    "name",
    "function",
    "weight",
    "options",
    "batched",
    "accuracy",
    "only_if",
    "shape",
    "clip",
)


@dataclass(frozen=True)
class Component:
    """One term of the weighted sum.

    Attributes:
        only_if: name of an earlier component. Where that one is below 1, this one is not called and counts as 0.
        shape: transforms the function's number.
        clip: least and greatest value after `shape`.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    accuracy: bool = False
    only_if: str | None = None
    shape: Callable[[float], Any] | None = None
    clip: tuple[float, float] | None = None
    row: RowNames = RowNames()
    context: CallContext = field(default_factory=CallContext, compare=False)
    _columns: set[str] = field(default_factory=set, compare=False)
    _bindings: dict[frozenset[str], Binding] = field(
        default_factory=dict, compare=False
    )

    @property
    def can_reach_one(self) -> bool | None:
        """True if it can be 1 or more, which counts as correct; None if that is unknown."""
        if self.clip is not None and self.clip[1] < 1.0:
            return False
        # The configuration says that this component decides accuracy.
        if self.accuracy:
            return True
        if self.shape is not None:
            return None
        if self.function.highest is not None:
            return self.function.highest >= 1.0
        is_rule = (
            str(self.function.function.__module__).partition(".")[0] == "megaverl"
            and not self.function.may_fail
        )
        return True if is_rule else None

    def shaped(
        self, samples: Sequence[RewardSample], gate: Sequence[float] | None = None
    ) -> list[float]:
        """Return the scores, shaped and clipped. Samples whose `gate` is below 1 get 0,
        and those whose gate is NaN get NaN.
        """
        results = [0.0] * len(samples)
        rows = []
        for row in range(len(samples)):
            if gate is None or gate[row] >= 1.0:
                rows.append(row)
            elif math.isnan(gate[row]):
                results[row] = math.nan
        # Samples behind a closed gate are not scored at all: their scores would be
        # ignored, and a judge may cost money.
        scores = self.score([samples[row] for row in rows], rows) if rows else []
        for row, value in zip(rows, scores, strict=True):
            if self.shape is not None and not math.isnan(value):
                where = f"what shape makes of {value}"
                with self._calling(where):
                    value = self.shape(value)
                value = self._number(value, where)
            if self.clip is not None and not math.isnan(value):
                value = min(max(value, self.clip[0]), self.clip[1])
            results[row] = value
        return results

    def score(
        self, samples: Sequence[RewardSample], rows: Sequence[int] | None = None
    ) -> list[float]:
        """Return one finite number for every sample, or NaN from a function that may fail.

        Args:
            rows: indices of the samples in the whole call, for `log_extra`; None: these are all samples.

        Raises:
            RewardError: the function raises, or returns something else; names the sample.
        """
        if self.function.batched:
            return self._score_batch(
                samples, range(len(samples)) if rows is None else rows
            )
        return [
            self._score_one(sample, number, len(samples))
            for number, sample in enumerate(samples)
        ]

    def _score_one(self, sample: RewardSample, number: int, count: int) -> float:
        where = f"sample {number} of {count} (prompt: {_excerpt(sample.prompt)})"
        columns = tuple(sample.extra)
        arguments, keywords = self._arguments(
            sample, partial(self._value, sample), columns, where
        )
        with self._calling(where):
            value = finished(
                self.function.function(*arguments, **keywords, **self.options)
            )
        return self._number(value, where)

    def _score_batch(
        self, samples: Sequence[RewardSample], rows: Sequence[int]
    ) -> list[float]:
        where = f"a batch of {len(samples)} samples"
        columns = tuple(
            dict.fromkeys(name for sample in samples for name in sample.extra)
        )

        def value_of(name: str) -> Any:
            if name == LOG_EXTRA:
                return partial(self.context.log_extra, rows=rows)
            if name in (LOG_METRIC, TRAINER_STATE):
                return self._value_of_run(name)
            return [self._value(sample, name) for sample in samples]

        arguments, keywords = self._arguments(list(samples), value_of, columns, where)
        with self._calling(where):
            values = finished(
                self.function.function(*arguments, **keywords, **self.options)
            )
            values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple):
            raise RewardError(
                f"reward {self.name!r} returned {show(values)} for {where}; being batched, it must return "
                f"a list of {len(samples)} numbers."
            )
        if len(values) != len(samples):
            raise RewardError(
                f"reward {self.name!r} returned {len(values)} numbers for {where}; it must return one for "
                "each, in their order."
            )
        return [
            self._number(
                value,
                f"sample {number} of {len(samples)} (prompt: {_excerpt(sample.prompt)})",
            )
            for number, (value, sample) in enumerate(zip(values, samples, strict=True))
        ]

    def _arguments(
        self,
        whole: Any,
        value_of: Callable[[str], Any],
        columns: Sequence[str],
        where: str,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the function's arguments for a sample or a list of samples.

        Args:
            whole: the sample or samples.
            value_of: returns one of their values by its name (see `binding`).
            columns: columns of the rows, beside prompt and answer.

        Raises:
            RewardError: a parameter cannot be bound, or the row does not have its column.
        """
        if self.function.takes_samples:
            return [whole], {}
        # Columns of all rows so far: a name that was a column once must not be bound by
        # position later.
        self._columns.update(columns)
        known = frozenset(self._columns)
        if known not in self._bindings:
            self._bindings[known] = self._bind(known)
        binding = self._bindings[known]
        if missing := missing_columns(binding, columns):
            raise RewardError(
                f"reward {self.name!r} needs the columns {', '.join(missing)} for {where}; the row has "
                f"{', '.join(columns) or 'none besides prompt and answer'}. Add them, or give the parameters a default."
            )
        return binding.arguments(value_of, columns)

    def _bind(self, columns: frozenset[str]) -> Binding:
        try:
            return self.function.binding(self.options, replace(self.row, extra=columns))
        except ValueError as error:
            raise self.function.unbound(self.options, error) from error

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the function can be called for rows with these columns beside prompt and answer.

        Raises:
            RewardError: a parameter cannot be bound; says which names can.
        """
        if not self.function.takes_samples:
            self._bind(frozenset(columns))

    def _value(self, sample: RewardSample, name: str) -> Any:
        """Return a value of a sample by its name (see `binding`)."""
        if name.startswith(COLUMN):
            return sample.extra.get(name.removeprefix(COLUMN))
        if name in (LOG_METRIC, TRAINER_STATE):
            return self._value_of_run(name)
        if name == TRL_PROMPT:
            return (
                list(sample.messages or ()) if sample.is_conversation else sample.prompt
            )
        if name == TRL_RESPONSE:
            return (
                conversation_of(sample.response)
                if sample.is_conversation
                else sample.response
            )
        value = getattr(sample, name)
        if name == TOKEN_IDS:
            return None if value is None else list(value)
        return dict(value) if name == "extra" else value

    def _value_of_run(self, name: str) -> Any:
        return self.context.log_metric if name == LOG_METRIC else self.context.state

    def _calling(self, where: str) -> AbstractContextManager[None]:
        """Return a context for a call of user code. Its errors name the reward and the sample."""
        return user_code(partial(self._raised, where=where))

    def _number(self, value: Any, where: str) -> float:
        missing = (
            " Does every path through the function return one?" if value is None else ""
        )
        message = f"reward {self.name!r} returned {show(value)} for {where}; it must return one number.{missing}"
        with user_code(lambda error: RewardError(message)):
            # A scalar of numpy or torch.
            if hasattr(value, "item"):
                value = value.item()
            if not isinstance(value, numbers.Real):
                raise TypeError(value)
            # Raises OverflowError for an integer that is too large for a float.
            number = float(value)
        if not math.isfinite(number) and not (
            self.function.may_fail and math.isnan(number)
        ):
            raise RewardError(
                f"reward {self.name!r} returned {number} for {where}; it must be finite. Return a "
                "number, such as 0, where the response cannot be scored."
            )
        return number

    def _raised(self, error: BaseException, where: str) -> RewardError:
        return RewardError(
            f"reward {self.name!r} raised {describe(error)}, on {where}. Correct the function or "
            "the row; a response that cannot be scored should get a number such as 0."
        )


class Reward:
    """Scores samples by the weighted sum of `components`.

    Args:
        may_be_empty: whether there may be no component, because an environment or a model gives rewards too.

    Example:
        reward = build_reward([{"name": "exact_match"}, {"name": "finished", "weight": 0.1}])
        output = reward.score([RewardSample("1 + 1 =", "2", reference="2")])
        output.total, output.correct
    """

    def __init__(
        self, components: Sequence[Component], *, may_be_empty: bool = False
    ) -> None:
        if not components and not may_be_empty:
            raise RewardError(
                "no reward is configured. Add one, for example reward: [{name: exact_match}]."
            )
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
            raise RewardError(
                f"accuracy: true stands at {', '.join(marked)}; only one reward can decide accuracy."
            )
        # Without a mark, the first reward decides.
        deciding = marked or [component.name for component in components]
        self.accuracy_component: str | None = deciding[0] if deciding else None

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that all functions can be called for rows with these columns beside prompt and answer.

        Raises:
            RewardError: a function has a parameter that cannot be bound; says which names can.
        """
        for component in self.components:
            component.check_columns(columns)

    def take_logged(self) -> dict[str, list[float]]:
        """Return the metrics that functions have logged since the last call, by name."""
        by_name: dict[str, list[float]] = {}
        for component in self.components:
            for name, value in component.context.metrics:
                by_name.setdefault(name, []).append(value)
            component.context.metrics.clear()
        return by_name

    def take_columns(self, count: int) -> list[dict[str, Any]]:
        """Return, for each of the last call's `count` samples, the values that functions have logged, by column."""
        rows: list[dict[str, Any]] = [{} for _ in range(count)]
        for component in self.components:
            for row, logged in zip(
                rows, component.context.take_columns(count), strict=True
            ):
                row.update(logged)
        return rows

    def begin(self, state: TrainerState) -> None:
        """Set the training progress that functions can read."""
        for component in self.components:
            component.context.state = state

    @property
    def has_accuracy(self) -> bool:
        """True unless no response can ever count as correct."""
        decisive = self._decisive
        return decisive is None or decisive.can_reach_one is not False

    @property
    def accuracy_note(self) -> str:
        """Remark about accuracy that the user should read before the run; empty if nothing is doubtful."""
        decisive = self._decisive
        if decisive is None or decisive.can_reach_one:
            return ""
        fix = "Mark another entry of reward with accuracy: true"
        if decisive.can_reach_one is None:
            return (
                f"accuracy counts responses to which the reward {decisive.name!r} gives 1 or more. If it never gives "
                f"1, accuracy stays 0: {fix[0].lower()}{fix[1:]}, or set trainer.best_metric=reward."
            )
        return (
            f"no accuracy is shown: the reward {decisive.name!r}, which decides it, never gives 1. The reward decides "
            f"which checkpoint is the best. {fix} to have one."
        )

    @property
    def _decisive(self) -> Component | None:
        """The component that decides whether a response is correct."""
        named = (
            component
            for component in self.components
            if component.name == self.accuracy_component
        )
        return next(named, None)

    def score(self, samples: Sequence[RewardSample]) -> RewardOutput:
        """Return totals, components and correctness of `samples` in order; NaN for samples that could not be scored.

        Raises:
            RewardError: a function raises, or returns anything but one finite number for each sample.
        """
        scores: dict[str, list[float]] = {}
        for component in self.components:
            gate = None if component.only_if is None else scores[component.only_if]
            scores[component.name] = component.shaped(samples, gate)
        total = [
            # `fsum` rounds once, so that the total does not depend on the order of the
            # components.
            math.fsum(
                component.weight * scores[component.name][number]
                for component in self.components
            )
            for number in range(len(samples))
        ]
        decisive = (
            scores[self.accuracy_component]
            if self.accuracy_component
            else [0.0] * len(samples)
        )
        correct = [value >= 1.0 for value in decisive]
        return RewardOutput(total, scores, correct)


def build_reward(
    specs: Any,
    *,
    may_be_empty: bool = False,
    modules: Sequence[str] = (),
    row: RowNames | None = None,
) -> Reward:
    """Build the reward that a configuration describes.

    Args:
        specs: one entry or a list of entries. An entry is a built-in reward's name, or a mapping or object with `name`
            (a built-in reward, or a label beside `function`), `function` (`module:function` or
            `path/to/file.py:function`), `weight` (1), `options` (keyword arguments), `batched` (whether `function`
            takes lists), `accuracy` (whether this one decides what counts as correct), and `only_if`, `shape` (a
            function, named like `function`) and `clip`; see `Component`. Further keys of a mapping are options too.
            `batched` and `accuracy` may also be among the options.
        may_be_empty: see `Reward`.
        modules: modules of the user to import first, so that the rewards that they register are known by name.
        row: names of the data's columns, as far as they are known, since parameters may be named like columns.

    Raises:
        ConfigError: a module cannot be imported.
        RewardError: an entry names nothing known, or has options that the function does not accept.
    """
    load_modules(modules)
    entries = (
        [specs]
        if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence)
        else specs
    )
    components: list[Component] = []
    taken: dict[str, int] = {}
    for entry in entries:
        # A reward may be listed twice with other options. The second one is shown as
        # `name_2`.
        component = _build_component(_as_mapping(entry), row or RowNames())
        taken[component.name] = taken.get(component.name, 0) + 1
        if taken[component.name] > 1:
            component = replace(
                component, name=f"{component.name}_{taken[component.name]}"
            )
        components.append(component)
    return Reward(components, may_be_empty=may_be_empty)


def _as_mapping(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"name": entry}
    if not isinstance(entry, Mapping):
        return {
            key: getattr(entry, key)
            for key in SPEC_KEYS
            if getattr(entry, key, None) is not None
        }
    options = {
        **(entry.get("options") or {}),
        **{key: value for key, value in entry.items() if key not in SPEC_KEYS},
    }
    return {
        **{key: value for key, value in entry.items() if key in SPEC_KEYS},
        "options": options,
    }


def _build_component(entry: Mapping[str, Any], row: RowNames) -> Component:
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
        raise RewardError(
            f"a reward needs a name or a function; found {dict(entry)!r}."
        )
    weight = entry.get("weight", 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not math.isfinite(weight)
    ):
        raise RewardError(
            f"reward {label!r}: weight is {weight!r}; it must be a finite number."
        )
    function.check_options(options)
    shape = (
        _own_function(entry["shape"], "reward.shape") if entry.get("shape") else None
    )
    clip = tuple(float(value) for value in entry["clip"]) if entry.get("clip") else None
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise RewardError(
            f"reward {label!r}: clip is {list(clip)}; expected [minimum, maximum]."
        )
    return Component(
        label,
        function,
        float(weight),
        options,
        accuracy,
        entry.get("only_if"),
        shape,
        clip,
        row,
    )


def _own_function(target: str, key: str = "reward.function") -> Callable[..., Any]:
    try:
        return load_function(target, key)
    except ConfigError as error:
        raise RewardError(str(error)) from error


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]} ... {text[-35:]}")
