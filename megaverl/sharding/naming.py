"""Naming many tensors in one message: those that differ in a number only (layer, expert) as one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

NUMBER = re.compile(r"\d+")
GAP = "\0"  # stands for a number; no name holds it


def listed(lines: Iterable[str]) -> list[str]:
    """The lines, in order; lines that say the same of every number in some ranges become one.

    `layers.0.up: x`, `layers.1.up: x`, `layers.3.up: x` give `layers.0-1,3.up: x`. Nothing is left out.
    """
    alike: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        alike.setdefault(NUMBER.sub(GAP, line), []).append(tuple(map(int, NUMBER.findall(line))))
    out = []
    for text, numbers in alike.items():
        distinct = sorted(set(numbers))
        columns = [sorted(set(column)) for column in zip(*distinct, strict=True)]
        if prod(map(len, columns)) == len(distinct):
            out.append(_fill(text, [_ranges(column) for column in columns]))
        else:
            out += [_fill(text, [str(number) for number in row]) for row in distinct]
    return out


def as_block(problems: Iterable[str], most: int) -> str:
    """The lines of `listed`, each on an indented line of its own, and how many there are beyond `most`."""
    lines = listed(problems)
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def _fill(text: str, numbers: list[str]) -> str:
    values = iter(numbers)
    return re.sub(GAP, lambda _: next(values), text)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
