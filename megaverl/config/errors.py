"""Mistakes in a configuration, and the one error that lists them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megaverl.errors import ConfigError


@dataclass(frozen=True)
class ConfigIssue:
    """One thing to fix.

    Attributes:
        key: dotted, as in the file.
        message: what was found and what is allowed, in one or more sentences.
        where: "file, line n" or "command line"; empty where a default or a missing key is meant.
        involves: further keys that the mistake depends on; one that is itself wrong makes this one moot.
    """

    key: str
    message: str
    where: str = ""
    involves: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.key}{where}: {self.message}"


class InvalidConfig(ConfigError):
    """Carries every mistake of a configuration in `mistakes`; its message lists them."""

    def __init__(self, mistakes: Iterable[ConfigIssue], source: str) -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in the configuration ({source}):"]
        lines += ["  - " + str(mistake).replace("\n", "\n    ") for mistake in self.mistakes]
        super().__init__("\n".join(lines))


def found(value: Any) -> str:
    """How a value is shown in a message: as YAML would write it, cut where it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    assert text is not None
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most likely meant: it begins alike, is close in spelling, or one contains the other."""
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
    """Whether `name` is `other` cut short, part by part: gpu_mem of gpu_memory_utilization."""
    parts, others = (text.lower().replace("-", "_").split("_") for text in (name, other))
    alike = all(whole.startswith(part) for part, whole in zip(parts, others, strict=False))
    return len(name) > 2 and len(parts) <= len(others) and alike


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean `x`?" (with the leading space), or nothing."""
    close = nearest(name, known)
    return f" Did you mean `{close}`?" if close else ""


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def listed(values: Iterable[Any], most: int = 16) -> str:
    """The values with commas between them; a long list is cut."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
