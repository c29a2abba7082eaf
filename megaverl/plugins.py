"""The one loader of plug-ins: parts of the user's own, named as `module:object` or `path/to/file.py:object`.

A module is found where Python finds it, and in the working folder: a console script does not look there by itself.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from megaverl.errors import ConfigError, MegaverlError
from megaverl.processes import ending_with_parent
from megaverl.user_code import describe, user_code, where_raised

CHECK_SECONDS = 120.0
_importing = threading.RLock()  # a module stands in sys.modules before it is whole: no other thread may look then


def load_object(name: str, key: str) -> Any:
    """Import a plug-in and return the object that its name leads to.

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
    with user_code(lambda error: ConfigError(f"{key}: {place}: asked for {attribute!r}, it raised {describe(error)}.")):
        is_there = hasattr(module, attribute)  # a module may have a __getattr__ of its own
    if not is_there:
        there = sorted(one for one in vars(module) if one.isidentifier() and not one.startswith("_"))
        near = difflib.get_close_matches(attribute, there, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{key}: {place} has no {attribute!r}{hint}; it has {', '.join(there[:12]) or 'nothing'}.")
    return getattr(module, attribute)


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import a plug-in that must be callable.

    Raises:
        ConfigError: as `load_object`; or it is no function.
    """
    function = load_object(name, key)
    if not callable(function):
        raise ConfigError(f"{key}: {name} is {type(function).__name__}; expected a function.")
    return function  # type: ignore[no-any-return]


def call_object(name: str, key: str, *arguments: Any) -> Any:
    """Call the function that `name` leads to, and return its result.

    Raises:
        ConfigError: as `load_function`.
        MegaverlError: the function raises; says what and where.
    """
    function = load_function(name, key)
    with calling(name, key):
        return function(*arguments)


def calling(name: str, key: str) -> AbstractContextManager[None]:
    """Return the context in which a plug-in is called: whatever it raises names it, its key, and the line."""

    def failed(error: BaseException) -> MegaverlError:
        return MegaverlError(f"{key}: {name} raised {describe(error)}{where_raised(error)}.")

    return user_code(failed, keep=MegaverlError)


def load_module(place: str, key: str) -> ModuleType:
    """Import the module of this dotted name, or of this file.

    Raises:
        ConfigError: there is none, or it raises as it is imported, SystemExit too.
    """

    def failed(error: BaseException) -> ConfigError:
        what = describe(error)
        is_missing = what.startswith("ModuleNotFoundError: No module named")
        hint = ". Is it installed, or its folder on PYTHONPATH? A file can be named by its path instead"
        return ConfigError(f"{key}: {place} cannot be imported: {what}{hint if is_missing else ''}.")

    with user_code(failed, keep=ConfigError):
        return _import_file(Path(place), key) if place.endswith(".py") else _import_module(place)


def absolute_name(name: str) -> str:
    """Return a plug-in's name with the path of its file made absolute; a dotted name stays as it is."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).absolute()}:{attribute}" if colon and place.endswith(".py") else name


def search_working_folder() -> None:
    """Let Python find modules in the working folder, after all other places.

    The folder is added by its absolute path, also beside the empty entry that `python -m` makes: user code may change
    the working folder later.
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


def check_plugins(names: Mapping[str, str], seconds: float = CHECK_SECONDS) -> dict[str, str]:
    """Load plug-ins in a child process, and return what is wrong with those that cannot be loaded, by their keys.

    The child protects the caller: a module may end its process as it is imported, change the working folder, or hang.

    Args:
        names: plug-ins by the keys that name them.
        seconds: for all of them.
    """
    problems: dict[str, str] = {}
    left = dict(names)
    end = time.monotonic() + seconds
    while left:
        answered, why = _check_in_child(left, max(end - time.monotonic(), 0.0))
        problems |= {key: problem for key, problem in answered.items() if problem}
        left = {key: name for key, name in left.items() if key not in answered}
        if left:  # the child ended, or hung, in the first of these
            key, name = next(iter(left.items()))
            problems[key] = f"{key}: {name}: {why}"
            del left[key]
    return problems


def _check_in_child(names: Mapping[str, str], seconds: float) -> tuple[dict[str, str], str]:
    """Load plug-ins in one child; return the answers that came, and why none came after them."""
    with tempfile.TemporaryFile() as answers:
        # The child answers into a file of its own: what user code prints must not mix with the answers.
        command = ending_with_parent([sys.executable, "-m", "megaverl.plugins", str(answers.fileno())])
        try:
            child = subprocess.run(
                command, input=json.dumps(dict(names)).encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[answers.fileno()], timeout=seconds, check=False,
            )  # fmt: skip
            why = f"it ended its process with exit code {child.returncode} as it was imported."
        except subprocess.TimeoutExpired:
            why = f"it was not imported within {seconds:.0f} s."
        answers.seek(0)
        return dict(json.loads(line) for line in answers.read().splitlines()), why


def _answer_checks(answers: int) -> None:
    """Load the plug-ins that the standard input names, and write a line for each to the descriptor `answers`."""
    for key, name in json.loads(sys.stdin.buffer.read()).items():
        problem = ""
        try:
            load_object(name, key)
        except ConfigError as error:
            problem = str(error)
        os.write(answers, json.dumps([key, problem]).encode() + b"\n")
    os._exit(0)  # user code may have left threads and exit handlers behind


if __name__ == "__main__":
    _answer_checks(int(sys.argv[1]))
