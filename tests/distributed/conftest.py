"""One process that forks the ranks of all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.forks import Server


@pytest.fixture(scope="session")
def forks() -> Iterator[Server]:
    with Server() as server:
        yield server
