"""Processes that end with their parent, whatever ends the parent. Also open files, a free port, and frozen objects.

    subprocess.run(ending_with_parent(["python", "-m", "megaverl.cli.train", ...]))

A killed process cannot end its children, so the kernel does (Linux: prctl(2),
PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
_freezing = 0  # number of callers that want objects to stay frozen
# Some programs loop over all descriptors up to the limit, which containers set to a
# billion.
MOST_FILES = 2**20


# Variable with the folder in which the ranks of a command record that they have
# finished. A rank without a record has ended in another way, for example because user
# code called os._exit(0).
FINISHED = "_MEGAVERL_FINISHED"


def note_finished() -> None:
    """Record, for the agent that started this rank, that its command has reached its end."""
    if (folder := os.environ.get(FINISHED)) and (rank := os.environ.get("LOCAL_RANK")):
        with open(os.path.join(folder, rank), "w"):
            pass


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` under the same process number, tied to this process.

    The kernel watches the thread that starts the process, so start it on a thread that
    lasts long enough. This costs the start of a bare interpreter (12 ms). No Python
    code runs between fork and exec in a process with threads.
    """
    return [
        sys.executable,
        "-IS",
        os.path.abspath(__file__),
        str(os.getpid()),
        *command,
    ]


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; exit now
    if the parent is not `parent` any more.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def freeze_objects() -> None:
    """Exclude existing objects from garbage collections, unless an earlier caller has done so.

    Imported modules are some 400,000 objects. They would cost half a second in each
    collection, and memory in each forked process.
    """
    global _freezing
    if not _freezing:
        gc.freeze()
    _freezing += 1


def thaw_objects() -> None:
    """Withdraw a call of `freeze_objects`; the last caller unfreezes all objects."""
    global _freezing
    _freezing -= 1
    if not _freezing:
        gc.unfreeze()


def raise_open_files() -> None:
    """Raise the soft limit of open files, usually 1024, to the hard one, since sockets to other ranks count too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def free_port() -> int:
    """Return a port of the loopback on which nobody listens."""
    # Imported here, since every process that runs this file as a script would wait for
    # it.
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
