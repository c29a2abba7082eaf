"""What a configuration or a node's command line says of a role's place: read into one form, `Wanted`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# In the order in which counts are served and worlds are named.
ROLES = ("actor", "critic", "reference", "reward", "rollout", "coordinator")
# What a node may say it is: `--role train` is the actor, with all that is not given a place of its own.
CLAIMS = {"train": "actor", **{role: role for role in ROLES}}
REST, ALL = "rest", "all"

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
_MOST = 1 << 20  # ranks; a longer range is a slip, and would fill the memory
FORMS = (
    "ranks (8, [0, 1], '0-7', '0-3,8-11'), {nodes: NAMES or NUMBERS}, {num_ranks: N}, {num_nodes: N}, "
    "another role's name (its ranks), rest, or all"
)


@dataclass(frozen=True)
class Wanted:
    """A role's place, as it was asked for; exactly one of the fields is set.

    Attributes:
        ranks: of the world.
        nodes: names or numbers of nodes, all of whose ranks it takes.
        num_ranks, num_nodes: so many of those that nobody names.
        role: the role whose ranks it shares.
        word: "rest" (all ranks that no other role takes) or "all".
    """

    ranks: tuple[int, ...] | None = None
    nodes: tuple[str | int, ...] | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    role: str | None = None
    word: str | None = None


def parse_ranks(text: str) -> tuple[int, ...]:
    """The numbers of "0-3,8": in the order written, doubles kept.

    Raises:
        ValueError: says what was found and expected.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"found '{text}'; expected numbers and ranges such as '0-7' or '0-3,8'.")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"found '{part.strip()}', a range that ends before it begins; write {last}-{first}.")
        if last >= _MOST:
            raise ValueError(f"found '{part.strip()}'; ranks go up to {_MOST - 1}.")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def parse_wanted(value: Any) -> Wanted:
    """Read one role's entry.

    Args:
        value: as YAML gives it; see `FORMS`.

    Raises:
        ValueError: says what was found and which forms there are.
    """
    if isinstance(value, Wanted):
        return value
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    if isinstance(value, str) and value.strip() in (REST, ALL):
        return Wanted(word=value.strip())
    if isinstance(value, str) and value.strip() in ROLES:
        return Wanted(role=value.strip())
    if isinstance(value, str) and not value[:1].isdigit() and value.strip():
        near = difflib.get_close_matches(value, [*ROLES, REST, ALL], n=1, cutoff=0.6)
        hint = f" Did you mean `{near[0]}`?" if near else f" A node is named as {{nodes: {value}}}."
        raise ValueError(f"found {value!r}; expected {FORMS}.{hint}")
    ranks = _numbers(value)
    if not ranks:
        raise ValueError(f"found {value!r}; expected {FORMS}.")
    return Wanted(ranks=ranks)


def parse_claims(text: str) -> tuple[str, ...]:
    """The roles that a node says it is: "rollout", "reward,critic", "train" (the actor).

    Raises:
        ValueError: an unknown role.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in found if part not in CLAIMS]
    if unknown or not found:
        raise ValueError(f"found {text!r}; expected one or more of {', '.join(CLAIMS)}, with commas between them.")
    return tuple(dict.fromkeys(CLAIMS[part] for part in found))


def _parse_mapping(value: Mapping[str, Any]) -> Wanted:
    if len(value) != 1 or not set(value) <= {"ranks", "nodes", "num_ranks", "num_nodes"}:
        raise ValueError(f"found {dict(value)!r}; expected {FORMS}.")
    ((key, inner),) = value.items()
    if key in ("num_ranks", "num_nodes"):
        if not isinstance(inner, int) or isinstance(inner, bool) or inner < 1:
            raise ValueError(f"found {key}: {inner!r}; expected an integer of at least 1.")
        return Wanted(num_ranks=inner) if key == "num_ranks" else Wanted(num_nodes=inner)
    if key == "ranks":
        return Wanted(ranks=_numbers(inner))
    return Wanted(nodes=_node_names(inner))


def _numbers(value: Any) -> tuple[int, ...]:
    parts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    numbers: list[int] = []
    for part in parts:
        if isinstance(part, str):
            numbers.extend(parse_ranks(part))
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < _MOST:
            numbers.append(part)
        else:
            raise ValueError(f"found {value!r}; expected {FORMS}.")
    if not numbers:
        raise ValueError("found no ranks at all; leave the role out, or give it some.")
    return tuple(numbers)


def _node_names(value: Any) -> tuple[str | int, ...]:
    """Names as they stand, and numbers; "0-3" is four numbers."""
    parts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    names: list[str | int] = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str) or part == "" or (part == -1):
            raise ValueError(f"found nodes: {value!r}; expected names or numbers of nodes.")
        if isinstance(part, str) and all(_RANGE.fullmatch(piece) for piece in part.split(",")):
            names.extend(parse_ranks(part))
        else:
            names.append(part)
    if not names:
        raise ValueError("found no nodes at all; leave the role out, or give it some.")
    return tuple(names)
