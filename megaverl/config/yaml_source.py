"""Read YAML files and `key=value` overrides into one mapping, recording where each key was written; find recipes.

A file may extend another one with `base: FILE`, a path relative to its own folder.
Mappings merge, and all other values replace.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from megaverl.config.errors import ConfigIssue
from megaverl.config.key_types import list_entry, section_of, type_at
from megaverl.config.run import named_reward
from megaverl.config.successors import successor_sentence
from megaverl.config.typed_yaml import (
    MAX_BYTES,
    BadYaml,
    compose,
    construct,
    read_argument,
)
from megaverl.config.wording import yaml_text
from megaverl.errors import ConfigError

BASE = "base"
COMMAND_LINE = "command line"
MISSING = object()
# NUL, and halves of surrogate pairs, which cannot be encoded as UTF-8.
_UNUSABLE = re.compile(r"[\x00\ud800-\udfff]")
_REFERENCE = re.compile(r"\$\{([a-z]\w*(?:\.\w+)+)\}")
Key = tuple[str, ...]
# `key=text` as on a command line, or a key and its value, as a program passes them.
Override = str | tuple[str, Any]


# Sections that may be written as one text -> the key that the text sets: `model:
# org/name`.
SHORT = {"model": "path"}
# Lists whose entries may be texts -> function that expands such an entry.
SHORT_ENTRIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "reward": named_reward,
    **dict.fromkeys(
        ("data.train", "data.validation", "sft.train"), lambda text: {"path": text}
    ),
}


@dataclass
class YamlSource:
    """Values read so far, with their origins.

    Attributes:
        name: file and command line, for messages.
        values: plain dictionaries and lists.
        places: key path -> "file, line n" or "command line".
        layers: files and the command line, in rising priority.
        mistakes: mistakes so far.
        warnings: warnings so far.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    mistakes: list[ConfigIssue] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def place(self, key: str | Key) -> str:
        """Return where `key` was written, or else the nearest mapping around it; "" if neither was."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        while path:
            if path in self.places:
                return self.places[path]
            path = path[:-1]
        return ""

    def layer(self, key: str) -> int:
        """Return the index of the highest layer that sets `key` or a key inside it, or -1."""
        path = tuple(key.split("."))
        inside = [place for at, place in self.places.items() if at[: len(path)] == path]
        # A key without a place of its own was set with the section around it.
        places = inside or [self.place(path)]
        files = [place.rpartition(", line ")[0] or place for place in places]
        return max(
            self.layers.index(file) if file in self.layers else -1 for file in files
        )

    def forget(self, path: Key) -> None:
        """Remove the places of a replaced key and of everything inside it."""
        self.places = {
            at: place for at, place in self.places.items() if at[: len(path)] != path
        }

    def add(self, key: str, message: str, where: str | None = None) -> None:
        """Record a mistake at `key`. `where` overrides the recorded place."""
        self.mistakes.append(
            ConfigIssue(key, message, self.place(key) if where is None else where)
        )


def read_source(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[Override],
    defaults: dict[str, Any] | None = None,
) -> YamlSource:
    """Read a file, merge the overrides and resolve `${...}`. Mistakes are recorded, not raised.

    Args:
        path: YAML file, or its content as a mapping, or None.
        overrides: in rising priority.
        defaults: values for `${...}` that refer to keys which neither the file nor the overrides set.
    """
    source = YamlSource(COMMAND_LINE)
    if isinstance(path, Mapping):
        source.name = "what was given"
    elif path:
        source.name = f"{path}"
    if path and overrides:
        source.name += " and the command line"
    if isinstance(path, Mapping):
        # Overrides and defaults are written into the caller's values.
        source.values = copy.deepcopy(dict(path))
        _write_out_short(source.values, source.places)
        if source.values.pop(BASE, None) is not None:
            source.add(
                BASE, "stands in a file. Give the path of one instead of its content."
            )
    elif path:
        source.values = _read_file(source, Path(path), ())
    # Layers in rising priority. The files have been added by `_read_file`.
    source.layers.append(COMMAND_LINE)
    for override in overrides:
        _apply(source, override)
    _check_references(source, source.values, ())
    tree = _tree(source)
    # References may name keys that nobody set. Their defaults are put in for the
    # resolution, and taken out after it.
    borrowed = _borrow(tree, defaults or {})
    _drop_unresolvable(source, tree, ())
    source.values = OmegaConf.to_container(tree, resolve=True)  # type: ignore[assignment]
    for key in borrowed:
        take(source.values, key.split("."))
    _drop_empty_sections(source.values, ())
    return source


def _read_file(
    source: YamlSource, path: Path, above: tuple[Path, ...]
) -> dict[str, Any]:
    """Read a file and merge it over its base, if it names one. Returns an empty mapping if it cannot be read.

    Args:
        above: files whose `base` led to this one.
    """
    places: dict[Key, str] = {}
    values: Any = None
    try:
        with path.open(encoding="utf-8") as file:
            # One more than allowed, so that a larger file is refused without reading
            # all of it.
            node = compose(file.read(MAX_BYTES + 1))
        if node is not None:
            _locate(source, places, node, (), str(path))
            values = construct(
                node,
                type_at,
                lambda at, text: source.add(
                    ".".join(at) or "--config", text, places.get(at, "")
                ),
            )
    except FileNotFoundError:
        similar = " or ".join(similar_recipes(path))
        hint = (
            f"Did you mean {similar}?" if similar else "Give the path of a YAML file."
        )
        hint = successor_sentence(str(path)) or hint
        source.add("--config", f"{path} does not exist. {hint}", where="")
    except (OSError, UnicodeDecodeError) as error:
        source.add("--config", f"{path} cannot be read: {error}.", where="")
    except BadYaml as error:
        separator = ", " if str(error).startswith("line ") else " "
        source.add("--config", f"{path}{separator}{error}", where="")
    else:
        if values is None or isinstance(values, dict):
            return _over_base(source, values or {}, places, (*above, path))
        shape = f"holds a {type(values).__name__}; expected sections (`key: value`)."
        source.add("--config", f"{path} {shape}", where="")
    return {}


def _over_base(
    source: YamlSource,
    values: dict[str, Any],
    places: dict[Key, str],
    files: tuple[Path, ...],
) -> dict[str, Any]:
    """Return `values` merged over those of the base file that they name, and record their places.

    Args:
        files: chain of files from the first to the one that holds the values.
    """
    _write_out_short(values, places)
    if BASE in values:
        below = _read_base(source, values.pop(BASE), places.pop((BASE,), ""), files)
        replaced: list[Key] = []
        values = _merged(below, values, (), replaced)
        for path in replaced:
            source.forget(path)
    source.places.update(places)
    source.layers.append(str(files[-1]))
    return values


def _write_out_short(values: dict[str, Any], places: dict[Key, str]) -> None:
    """Expand sections that are written as one text."""
    for name, key in SHORT.items():
        if isinstance(values.get(name), str):
            values[name] = {key: values[name]}
            places.setdefault((name, key), places.get((name,), ""))


def _read_base(
    source: YamlSource, name: Any, where: str, files: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the values of the base that the last of `files` names, or an empty mapping with a recorded mistake."""
    if not isinstance(name, str) or not name:
        source.add(
            BASE,
            f"found {yaml_text(name)}; expected the path of a YAML file, from this one's folder.",
            where,
        )
        return {}
    folder = files[-1].parent
    base = Path(os.path.normpath(folder / name))
    if not base.is_file():
        source.add(
            BASE,
            f"found {yaml_text(name)}, but {base} is not a file. It is named from this file's folder.",
            where,
        )
        return {}
    # A file that is its own base, directly or through others, would be read forever.
    if base.resolve() in [file.resolve() for file in files]:
        chain = " -> ".join(map(str, (*files, base)))
        source.add(
            BASE,
            f"comes back to a file that is laid over it: {chain}. Leave one of these out.",
            where,
        )
        return {}
    values = _read_file(source, base, files)
    # `model.config` is relative to the file that holds it; make it relative to the
    # extending file.
    model = values.get("model")
    if (
        isinstance(model, dict)
        and isinstance(model.get("config"), str)
        and base.parent != folder
    ):
        model["config"] = os.path.relpath(base.parent / model["config"], folder)
    return values


