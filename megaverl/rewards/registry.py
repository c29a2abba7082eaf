"""Registry of reward functions, built-in and of the user, with the types of their arguments and results."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from megaverl.errors import RewardError
from megaverl.plugins import load_module
from megaverl.rewards.binding import HOW, Binding, RowNames, bind
from megaverl.user_code import describe, user_code


@dataclass(frozen=True)
class RewardSample:
    """A response with its prompt, reference and other columns of the row.

    Attributes:
        prompt: text, as the model saw it.
        response: text, without special tokens.
        reference: the row's reference answer, of any JSON type; None if there is none.
        extra: the row's other columns.
        transcript: for an episode with several turns, everything after the prompt, with the environment's answers;
            `response` is then the last turn only. None if unknown.
        finish_reason: `stop` (the model ended it) or `length` (it was cut off); None if unknown.
        num_tokens: tokens of the response, with its end of sequence; None if unknown.
        messages: the prompt's conversation before the chat template; None if unknown.
        is_conversation: whether the row's own prompt is a list of messages instead of text.
        token_ids: tokens of the response, as the model drew them; None if unknown.
    """

    prompt: str
    response: str
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    num_tokens: int | None = None
    transcript: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    is_conversation: bool = False
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a list of samples, in its order.

    Attributes:
        total: weighted sums of the components, which are trained on. NaN if a sample could not be scored, for example
            because a judge gave no answer; the sample is left out.
        components: name -> unweighted values of each component.
        correct: what accuracy and pass@k count: whether the component with `accuracy: true`, or else the first one, is
            1 or more.
    """

    total: list[float]
    components: dict[str, list[float]]
    correct: list[bool]

    def metrics(self, prefix: str = "reward") -> dict[str, float]:
        """Return metrics of the scored samples.

        These are mean, standard deviation and extremes of the total, each component's
        mean, and accuracy.
        """
        scored = [value for value in self.total if not math.isnan(value)]
        if not scored:
            return {}
        mean = _mean(scored)
        right = []
        for value, total in zip(self.correct, self.total, strict=True):
            # A sample that could not be scored counts neither as right nor as wrong.
            if not math.isnan(total):
                right.append(float(value))
        values = {
            f"{prefix}/mean": mean,
            f"{prefix}/std": _mean([(value - mean) ** 2 for value in scored]) ** 0.5,
            f"{prefix}/min": min(scored),
            f"{prefix}/max": max(scored),
            f"{prefix}/accuracy": _mean(right),
        }
        values.update(
            {
                f"{prefix}/{name}_mean": _mean(scores)
                for name, scores in self.components.items()
            }
        )
        return values


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


FIRST = {False: "sample", True: "samples"}


def finished(value: Any) -> Any:
    """Return the value, or the result of the coroutine of a function that is declared with `async def`."""
    if not inspect.iscoroutine(value):
        return value
    # The calling thread may have a running event loop, in which asyncio.run would fail.
    with ThreadPoolExecutor(1, thread_name_prefix="async reward") as threads:
        return threads.submit(asyncio.run, value).result()


