"""Launcher of ranks: torchrun's agent, adapted to runs that save before they exit.

    # accepts torchrun's arguments
    python -m megaverl.trainer.elastic_agent --nnodes 2 --node-rank 0 ... -m megaverl.cli.main train ...

It differs from torchrun in five points:

- SIGTERM and SIGUSR1 are forwarded to the ranks. A scheduler signals only the process that it started, and torchrun
  gives ranks only 30 s, which is too short for a large checkpoint.
- The exit code is that of the ranks. torchrun always exits with 1 after a failure.
- The ranks end with the agent, for whatever reason the agent ends.
- `--max-restarts` does not apply to failures that a restart cannot cure.
- The job's store listens only on the address that the other nodes use.

`launch` starts the ranks of a command on this machine without torchrun.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megaverl.config import Config, smallest_world
from megaverl.errors import (
    FAILED,
    INTERRUPTED,
    MISTAKE,
    SAVED_AND_LEFT,
    GridError,
    TrainingStopped,
)
from megaverl.gpus import count_gpus
from megaverl.processes import FINISHED, ending_with_parent
from megaverl.rank_environment import prepare_agent
from megaverl.signal_handlers import handling
from megaverl.temporary import remove_temporary_folder, temporary_folder
from megaverl.trainer.preflight import CHECKED

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
MASTER_PORT = 29500  # torchrun's default
C10D_PORT = 29400  # torch's default for an endpoint without a port
JOIN_SECONDS = 600.0  # seconds to wait for the agents of all nodes
# Exit codes of a rank after which the ranks are not restarted: a run that saved because
# it must leave, a run that was interrupted, and a mistake in the configuration, which a
# restart would only repeat.
STAYS_DOWN = (SAVED_AND_LEFT, INTERRUPTED, MISTAKE)
# Modules that run the rank of a command.
COMMAND_MODULES = ("megaverl", "megaverl.cli.main", "megaverl.cli.train")
# Signals on which torch's agent still ends its ranks.
ENDS_RANKS = "SIGINT,SIGHUP,SIGQUIT"


def main(argv: Sequence[str] | None = None, log_hint: str = "") -> int:
    """Run the agent of a job on this machine.

    Args:
        argv: torchrun's arguments.
        log_hint: folder of the ranks' logs, for messages.

    Returns:
        0, or the exit code of the first rank that failed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import (
        config_from_args,
        determine_local_world_size,
        parse_args,
    )

    arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
    arguments.signals_to_handle = ENDS_RANKS
    nproc = determine_local_world_size(arguments.nproc_per_node)
    # Variables for the agent itself. Ranks inherit its environment.
    prepare_agent(os.environ, nproc)
    _silence_torchs_agent()
    _restart_only_what_failed()
    with handling(PASSED_ON, _pass_on):
        try:
            # The job's store lives as long as this reference.
            met = _meet(arguments)
            launch_config, program, program_arguments = config_from_args(arguments)
            is_command = any(
                word in COMMAND_MODULES for word in map(str, program_arguments)
            )
            # With --run-path `program` is not a command, and torch's own processes end
            # with this one.
            if isinstance(program, str):
                program, *program_arguments = ending_with_parent(
                    [program, *program_arguments]
                )
            with tempfile.TemporaryDirectory(prefix="megaverl_finished_") as finished:
                os.environ[FINISHED] = finished
                elastic_launch(launch_config, program)(*program_arguments)
                # A rank leaves a file when its command finishes, so an early
                # `os._exit(0)` is noticed.
                absent = [
                    rank
                    for rank in range(nproc)
                    if is_command and not Path(finished, str(rank)).exists()
                ]
            del met
        except (TrainingStopped, RendezvousError) as error:
            where = (
                ""
                if isinstance(error, TrainingStopped)
                else f"no rendezvous at {arguments.rdzv_endpoint}: "
            )
            print(f"error: {where}{error}", file=sys.stderr, flush=True)
            remove_temporary_folder()
            # No rank has begun. A thread of torch may still wait for an answer, so a
            # normal exit could hang.
            os._exit(FAILED)
        except ChildFailedError as error:
            return _explain(
                {rank: failure.exitcode for rank, failure in error.failures.items()},
                log_hint,
            )
        except (KeyboardInterrupt, SignalException) as error:
            return _interrupted(error)
    if absent:
        return _left_without_finishing(absent, log_hint)
    return 0


