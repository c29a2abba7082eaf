"""Process that runs tools under limits: `python -I tool_worker.py`.

The first line of its input names the tools and their limits; every further line is a
call. The process imports the tools' modules, then gives up everything that they do not
need: memory beyond a limit, writing files, other processes, the network. The kernel
enforces what it can (resource limits, a network namespace), and a Python audit hook
refuses the rest. This guards against mistakes and against what a model writes into an
argument. It does not stop hostile machine code.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# Kind of permission -> Python audit events that are refused without it.
REFUSED = {
    "network": (
        "socket.connect",
        "socket.bind",
        "socket.sendto",
        "socket.getaddrinfo",
        "socket.gethostbyname",
    ),
    "processes": (
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.kill",
    ),
    "files": (
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.chmod",
        "os.symlink",
        "os.link",
    ),
}
# Exceptions that a function raises because of its arguments.
ARGUMENT_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def serve() -> None:
    """Answer calls on standard output until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Redirect the tools' own output to standard error, so that it does not mix with the
    # answers.
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    setting = json.loads(sys.stdin.buffer.readline())
    sys.path[:0] = setting["path"]
    try:
        # `python -I` starts with an empty path, so these imports work only now.
        from megaverl.plugins import load_function
        from megaverl.user_code import describe

        tools = {
            name: load_function(target, f"tool {name}")
            for name, target in setting["tools"].items()
        }
    except Exception as error:
        # A user's module failed on import. The run reports it.
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
            text = f"more than {setting['memory_mb']} MiB of memory"
            answer({"error": text, "cause": "tool"})
        except BaseException as error:
            # A tool may raise anything, even SystemExit.
            text = describe(error)[: setting["max_characters"]]
            answer({"error": text, "cause": _cause_of(error)})


def _cause_of(error: BaseException) -> str:
    """Return where the cause of a tool's error lies: its `arguments`, a `connection`, or the `tool` itself."""
    from megaverl.errors import EnvironmentFault

    if isinstance(error, EnvironmentFault):
        return "connection"
    # `look` below raises PermissionError, and files are named by arguments.
    files = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
    if isinstance(error, (*ARGUMENT_ERRORS, *files, PermissionError)):
        return "arguments"
    # Errors of sockets, of urllib and of requests are OSErrors.
    return "connection" if isinstance(error, OSError) else "tool"


def limit(memory_mb: int, allow: set[str]) -> None:
    """Permanently give up memory beyond the limit and everything that is not allowed."""
    for resource_kind, most in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_CORE, 0),
        *(() if "files" in allow else ((resource.RLIMIT_FSIZE, 0),)),
    ):
        _, hard = resource.getrlimit(resource_kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource_kind, (most, most))
    if "network" not in allow:
        # Fails if user namespaces are disabled. Only the audit hook below then refuses
        # the network.
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)
    refused = {
        event
        for kind, events in REFUSED.items()
        if kind not in allow
        for event in events
    }

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in refused or (event.startswith("os.exec") and "os.exec" in refused):
            raise PermissionError(f"{event} is not allowed to a tool")
        if (
            event == "open"
            and "files" not in allow
            and isinstance(arguments[2], int)
            and arguments[2] & WRITING
        ):
            raise PermissionError("a tool may not write files")

    sys.addaudithook(look)


if __name__ == "__main__":
    serve()
