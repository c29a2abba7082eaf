"""Configuration mistakes, the exception that lists them all, and the words that their messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any

from megaverl.errors import ConfigError


@dataclass(frozen=True)
class ConfigIssue:
    """One mistake for the user to fix.

    Attributes:
        key: dotted key, as in the file.
        message: what was found and what is allowed, in one or more sentences.
        where: "file, line n" or "command line". Empty for a default or a missing key.
        involves: further keys that the mistake depends on. If one of them is itself wrong, this mistake is dropped.
    """

    key: str
    message: str
    where: str = ""
    involves: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.key}{where}: {self.message}"


class InvalidConfig(ConfigError):
    """Raised for an invalid configuration. `mistakes` holds all of them, and the message lists them."""

    def __init__(self, mistakes: Iterable[ConfigIssue], source: str) -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in the configuration ({source}):"]
        lines += ["  - " + str(mistake).replace("\n", "\n    ") for mistake in self.mistakes]
        super().__init__("\n".join(lines))


def yaml_text(value: Any) -> str:
    """Return `value` as YAML would write it, cut to 80 characters, for a message."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    assert text is not None
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely means, or None.

    Tried in order: an abbreviation part by part, a close spelling, one name contained in the other, a loosely similar
    spelling.
    """
    known = sorted(set(known))
    if alike := [other for other in known if _shortens(name, other)]:
        return min(alike, key=len)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    folded = name.lower().replace("-", "_")
    containing = [
        other for other in known if len(folded) > 2 and len(other) > 2 and (folded in other or other in folded)
    ]
    if containing:
        return min(containing, key=lambda other: abs(len(other) - len(folded)))
    loose = difflib.get_close_matches(folded, known, n=1, cutoff=0.55)
    return loose[0] if loose else None


def _shortens(name: str, other: str) -> bool:
    """Return whether `name` abbreviates `other` part by part, as gpu_mem does gpu_memory_utilization."""
    parts, others = (text.lower().replace("-", "_").split("_") for text in (name, other))
    alike = all(whole.startswith(part) for part, whole in zip(parts, others, strict=False))
    return len(name) > 2 and len(parts) <= len(others) and alike


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


def conflict_issues(
    switch: str,
    conflicts: Iterable[tuple[str, bool, str]],
    *,
    at_switch: bool = False,
) -> Iterator[ConfigIssue]:
    """Yield a mistake for each setting that cannot be combined with the key `switch`, which is set.

    Args:
        conflicts: keys of the other settings, whether each is set, and why the two exclude each other.
        at_switch: report the mistake at `switch`, not at the other key.
    """
    for key, is_set, why in conflicts:
        if is_set:
            reported, other = (switch, key) if at_switch else (key, switch)
            text = f"cannot be combined with {other}: {why}. Leave one of the two out."
            yield ConfigIssue(reported, text, involves=(other,))
