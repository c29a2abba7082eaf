"""Starting the ranks on this machine, where torchrun did not: the same agent, without its pages of output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from datetime import timedelta

from megaverl.config import Config, smallest_world
from megaverl.errors import GridError
from megaverl.processes import ending_with_parent
from megaverl.trainer.elastic_agent import ENDS_RANKS, explain, interrupted, passing_on_signals, silence_torchs_agent


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


def count_gpus() -> int:
    """GPUs that CUDA would show, asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def start_ranks(arguments: Sequence[str], nproc: int, log_hint: str = "") -> int:
    """Run `python arguments` in `nproc` ranks of one job.

    A rank that fails tells why by itself; here only what it could not tell (a signal) is said. The others are
    ended with it. SIGTERM and SIGUSR1 go on to the ranks, which save and leave.

    Returns: 0, or the exit code of the first rank that failed (1 where a signal ended it).
    """
    _set_environment(nproc)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megaverl.distributed.store import LOOPBACK, keep_store

    silence_torchs_agent()
    store = keep_store(LOOPBACK, 0, timedelta(minutes=1))  # torch's agent takes what is there, and would listen widely
    with tempfile.TemporaryDirectory(prefix="megaverl_launch_") as log_dir:
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="static",
            rdzv_endpoint=f"{LOOPBACK}:{store.port}",
            rdzv_configs={"rank": 0},
            local_addr=LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle=ENDS_RANKS,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        try:
            with passing_on_signals():
                program, *rest = ending_with_parent([sys.executable, *arguments])
                elastic_launch(launch_config, program)(*rest)
        except ChildFailedError as error:
            return explain({rank: failure.exitcode for rank, failure in error.failures.items()}, log_hint)
        except (KeyboardInterrupt, SignalException) as error:
            return interrupted(error)
    return 0


def _set_environment(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
