"""The process that forks ranks, as in tests/fabric."""

from __future__ import annotations

from tests.distributed.conftest import forks

__all__ = ["forks"]
