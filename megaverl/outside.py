"""Text, JSON and numbers from outside: from models, tools, programs, services and servers.

Their contents must not end the run. Text is cleaned where it enters, JSON is read with
bounds, and a number is a finite float. An unreadable answer raises ValueError, which
concerns that answer only.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# File that describes a Hugging Face model.
MODEL_CONFIG = "config.json"
MAX_DEPTH = 100  # nesting of JSON: templates, encoders and tools recurse into it
# Limit of a model's file (index or tokenizer) after decompression. The largest known
# ones have some 40 MB.
MAX_FILE_BYTES = 256 * 2**20
# Limit of a profiler's trace after decompression. Long steps of large models have
# hundreds of MB.
MAX_TRACE_BYTES = 2 * 2**30
# Lone surrogates cannot be encoded, and NUL ends a text for C libraries, command lines
# and SQLite.
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Return `text` as Unicode that every tokenizer, file and command line accepts.

    Adjacent halves of a surrogate pair are joined. Each lone surrogate, and each NUL,
    becomes U+FFFD.
    """
    if _UNUSABLE.search(text) is None:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\x00", "\ufffd")


def read_json(
    text: str | bytes, *, not_finite: bool = False, keeps_texts: bool = False
) -> Any:
    """Parse JSON from outside; its texts are cleaned.

    Args:
        not_finite: accept NaN and Infinity, which Python writes for metrics with these values.
        keeps_texts: do not clean texts, for files whose keys this project has marked with control characters.

    Raises:
        ValueError: the text is not JSON, is nested more than `MAX_DEPTH` deep, or has a number that no float can hold.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    constant = float if not_finite else _refuse
    try:
        value = json.loads(
            text, parse_constant=constant, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    return _cleaned(value, MAX_DEPTH, str if keeps_texts else clean)


def read_file(path: str | Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a file that came with a model or from another program. A name that ends in .gz is decompressed.

    Args:
        limit: largest number of bytes, decompressed.

    Raises:
        OSError: the file cannot be read, or is not gzip though its name says so.
        ValueError: the file is too large.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(limit + 1)
    except (EOFError, zlib.error) as error:
        raise OSError(f"damaged gzip file ({error})") from error
    if len(content) > limit:
        raise ValueError(f"larger than {limit:,} bytes")
    return content


def read_json_file(
    path: str | Path, limit: int = MAX_FILE_BYTES, *, not_finite: bool = False
) -> Any:
    """Parse a JSON file that came with a model or from another program.

    Args:
        limit: see `read_file`.
        not_finite: see `read_json`. A model's config.json may have such numbers in any case: Nemotron-H's has an
            infinite `time_step_limit`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large; or see `read_json`.
    """
    text = read_file(path, limit).decode("utf-8")
    return read_json(text, not_finite=not_finite or Path(path).name == MODEL_CONFIG)


def check_sizes(files: Iterable[Path], limit: int = MAX_FILE_BYTES) -> None:
    """Check that files which a library will read whole have at most `limit` bytes.

    Raises:
        OSError: a file cannot be inspected.
        ValueError: names the first file that is larger.
    """
    for file in files:
        if (size := file.stat().st_size) > limit:
            raise ValueError(
                f"{file.name} has {size:,} bytes; at most {limit:,} are read"
            )


def read_number(value: Any) -> float:
    """Return a number from outside as a float.

    Raises:
        ValueError: the value is not a number, is too large for a float, or is not finite.
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


def _cleaned(value: Any, depth: int, clean_text: Callable[[str], str] = clean) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict | list) and depth == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {
            clean_text(key): _cleaned(item, depth - 1, clean_text)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_cleaned(item, depth - 1, clean_text) for item in value]
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _float(text: str) -> float:
    return read_number(float(text))


def _int(text: str) -> int:
    number = int(text)  # ValueError beyond 4,300 digits
    read_number(number)
    return number
