"""Pool of sandbox workers, each of which runs several confined programs at once."""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megaverl.errors import RewardError
from megaverl.rewards.line_process import LineProcess, ProcessDied

WORKER = Path(__file__).with_name("worker.py")
MECHANISMS = ("namespaces", "user_namespaces", "landlock")  # tried in this order
START_SECONDS, MARGIN_SECONDS = 60.0, 30.0


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run.

    Attributes:
        seconds: wall time; CPU time has the same limit, rounded up, plus a second.
        memory_mb: address space.
        output_kb: standard output and error together.
        threads: threads besides the first; none if the kernel cannot count them for a program alone (see `MECHANISMS`:
            it
            can with the first, and for an ordinary user with the second).
        preload: packages that are imported once, before the first program.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 256
    threads: int = 16
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfinedProgram:
    """A Python program to run.

    Attributes:
        source: text of the program.
        input: standard input of a script.
        test: a test that decides instead (see `programs.run_tests`).
        seconds: wall time of this program. None: that of the sandbox.
        memory_mb: address space of this program. None: that of the sandbox.
    """

    source: str
    input: str = ""
    test: Mapping[str, Any] | None = None
    seconds: float | None = None
    memory_mb: int | None = None


@dataclass(frozen=True)
class ProgramOutcome:
    """Result of a program.

    Attributes:
        code: exit code, negative for a signal.
        passed: result of the test; for a script, whether its code is 0.
        reason: why it failed, in words.
    """

    code: int
    output: str
    errors: str
    passed: bool
    reason: str
    seconds: float
    memory_mb: float