@dataclass(frozen=True)
class RewardFunction:
    """A function and the way to call it.

    It takes either one `sample` (a `RewardSample`) as its first parameter, or values of
    a sample by name (see `megaverl.rewards.binding`); if `batched`, a list of each.
    Options follow as keyword arguments. It returns a number, or a list of numbers if
    `batched`.

    Attributes:
        check: called with the options when the reward is built; raises ValueError for wrong options.
        may_fail: whether NaN is a valid result, for a sample that could not be scored and is left out.
        highest: the greatest value that it returns; None: unknown.
    """

    name: str
    function: Callable[..., Any]
    batched: bool = False
    check: Callable[..., None] | None = None
    may_fail: bool = False
    highest: float | None = None

    @functools.cached_property
    def takes_samples(self) -> bool:
        """True if its first parameter is named `sample` (`samples` if batched)."""
        return (
            next(iter(inspect.signature(self.function).parameters), None)
            == FIRST[self.batched]
        )

    def may_take(self, value: str) -> bool:
        """Return whether it can receive a value of the run, such as TRL's `log_metric`, by name or in `**kwargs`."""
        parameters = inspect.signature(self.function).parameters.values()
        takes_rest = self.batched and any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )
        return takes_rest or any(parameter.name == value for parameter in parameters)

    def binding(self, options: Collection[str], row: RowNames | None = None) -> Binding:
        """Bind its parameters.

        Raises:
            ValueError: see `bind`.
        """
        return bind(self.function, options, batched=self.batched, row=row)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check that the function can be called with these options.

        Raises:
            RewardError: it cannot; names its parameters, and the options that were given.
        """
        signature = inspect.signature(self.function)
        try:
            if self.takes_samples:
                signature.bind(FIRST[self.batched], **options)
            else:
                arguments, keywords = self.binding(options).arguments(str, ())
                signature.bind(*arguments, **keywords, **options)
        except (TypeError, ValueError) as error:
            raise self.unbound(options, error) from error
        if self.check is not None:
            with user_code(self._refused):
                self.check(**options)

    def unbound(self, options: Mapping[str, Any], cause: Exception) -> RewardError:
        """Return the error for parameters that cannot be bound."""
        values = (
            ", ".join(f"{key}={value!r}" for key, value in options.items())
            or "no options"
        )
        return RewardError(
            f"reward {self.name!r} takes {inspect.signature(self.function)}, and is given {values}: {cause}. {HOW}. "
            "Change its parameters, or the options in the configuration."
        )

    def _refused(self, error: BaseException) -> RewardError:
        reason = str(error) if isinstance(error, ValueError) else describe(error)
        return RewardError(f"reward {self.name!r}: {reason}")


_REGISTERED: dict[str, RewardFunction] = {}


F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_reward(
    name: F,
    *,
    batched: bool = False,
    check: Callable[..., None] | None = None,
    may_fail: bool = False,
    highest: float | None = None,
) -> F: ...


@overload
def register_reward(
    name: str | None = None,
    *,
    batched: bool = False,
    check: Callable[..., None] | None = None,
    may_fail: bool = False,
    highest: float | None = None,
) -> Callable[[F], F]: ...


def register_reward(
    name: str | Callable[..., Any] | None = None,
    *,
    batched: bool = False,
    check: Callable[..., None] | None = None,
    may_fail: bool = False,
    highest: float | None = None,
) -> Callable[..., Any]:
    """Register a function under `name`, or under its own name, for configurations; see `RewardFunction`.

    Raises:
        RewardError: another function has the name.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = name if isinstance(name, str) else function.__name__
        if known in _REGISTERED and _place_of(_REGISTERED[known].function) != _place_of(
            function
        ):
            raise RewardError(
                f"a reward named {known!r} is registered already; choose another name."
            )
        _REGISTERED[known] = RewardFunction(
            known, function, batched, check, may_fail, highest
        )
        return function

    return register(name) if callable(name) else register


def load_modules(names: Sequence[str]) -> None:
    """Import modules or files of the user, which register rewards.

    Raises:
        ConfigError: one does not exist, or cannot be imported.
    """
    for name in names:
        load_module(name, "reward_modules")


def _place_of(function: Callable[..., Any]) -> Any:
    """Return the place of a function's definition, since one file may be imported both as a module and as a file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (
        (os.path.realpath(code.co_filename), function.__qualname__)
        if code
        else function
    )


def reward_names() -> list[str]:
    """List the names of all registered rewards."""
    for name in ("rules", "choices", "judge", "reasoning_gym"):  # the built-in ones
        importlib.import_module(f"megaverl.rewards.{name}")
    return sorted(_REGISTERED)


def find_reward(name: str) -> RewardFunction:
    """Return the registered reward `name`.

    Raises:
        RewardError: there is none; the message names the most similar one.
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
