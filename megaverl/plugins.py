"""Loader of plug-ins: objects of the user, named as `module:object` or `path/to/file.py:object`.

A module is searched on Python's path and in the working folder, which console scripts
do not search by default.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from megaverl.errors import ConfigError, MegaverlError
from megaverl.user_code import describe, user_code, where_raised

# A module is in sys.modules before it is complete, so other threads must not look
# meanwhile.
_importing = threading.RLock()


def load_object(name: str, key: str) -> Any:
    """Import a plug-in and return the object that its name leads to.

    Args:
        name: `module:object` (importable, also from the working folder), or `path/to/file.py:object`.
        key: configuration key of the name, for messages.

    Raises:
        ConfigError: the name is malformed, the module or file does not exist or raises when imported, or it lacks the
            object.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ConfigError(
            f"{key}: found {name!r}; expected module:object or path/to/file.py:object."
        )
    module = load_module(place, key)
    with user_code(
        lambda error: ConfigError(
            f"{key}: {place}: asked for {attribute!r}, it raised {describe(error)}."
        )
    ):
        # A module may define __getattr__, which may raise.
        is_there = hasattr(module, attribute)
    if not is_there:
        names = sorted(
            name
            for name in vars(module)
            if name.isidentifier() and not name.startswith("_")
        )
        near = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"{key}: {place} has no {attribute!r}{hint}; it has {', '.join(names[:12]) or 'nothing'}."
        )
    return getattr(module, attribute)


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import a plug-in that must be callable.

    Raises:
        ConfigError: as `load_object`; or the object is not callable.
    """
    function = load_object(name, key)
    if not callable(function):
        raise ConfigError(
            f"{key}: {name} is {type(function).__name__}; expected a function."
        )
    return function  # type: ignore[no-any-return]


def call_object(name: str, key: str, *arguments: Any) -> Any:
    """Call the function that `name` leads to, and return its result.

    Raises:
        ConfigError: as `load_function`.
        MegaverlError: the function raises; gives the error and its place.
    """
    function = load_function(name, key)
    with calling(name, key):
        return function(*arguments)


def calling(name: str, key: str) -> AbstractContextManager[None]:
    """Return a context for a call of a plug-in. Its errors name the plug-in, its key, and the line."""

    def failed(error: BaseException) -> MegaverlError:
        return MegaverlError(
            f"{key}: {name} raised {describe(error)}{where_raised(error)}."
        )

    return user_code(failed, keep=MegaverlError)


def load_module(place: str, key: str) -> ModuleType:
    """Import the module of this dotted name, or of this file.

    Raises:
        ConfigError: it does not exist, or raises when imported, even SystemExit.
    """

    def failed(error: BaseException) -> ConfigError:
        description = describe(error)
        is_missing = description.startswith("ModuleNotFoundError: No module named")
        hint = ". Is it installed, or its folder on PYTHONPATH? A file can be named by its path instead"
        return ConfigError(
            f"{key}: {place} cannot be imported: {description}{hint if is_missing else ''}."
        )

    with user_code(failed, keep=ConfigError):
        return (
            _import_file(Path(place), key)
            if place.endswith(".py")
            else _import_module(place)
        )


def absolute_name(name: str) -> str:
    """Return a plug-in's name with an absolute path of its file; a dotted name is unchanged."""
    place, colon, attribute = name.rpartition(":")
    return (
        f"{Path(place).absolute()}:{attribute}"
        if colon and place.endswith(".py")
        else name
    )


def search_working_folder() -> None:
    """Let Python find modules in the working folder, after all other places.

    The folder is added by its absolute path, even beside the empty entry that `python
    -m` makes, since user code may change the working folder later.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()


def _import_module(name: str) -> ModuleType:
    search_working_folder()
    return importlib.import_module(name)


def _import_file(path: Path, key: str) -> ModuleType:
    """Import a file once, whichever thread asks first."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is not there (looked in {Path.cwd()}).")
    name = f"megaverl_plugin_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
