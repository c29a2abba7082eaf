"""A role that is on other ranks says so when it is used."""

from __future__ import annotations

import pytest

from megaverl.workers import RemoteWorker, local


def test_using_it_names_the_role_and_what_was_asked_for() -> None:
    with pytest.raises(
        RuntimeError, match="this rank has no critic: asked for its 'values'"
    ):
        RemoteWorker("critic").values()


def test_a_role_that_must_be_here() -> None:
    assert local("an actor") == "an actor"
    with pytest.raises(RuntimeError, match="this rank has no actor"):
        local(RemoteWorker("actor"))
