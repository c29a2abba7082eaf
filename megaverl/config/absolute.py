"""Make the paths of a configuration absolute when a run starts: user code may change the working directory."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel

from megaverl.config.evaluation import SUITE_PREFIX, HarnessTask
from megaverl.config.schema import Config
from megaverl.plugins import absolute_name

# Keys that name a file or folder which need not exist yet, so existence cannot tell a
# path from a name.
PLACES = {
    "run.dir",
    "model.offload_folder",
    "trainer.replay_rollouts",
    "rollout.servers.file",
    "rollout.servers.folder",
}
# Field names that mean such a file or folder in every section.
PLACE_NAMES = ("folder", "file", "dir")
# Fields, and options of plug-ins, that hold either a path, a name on a hub, or
# something else. Only values that exist on disk are treated as paths.
FILE_NAMES = (
    *(
        "path",
        "tokenizer",
        "train",
        "validation",
        "tools",
        "resume",
        "search",
        "template",
        "config",
    ),
    *("include_path", "harness_python"),
    *("reward_modules", "modules", "offload_folder", "chat_template"),
)


def with_absolute_paths(config: Config) -> Config:
    """Return a copy of `config` in which folders, data files, models and plug-in files have absolute paths.

    A name that is not a path on this machine, such as a model on a hub, stays as it is.
    """
    resolved: Config = _absolute(config, "")
    return resolved


def _absolute(value: Any, key: str) -> Any:
    """Return `value`, the value at the dotted key `key`, with every path inside it made absolute.

    Unchanged values are returned as the same object.
    """
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {
            name: _absolute(field, f"{key}.{name}".lstrip("."))
            for name, field in fields.items()
        }
        changed = {
            name: field for name, field in changed.items() if field is not fields[name]
        }
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        items = {name: _absolute(item, f"{key}.{name}") for name, item in value.items()}
        return (
            items
            if any(items[name] is not item for name, item in value.items())
            else value
        )
    if isinstance(value, list | tuple):
        entries = [_absolute(entry, key) for entry in value]
        return (
            type(value)(entries)
            if any(a is not b for a, b in zip(entries, value, strict=True))
            else value
        )
    if not isinstance(value, str) or not value:
        return value
    return _absolute_text(value, key)


def _absolute_text(value: str, key: str) -> str:
    """Return the text `value` as an absolute path if `key` says that it is a path, else unchanged."""
    # A plug-in is written file.py:function; only its file part is a path.
    named = absolute_name(value)
    if named != value:
        return named if Path(value.rpartition(":")[0]).is_file() else value
    if value.startswith(SUITE_PREFIX):
        return _absolute_suite(value)
    if key == "evaluation.tasks":
        return _absolute_task(value)
    if key.startswith("evaluation.data."):
        path, mark, options = value.partition("?")
        return (
            f"{Path(path).absolute()}{mark}{options}" if Path(path).exists() else value
        )
    field = key.rpartition(".")[2]
    if key in PLACES or (field in PLACE_NAMES and ".options" not in key):
        return str(Path(value).absolute())
    if field not in FILE_NAMES:
        return value
    # The same keys take names on a hub, which must stay as they are.
    is_pattern = glob.has_magic(value) and bool(glob.glob(value, recursive=True))
    if Path(value).exists() or is_pattern:
        return str(Path(value).absolute())
    return value


def _absolute_task(value: str) -> str:
    """Return a task of a harness with the absolute path of its file, if it has one that exists."""
    try:
        task = HarnessTask.parse(value)
    except ValueError:
        return value
    if task.source is None or not Path(task.source).is_file():
        return value
    rest = task.task.removeprefix(task.source)
    return str(HarnessTask(task.harness, f"{Path(task.source).absolute()}{rest}"))


def _absolute_suite(value: str) -> str:
    """Return a source `suite:NAME?path=...` with an absolute path, if the path exists."""
    name, _, query = value.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not options.get("path") or not Path(options["path"]).exists():
        return value
    options["path"] = str(Path(options["path"]).absolute())
    return f"{name}?{urlencode(options)}"
