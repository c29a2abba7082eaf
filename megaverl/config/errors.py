"""Configuration mistakes, and the exception that lists them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
        lines = [
            f"{count} mistake{'s' if count > 1 else ''} in the configuration ({source}):"
        ]
        lines += [
            "  - " + str(mistake).replace("\n", "\n    ") for mistake in self.mistakes
        ]
        super().__init__("\n".join(lines))


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
    for key, is_set, reason in conflicts:
        if is_set:
            reported, conflicting = (switch, key) if at_switch else (key, switch)
            text = f"cannot be combined with {conflicting}: {reason}. Leave one of the two out."
            yield ConfigIssue(reported, text, involves=(conflicting,))
