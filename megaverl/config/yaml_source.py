"""YAML and `key=value` into one plain mapping, remembering where each key was written; recipes by name.

A file may be laid over another one: `base: FILE`, named from its own folder. Mappings merge, all else replaces.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import megaverl
from megaverl.config.errors import ConfigIssue, found
from megaverl.errors import ConfigError

BASE = "base"
COMMAND_LINE = "command line"
MISSING = object()
_REFERENCE = re.compile(r"\$\{([a-z]\w*(?:\.\w+)+)\}")
Key = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as people expect it: `1e-6` is a number, a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
# A text in the place of these sections is this key of theirs: `model: org/name`.
SHORT = {"model": "path"}


@dataclass
class YamlSource:
    """What was read: `values` as plain dictionaries and lists, `places` by key path, `mistakes` so far.

    `layers`: the files and the command line, each laid over those before it.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    mistakes: list[ConfigIssue] = field(default_factory=list)

    def place(self, key: str | Key) -> str:
        """Where `key`, or else the nearest mapping around it that was written, stands; empty if nowhere."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        while path:
            if path in self.places:
                return self.places[path]
            path = path[:-1]
        return ""

    def layer(self, key: str) -> int:
        """The highest layer in which `key` or something inside it stands; -1 where none has it."""
        path = tuple(key.split("."))
        inside = [place for at, place in self.places.items() if at[: len(path)] == path] or [self.place(path)]
        files = [place.rpartition(", line ")[0] or place for place in inside]
        return max(self.layers.index(file) if file in self.layers else -1 for file in files)

    def forget(self, path: Key) -> None:
        """Drop the places of a key, and of all inside it, that is replaced."""
        self.places = {at: place for at, place in self.places.items() if at[: len(path)] != path}

    def add(self, key: str, message: str, where: str | None = None) -> None:
        self.mistakes.append(ConfigIssue(key, message, self.place(key) if where is None else where))


def read_source(
    path: str | Path | Mapping[str, Any] | None, overrides: list[str], defaults: dict[str, Any] | None = None
) -> YamlSource:
    """Read the file (if any), lay the overrides over it, resolve `${...}`; mistakes are noted, not raised.

    Instead of a file its content may be given, as a mapping.

    `defaults` are what `${...}` finds where neither the file nor the overrides hold the key.
    """
    source = YamlSource("what was given" if isinstance(path, Mapping) else f"{path}" if path else COMMAND_LINE)
    if path and overrides:
        source.name += " and the command line"
    if isinstance(path, Mapping):
        source.values = copy.deepcopy(dict(path))
        _write_out_short(source.values, source.places)
        if source.values.pop(BASE, None) is not None:
            source.add(BASE, "stands in a file. Give the path of one instead of its content.")
    elif path:
        source.values = _read_file(source, Path(path), ())
    source.layers.append(COMMAND_LINE)
    tree = _tree(source)
    for override in overrides:
        _apply(source, tree, override)
    borrowed = _borrow(tree, defaults or {})
    _drop_unresolvable(source, tree, ())
    source.values = OmegaConf.to_container(tree, resolve=True)  # type: ignore[assignment]
    for key in borrowed:
        take(source.values, key.split("."))
    return source


def _read_file(source: YamlSource, path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file, laid over its base if it names one; empty where it cannot be read. above: the files that led to it."""
    places: dict[Key, str] = {}
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
        if node is not None:
            _locate(source, places, node, (), str(path))
    except FileNotFoundError:
        hint = " or ".join(similar_recipes(path))
        hint = f"Did you mean {hint}?" if hint else "Give the path of a YAML file."
        source.add("--config", f"{path} does not exist. {hint}", where="")
    except (OSError, UnicodeDecodeError) as error:
        source.add("--config", f"{path} cannot be read: {error}.", where="")
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        source.add("--config", f"{path}{line} is not valid YAML: {problem}.", where="")
    except (yaml.YAMLError, ValueError) as error:
        source.add("--config", f"{path} is not valid YAML: {error}.", where="")
    except RecursionError:
        source.add("--config", f"{path}: an anchor (&) stands inside what it names. Write the value out.", where="")
    else:
        if values is None or isinstance(values, dict):
            return _over_base(source, values or {}, places, (*above, path))
        shape = f"holds a {type(values).__name__}; expected sections (`key: value`)."
        source.add("--config", f"{path} {shape}", where="")
    return {}


def _over_base(
    source: YamlSource, values: dict[str, Any], places: dict[Key, str], files: tuple[Path, ...]
) -> dict[str, Any]:
    """`values` over those of the base that they name, and their places likewise.

    Args:
        files: from the first file to the one that holds the values.
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
    for name, key in SHORT.items():
        if isinstance(values.get(name), str):
            values[name] = {key: values[name]}
            places.setdefault((name, key), places.get((name,), ""))


def _read_base(source: YamlSource, name: Any, where: str, files: tuple[Path, ...]) -> dict[str, Any]:
    """What the last of `files` is laid over."""
    if not isinstance(name, str) or not name:
        source.add(BASE, f"found {found(name)}; expected the path of a YAML file, from this one's folder.", where)
        return {}
    folder = files[-1].parent
    base = Path(os.path.normpath(folder / name))
    if not base.is_file():
        source.add(BASE, f"found {found(name)}, but {base} is not a file. It is named from this file's folder.", where)
        return {}
    if base.resolve() in [file.resolve() for file in files]:
        chain = " -> ".join(map(str, (*files, base)))
        source.add(BASE, f"comes back to a file that is laid over it: {chain}. Leave one of these out.", where)
        return {}
    values = _read_file(source, base, files)
    model = values.get("model")
    if isinstance(model, dict) and isinstance(model.get("config"), str) and base.parent != folder:
        model["config"] = os.path.relpath(base.parent / model["config"], folder)  # it is named from a file's folder
    return values


def _merged(below: dict[str, Any], above: dict[str, Any], at: Key, replaced: list[Key]) -> dict[str, Any]:
    """`above` laid over `below`; notes the paths of what it replaces as a whole."""
    result = dict(below)
    for key, value in above.items():
        path = (*at, str(key))
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            value = _merged(below[key], value, path, replaced)
        elif key in below:
            replaced.append(path)
        result[key] = value
    return result


def _locate(source: YamlSource, places: dict[Key, str], node: yaml.Node, at: Key, file: str) -> None:
    """Note the line of every key below `node`, and report keys that stand twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*at, str(index))] = f"{file}, line {item.start_mark.line + 1}"
            _locate(source, places, item, (*at, str(index)), file)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        path = (*at, name)
        if name in seen and name != "<<":
            source.add(
                ".".join(path), f"stands twice in {file}, in lines {seen[name]} and {line}. Keep one of them.", where=""
            )
        seen[name] = line
        places[path] = f"{file}, line {line}"
        _locate(source, places, value_node, path, file)


