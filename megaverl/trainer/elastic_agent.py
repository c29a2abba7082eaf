"""torchrun, but SIGTERM and SIGUSR1 go on to the ranks, the exit code is that of the ranks, they end with the agent
whatever ends it, `--max-restarts` leaves alone what a restart cannot cure, and the job's store listens where the other
nodes look for it, and nowhere else; and starting the ranks on this machine, where torchrun did not: how many.

    # torchrun's arguments
    python -m megaverl.trainer.elastic_agent --nnodes 2 --node-rank 0 ... -m megaverl.cli.main train ...

A scheduler signals the process that it has started, and torchrun gives ranks that it ends 30 s, which is less than a
large checkpoint takes, and then exits with 1 whatever they say.
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
from megaverl.errors import FAILED, INTERRUPTED, MISTAKE, SAVED_AND_LEFT, STARTS_AGAIN, GridError, TrainingStopped
from megaverl.gpus import count_gpus
from megaverl.processes import FINISHED, ending_with_parent
from megaverl.rank_environment import prepare_agent
from megaverl.temporary import remove_temporary_folder, temporary_folder
from megaverl.trainer.preflight import CHECKED

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
MASTER_PORT = 29500  # torchrun's, where none is given
C10D_PORT = 29400  # torch's, of an endpoint without one
JOIN_SECONDS = 600.0  # that the agents of all nodes are waited for
# Exit codes of a rank after which the ranks are not started again: a run that saved because it must leave, one that was
# interrupted, and a mistake in the configuration, which would be the same again.
STAYS_DOWN = (SAVED_AND_LEFT, INTERRUPTED, MISTAKE)
COMMAND_MODULES = ("megaverl", "megaverl.cli.main", "megaverl.cli.train")  # what a rank of a command runs
ENDS_RANKS = "SIGINT,SIGHUP,SIGQUIT"  # what torch's agent still takes as a reason to end its ranks


def main(argv: Sequence[str] | None = None, log_hint: str = "") -> int:
    """Run an agent of a job on this machine; the exit code of its first rank that failed.

    Args:
        argv: torchrun's.
        log_hint: the folder of the ranks' logs.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, determine_local_world_size, parse_args

    arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
    arguments.signals_to_handle = ENDS_RANKS
    nproc = determine_local_world_size(arguments.nproc_per_node)
    prepare_agent(os.environ, nproc)
    _silence_torchs_agent()
    _restart_only_what_failed()
    with _passing_on_signals():
        try:
            met = _meet(arguments)  # the job's store lives as long as this does
            launch_config, program, given = config_from_args(arguments)
            is_command = any(word in COMMAND_MODULES for word in map(str, given))
            if isinstance(program, str):  # else --run-path, for which torch's own processes end with this one
                program, *given = ending_with_parent([program, *given])
            with tempfile.TemporaryDirectory(prefix="megaverl_finished_") as finished:
                os.environ[FINISHED] = finished
                elastic_launch(launch_config, program)(*given)
                absent = [rank for rank in range(nproc) if is_command and not Path(finished, str(rank)).exists()]
            del met
        except (TrainingStopped, RendezvousError) as error:
            where = "" if isinstance(error, TrainingStopped) else f"no rendezvous at {arguments.rdzv_endpoint}: "
            print(f"error: {where}{error}", file=sys.stderr, flush=True)
            remove_temporary_folder()
            os._exit(FAILED)  # no rank has begun; a thread of torch may still wait for an answer
        except ChildFailedError as error:
            return _explain({rank: failure.exitcode for rank, failure in error.failures.items()}, log_hint)
        except (KeyboardInterrupt, SignalException) as error:
            return _interrupted(error)
    if absent:
        return _left_without_finishing(absent, log_hint)
    return 0


def _left_without_finishing(ranks: Sequence[int], log_hint: str) -> int:
    """Report local ranks that ended with exit code 0 before their command did; return the exit code of the job."""
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
    """Of several nodes with a fixed address: see that all are here, within `--rdzv-conf timeout=SECONDS`; of a
    rendezvous by torch's c10d, which finds that out by itself, that no other program answers there. One node alone
    meets nobody: its store is on the loopback. Returns the store, for torch's agent of the first node to use."""
    from megaverl.distributed.rendezvous import meet
    from megaverl.distributed.store import LOOPBACK, keep_store, store_at

    if arguments.standalone or arguments.nnodes in ("1", "1:1"):
        store = keep_store(LOOPBACK, arguments.master_port or 0, timedelta(seconds=JOIN_SECONDS))
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.node_rank = "static", f"{LOOPBACK}:{store.port}", 0
        return store
    arguments.master_port = arguments.master_port or MASTER_PORT
    if not arguments.nnodes.isdigit() or arguments.rdzv_backend not in ("static", "c10d"):
        return None
    settings = dict(part.split("=", 1) for part in arguments.rdzv_conf.split(",") if "=" in part)
    endpoint = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
    host, _, port = endpoint.rpartition(":")
    if arguments.rdzv_backend == "c10d":
        with suppress(OSError):  # nobody is there yet
            store_at(host or port, int(port) if host else C10D_PORT)
        return None
    patience = float(settings.get("timeout", JOIN_SECONDS))
    return meet(host, int(port), arguments.node_rank, int(arguments.nnodes), patience)