def _merged(
    below: dict[str, Any], above: dict[str, Any], at: Key, replaced: list[Key]
) -> dict[str, Any]:
    """Return `above` merged over `below`. Appends the paths of values that were replaced as a whole to `replaced`."""
    result = dict(below)
    for key, value in above.items():
        path = (*at, str(key))
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            value = _merged(below[key], value, path, replaced)
        elif key in below:
            replaced.append(path)
        result[key] = value
    return result


def _locate(
    source: YamlSource, places: dict[Key, str], node: yaml.Node, at: Key, file: str
) -> None:
    """Record the line of every key below `node`, and report keys that occur twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*at, str(index))] = f"{file}, line {item.start_mark.line + 1}"
            _locate(source, places, item, (*at, str(index)), file)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name = str(key_node.value)
        line = key_node.start_mark.line + 1
        path = (*at, name)
        # YAML lets the last one win, which hides a mistake. Several merges are allowed.
        if name in seen and name != "<<":
            source.add(
                ".".join(path),
                f"stands twice in {file}, in lines {seen[name]} and {line}. Keep one of them.",
                where="",
            )
        seen[name] = line
        places[path] = f"{file}, line {line}"
        _locate(source, places, value_node, path, file)


def _tree(source: YamlSource) -> DictConfig:
    """Return the values as an OmegaConf tree, which resolves `${...}`."""
    try:
        return OmegaConf.create(source.values)
    except (OmegaConfBaseException, ValueError) as error:
        source.add("--config", f"{source.name}: {_first_line(error)}", where="")
        return OmegaConf.create({})


def _apply(source: YamlSource, override: Override) -> None:
    """Merge one override into the values. Mistakes are recorded."""
    if isinstance(override, tuple):
        path = tuple(override[0].split("."))
        problem = _lay(source, path, override[1])
        if problem:
            source.add(override[0], problem, where=COMMAND_LINE)
        source.places[path] = COMMAND_LINE
        return
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or key.startswith("-"):
        source.add(
            override,
            "expected key=value, with a dotted key, such as actor.tp=2.",
            where=COMMAND_LINE,
        )
        return
    # `data.train[0].path` is accepted for `data.train.0.path`.
    path = tuple(re.sub(r"\[(\w+)\]", r".\1", key).split("."))
    if not all(path):
        source.add(
            key,
            "has an empty part. Write a dotted key, such as actor.tp=2.",
            where=COMMAND_LINE,
        )
        return
    if key == BASE:
        source.add(
            key,
            "stands in a file, and names what that is laid over. Here --config names a file.",
            COMMAND_LINE,
        )
        return
    try:
        value = read_argument(text, type_at(path), type_at, path)
    except BadYaml as error:
        shown = (
            ""
            if str(error).startswith("found ")
            else f"found {yaml_text(text)}, which "
        )
        source.add(key, f"{shown}{error}", where=COMMAND_LINE)
        return
    # The shell removes one pair of quotes, so a second pair is most likely a mistake.
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_quoted and isinstance(value, str) and value == text:
        source.warnings.append(
            f"{key}: the quotes of {text} are part of the text; leave them out unless they are meant"
        )
    if key in SHORT and isinstance(value, str):
        path = (key, SHORT[key])
    problem = _lay(source, path, value)
    if problem:
        source.add(key, problem, where=COMMAND_LINE)
        return
    source.places[path] = COMMAND_LINE


def _lay(source: YamlSource, path: Key, value: Any) -> str:
    """Set the value at `path`: mappings merge, all else replaces. Returns what is wrong, or ""."""
    around: Any = source.values
    for depth, part in enumerate(path):
        at = path[:depth]
        if isinstance(around, list):
            if not part.isdigit() or int(part) > len(around):
                last = (
                    f"0 to {len(around) - 1}, and {len(around)} adds one"
                    if around
                    else "0"
                )
                return f"{'.'.join(at)} is a list. Name an entry by its number: {last}."
            if int(part) == len(around):
                # An index one past the end adds an entry.
                around.append({})
            number: Any = int(part)
        elif isinstance(around, dict):
            number = part
        else:
            return f"cannot be set: {'.'.join(at)} is {yaml_text(around)}, which has no keys."
        is_last = depth == len(path) - 1
        here = around[number] if isinstance(around, list) else around.get(number)
        if is_last:
            is_merged = isinstance(here, dict) and isinstance(value, dict)
            if not is_merged:
                source.forget(path)
            around[number] = _merged(here, value, path, []) if is_merged else value
            return ""
        around[number] = _opened(here, path[: depth + 1], path[depth + 1])
        around = around[number]
    return ""


def _opened(here: Any, at: Key, following: str) -> Any:
    """Return the value at `at` in a form that can hold the key `following`: short forms are expanded."""
    entry_of_text = SHORT_ENTRIES.get(".".join(at))
    # `data.train.0.weight=2` addresses the only entry of a list that was written
    # without brackets.
    if (
        following.isdigit()
        and list_entry(type_at(at)) is not None
        and not isinstance(here, list)
    ):
        here = [] if here is None else [here]
    if isinstance(here, list) and entry_of_text and following.isdigit():
        return [
            entry_of_text(entry) if isinstance(entry, str) else entry for entry in here
        ]
    if isinstance(here, str) and entry_of_text:
        return entry_of_text(here)
    if here is None or (isinstance(here, bool) and section_of(type_at(at)) is not None):
        # `rollout.partial: true` means the section with all its defaults.
        return {}
    return here


def _check_references(source: YamlSource, values: Any, at: Key) -> None:
    """Report every text with a malformed `${...}`, and set it to null so that the remaining values can be resolved."""
    for key, value in list(
        values.items() if isinstance(values, dict) else enumerate(values)
    ):
        path = (*at, str(key))
        if isinstance(value, dict | list):
            _check_references(source, value, path)
        elif isinstance(value, str) and "${" in value:
            try:
                OmegaConf.create({"text": value})
            except (OmegaConfBaseException, ValueError, RecursionError):
                text = f"found {yaml_text(value)}, whose ${{...}} is no reference. {_HOW_TO_REFER}"
                source.add(".".join(path), text)
                values[key] = None


_HOW_TO_REFER = (
    "${section.key} is another key, ${oc.env:NAME} an environment variable; a ${ "
    "that is meant as text is written \\${."
)


def _drop_empty_sections(values: dict[str, Any], at: Key) -> None:
    """Remove sections that are null, as a YAML key with nothing below it is. They get their defaults."""
    for key, value in list(values.items()):
        path = (*at, str(key))
        if (
            value is None
            and isinstance(kind := type_at(path), type)
            and issubclass(kind, BaseModel)
        ):
            del values[key]
        elif isinstance(value, dict) and section_of(type_at(path)) is not None:
            _drop_empty_sections(value, path)


def refuse_impossible(source: YamlSource, values: Any, at: Key = ()) -> None:
    """Report values that no key can hold, and set them to null.

    These are NaN and infinities, integers of more than 64 bits, and text that cannot be
    encoded or contains NUL.
    """
    for key, value in list(
        values.items() if isinstance(values, dict) else enumerate(values)
    ):
        path = (*at, str(key))
        if isinstance(value, dict | list):
            refuse_impossible(source, value, path)
        elif isinstance(value, float) and not math.isfinite(value):
            source.add(".".join(path), f"found {value}; expected a finite number.")
            values[key] = None
        elif isinstance(value, int) and abs(value) >= 2**63:
            source.add(
                ".".join(path),
                f"found {yaml_text(value)}; expected an integer of at most 64 bits.",
            )
            values[key] = None
        elif isinstance(value, str) and _UNUSABLE.search(value):
            source.add(
                ".".join(path),
                f"found {yaml_text(value)}, with a character that is no text: NUL or half a pair.",
            )
            values[key] = None


def _borrow(tree: DictConfig, defaults: dict[str, Any]) -> list[str]:
    """Add the defaults that `${...}` refers to and the user did not set, such as `${run.dir}`. Returns their keys."""
    text = OmegaConf.to_yaml(tree, resolve=False)
    borrowed = []
    for key in sorted(set(_REFERENCE.findall(text))):
        value = value_at(defaults, key.split("."))
        if isinstance(value, str | int | float) and OmegaConf.select(tree, key) is None:
            # A conflicting value in the file is reported later.
            with contextlib.suppress(OmegaConfBaseException):
                OmegaConf.update(tree, key, value, force_add=True)
                borrowed.append(key)
    return borrowed


def value_at(values: Any, path: Sequence[str]) -> Any:
    """Return the value at `path`, or MISSING."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def put(values: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set the value at `path`, creating mappings on the way. Returns False if a value on the way is not a mapping."""
    head, *rest = path
    if not rest:
        values[head] = value
        return True
    if values.get(head) is None:
        values[head] = {}
    return isinstance(values[head], dict) and put(values[head], rest, value)


