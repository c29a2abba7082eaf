"""For every test: `launch` starts real ranks (see tests/launcher.py)."""

from __future__ import annotations

import gc
import os

# One thread per process, as torchrun sets it. Two workers and their ranks share the
# cores, and with several threads the last bits of a rank's first attention were not
# always the same. Set before torch is imported, for all child processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from megaverl.processes import end_with_parent
from tests.launcher import Launcher

gc.set_threshold(100_000)  # thousands of modules are imported, and stay
if "PYTEST_XDIST_WORKER" in os.environ:
    end_with_parent(os.getppid())

# a machine that is busy must not make an example too slow
settings.register_profile(
    "megaverl", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("megaverl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks first, so that short ones fill the end of two workers' time (`--dist loadfile`)."""
    starting = {item.path for item in items if _starts_ranks(item)}
    items.sort(key=lambda item: item.path not in starting)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of later collections of garbage, which would go through them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # pytest registers what prints in the same hook
def pytest_configure(config: pytest.Config) -> None:
    """Print failures at once, on the process that prints: a run that is cut off has named them all the same."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_PrintsFailures(terminal))


class _PrintsFailures:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nfailed ({report.when}): {report.nodeid}")
            self._terminal.write_line(report.longreprtext)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, and what it wants, in a line each."""
    for line in skipped_lines(
        report.longrepr for report in terminalreporter.stats.get("skipped", ())
    ):
        terminalreporter.write_line(line)


def skipped_lines(places: Iterable[Any]) -> list[str]:
    """A line for each reason, from what reports of skipped tests have: (file, line, "Skipped: reason")."""
    reasons = Counter(
        (reason.removeprefix("Skipped: "), Path(file).name)
        for file, _, reason in places
    )
    return [
        f"skipped: {count} of {file}: {reason}"
        for (reason, file), count in sorted(reasons.items())
    ]


def _starts_ranks(item: pytest.Item) -> bool:
    return "launch" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Real ranks: `launch.world(4, "tests.module:function", **kwargs)`, `launch.ranks`, `launch.command`."""
    with Launcher() as launcher:
        yield launcher
