"""`load_config`: a file and overrides in, a checked Config or the list of all mistakes out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megaverl.config.algorithm_conflicts import algorithm_warnings
from megaverl.config.checks import cross_mistakes
from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.flat import put, translate
from megaverl.config.grids import REINFORCING
from megaverl.config.lengths import fitted_lengths
from megaverl.config.passthrough import passthrough_mistakes
from megaverl.config.placement import CLAIMS
from megaverl.config.roles import INHERITED
from megaverl.config.schema import Config
from megaverl.config.validate import validate
from megaverl.config.yaml_source import BASE, YamlSource, read_source

Command = Literal["train", "sft", "dpo", "reward", "generate", "eval", "quickstart"]


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: list[str] | None = None,
    *,
    command: Command = "train",
    check_paths: bool = True,
    world_size: int | None = None,
) -> Config:
    """Read, merge, resolve and check the configuration of one run, before anything is built.

    Args:
        path: YAML file, or what one would hold, or None for the defaults. The flat form is understood (`flat.py`).
        overrides: `key=value`, dotted keys, values as YAML; later ones win, mappings merge, lists replace.
        command: what the configuration must be complete for.
        check_paths: False leaves out every check that needs the model folder or the data files to be there,
            as for a recipe that is looked at on another machine.
        world_size: ranks that the grids must fill. None: torchrun's WORLD_SIZE, or `run.nproc`, or unknown (`--role`).

    Raises:
        InvalidConfig: (a ConfigError) lists every mistake: its key, place, what was found and is allowed.
    """
    source, choice = _read(path, overrides or [], command)
    config, mistakes = validate(source)
    foreign, warnings = passthrough_mistakes(source.values, source.place)
    mistakes = _first_of_each_key([*source.mistakes, *mistakes, *foreign])
    world_size = world_size or _world_size(config)
    mistakes += _not_moot(cross_mistakes(config, command, check_paths, world_size), mistakes, source)
    if mistakes:
        raise InvalidConfig(mistakes, source.name)
    if command in REINFORCING:
        warnings += algorithm_warnings(config)
    config.note(warnings, [choice] if choice else [])
    return config


def _read(
    path: str | Path | Mapping[str, Any] | None, overrides: list[str], command: Command
) -> tuple[YamlSource, str]:
    """Everything that was written, and the lengths that were not where the model needs others than the defaults."""
    defaults = _own_defaults()
    source = read_source(path, overrides, defaults)
    translate(source)
    lengths, choice = fitted_lengths(source.values, command)
    if lengths:  # once more, since `${...}` may name one of them
        for key, length in lengths.items():
            put(defaults, key.split("."), length)
        source = read_source(path, overrides, defaults)
        translate(source)
        for key, length in lengths.items():
            put(source.values, key.split("."), length)
    return source, choice


def _own_defaults() -> dict[str, Any]:
    """Defaults that depend on no other key: the critic's and the reference's may be the actor's."""
    values = Config().to_dict()
    return {section: value for section, value in values.items() if section not in INHERITED}


def _world_size(config: Config) -> int | None:
    if os.environ.get(CLAIMS):  # what ranks the roles have is known when all nodes have said what they are
        return None
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    return config.run.nproc


def _first_of_each_key(mistakes: list[ConfigIssue]) -> list[ConfigIssue]:
    """A key that could not be read was left null: do not report the null as well."""
    kept: dict[str, ConfigIssue] = {}
    for mistake in mistakes:
        kept.setdefault(mistake.key, mistake)
    return list(kept.values())


def _not_moot(found: list[ConfigIssue], earlier: list[ConfigIssue], source: YamlSource) -> list[ConfigIssue]:
    """Drop what rests on a key that is itself wrong, and say where the others were written."""
    wrong = [mistake.key for mistake in earlier]
    if any(key.startswith("--") or key == BASE for key in wrong):  # a file could not be read
        return []
    return [
        ConfigIssue(mistake.key, mistake.message, source.place(mistake.key), mistake.involves)
        for mistake in found
        if not any(_overlap(key, bad) for key in (mistake.key, *mistake.involves) for bad in wrong)
    ]


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