def _left_without_finishing(ranks: Sequence[int], log_hint: str) -> int:
    """Report local ranks that exited with code 0 before their command had finished. Return the exit code of the job."""
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of this node"
    where = f" See {log_hint}/rank_N.log." if log_hint else ""
    print(
        f"error: {names} left with exit code 0 before the run was over. Something in the process called os._exit: look "
        f"for it in rewards, environments and other plug-ins.{where}",
        file=sys.stderr,
        flush=True,
    )
    return FAILED


def _meet(arguments: argparse.Namespace) -> object:
    """Wait for the agents of all nodes, and return the job's store, which torch's agent of the first node uses.

    - A single node has no other agents. Its store is on the loopback interface.
    - Several nodes with a fixed address wait for each other, within `--rdzv-conf timeout=SECONDS`.
    - torch's c10d rendezvous waits by itself. Here it is only checked that no other program listens at the address.
    """
    from megaverl.distributed.rendezvous import meet
    from megaverl.distributed.store import LOOPBACK, keep_store, store_at

    if arguments.standalone or arguments.nnodes in ("1", "1:1"):
        store = keep_store(
            LOOPBACK, arguments.master_port or 0, timedelta(seconds=JOIN_SECONDS)
        )
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.node_rank = (
            "static",
            f"{LOOPBACK}:{store.port}",
            0,
        )
        return store
    arguments.master_port = arguments.master_port or MASTER_PORT
    if not arguments.nnodes.isdigit() or arguments.rdzv_backend not in (
        "static",
        "c10d",
    ):
        return None
    settings = dict(
        part.split("=", 1) for part in arguments.rdzv_conf.split(",") if "=" in part
    )
    endpoint = (
        arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
    )
    host, _, port = endpoint.rpartition(":")
    if arguments.rdzv_backend == "c10d":
        with suppress(OSError):  # nobody listens yet
            store_at(host or port, int(port) if host else C10D_PORT)
        return None
    patience = float(settings.get("timeout", JOIN_SECONDS))
    return meet(host, int(port), arguments.node_rank, int(arguments.nnodes), patience)


def _restart_only_what_failed() -> None:
    """Restart no ranks that a restart cannot cure (`STAYS_DOWN`).

    torch's `launch_agent` creates an agent of the class that its module names and
    accepts no other class as argument (torch 2.13, torch/distributed/launcher/api.py),
    so the name in the module is replaced.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import (
        LocalElasticAgent,
    )
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(
                failure.exitcode in STAYS_DOWN for failure in result.failures.values()
            ):
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]


def _silence_torchs_agent() -> None:
    """Silence the log messages of torch's agent.

    A rank prints by itself why it fails, and `_explain` prints what a rank cannot.
    torch's agent would repeat both.
    """
    for name in ("elastic", "launcher"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(logging.NullHandler())
        # torch sets a level on each module's logger, so a level here would have no
        # effect.
        logger.propagate = False


def _explain(exitcodes: dict[int, int], log_hint: str = "") -> int:
    """Print the reasons that the ranks could not print. Return the exit code of the job.

    Args:
        exitcodes: by rank, the exit codes other than 0. A negative code is the number of a signal.
        log_hint: folder of the ranks' logs.
    """
    ended_by_agent = -signal.SIGTERM
    ended_first = {
        rank: code for rank, code in exitcodes.items() if code != ended_by_agent
    } or exitcodes
    # If a signal ended a rank, that rank is the cause. The others then fail because
    # their connection to it broke.
    rank, exitcode = min(ended_first.items(), key=lambda item: (item[1] > 0, item[0]))
    if exitcode in (FAILED, MISTAKE, INTERRUPTED, SAVED_AND_LEFT):
        return exitcode
    if exitcode >= 0:
        print(f"rank {rank} ended with exit code {exitcode}.", file=sys.stderr)
        return exitcode
    name = signal.Signals(-exitcode).name
    cause = (
        " Out of memory is the usual cause (see dmesg)." if name == "SIGKILL" else ""
    )
    where = f" Its log: {log_hint}/rank_{rank}.log" if log_hint else ""
    print(f"rank {rank} was ended by {name}.{cause}{where}", file=sys.stderr)
    return FAILED


def _interrupted(error: BaseException) -> int:
    """Report that a signal ended the ranks. Return the exit code of the job."""
    name = signal.Signals(getattr(error, "sigval", signal.SIGINT)).name
    print(
        f"interrupted by {name} and ended without saving; SIGTERM lets a training run save first.",
        file=sys.stderr,
        flush=True,
    )
    return INTERRUPTED


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Forward a signal to this process's ranks. Without ranks, it ends this process."""
    ranks = [child for child in psutil.Process().children() if _is_rank(child)]
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            rank.send_signal(number)
    if not ranks:
        sys.exit(128 + number)


