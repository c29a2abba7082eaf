"""What an undisturbed run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.runs import Remains, arguments, remains
from tests.launcher import Launcher
from tests.trainer.conftest import make_inputs


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of `tests.trainer.conftest`. Read-only for the tests."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="package")
def undisturbed(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The `runs` folder of a run to which nothing happened. Read-only for the tests."""
    runs = tmp_path_factory.mktemp("undisturbed")
    ended = launch.command(
        arguments(inputs, runs, "trainer.store_rollouts=true"), logs=runs / "output"
    )
    assert ended.codes == [0, 0], ended.output
    return runs


@pytest.fixture(scope="package")
def expected(undisturbed: Path) -> Remains:
    return remains(undisturbed / "run")
