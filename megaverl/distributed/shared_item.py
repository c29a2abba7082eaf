"""`SharedItem`: tensors shared by several rows of a batch.

The module imports torch only for type checkers, so that rows can be read without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SharedItem:
    """Tensors that belong to rows of a batch, created on first access.

    Args:
        make: returns the tensors by name.

    Attributes:
        key: equal for items with equal tensors.
        size: number of tokens of its row that the item stands for.
    """

    __slots__ = ("_make", "_tensors", "key", "size")

    def __init__(
        self, key: str, size: int, make: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self.key, self.size = key, size
        self._make: Callable[[], Mapping[str, Tensor]] | None = make
        self._tensors: Mapping[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name. The first access may raise an error of `make`."""
        if self._make is not None:
            # The function may hold files or buffers, and is dropped with its first
            # result.
            self._tensors, self._make = self._make(), None
        return self._tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedItem) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"SharedItem({self.key}, {self.size})"
