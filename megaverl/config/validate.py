"""From plain values to sections: what pydantic refuses, in this project's words."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megaverl.config.describe import all_keys, keys_of, section_at
from megaverl.config.errors import ConfigIssue, did_you_mean, found
from megaverl.config.passthrough import PLACES
from megaverl.config.registered import place_of
from megaverl.config.roles import INHERITED
from megaverl.config.schema import Config
from megaverl.config.yaml_source import BASE, Key, YamlSource

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
_NAME_LETTERS = "letters, digits and . _ + = , @ - only"
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def validate(source: YamlSource) -> tuple[Config, list[ConfigIssue]]:
    """The configuration with every refused key left at its default, and the mistakes."""
    values = source.values
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    written = [_written(detail["loc"], values) for detail in details]
    mistakes = [_mistake(d, source) for d, is_written in zip(details, written, strict=True) if is_written]
    for detail in sorted(details, key=lambda d: len(d["loc"]), reverse=True):
        values = _without(values, tuple(detail["loc"]))
    try:
        return Config.model_validate(values), mistakes
    except ValidationError:  # taking a key out of a list moved the others: judge the rest on defaults alone
        return Config(), mistakes


def _written(loc: tuple[int | str, ...], values: Any) -> bool:
    """False where another role only inherited the actor's mistake."""
    for part in loc[:-1]:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return not isinstance(values, dict) or loc[-1] in values or loc[0] not in INHERITED


def _mistake(detail: ErrorDetails, source: YamlSource) -> ConfigIssue:
    path = tuple(str(part) for part in detail["loc"])
    key = ".".join(path)
    return ConfigIssue(key, _message(detail, path), source.place(path))


def _message(detail: ErrorDetails, path: Key) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key." + _suggest(path)
    if kind == "invalid_key":
        return "a key must be text."
    shown = f"found {found(detail['input'])}"
    if kind == "literal_error":
        allowed = str(context["expected"])
        names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
        hint = did_you_mean(detail["input"], names) if isinstance(detail["input"], str) else ""
        if path == ("algorithm", "name") and isinstance(detail["input"], str):
            hint = place_of(detail["input"]) or hint
        return f"{shown}; allowed: {', '.join(names)}.{hint}"
    if kind == "string_pattern_mismatch":
        own = "[A-Za-z_]" in str(context.get("pattern"))
        return f"{shown}; expected {'module:function or file.py:function' if own else _NAME_LETTERS}."
    if kind in _EXPECTED:
        return f"{shown}; expected {_EXPECTED[kind]}."
    bounds = [f"{word} {context[name]}" for name, word in _BOUNDS.items() if name in context]
    return f"{shown}; expected {' and '.join(bounds)}." if bounds else f"{shown}: {detail['msg']}."


def _suggest(path: Key) -> str:
    """The sibling that is nearest in spelling; else the same name elsewhere in the configuration."""
    *parents, name = path
    siblings = keys_of(section_at(tuple(parents))) + [BASE] * (not parents)
    hint = did_you_mean(name, siblings)
    exact = [key for key in all_keys() if key.rsplit(".", 1)[-1] == name]
    exact += [f"{place}.{name}" for place, target in PLACES.items() if name in (target.settable() or {})]
    nearby = [key for key in exact if parents and key.startswith(parents[0] + ".")] or exact
    if nearby:
        return f" Did you mean `{nearby[0]}`?"
    return hint or (f" Known here: {', '.join(siblings)}." if siblings else "")


def _without(values: Any, loc: tuple[int | str, ...]) -> Any:
    """A copy of `values` that lacks what stands at `loc`."""
    head, *rest = loc
    if isinstance(values, dict):
        if head not in values:
            return values
        if not rest:
            return {key: value for key, value in values.items() if key != head}
        return {**values, head: _without(values[head], tuple(rest))}
    if isinstance(values, list) and isinstance(head, int) and head < len(values):
        if not rest:
            return values[:head] + values[head + 1 :]
        return [_without(item, tuple(rest)) if index == head else item for index, item in enumerate(values)]
    return values