@dataclass
class Sandbox:
    """Runs programs in up to `size` workers; thread-safe.

    Args:
        mechanism: one of `MECHANISMS`; None: the first that this machine supports.

    Raises:
        RewardError: (from `run`) this machine supports none.

    Example:
        box = Sandbox(SandboxLimits(seconds=2.0))
        outcome = box.run(ConfinedProgram("print(input())", input="hello"))
        outcome.passed, outcome.output
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    size: int = 2
    mechanism: str | None = None
    _free: queue.LifoQueue[LineProcess | None] = field(init=False)

    _shared: ClassVar[dict[tuple[Any, ...], Sandbox]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __post_init__(self) -> None:
        # Last in, first out: a worker that runs is taken before a place where one would
        # have to start.
        # Workers start with the first program that needs them.
        self._free = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put(None)

    @classmethod
    def shared(cls, limits: SandboxLimits, size: int) -> Sandbox:
        """Return this process's sandbox with these limits, closed when the process ends."""
        with cls._sharing:
            if (limits, size) not in cls._shared:
                cls._shared[limits, size] = cls(limits, size)
                atexit.register(cls._shared[limits, size].close)
            return cls._shared[limits, size]

    def run_all(self, tasks: Sequence[ConfinedProgram]) -> list[ProgramOutcome]:
        """Run all programs, as many in parallel as there are workers."""
        if len(tasks) < 2:
            return [self.run(task) for task in tasks]
        with ThreadPoolExecutor(
            min(self.size, len(tasks)), thread_name_prefix="sandbox"
        ) as pool:
            return list(pool.map(self.run, tasks))

    def run(self, task: ConfinedProgram) -> ProgramOutcome:
        """Run one program. Whatever it does becomes an outcome."""
        parts: list[Any] = [{"source": task.source, "input": task.input}]
        if task.test is not None:
            parts.append(dict(task.test))
        # The worker forwards the program's bytes without reading them, so it must know
        # their number.
        sizes = [len(json.dumps(part)) + 1 for part in parts]
        seconds = self.limits.seconds if task.seconds is None else task.seconds
        memory_mb = self.limits.memory_mb if task.memory_mb is None else task.memory_mb
        died: int | None = None
        # A worker may die because of something else, such as the kernel's out-of-memory
        # killer, so try twice.
        for _ in range(2):
            worker = self._free.get()
            try:
                worker = worker or self._start()
                for line in (
                    {"seconds": seconds, "memory_mb": memory_mb, "sizes": sizes},
                    *parts,
                ):
                    worker.send(line)
                # The worker answers somewhat later than the program's own limit.
                return self._outcome(
                    task, worker.answer(seconds + MARGIN_SECONDS), seconds
                )
            except (ProcessDied, TimeoutError) as error:
                died = error.code if isinstance(error, ProcessDied) else None
                if worker is not None:
                    worker.close()
                # The place in the queue stays, and a new worker starts with the next
                # program.
                worker = None
            finally:
                self._free.put(worker)
        return ProgramOutcome(
            -9, "", "", False, f"its sandbox ended twice (code {died})", 0.0, 0.0
        )

    def close(self) -> None:
        """End all workers."""
        for worker in [self._free.get() for _ in range(self.size)]:
            if worker is not None:
                worker.close()
            # Places go back, so that a closed sandbox can be used again.
            self._free.put(None)

    def _outcome(
        self, task: ConfinedProgram, answer: Mapping[str, Any], seconds: float
    ) -> ProgramOutcome:
        verdict, code = answer["verdict"], int(answer["code"])
        if answer["timed_out"]:
            reason = f"it took longer than {seconds:g} s"
        elif answer["too_much"]:
            reason = f"it wrote more than {self.limits.output_kb} KiB"
        elif code:
            last = answer["errors"].strip().rpartition("\n")[2]
            reason = (
                f"it ended by signal {-code}"
                if code < 0
                else f"it ended with code {code}: {last}"
            )
        else:
            reason = str(verdict.get("error", ""))
        # A program that was stopped may still have ended with code 0.
        stopped = bool(answer["timed_out"] or answer["too_much"])
        passed = not stopped and (
            code == 0 if task.test is None else verdict["passed"] is True
        )
        code = -9 if stopped else code
        usage = float(answer["seconds"]), float(answer["memory_mb"])
        return ProgramOutcome(
            code,
            answer["output"],
            answer["errors"],
            passed,
            "" if passed else reason,
            *usage,
        )

    def _start(self) -> LineProcess:
        tried = [self.mechanism] if self.mechanism else list(MECHANISMS)
        refused = {}
        for name in tried:
            started = _started(self.limits, name)
            if isinstance(started, LineProcess):
                return started
            refused[name] = started
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise RewardError(
            f"programs cannot be confined here ({reasons}), and are not run without. Allow one of them: user "
            "namespaces "
            "(sysctl user.max_user_namespaces above 0, in Docker --security-opt seccomp=unconfined), or a kernel of "
            "5.13 or newer with Landlock."
        )


def _started(limits: SandboxLimits, mechanism: str) -> LineProcess | str:
    """Return a worker, or the reason why it could not start."""
    # Do not pass on this process's environment, which may hold keys and addresses. A
    # fixed hash seed gives sets the same order in every run.
    environment = {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    # `-sSP`: no user packages, no site module, and no path of the current folder.
    worker = LineProcess([sys.executable, "-sSP", str(WORKER)], environment, folder="/")
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys([paths["purelib"], paths["platlib"]]))
    setting = {**asdict(limits), "mechanism": mechanism, "packages": packages}
    try:
        worker.send(setting)
        answer = worker.answer(START_SECONDS)
    except (TimeoutError, ProcessDied) as error:
        worker.close()
        return f"its process did not start ({error})"
    if "ready" in answer:
        return worker
    worker.close()
    return str(answer["error"])


@functools.cache
def why_not_here() -> str | None:
    """Return why programs cannot be confined on this machine; None if they can."""
    box = Sandbox(size=1)
    try:
        box.run(ConfinedProgram("pass"))
    except RewardError as error:
        return str(error)
    finally:
        box.close()
    return None
