"""Convert values from JSON text, Arrow and users' code to values that JSON can hold.

Rows travel as JSON: between ranks, to rewards in other processes, and into checkpoints.
So every value is converted when its row is read, or refused with its row and column. A
value that cannot travel must fail a run at its start, not when the first reward runs on
another node.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from megaverl.errors import DataError
from megaverl.outside import MAX_DEPTH

MAX_DIGITS = 4300
"""Digits of an integer: Python's own limit for reading one from text (`sys.get_int_max_str_digits`)."""

_TOO_LARGE = 10**MAX_DIGITS


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line of a JSONL file.

    Args:
        where: file and line, for messages.

    Raises:
        DataError: the line is not one JSON object, or exceeds the limits of Python's JSON reader.
    """
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}). Each line must hold one whole JSON object; correct or remove "
            "this line."
        ) from error
    # Python refuses to convert integers with very many digits.
    except ValueError as error:
        raise DataError(
            f"{where}: a number has more than {MAX_DIGITS} digits. Write it as text, or remove this line."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: the line holds {_too_nested()}") from error
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: a JSON object is expected, like {{"prompt": "...", "answer": "..."}}; found {_kind(row)}.'
        )
    return row


def plain_value(value: Any, where: str, name: str) -> Any:
    """Return `value` as JSON can hold it: text, numbers, true/false, null, lists and mappings with text keys.

    Dates, times and UUIDs become ISO 8601 text, decimals text with all their digits,
    durations seconds, tuples lists, integer keys text, and scalars and arrays of numpy
    or torch plain numbers and lists.

    Args:
        where: the row, for messages.
        name: the column, for messages.

    Raises:
        DataError: the value contains bytes or another object without a JSON form, NaN or infinity, half of a surrogate
            pair, an integer of more than `MAX_DIGITS` digits, or more than `MAX_DEPTH` levels.
    """
    return plain_columns({name: value}, where)[name]


def plain_columns(columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Apply `plain_value` to every column of a row.

    Raises:
        DataError: a value or a column's name cannot be held by JSON.
    """
    try:
        return {
            _plain_key(name, ("the name of a column",)): _plain(value, (str(name),))
            for name, value in columns.items()
        }
    except _NotPlain as error:
        raise DataError(f"{where}: {error}") from error


class _NotPlain(ValueError):
    """Raised for a value that JSON cannot hold. The message names its path of keys and indices."""

    # Nested pairs are unrolled from the inside out.
    def __init__(self, path: _Path, problem: str) -> None:
        steps: list[str] = []
        while len(path) == 2:
            path, step = path
            steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
        name = f"{path[0]}{''.join(reversed(steps[-8:]))}"
        super().__init__(f"{name!r} {problem}")


# (name of the column,), or (path of the parent, key or index). Nested, so that building
# a path costs nothing until a message needs it.
_Path = tuple[Any, ...]


def _plain(value: Any, path: _Path, depth: int = 0) -> Any:
    """Return a value as JSON can hold it."""
    # Compared by identity: 1 == True, and numbers are handled below.
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _plain_text(value, path)
    if isinstance(value, list | tuple | Mapping):
        if depth >= MAX_DEPTH:
            raise _NotPlain(path, f"and so on holds {_too_nested()}")
        if isinstance(value, Mapping):
            plain = {}
            for key, item in value.items():
                plain[_plain_key(key, path)] = _plain(item, (path, key), depth + 1)
            return plain
        return [
            _plain(item, (path, place), depth + 1) for place, item in enumerate(value)
        ]
    # Arrays of numpy and torch become lists; their scalars become plain numbers or
    # dates.
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), path, depth + 1)
    if isinstance(value, int):
        if not -_TOO_LARGE < value < _TOO_LARGE:
            raise _NotPlain(
                path, f"is a number of more than {MAX_DIGITS} digits. Write it as text."
            )
        return int(value)
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            word = "NaN" if math.isnan(value) else "infinite"
            raise _NotPlain(
                path,
                f"is {word}, which JSON cannot hold. Write null or a number, or remove the row.",
            )
        return float(value) if isinstance(value, float) else format(value, "f")
    return _plain_object(value, path)


