"""Interface of the rows of a data set, whatever they are read from."""

from __future__ import annotations

from typing import Any, Protocol


class RowSource(Protocol):
    """Rows by number. `where` names a row in a way that a person can find it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Digest that changes if the rows change."""
        ...
