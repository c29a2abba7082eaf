"""One promise of a contract, and what became of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PromiseResult:
    """promise: what must hold. problem: why it does not; empty where it does."""

    promise: str
    problem: str = ""


class Broken(Exception):
    """A promise that does not hold; the message says what was found and what to change."""


Promise = tuple[str, Callable[[], None]]


def keep(promises: Iterable[Promise]) -> Iterator[PromiseResult]:
    """Try every promise; one that is broken does not stop the others."""
    for words, attempt in promises:
        try:
            attempt()
        except Broken as broken:
            yield PromiseResult(words, str(broken))
        except Exception as error:  # whatever the user's part raises
            frames = traceback.extract_tb(error.__traceback__)
            last = frames[-1] if frames else None
            where = f" ({last.filename}, line {last.lineno})" if last else ""
            yield PromiseResult(words, f"{type(error).__name__}: {error}{where}")
        else:
            yield PromiseResult(words)
