"""Entries of a column that hold tensors, such as images: rows share them, and they are kept and sent once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

MARK = "\0shared"  # the only key of what stands for an item in JSON


class SharedItem:
    """Tensors that belong to rows of a batch, made when they are first asked for.

    Attributes:
        key: the same for items with the same tensors.
        size: how many tokens of its row an item stands for.
    """

    __slots__ = ("_make", "_tensors", "key", "size")

    def __init__(self, key: str, size: int, make: Callable[[], Mapping[str, Tensor]]) -> None:
        self.key, self.size = key, size
        self._make: Callable[[], Mapping[str, Tensor]] | None = make
        self._tensors: Mapping[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name; raises what making them raises."""
        if self._make is not None:
            self._tensors, self._make = self._make(), None
        return self._tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedItem) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"SharedItem({self.key}, {self.size})"


def taken_out(columns: Mapping[str, Sequence[Any]]) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """The columns with a name in the place of each item, and the tensors of all items, each once, by names of their
    own."""
    tensors: dict[str, Tensor] = {}

    def name_of(entry: Any) -> Any:
        if not isinstance(entry, list) or not any(isinstance(item, SharedItem) for item in entry):
            return entry
        tensors.update({f"{item.key}/{name}": tensor for item in entry for name, tensor in item.tensors.items()})
        return {MARK: [[item.key, item.size] for item in entry]}

    return {name: [name_of(entry) for entry in column] for name, column in columns.items()}, tensors


def put_back(columns: Mapping[str, Sequence[Any]], tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Undo `taken_out`.

    Raises:
        KeyError: an item without tensors.
    """
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, _, own = name.rpartition("/")
        by_key.setdefault(key, {})[own] = tensor
    made: dict[str, SharedItem] = {}

    def item(key: str, size: int) -> SharedItem:
        if key not in made:
            held = by_key[key]
            made[key] = SharedItem(key, size, lambda: held)
        return made[key]

    def entry_of(entry: Any) -> Any:
        return [item(*each) for each in entry[MARK]] if isinstance(entry, dict) and MARK in entry else entry

    return {name: [entry_of(entry) for entry in column] for name, column in columns.items()}
