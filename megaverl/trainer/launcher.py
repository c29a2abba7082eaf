"""Starting the ranks on this machine, where torchrun did not: how many, and the agent that runs them."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Sequence

from megaverl.config import Config, smallest_world
from megaverl.errors import GridError
from megaverl.gpus import count_gpus
from megaverl.trainer import elastic_agent


def launch(config: Config, command: str, argv: Sequence[str], nproc: int | None = None) -> int:
    """Run `megaverl argv` in as many ranks as the run wants; returns the exit code of the first that failed.

    Raises:
        GridError: the number of processes does not fill a grid.
    """
    wanted = nproc or config.run.nproc or default_nproc(config, command)
    check_world(config, command, wanted)
    return start_ranks(["-m", "megaverl.cli.main", *argv], wanted, log_hint=str(config.run_dir / "logs"))


def default_nproc(config: Config, command: str) -> int:
    """One process per GPU; without a GPU as many as the grids need."""
    return count_gpus() or smallest_world(config, command)


def check_world(config: Config, command: str, world_size: int) -> None:
    """Raise a GridError with every grid that `world_size` ranks do not fill."""
    from megaverl.config.grids import grid_mistakes

    mistakes = [str(mistake) for mistake in grid_mistakes(config, command, None, world_size)]
    if mistakes:
        raise GridError("\n".join(mistakes))


def start_ranks(arguments: Sequence[str], nproc: int, log_hint: str = "") -> int:
    """Run `python arguments` in `nproc` ranks of one job.

    A rank that fails prints why by itself; here only what it could not (a signal) is printed. The others are
    ended with it. SIGTERM and SIGUSR1 go on to the ranks, which save and leave.

    Returns: 0, or the exit code of the first rank that failed (1 where a signal ended it).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="megaverl_launch_") as log_dir:
        agent = {
            "--nproc-per-node": str(nproc),
            "--rdzv-id": uuid.uuid4().hex,
            "--local-addr": "127.0.0.1",
            "--log-dir": log_dir,
            "--monitor-interval": "0.1",
        }
        # after "--" nothing is taken for an option of the agent, such as the command's own --nproc
        options = ["--standalone", *(word for option in agent.items() for word in option), "--no-python", "--"]
        return elastic_agent.main([*options, sys.executable, *arguments], log_hint)
