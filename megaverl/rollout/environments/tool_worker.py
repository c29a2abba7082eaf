"""The process that tools run in: `python -I tool_worker.py`, with limits on what they can use and reach.

The first line names the tools and the limits; every further line is a call. It imports the tools' modules first, then
gives up what they need not: memory beyond a limit, files to write, other processes, the network. What the system
allows is done by the system (resource limits, a network namespace of its own); an audit hook of Python's refuses the
rest. That holds off mistakes and what a model writes into an argument. It is no wall around hostile machine code.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# Events of Python's audit hooks, by what a tool may be allowed.
REFUSED = {
    "network": ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
    "processes": ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.kill"),
    "files": ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.symlink", "os.link"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def serve() -> None:
    """Answer calls on the standard output until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a tool prints must not mix with the answers

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    setting = json.loads(sys.stdin.buffer.readline())
    sys.path[:0] = setting["path"]
    try:
        from megaverl.plugins import load_function  # found on the path that was just set
        from megaverl.user_code import describe

        tools = {name: load_function(target, f"tool {name}") for name, target in setting["tools"].items()}
    except Exception as error:  # of a user's module: told to the one who named it
        answer({"error": f"{error}"})
        return
    limit(setting["memory_mb"], set(setting["allow"]))
    answer({"ready": sorted(tools)})
    for line in sys.stdin.buffer:
        name, arguments = json.loads(line)
        try:
            result = str(tools[name](**arguments))
            answer({"result": result[: setting["max_characters"]]})
        except MemoryError:
            answer({"error": f"more than {setting['memory_mb']} MiB of memory"})
        except BaseException as error:  # a tool may raise anything, SystemExit too; the model is told
            answer({"error": describe(error)[: setting["max_characters"]]})


def limit(memory_mb: int, allow: set[str]) -> None:
    """Give up everything but so much memory and what is allowed, for good."""
    for what, most in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_CORE, 0),
        *(() if "files" in allow else ((resource.RLIMIT_FSIZE, 0),)),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    if "network" not in allow:
        # Refused where user namespaces are switched off; the hook below is then what is left.
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)
    refused = {event for kind, events in REFUSED.items() if kind not in allow for event in events}

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in refused or (event.startswith("os.exec") and "os.exec" in refused):
            raise PermissionError(f"{event} is not allowed to a tool")
        if event == "open" and "files" not in allow and isinstance(arguments[2], int) and arguments[2] & WRITING:
            raise PermissionError("a tool may not write files")

    sys.addaudithook(look)


if __name__ == "__main__":
    serve()
