"""Reward functions by name: the built-in ones, and those that are registered beside them."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.errors import RewardError

SAMPLE_STYLE = {False: ("sample",), True: ("samples",)}
COLUMN_STYLE = {
    False: ("prompt", "response", "reference", "extra"),
    True: ("prompts", "responses", "references", "extras"),
}


@dataclass(frozen=True)
class RewardFunction:
    """A function and how it is called.

    It takes either one `sample` (a `RewardSample`), or `prompt, response, reference, extra`; if `batched`, a
    list of each: `samples`, or `prompts, responses, references, extras`. Options follow as keyword arguments.
    It returns a number, or a list of numbers if `batched`.

    Attributes:
        check: called with the options when the reward is built; raises ValueError for one that cannot be
            used.
    """

    name: str
    function: Callable[..., Any]
    batched: bool = False
    check: Callable[..., None] | None = None

    @functools.cached_property
    def takes_samples(self) -> bool:
        """Whether its first parameter is named `sample` (`samples`)."""
        return next(iter(inspect.signature(self.function).parameters), None) == SAMPLE_STYLE[self.batched][0]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """See that the function can be called with these options.

        Raises:
            RewardError: names what it takes, and what was given.
        """
        columns = SAMPLE_STYLE[self.batched] if self.takes_samples else COLUMN_STYLE[self.batched]
        signature = inspect.signature(self.function)
        try:
            signature.bind(*columns, **options)
        except TypeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
            raise RewardError(
                f"reward {self.name!r} takes {signature}, but would be called with ({', '.join(columns)}) "
                f"and {given}: {error}. Mend the options in the configuration, or the function's parameters"
                f"{'' if self.batched else ' (a function over whole lists needs batched: true)'}."
            ) from error
        if self.check is not None:
            try:
                self.check(**options)
            except ValueError as error:
                raise RewardError(f"reward {self.name!r}: {error}") from error


_REGISTERED: dict[str, RewardFunction] = {}


def register_reward(
    name: str, *, batched: bool = False, check: Callable[..., None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: makes a function known to configurations as `name`; see `RewardFunction`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in _REGISTERED:
            raise RewardError(f"a reward named {name!r} is registered already; choose another name.")
        _REGISTERED[name] = RewardFunction(name, function, batched, check)
        return function

    return register


def reward_names() -> list[str]:
    """Names of all registered rewards."""
    _load_built_in()
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
            "function: module:function, or function: path/to/file.py:function."
        )
    return _REGISTERED[name]


def _load_built_in() -> None:
    for module in ("matching", "length", "math"):
        importlib.import_module(f"megaverl.rewards.{module}")
