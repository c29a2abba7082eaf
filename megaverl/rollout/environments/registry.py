"""Environments and games by name, or `module:object` of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megaverl.errors import ConfigError
from megaverl.plugins import load_object
from megaverl.rollout.environments.environment import Alone, Codec, Environment, Game

Kind = type[Environment] | type[Game]
T = TypeVar("T", bound=Kind)

# name -> the module that registers it
BUILT_IN = {
    "tools": "megaverl.rollout.environments.tools",
    "guess": "megaverl.rollout.environments.games",
    "signals": "megaverl.rollout.environments.games",
    "gymnasium": "megaverl.rollout.environments.adapters",
    "textarena": "megaverl.rollout.environments.adapters",
    "openenv": "megaverl.rollout.environments.adapters",
    "gateway": "megaverl.rollout.environments.gateway",
    "verifiers": "megaverl.rollout.environments.verifiers",
}
_REGISTERED: dict[str, Kind] = {}


def register_environment(name: str) -> Callable[[T], T]:
    """Decorator: makes a class known to configurations as `name`.

    Raises:
        ConfigError: the name is taken by another.
    """

    def register(kind: T) -> T:
        if name in _REGISTERED:
            raise ConfigError(f"an environment named '{name}' is registered already; choose another name")
        _REGISTERED[name] = kind
        return kind

    return register


def environment_names() -> list[str]:
    """Of all that are registered or come with the package."""
    return sorted({*BUILT_IN, *_REGISTERED})


def find_environment(name: str) -> Kind:
    """The class that a configuration names.

    Raises:
        ConfigError: unknown (the nearest names are listed), not importable, or no environment.
    """
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = environment_names()
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(
            f"no environment '{name}'.{hint} There are: {', '.join(known)}; or a class of your own as module:object."
        )
    found = load_object(name, "environment")
    if not (inspect.isclass(found) and issubclass(found, Environment | Game)):
        raise ConfigError(f"environment '{name}' is not a class derived from Environment or Game: found {found!r:.80}")
    return found


def make_game(name: str, codec: Codec, options: Mapping[str, Any]) -> Game:
    """One episode of the environment or game `name`.

    Raises:
        ConfigError: unknown, or options that it does not take.
    """
    kind = find_environment(name)
    made = kind(codec, **options)
    return made if isinstance(made, Game) else Alone(made)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """See that the class can be made with these options.

    Raises:
        ConfigError: names what it takes.
    """
    kind = find_environment(name)
    signature = inspect.signature(kind)
    try:
        signature.bind("codec", **options)
    except TypeError as error:
        taken = [key for key in signature.parameters if key != "codec"]
        raise ConfigError(f"environment '{name}' takes {', '.join(taken) or 'no options'}: {error}") from error
    check = getattr(kind, "check", None)
    if check is not None:
        check(**options)


def agents_of(name: str) -> tuple[str, ...]:
    """Who plays in it."""
    kind = find_environment(name)
    return kind.agents if issubclass(kind, Game) else Alone.agents
