"""Processes that end with the process that started them, however that ends; open files, a free port, frozen objects.

    subprocess.run(ending_with_parent(["python", "-m", "megaverl.cli.train", ...]))

A process that is killed cannot end its children, so the kernel does it (Linux: prctl(2), PR_SET_PDEATHSIG).
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
_freezing = 0  # who has asked for objects to be frozen, and still does
MOST_FILES = 2**20  # some programs visit every number up to the limit, which containers set to a billion


# Variable with the folder in which the ranks of a command note that they have finished. A rank without a note has left
# in another way, as user code does that calls os._exit(0).
FINISHED = "_MEGAVERL_FINISHED"


def note_finished() -> None:
    """Note, for the agent that started this rank, that its command has come to its end."""
    if (folder := os.environ.get(FINISHED)) and (rank := os.environ.get("LOCAL_RANK")):
        with open(os.path.join(folder, rank), "w"):
            pass


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command`, under the same process number, and tied to this process.

    The kernel looks at the thread that starts it: start it on one that lasts as long as it is wanted. It costs a bare
    interpreter (12 ms) before the command, and no code runs between fork and exec in a process with threads.
    """
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Kill this process when the thread that started it ends; now, if its parent is not process `parent` any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def freeze_objects() -> None:
    """Leave what is there out of collections, unless somebody has asked for it before.

    Imported modules are some 400,000 objects: half a second of each collection, and of a copied process's memory.
    """
    global _freezing
    if not _freezing:
        gc.freeze()
    _freezing += 1


def thaw_objects() -> None:
    """No longer ask for it; who is the last unfreezes all."""
    global _freezing
    _freezing -= 1
    if not _freezing:
        gc.unfreeze()


def raise_open_files() -> None:
    """Raise the soft limit of open files, usually 1024, to the hard one: sockets to other ranks count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def free_port() -> int:
    """One of the loopback's that nobody listens at."""
    import socket  # not where this file is run: each process that is started would wait for it

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
