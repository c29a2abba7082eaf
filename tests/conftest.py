"""Fixtures for every test: `world` runs a function on real processes (see tests/worlds.py)."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from megaverl.processes import end_with_parent
from tests.faults.server import Server
from tests.worlds import close_worlds, run_world

gc.set_threshold(100_000)  # thousands of modules are imported, and stay
if "PYTEST_XDIST_WORKER" in os.environ:
    end_with_parent(os.getppid())

# a machine that is busy must not make an example too slow
settings.register_profile("megaverl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megaverl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks first, so that short ones fill the end of two workers' time (`--dist loadfile`)."""
    starting = {item.path for item in items if _starts_ranks(item)}
    items.sort(key=lambda item: item.path not in starting)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, and what it wants, in a line each."""
    for line in skipped_lines(report.longrepr for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


def skipped_lines(places: Iterable[Any]) -> list[str]:
    """A line for each reason, from what reports of skipped tests have: (file, line, "Skipped: reason")."""
    reasons = Counter((reason.removeprefix("Skipped: "), Path(file).name) for file, _, reason in places)
    return [f"skipped: {count} of {file}: {reason}" for (reason, file), count in sorted(reasons.items())]


def _starts_ranks(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return "world" in fixtures or "server" in fixtures or hasattr(getattr(item, "module", None), "run_world")


@pytest.fixture
def world() -> Callable[..., list[Any]]:
    """`world(num_ranks, "tests.module:function", **kwargs)`: one result per rank."""
    return run_world


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Forks the ranks of whole commands, one run after the other (see tests/faults/server.py)."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def _worlds_end_with_the_session() -> Iterator[None]:
    yield
    close_worlds()