_CONVERTED = (datetime.timedelta, datetime.date, datetime.time, Decimal, UUID)


def is_converted(value: Any) -> bool:
    """Return whether `plain_value` changes the type of the value, as for a date."""
    return isinstance(value, _CONVERTED)


def _plain_object(value: Any, path: _Path) -> Any:
    """Return a date, duration or UUID as text or a number."""
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    # NaT is not equal to itself.
    # pandas' NaT is a date that differs from itself, and has no text.
    if isinstance(value, datetime.date | datetime.time) and value == value:
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise _NotPlain(
            path,
            "is bytes, which JSON cannot hold. Store text (base64 for data that is not text), or remove the column. "
            "Images are read from the column that data.images.key names, by models that take them.",
        )
    raise _NotPlain(
        path,
        f"is {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold. Use text, numbers, "
        "true/false, null, lists and mappings, or remove the column.",
    )


def _plain_text(text: str, path: _Path) -> str:
    """Return text unchanged, or refuse it if it cannot be encoded."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _NotPlain(
                path,
                f"has half of a surrogate pair ({text[error.start]!r}, character {error.start + 1}), which is not "
                "text. The row was cut or escaped wrongly where it was written: correct or remove it.",
            ) from error
    return text


def _plain_key(key: Any, path: _Path) -> str:
    """Return a mapping's key as text."""
    if isinstance(key, str):
        return _plain_text(key, path)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if isinstance(key, datetime.date | datetime.time | Decimal | UUID):
        return str(_plain(key, path))
    raise _NotPlain(
        path,
        f"has the key {key!r:.60}, and keys of mappings are text in JSON. Write text.",
    )


def without_null_fields(value: Any) -> Any:
    """Remove fields of mappings that are None, at every level. Lists keep their Nones."""
    if isinstance(value, Mapping):
        return {
            key: without_null_fields(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [without_null_fields(item) for item in value]
    return value


Conversion = Callable[[Any], Any]


def parse_text(text: str) -> Any:
    """Parse JSON text inside a row.

    Raises:
        ValueError: the text is not JSON, or exceeds the limits of Python's reader.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it holds {_too_nested()}") from error


def arrow_conversion(arrow_type: Any) -> Conversion | None:
    """Return a function that restores what a value's writer meant from its Arrow type, or None for no change.

    Arrow stores a missing field as a null field of its struct. Such fields are removed
    again, so a row reads the same from Parquet and from JSONL. A map becomes a mapping.
    Nulls in maps and lists were written, and stay.

    Raises:
        DataError: a map has keys that are lists, structs or maps.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_struct(arrow_type):
        fields = {field.name: arrow_conversion(field.type) for field in arrow_type}
        return lambda value: None if value is None else _convert_struct(value, fields)
    if types.is_map(arrow_type):
        if types.is_nested(arrow_type.key_type):
            raise DataError(
                f"a map with keys of type {arrow_type.key_type}; keys must be text in JSON"
            )
        of_item = arrow_conversion(arrow_type.item_type) or _unchanged
        return lambda value: (
            None if value is None else {key: of_item(item) for key, item in value}
        )
    if types.is_dictionary(arrow_type):
        return arrow_conversion(arrow_type.value_type)
    # Covers lists, large lists, list views and lists of fixed size.
    if types.is_nested(arrow_type) and hasattr(arrow_type, "value_type"):
        of_element = arrow_conversion(arrow_type.value_type)
        if of_element is None:
            return None
        return lambda value: (
            None if value is None else [of_element(item) for item in value]
        )
    return None


def _convert_struct(
    value: Mapping[str, Any], fields: Mapping[str, Conversion | None]
) -> dict[str, Any]:
    """Return a struct's fields that are not null, converted."""
    converted = {}
    for name, item in value.items():
        if item is not None:
            conversion = fields[name]
            converted[name] = item if conversion is None else conversion(item)
    return converted


def _unchanged(value: Any) -> Any:
    """Return `value`."""
    return value


def _too_nested() -> str:
    """Return the end of a message about nesting."""
    return f"lists and mappings in more than {MAX_DEPTH} levels. Write the inner part as text, or remove the row."


def _kind(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    names = {
        list: "a list",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true/false",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
