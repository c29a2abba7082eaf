"""Text, JSON and numbers from outside the run: of models, tools, programs, services and servers.

Whatever they write must not end the run. Text is cleaned where it enters, JSON is read with bounds, and a number is a
finite float; what cannot be read raises ValueError, which is the error of that one answer.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # of JSON: templates, encoders and tools recurse into it
# Lone surrogates cannot be encoded, and NUL ends a text for C libraries, command lines and SQLite.
MAX_FILE_BYTES = 256 * 2**20  # of a JSON file of a model: the index of the largest ones has some 10 MB
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Return `text` as Unicode that every tokenizer, file and command line takes.

    Halves of a surrogate pair that stand side by side are joined; each lone one, and each NUL, becomes U+FFFD.
    """
    if _UNUSABLE.search(text) is None:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\x00", "\ufffd")


def read_json(text: str | bytes) -> Any:
    """Parse JSON from outside; its texts are `clean`.

    Raises:
        ValueError: not JSON, nested more than `MAX_DEPTH` deep, or a number that no float can hold.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    return _cleaned(value, MAX_DEPTH)


def read_json_file(path: str | Path) -> Any:
    """Parse a JSON file that came with a model or from another program.

    Raises:
        OSError: it cannot be read.
        ValueError: too large, or see `read_json`.
    """
    with Path(path).open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES:,} bytes")
    return read_json(content.decode("utf-8"))


def read_number(value: Any) -> float:
    """Return a number from outside as a float.

    Raises:
        ValueError: no number, too large for a float, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, found {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("expected a number, found one that is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {number}")
    return number


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict | list) and depth == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {clean(key): _cleaned(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item, depth - 1) for item in value]
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _float(text: str) -> float:
    return read_number(float(text))


def _int(text: str) -> int:
    number = int(text)  # ValueError beyond 4,300 digits
    read_number(number)
    return number