def _tree(source: YamlSource) -> DictConfig:
    try:
        return OmegaConf.create(source.values)
    except (OmegaConfBaseException, ValueError) as error:
        source.add("--config", f"{source.name}: {_first_line(error)}", where="")
        return OmegaConf.create({})


def _apply(source: YamlSource, tree: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or key.startswith("-"):
        source.add(override, "expected key=value, with a dotted key, such as actor.tp=2.", where=COMMAND_LINE)
        return
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        source.add(key, f"found {found(text)}, which is not valid YAML: {_first_line(error)}", where=COMMAND_LINE)
        return
    if key == BASE:
        source.add(key, "stands in a file, and names what that is laid over. Here --config names a file.", COMMAND_LINE)
        return
    if key in SHORT and isinstance(value, str):
        key = f"{key}.{SHORT[key]}"
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError, AttributeError) as error:
        source.add(key, f"cannot be set to {found(value)}: {_first_line(error)}", where=COMMAND_LINE)
        return
    source.places[tuple(re.sub(r"\[(\w+)\]", r".\1", key).split("."))] = COMMAND_LINE


def _borrow(tree: DictConfig, defaults: dict[str, Any]) -> list[str]:
    """Put in the defaults that `${...}` refers to and the file leaves out, such as `${run.dir}`; their keys."""
    text = OmegaConf.to_yaml(tree, resolve=False)
    borrowed = []
    for key in sorted(set(_REFERENCE.findall(text))):
        value = value_at(defaults, key.split("."))
        if isinstance(value, str | int | float) and OmegaConf.select(tree, key) is None:
            with contextlib.suppress(OmegaConfBaseException):  # a file that is wrong there is reported later
                OmegaConf.update(tree, key, value, force_add=True)
                borrowed.append(key)
    return borrowed


def value_at(values: Any, path: Sequence[str]) -> Any:
    """What stands at `path`; MISSING where nothing does."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def put(values: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set what stands at `path`, making the mappings around it; False where one of these is something else."""
    head, *rest = path
    if not rest:
        values[head] = value
        return True
    if values.get(head) is None:
        values[head] = {}
    return isinstance(values[head], dict) and put(values[head], rest, value)


def take(values: dict[str, Any], path: Sequence[str]) -> Any:
    """What stands at `path`, taken out with the mappings that are empty without it; MISSING where nothing does."""
    *around, last = path
    if (value := value_at(values, path)) is not MISSING:
        inner = value_at(values, around)
        inner.pop(last)
        if around and not inner:
            take(values, around)
    return value


def _drop_unresolvable(source: YamlSource, tree: Any, at: Key) -> None:
    """Report every `${...}` that leads nowhere and every `???`, and make it null: the rest can be checked."""
    keys = list(range(len(tree))) if isinstance(tree, ListConfig) else list(tree.keys())
    for key in keys:
        path = (*at, str(key))
        try:
            if OmegaConf.is_missing(tree, key):
                raise ValueError("was left open (???). Give it a value in the file or as key=value")
            value = tree[key]
        except (OmegaConfBaseException, ValueError) as error:
            source.add(".".join(path), f"{_first_line(error)}.")
            tree[key] = None
            continue
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_interpolation(tree, key):
            _drop_unresolvable(source, value, path)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def recipes_folder() -> Path:
    """The folder of all recipes."""
    package = Path(megaverl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe(name: str) -> Path:
    """The path of `configs/name.yaml`, such as `gsm8k_smollm2/ppo`.

    Raises:
        ConfigError: no such recipe.
    """
    path = recipes_folder() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"there is no recipe {name}.yaml in {path.parent}.")
    return path


def all_recipes() -> list[Path]:
    """Every file that can be run as it stands: not what a family, or several, are laid over."""
    files = recipes_folder().rglob("*.yaml")
    return sorted(path for path in files if path.name != "base.yaml" and path.parent.name != "bases")


def similar_recipes(path: Path) -> list[str]:
    """Recipes in whose path every word of a file's name stands, those with the fewest other words; such as
    configs/gsm8k_smollm2/ppo.yaml for ppo_gsm8k_smollm2.yaml.
    """
    words = _words(path.stem)
    others = {each: _words(str(each.relative_to(recipes_folder()).with_suffix(""))) for each in all_recipes()}
    fitting = {each: len(other - words) for each, other in others.items() if words and words <= other}
    best = [each for each, extra in fitting.items() if extra == min(fitting.values())]
    return [str(each.relative_to(Path.cwd()) if each.is_relative_to(Path.cwd()) else each) for each in best[:3]]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
