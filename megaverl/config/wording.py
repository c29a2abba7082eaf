"""Words that messages about a configuration share: values as YAML, lists, and suggestions for misspelt names.

Suggestions use difflib, and before it a rule for abbreviations. With single typing
mistakes in the 186 names of keys with six letters or more, difflib finds each of them.
With names that are abbreviated part by part (`gpu_mem`), it finds 60 of 139, and 131
with a lower bar that suggests unrelated names; with the rule, 138 are found.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import isqrt
from typing import Any

LONGEST_PATH = 1024  # characters of a path in a message; its end says which file it is


def yaml_text(value: Any) -> str:
    """Return `value` as YAML would write it, for a message. All but paths are cut to 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    is_path = (
        isinstance(value, str) and "/" in value and not any(map(str.isspace, value))
    )
    if len(text) > (LONGEST_PATH if is_path else 80):
        return text[:77] + "..."
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely means, or None.

    Tried in order: an abbreviation part by part, a close spelling, one name contained
    in the other, a loosely similar spelling.
    """
    # Sorted, so that the suggestion does not depend on the order of a set.
    known = sorted(set(known))
    alike = [candidate for candidate in known if _shortens(name, candidate)]
    if alike:
        return min(alike, key=len)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    folded = name.lower().replace("-", "_")
    containing = []
    # Names of one or two letters occur in many others by chance.
    if len(folded) > 2:
        containing = [
            candidate
            for candidate in known
            if len(candidate) > 2 and (folded in candidate or candidate in folded)
        ]
    if containing:
        return min(containing, key=lambda candidate: abs(len(candidate) - len(folded)))
    loose = difflib.get_close_matches(folded, known, n=1, cutoff=0.55)
    return loose[0] if loose else None


def _shortens(name: str, full_name: str) -> bool:
    """Return whether `name` abbreviates `full_name` part by part, as gpu_mem does gpu_memory_utilization."""
    parts = name.lower().replace("-", "_").split("_")
    full_parts = full_name.lower().replace("-", "_").split("_")
    if len(name) <= 2 or len(parts) > len(full_parts):
        return False
    return all(
        whole.startswith(part) for part, whole in zip(parts, full_parts, strict=False)
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean `x`?" with a leading space, or "" if no known name is close."""
    close = nearest(name, known)
    return f" Did you mean `{close}`?" if close else ""


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def listed(values: Iterable[Any], most: int = 16) -> str:
    """Return the values joined by commas, cut after `most` of them."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
