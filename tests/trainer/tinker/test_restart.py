"""A server that is killed while it saves, and the next one in the same folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.trainer.tinker.server import Server
from tests.trainer.tinker.test_server import connected, new_model, step, supervised_rows

tinker = pytest.importorskip("tinker")


def test_what_was_saved_outlives_a_killed_server(
    tmp_path: Path, served_model: Path
) -> None:
    server = Server(tmp_path, served_model, "actor.tp=1", "run.nproc=1")
    server.start()
    client = server.client()
    model = new_model(client, server)
    step(model, supervised_rows())
    path = model.save_state("state").result().path
    expected = step(model, supervised_rows())[0].metrics
    model.save_state("half")
    server.end(signal.SIGKILL)
    server.start()
    with connected(server) as client:
        restored = client.create_training_client_from_state_with_optimizer(path)
        assert step(restored.result(), supervised_rows())[0].metrics == expected
    assert server.end(signal.SIGTERM) == 0
    weights = server.adapter(path).parents[1]
    assert {folder.name for folder in weights.iterdir()} <= {"state", "half"}