def _is_rank(child: psutil.Process) -> bool:
    try:
        return "LOCAL_RANK" in child.environ()
    except psutil.Error:  # it has just ended
        return False


def launch(
    config: Config, command: str, argv: Sequence[str], nproc: int | None = None
) -> int:
    """Run `megaverl argv` with as many ranks as the run needs. Return the exit code of the first rank that failed.

    Raises:
        GridError: the number of processes does not fill a grid.
    """
    wanted = nproc or config.run.nproc or default_nproc(config, command)
    check_world(config, command, wanted)
    return start_ranks(
        ["-m", "megaverl.cli.main", *argv],
        wanted,
        log_hint=str(config.run_dir / "logs"),
    )


def default_nproc(config: Config, command: str) -> int:
    """Return the number of GPUs, or the number of ranks that the grids need if there is no GPU."""
    return count_gpus() or smallest_world(config, command)


def check_world(config: Config, command: str, world_size: int) -> None:
    """Check that `world_size` ranks fill the grids of all roles.

    Raises:
        GridError: lists every grid that they do not fill.
    """
    from megaverl.config.grids import grid_mistakes

    mistakes = [
        str(mistake) for mistake in grid_mistakes(config, command, None, world_size)
    ]
    if mistakes:
        raise GridError("\n".join(mistakes))


def start_ranks(arguments: Sequence[str], nproc: int, log_hint: str = "") -> int:
    """Run `python arguments` in `nproc` ranks of one job. The caller has checked code and data.

    A rank that fails prints the reason itself, and all other ranks are ended. This
    process prints only what a rank cannot, such as a signal that ended it. SIGTERM and
    SIGUSR1 are forwarded to the ranks, which save and exit.

    Returns:
        0, or the exit code of the first rank that failed (1 if a signal ended it).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with (
        tempfile.TemporaryDirectory(prefix="megaverl_launch_") as log_dir,
        _marked_as_checked(),
    ):
        agent = {
            "--nproc-per-node": str(nproc),
            "--rdzv-id": uuid.uuid4().hex,
            "--local-addr": "127.0.0.1",
            "--log-dir": log_dir,
            "--monitor-interval": "0.1",
        }
        # After "--", nothing is parsed as an option of the agent, such as the command's
        # own --nproc.
        options = [
            "--standalone",
            *(word for option in agent.items() for word in option),
            "--no-python",
            "--",
        ]
        return main([*options, sys.executable, *arguments], log_hint)


@contextmanager
def _marked_as_checked() -> Iterator[None]:
    """Mark code and data as checked for ranks that are started inside (`preflight.check_in_ranks`)."""
    os.environ[CHECKED] = "1"
    try:
        yield
    finally:
        del os.environ[CHECKED]


if __name__ == "__main__":
    with temporary_folder():
        exit_code = main()
    sys.exit(exit_code)
