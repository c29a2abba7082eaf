"""Worker process whose copies run confined programs: `python -sSP worker.py`.

It imports modules that programs often use, moves behind a boundary, and forks a copy of
itself for every program, so that no interpreter starts and no import is repeated. The
first line of its input has the limits, every further line a task, and each task gets
one line of answer. A copy's changes end with it, and it is killed when its time is
over.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    sys.path.insert(
        0, os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    )

from megaverl.rewards.sandbox import confinement, programs

# Modules of the standard library that programs often import: imported before the first
# fork, once for all programs.
PRELOADED = (
    "array",
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "sys",
    "textwrap",
    "time",
    "traceback",
    "types",
    "typing",
    "unittest",
)
FIRST_FREE = 100  # file descriptors from here on are above those that a program gets


def serve() -> None:
    """Answer on standard output until standard input ends."""
    # Standard output carries the answers; anything that an imported package prints goes
    # to standard error instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.dup(0)
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    setting = _line(requests)
    try:
        existing = [path for path in sys.path[1:] if os.path.exists(path)]
        # Only folders that the boundary leaves readable.
        sys.path[:] = existing + setting["packages"]
        for name in [*PRELOADED, *setting["preload"]]:
            importlib.import_module(name)
        boundary = confinement.enter(setting["mechanism"], setting["packages"])
    except (OSError, ImportError) as error:
        answer({"error": f"{error}"})
        return
    for name in (signal.SIGINT, signal.SIGTERM):
        # With default handlers, process 1 of a namespace ignores these signals from
        # inside.
        signal.signal(name, signal.SIG_DFL)
    # Python refuses to print integers of more than 4,300 digits by default; a program's
    # time is limited anyway.
    sys.set_int_max_str_digits(0)
    # A collection in a copy would write to all objects, and so copy the memory that it
    # shares with this process.
    gc.collect()
    gc.freeze()
    answer({"ready": True})
    while header := _line(requests):
        confined = {name: header[name] for name in ("seconds", "memory_mb")} | {
            "threads": setting["threads"]
        }
        answer(
            run(
                requests,
                header["sizes"],
                boundary,
                confined,
                setting["output_kb"] * 1024,
            )
        )


def _line(file: int) -> Any:
    """Read the next line and nothing after it; None at the end."""
    # A larger read could take bytes of the programs' lines, which only their copies may
    # read.
    text = b""
    # Byte by byte, because the rest belongs to the copies.
    while not text.endswith(b"\n"):
        if not (byte := os.read(file, 1)):
            return None
        text += byte
    return json.loads(text)


def run(
    requests: int,
    sizes: Sequence[int],
    boundary: confinement.Boundary,
    limits: Mapping[str, Any],
    max_output: int,
) -> dict[str, Any]:
    """Run one task and leave nothing behind.

    The copies read their programs from `requests` themselves. So this process never
    holds a program or a test, and no copy can find another one's in its memory.

    Args:
        sizes: bytes of the program's line, and of the test's line if there is one.

    Returns:
        `code` (negative for a signal), `output`, `errors`, `verdict`, `timed_out`, `too_much`, and the costs `seconds`
        and `memory_mb`.
    """
    out, err, verdict = os.pipe(), os.pipe(), os.pipe()
    pipes = [out, err, verdict]

    def script(task: Any) -> None:
        programs.run_script(task["source"])

    def response(task: Any) -> None:
        programs.serve_response(task["source"], *_opened(3, "rb", "wb"))

    def tests(task: Any) -> None:
        programs.run_tests(task, *_opened(3, "rb", "wb", "wb"))

    def start(size: int, program: Callable[[Any], None], files: list[int]) -> int:
        return _start(
            requests,
            size,
            program,
            files,
            lambda: confinement.confine(boundary, **limits),
        )

    if len(sizes) == 1:
        children = [start(sizes[0], script, [out[1], err[1]])]
    else:
        ask, tell = os.pipe(), os.pipe()
        pipes += [ask, tell]
        # The response reads requests and writes answers. It has no way to write a
        # verdict.
        first = start(sizes[0], response, [out[1], err[1], ask[0], tell[1]])
        # The tests' own output is no output of the program, so it goes where errors go.
        second = start(sizes[1], tests, [err[1], err[1], tell[0], ask[1], verdict[1]])
        children = [second, first]
    begin = time.monotonic()
    # A writing end that stays open here would keep a copy waiting for more after the
    # other one has ended.
    for reading, writing in pipes[3:]:
        os.close(reading)
        os.close(writing)
    for _, writing in pipes[:3]:
        os.close(writing)
    collected = _collect(
        [reading for reading, _ in pipes[:3]],
        children[0],
        begin + limits["seconds"],
        max_output,
    )
    # children[0] decides: the script, or the tests.
    codes, memory = [], 0.0
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        codes.append(os.waitstatus_to_exitcode(status))
        memory = max(memory, usage.ru_maxrss / 1024)
    # Processes of other programs cannot exist: one program runs at a time.
    if boundary.is_namespace:
        _sweep()
    return {
        **collected,
        "code": codes[0],
        "seconds": time.monotonic() - begin,
        "memory_mb": memory,
    }


def _start(
    requests: int,
    size: int,
    program: Callable[[Any], None],
    files: list[int],
    confine: Callable[[], None],
) -> int:
    """Fork a copy that runs `program` on its line of `requests`, with only these files as descriptors 1, 2, 3, ...

    Returns:
        The copy's process number, once it has read its line.
    """
    ready = os.pipe()
    child = os.fork()
    if child:
        # Empty if the copy ended before it had read its line.
        os.close(ready[1])
        has_read = os.read(ready[0], 1)
        os.close(ready[0])
        if not has_read:
            # The rest of its line would be read as the next request.
            os._exit(1)
        return child
    try:
        # The line is read before anything is given up.
        task = json.loads(_exactly(requests, size))
        os.write(ready[1], b"r")
        standard_input = os.memfd_create("input")
        with os.fdopen(os.dup(standard_input), "wb") as file:
            file.write(task.pop("input", "").encode("utf-8", "surrogatepass"))
        os.lseek(standard_input, 0, os.SEEK_SET)
        # Above all descriptors that will be replaced, so that none is overwritten
        # before it is copied.
        moved = [
            fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE)
            for file in (standard_input, *files)
        ]
        for number, moved_file in enumerate(moved):
            os.dup2(moved_file, number)
        # No other descriptor of the worker may stay open in a program.
        os.closerange(len(moved), FIRST_FREE + 2 * len(moved) + 64)
        sys.stdin, sys.stdout, sys.stderr = _opened(0, "r", "w", "w")
        os.environ.clear()
        # Python reseeds `random` after a fork. A fixed seed gives a program the same
        # result in every run.
        random.seed(0)
        confine()
        program(task)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def _opened(first: int, *modes: str) -> list[Any]:
    """Open the file descriptors first, first + 1, ... with these modes."""
    return [os.fdopen(first + place, mode) for place, mode in enumerate(modes)]


def _exactly(file: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _collect(
    files: list[int], child: int, deadline: float, max_output: int
) -> dict[str, Any]:
    """Read the pipes until the child ends, its time is over, or the output is too long."""
    texts = {file: bytearray() for file in files}
    open_files, ended = set(files), os.pidfd_open(child)
    waiting = select.poll()
    for file in (*files, ended):
        waiting.register(file, select.POLLIN)
    timed_out = too_much = False
    has_ended = False
    while not has_ended or open_files:
        left = deadline - time.monotonic()
        # After the child's end, only what is in the pipes already is read.
        events = waiting.poll(0 if has_ended else max(left, 0) * 1e3)
        if has_ended and not events:
            # Another process of the task still holds a pipe open.
            break
        if left <= 0 and not has_ended:
            timed_out = True
            break
        for file, _ in events:
            if file == ended:
                has_ended = True
                waiting.unregister(ended)
                continue
            data = os.read(file, 65536)
            texts[file] += data
            if not data:
                open_files.discard(file)
                waiting.unregister(file)
        if sum(map(len, texts.values())) > max_output:
            too_much = True
            break
    for file in (*files, ended):
        os.close(file)
    output, errors, verdict = (bytes(texts[file]) for file in files)
    return {
        "output": output[:max_output].decode("utf-8", "replace"),
        "errors": errors[-2000:].decode("utf-8", "replace"),
        "verdict": _verdict(verdict),
        "timed_out": timed_out,
        "too_much": too_much,
    }


def _verdict(text: bytes) -> dict[str, Any]:
    return (
        dict(json.loads(text))
        if text
        else {"passed": False, "error": "the tests did not end"}
    )


def _sweep() -> None:
    """Kill all other processes of the namespace. There should be none, since programs cannot start any."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve()
