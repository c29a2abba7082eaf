"""verifiers' tasksets as rows, and its environments as episodes: the real package, answered by a real model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaverl.config.files_and_packages import source_problem
from megaverl.data.sources import kind_of, open_source
from megaverl.errors import ConfigError, DataError
from megaverl.rollout.environments import check_options
from megaverl.rollout.environments.verifiers import COLUMN, read_taskset
from tests.rollout.environments.test_gateway import LIMITS, engine, played, written

pytest.importorskip("verifiers", reason="pip install 'megaverl[verifiers]'")
__all__ = ["engine"]  # its fixture

TASKSET = "verifiers:own_taskset?size=5&first=go"
PLAYED_HERE = {"environment": {"agent": {"harness": {"id": "own_taskset"}}}}


@pytest.fixture(scope="module", autouse=True)
def tasksets_are_installed() -> Iterator[None]:
    """verifiers takes a taskset by the name of a module."""
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


def test_how_a_taskset_is_written() -> None:
    assert kind_of(TASKSET) == "verifiers" and source_problem(TASKSET) == ""
    assert read_taskset("verifiers:owner/name-v1@2?size=7&split=test&k=[1]") == (
        {"id": "owner/name-v1@2", "split": "test", "k": [1]},
        7,
    )
    assert "found size=0" in source_problem("verifiers:a?size=0")
    for wrong in (
        "verifiers:",
        "verifiers:a b",
        "verifiers:a?size=many",
        "verifiers:a?size=0",
        "verifiers:a?x",
    ):
        assert "expected verifiers:" in source_problem(wrong)


def test_tasks_are_rows() -> None:
    rows = open_source(TASKSET)
    assert len(rows) == 5 and rows.where(4).endswith("first=go, row 5")
    assert rows[3] == {
        "prompt": "go 3",
        "answer": "",
        COLUMN: {"taskset": TASKSET, "index": 3},
    }
    assert json.loads(json.dumps(rows[3])) == rows[3], "it can travel"
    assert (
        rows.fingerprint
        == open_source(TASKSET).fingerprint
        != open_source(TASKSET.replace("go", "say")).fingerprint
    )
    with pytest.raises(
        DataError, match=r"has no end; say how many of its tasks are rows: \?size=1000"
    ):
        open_source("verifiers:own_taskset")
    with pytest.raises(
        DataError, match="has no taskset 'none-such'.*must already be installed"
    ):
        open_source("verifiers:none-such?size=1")
    with pytest.raises(DataError, match="frist"):
        open_source("verifiers:own_taskset?size=1&frist=go")


def test_an_episode_keeps_the_tokens_that_were_drawn(engine) -> None:  # type: ignore[no-untyped-def]
    row = open_source(TASKSET)[3]
    view, drawn = played(engine, PLAYED_HERE, row, name="verifiers")
    assert len(drawn) == 2 and view.prompt == written("<user>go 3$\n<assistant>")
    own = [token for token, is_own in zip(view.tokens, view.own, strict=True) if is_own]
    assert own == [token for each in drawn for token in each.token_ids]
    assert sum(view.rewards) > 1 and view.finish_reason == "stop"


def test_a_task_that_fails_ends_its_episode_in_words(
    engine, caplog: pytest.LogCaptureFixture
) -> None:  # type: ignore[no-untyped-def]
    options = {**PLAYED_HERE, "error_reward": -1.0}
    view, _ = played(engine, options, open_source(TASKSET)[2], name="verifiers")
    assert sum(view.rewards) == -1.0
    assert "forgotten" in caplog.text and "ends with reward -1" in caplog.text


def test_what_cannot_be() -> None:
    with pytest.raises(
        ConfigError,
        match="command, function and outside are of the environment 'gateway'",
    ):
        check_options("verifiers", {"function": "a:b"})
    with pytest.raises(ConfigError, match="token_env"):
        check_options("verifiers", {"host": "0.0.0.0"})
    assert LIMITS.max_turns > 2
