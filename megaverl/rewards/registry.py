"""Reward functions by name: the built-in ones, and those that are registered beside them."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.errors import RewardError
from megaverl.plugins import load_module
from megaverl.rewards.binding import HOW, VALUES, Binding, bind

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
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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
            "function: module:function, or function: path/to/file.py:function, or registered (@register_reward) by a "
            "module that reward_modules names."
        )
    return _REGISTERED[name]


def _load_built_in() -> None:
    for name in ("rules", "code_tests", "judge", "reasoning_gym"):
        importlib.import_module(f"megaverl.rewards.{name}")
