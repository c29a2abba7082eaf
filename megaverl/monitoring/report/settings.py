"""The configuration in a report: what was set, and where runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megaverl.config import Config
from megaverl.monitoring.report.run_folder import RunRecord


class Setting(NamedTuple):
    """A key, its value in every run (empty where it has none), and whether the runs differ."""

    key: str
    values: tuple[str, ...]
    differs: bool


def settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Every key that some run has not at its default, or in which runs differ."""
    default = dict(flat(Config().to_dict()))
    each = [dict(flat(run.config)) for run in runs]
    found = []
    for key in dict.fromkeys(key for config in each for key in config):
        values = tuple(_text(config[key]) if key in config else "" for config in each)
        differs = len(set(values)) > 1
        if differs or any(key in config and config[key] != default.get(key) for config in each):
            found.append(Setting(key, values, differs))
    return found


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a list of mappings by number, any other list as it is."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}{key}.")
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{prefix}{number}.")
    else:
        yield prefix.removesuffix("."), value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
