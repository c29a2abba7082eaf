"""Parts of the user's own, named in a configuration as `module:object` or `path/to/file.py:object`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from megaverl.errors import ConfigError

_importing = threading.RLock()  # a module stands in sys.modules before it is whole: no other thread may look then


def load_object(name: str, key: str) -> Any:
    """What `name` leads to.

    Args:
        name: `module:object` (importable, also from the working folder), or `path/to/file.py:object`.
        key: the configuration's key that holds it, for messages.

    Raises:
        ConfigError: badly written; no such module or file; one that raises as it is imported; no such object in it.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ConfigError(f"{key}: found {name!r}; expected module:object or path/to/file.py:object.")
    module = load_module(place, key)
    if not hasattr(module, attribute):
        there = sorted(one for one in vars(module) if one.isidentifier() and not one.startswith("_"))
        near = difflib.get_close_matches(attribute, there, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{key}: {place} has no {attribute!r}{hint}; it has {', '.join(there[:12]) or 'nothing'}.")
    return getattr(module, attribute)


def call_object(name: str, key: str, *arguments: Any) -> Any:
    """What the function that `name` leads to makes of the arguments. An error that it raises has a note that names it.

    Raises:
        ConfigError: as `load_object`; it is no function.
    """
    function = load_object(name, key)
    if not callable(function):
        raise ConfigError(f"{key}: {name} is {type(function).__name__}; expected a function.")
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's function raises
        error.add_note(f"in {name}, which {key} names")
        raise


def load_module(place: str, key: str) -> ModuleType:
    """The module of this dotted name, or of this file.

    Raises:
        ConfigError: there is none, or it raises as it is imported.
    """
    try:
        return _file(Path(place), key) if place.endswith(".py") else _module(place)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module does when it is imported
        hint = ""
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("megaverl."):
            hint = ". Is it installed, or its folder on PYTHONPATH? A file can be named by its path instead"
        raise ConfigError(f"{key}: {place} cannot be imported: {type(error).__name__}: {error}{hint}.") from error


def _module(name: str) -> ModuleType:
    """By its dotted name, also where it lies in the working folder (a console script does not look there)."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _file(path: Path, key: str) -> ModuleType:
    """A file, imported once, by whichever thread asks first."""
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