def take(values: dict[str, Any], path: Sequence[str]) -> Any:
    """Remove and return the value at `path`, with mappings that become empty. Returns MISSING if there is none."""
    *around, last = path
    if (value := value_at(values, path)) is not MISSING:
        inner = value_at(values, around)
        inner.pop(last)
        if around and not inner:
            take(values, around)
    return value


def _drop_unresolvable(source: YamlSource, tree: Any, at: Key) -> None:
    """Report every `${...}` that cannot be resolved and every `???`, and set it to null.

    The rest of the configuration can then be checked.
    """
    keys = list(range(len(tree))) if isinstance(tree, ListConfig) else list(tree.keys())
    for key in keys:
        path = (*at, str(key))
        try:
            if OmegaConf.is_missing(tree, key):
                raise ValueError(
                    "was left open (???). Give it a value in the file or as key=value"
                )
            value = tree[key]
        except (OmegaConfBaseException, ValueError) as error:
            hint = (
                f" {_HOW_TO_REFER}"
                if "${" in str(tree._get_node(key)) or "nterpolation" in str(error)
                else ""
            )
            source.add(".".join(path), f"{_first_line(error)}.{hint}")
            tree[key] = None
            continue
        if isinstance(
            value, DictConfig | ListConfig
        ) and not OmegaConf.is_interpolation(tree, key):
            _drop_unresolvable(source, value, path)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def recipes_folder() -> Path:
    """Return the folder of all recipes: inside the package if it was installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe(name: str) -> Path:
    """Return the path of a recipe such as `gsm8k_smollm2/ppo`.

    Raises:
        ConfigError: there is no such recipe.
    """
    path = recipes_folder() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"there is no recipe {name}.yaml in {path.parent}.")
    return path


def all_recipes() -> list[Path]:
    """Return every recipe that can be run as it is. Files that only serve as a `base` are left out."""
    files = recipes_folder().rglob("*.yaml")
    return sorted(
        path
        for path in files
        if path.name != "base.yaml" and path.parent.name != "bases"
    )


def similar_recipes(path: Path) -> list[str]:
    """Return up to three recipes whose paths contain every word of a file's name, those with the fewest other words.

    For ppo_gsm8k_smollm2.yaml that is configs/gsm8k_smollm2/ppo.yaml.
    """
    words = _words(path.stem)
    words_by_path = {
        candidate: _words(str(candidate.relative_to(recipes_folder()).with_suffix("")))
        for candidate in all_recipes()
    }
    fitting = {
        candidate: len(candidate_words - words)
        for candidate, candidate_words in words_by_path.items()
        if words and words <= candidate_words
    }
    best = [
        candidate
        for candidate, num_other_words in fitting.items()
        if num_other_words == min(fitting.values())
    ]
    return [
        str(
            candidate.relative_to(Path.cwd())
            if candidate.is_relative_to(Path.cwd())
            else candidate
        )
        for candidate in best[:3]
    ]


def _words(name: str) -> set[str]:
    """Return the words of a name, in lower case."""
    return set(re.findall(r"[a-z0-9]+", name.lower()))