def _restart_only_what_failed() -> None:
    """`--max-restarts` counts for failures alone: a run that wants to start again (`STARTS_AGAIN`) does, however often.
    torch's `launch_agent` makes its agent of the class that its module names (torch 2.13,
    torch/distributed/launcher/api.py), and has no argument for another."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(failure.exitcode in STAYS_DOWN for failure in result.failures.values()):
                self._remaining_restarts = 0
            elif any(failure.exitcode == STARTS_AGAIN for failure in result.failures.values()):
                worker_group.spec.max_restarts += 1  # ranks count their restarts by the difference of the two
                self._remaining_restarts += 1
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]


def _silence_torchs_agent() -> None:
    """A rank tells by itself why it fails, and `_explain` what it could not: torch's agent would tell it once more."""
    for name in ("elastic", "launcher"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False  # torch gives each module's logger a level of its own


@contextmanager
def _passing_on_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 that this process gets go to its ranks; without any, they end this process."""
    before = {number: signal.signal(number, _pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(exitcodes: dict[int, int], log_hint: str = "") -> int:
    """Say what the ranks could not; returns the exit code of the job.

    Args:
        exitcodes: by rank, of those that did not end with 0; negative: the signal.
        log_hint: the folder of the ranks' logs.
    """
    ended_by_agent = -signal.SIGTERM
    own = {rank: code for rank, code in exitcodes.items() if code != ended_by_agent} or exitcodes
    # A rank that a signal ended is the cause: the others then fail on the connection to it.
    rank, exitcode = min(own.items(), key=lambda item: (item[1] > 0, item[0]))
    if exitcode in (FAILED, MISTAKE, INTERRUPTED, SAVED_AND_LEFT, STARTS_AGAIN):
        return exitcode
    if exitcode >= 0:
        print(f"rank {rank} ended with exit code {exitcode}.", file=sys.stderr)
        return exitcode
    name = signal.Signals(-exitcode).name
    cause = " Out of memory is the usual cause (see dmesg)." if name == "SIGKILL" else ""
    where = f" Its log: {log_hint}/rank_{rank}.log" if log_hint else ""
    print(f"rank {rank} was ended by {name}.{cause}{where}", file=sys.stderr)
    return FAILED


def _interrupted(error: BaseException) -> int:
    """Say so, after a signal that ends the ranks; returns the exit code of the job."""
    name = signal.Signals(getattr(error, "sigval", signal.SIGINT)).name
    print(
        f"interrupted by {name} and ended without saving; SIGTERM lets a training run save first.",
        file=sys.stderr,
        flush=True,
    )
    return INTERRUPTED


def _pass_on(number: int, frame: FrameType | None) -> None:
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
    """Run `python arguments` in `nproc` ranks of one job, whose code and data the caller has checked.

    A rank that fails prints why by itself; here only what it could not (a signal) is printed. The others are
    ended with it. SIGTERM and SIGUSR1 go on to the ranks, which save and leave.

    Returns: 0, or the exit code of the first rank that failed (1 where a signal ended it).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="megaverl_launch_") as log_dir, _marked_as_checked():
        agent = {
            "--nproc-per-node": str(nproc),
            "--rdzv-id": uuid.uuid4().hex,
            "--local-addr": "127.0.0.1",
            "--log-dir": log_dir,
            "--monitor-interval": "0.1",
        }
        # after "--" nothing is taken for an option of the agent, such as the command's own --nproc
        options = ["--standalone", *(word for option in agent.items() for word in option), "--no-python", "--"]
        return main([*options, sys.executable, *arguments], log_hint)


@contextmanager
def _marked_as_checked() -> Iterator[None]:
    """Tell ranks that are started inside that code and data are checked (`preflight.check_in_ranks`)."""
    os.environ[CHECKED] = "1"
    try:
        yield
    finally:
        del os.environ[CHECKED]


if __name__ == "__main__":
    with temporary_folder():
        exit_code = main()
    sys.exit(exit_code)
