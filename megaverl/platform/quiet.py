"""Keep libraries from importing and reporting things that do not matter to a run.

A program that uses the Python API has no separate log for the output of libraries, so
their lines would appear in its own output.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

# megatron-core imports Weights & Biases wherever it is installed
# (`megatron/core/timers.py`, its inference engine), and works without it. The import
# takes 0.7 s in every rank and creates two folders in the temporary folder.
HIDDEN = ("wandb",)
IMPORTER = "megatron"
# Python warnings.
EXPECTED = (
    # Shards of a parameter are views, whose `.grad` the optimizer sets itself.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # A barrier uses the current device, which `Platform.start` has set. torch advises
    # to pass `device_id` to `init_process_group`. Then it makes every later group by
    # splitting the default group's communicator (`_new_process_group_helper`), which
    # holds the ranks of one role group only: groups across role groups could not be
    # made, and each of Megatron's groups would take a communicator at once.
    r"barrier\(\): using the device under current context",
)
# Loggers that report features which a CPU cannot have.
EXPECTED_LOGGERS = ("torch._library.triton",)


class _Hidden(MetaPathFinder):
    """Import hook that makes `import wandb` fail in megatron-core's modules, and nowhere else."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in HIDDEN and _importing_module().partition(".")[0] == IMPORTER:
            raise ModuleNotFoundError(f"{name} is hidden from {IMPORTER}", name=name)


def hide_from_megatron() -> None:
    """Install the import hook, once."""
    if not any(isinstance(finder, _Hidden) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hidden())


def _importing_module() -> str:
    """Return the name of the module whose import statement is being executed."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in str(
        frame.f_globals.get("__name__", "importlib")
    ):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def leave_out_expected_warnings() -> None:
    """Suppress warnings of megatron-core and torch about intended behaviour."""
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message=message)
    for name in EXPECTED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def native_stderr_without(text: str) -> Iterator[None]:
    """Drop lines with `text` that native code writes to stderr inside this block."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        saved = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            captured.seek(0)
            for line in captured:
                if text.encode() not in line:
                    os.write(2, line)
