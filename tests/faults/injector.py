"""The fault injector: at rank r, in step s, at stage x or byte b of a write, something goes wrong, once.

    MEGAVERL_FAULT='{"kind": "kill", "rank": 1, "step": 2, "stage": "actor_update", "mark": "/path"}'

It patches seams that a run has anyway: the note of the stage that begins, the file that
a checkpoint is written through, the message that a reshard sends, and the files of a
version of the weights that servers read.
`tests.faults.rank` installs it in a rank and then does what the command does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

VARIABLE = "MEGAVERL_FAULT"
Kind = Literal[
    "kill",
    "stop",
    "term",
    "usr1",
    "int",
    "exception",
    "stall",
    "full",
    "readonly",
    "vanish",
]
GONE = ".gone"


class Injected(RuntimeError):
    """The exception that a fault of that kind raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        kind: kill (SIGKILL), stop (SIGSTOP), term (SIGTERM), usr1 (SIGUSR1), int (SIGINT), exception, stall (this
            thread waits for good); of a write also full and readonly (the system's errors); vanish (`folder` is there
            no more).
        stage: as `Stages.status` gets it, without its step.
        step: in this one, counted from 1, or the first later one that has such a stage; None: whichever comes first.
        message: before this rank sends the message of this number to another rank in the stage's reshard, from 0.
        file: before this rank writes the file of this name for servers in the stage; with `byte`, when so many bytes
            of it are written.
        byte: of what this rank writes from then on for that step's checkpoint, or a later one: an earlier one may still
            be on its way to the disk; None: as the stage begins.
        delay: seconds after that, while the stage runs (signals only).
        folder: renamed by vanish, as if its file system were not mounted any more.
        mark: this file is made when it happens; while it is there, nothing does, so that a restart goes well.
    """

    kind: Kind
    rank: int
    stage: str
    step: int | None = None
    byte: int | None = None
    delay: float = 0.0
    folder: str = ""
    mark: str = ""
    message: int | None = None
    file: str = ""

    def environment(self) -> dict[str, str]:
        """What makes the ranks have it."""
        return {VARIABLE: json.dumps(asdict(self))}

    def happens_to(self, step: int | None, stage: str) -> bool:
        is_time = self.step is None or (step is not None and step >= self.step)
        return (
            is_time
            and stage == self.stage
            and not (self.mark and Path(self.mark).exists())
        )

    def strike(self) -> None:
        """Let it happen."""
        if self.mark:
            Path(self.mark).touch()
        if self.delay:
            threading.Timer(self.delay, self._act).start()
        else:
            self._act()

    def _act(self) -> None:
        if self.kind in ("kill", "stop", "term", "usr1", "int"):
            os.kill(os.getpid(), getattr(signal, f"SIG{self.kind.upper()}"))
        elif self.kind == "exception":
            raise Injected(f"injected into {self.stage}")
        elif self.kind == "stall":
            stall()
        elif self.kind == "vanish":
            Path(self.folder).rename(self.folder + GONE)
        else:
            raise OSError(
                *{
                    "full": (28, "No space left on device"),
                    "readonly": (30, "Read-only file system"),
                }[self.kind]
            )


def stall() -> NoReturn:
    """Never come back, as a deadlock or a hung file system would not."""
    while True:
        time.sleep(3600)


def install(environment: Mapping[str, str], rank: int) -> None:
    """Patch this process, if the fault that the environment names is this rank's."""
    if VARIABLE not in environment:
        return
    fault = Fault(**json.loads(environment[VARIABLE]))
    if fault.rank == rank:
        _Patches(fault).apply()


class _Patches:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.armed = False
        self.written = self.sent = 0

    def apply(self) -> None:
        from safetensors.torch import save_file

        from megaverl.checkpoint import ChecksummedFile
        from megaverl.trainer.job import Stages
        from megaverl.weights import change_files
        from megaverl.weights.transports.point_to_point import PointToPoint

        note, write, begin = Stages.status, ChecksummedFile.write, PointToPoint._begin
        save, write_text = save_file, Path.write_text

        def note_with_fault(stages: Stages, name: str) -> None:
            note(stages, name)
            if not self.armed and self.fault.happens_to(stages.step, name):
                at_once = self.fault.byte is None and self.fault.message is None
                if at_once and not self.fault.file:
                    self.fault.strike()
                else:
                    self.armed, self.written, self.sent = True, 0, 0

        def begin_with_fault(transport: PointToPoint) -> None:
            if self.armed and transport._rounds[transport._begun].outgoing is not None:
                if self.sent == self.fault.message:
                    self.armed = False
                    self.fault.strike()
                self.sent += 1
            begin(transport)

        def write_with_fault(
            file: ChecksummedFile, data: Any, known_crc32: int | None = None
        ) -> int:
            if self.fault.file or not self._is_meant(str(file.name)):
                return write(file, data, known_crc32)
            view = memoryview(data).cast("B")
            size, byte, before = len(view), self.fault.byte, 0
            if self.armed and byte is not None and self.written + size > byte:
                before = max(0, byte - self.written)
                write(file, view[:before])
                self.armed = False
                self.fault.strike()
            self.written += size
            write(file, view[before:])
            return size

        def save_with_fault(tensors: Any, path: Path, **more: Any) -> None:
            save(tensors, path, **more)
            if self.armed and path.name == self.fault.file:
                os.truncate(path, self.fault.byte or 0)
                self.fault.strike()

        def write_text_with_fault(path: Path, *given: Any, **more: Any) -> int:
            if self.armed and path.name == self.fault.file:
                self.fault.strike()
            return write_text(path, *given, **more)

        Stages.status = note_with_fault  # type: ignore[assignment, method-assign]
        ChecksummedFile.write = write_with_fault  # type: ignore[assignment, method-assign]
        PointToPoint._begin = begin_with_fault  # type: ignore[assignment, method-assign]
        vars(change_files)["save_file"] = save_with_fault
        Path.write_text = write_text_with_fault  # type: ignore[assignment, method-assign]

    def _is_meant(self, path: str) -> bool:
        found = re.search(r"/step_(\d+)", path)
        return (
            found is None or self.fault.step is None or int(found[1]) >= self.fault.step
        )
