"""What `tests.launcher` starts: a rank that does jobs until none comes, or one job until it ends."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from megaverl.processes import end_with_parent

# The launcher cuts a hang long before this; it only frees ranks whose launcher was
# killed outright.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def stay(log: Path, environment: dict[str, str], jobs: Connection) -> None:
    """Join a gloo process group, and answer the jobs that come, until the other end is closed."""

    def serve() -> int:
        gc.set_threshold(100_000)  # a fifth less time for imports
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        jobs.send_bytes(json.dumps({"ready": os.getpid()}).encode())
        while True:
            try:
                job = jobs.recv()
            except EOFError:
                return 0
            jobs.send_bytes(_answer(**job))

    _live(log, environment, serve)


def do_once(
    log: Path,
    environment: dict[str, str],
    target: str,
    kwargs: dict[str, Any],
    result: Path,
) -> None:
    """Do one job without a process group; write what it returns, and end with 0, or as it ends."""

    def do() -> int:
        result.write_text(json.dumps(_call(target, kwargs)))
        return 0

    _live(log, environment, do)


_modules_called: list[ModuleType] = []  # the last one alone


def _call(target: str, kwargs: dict[str, Any]) -> Any:
    """Call `target`, after the module of the call before has closed what it keeps for its own calls alone.

    An engine that a module keeps (its `close()` ends it), or that a command has left to
    the end of its process, holds vLLM's process groups. Another module's engine with
    another tensor-parallel size could not be made beside it.
    """
    name, function = target.split(":")
    module = importlib.import_module(name)
    is_next_of_module = bool(_modules_called) and _modules_called[-1] is module
    if _modules_called and not is_next_of_module:
        getattr(_modules_called.pop(), "close", lambda: None)()
    keeps_its_engine = is_next_of_module and hasattr(module, "close")
    if not keeps_its_engine and "vllm.distributed.parallel_state" in sys.modules:
        from megaverl.rollout.vllm_tracing import release_groups

        release_groups()
    _modules_called[:] = [module]
    return getattr(module, function)(**kwargs)


def _answer(target: str, kwargs: dict[str, Any]) -> bytes:
    try:  # a result that is not JSON is the job's error, not the rank's
        return json.dumps({"result": _call(target, kwargs)}).encode()
    except BaseException:  # every failure, SystemExit included, is reported to the test
        return json.dumps({"error": traceback.format_exc()}).encode()


def _live(log: Path, environment: dict[str, str], body: Callable[[], int]) -> NoReturn:
    """Be a process like one that a launcher has started, and end with what `body` returns or leaves with.

    It ends at once: gloo's and an engine's destructors may wait for peers that are
    already gone.
    """
    # A copy's is the server of copies, which ends with the launcher.
    end_with_parent(os.getppid())
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():  # gone before that
        os._exit(1)
    os.setsid()
    code, output = 1, os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.argv = [__file__]
    cast(io.TextIOWrapper, sys.stdout).reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a copy knows that of the server of copies
    # Ignored by what a script starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = body()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
