"""One server for all tests of this folder."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.tinker.server import Server, make_model


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the base model."""
    return make_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, served_model: Path
) -> Iterator[Server]:
    """A server on two ranks, shared by the tests. Each test creates adapters of its own."""
    pytest.importorskip("tinker")
    server = Server(tmp_path_factory.mktemp("tinker"), served_model)
    server.start()
    yield server
    # A signal to leave ends the server without an error.
    assert server.end(signal.SIGTERM) == 0
