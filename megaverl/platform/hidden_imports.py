"""Keep megatron-core from importing packages that it does not need here.

megatron-core imports Weights & Biases wherever it is installed (`megatron/core/timers.py` and its inference engine),
and works without it. The import takes 0.7 s in every rank and creates two folders in the temporary folder.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

HIDDEN = ("wandb",)
IMPORTER = "megatron"


class _Hidden(MetaPathFinder):
    """Import hook that lets `import wandb` fail in megatron-core's modules, and nowhere else."""

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
    while frame.f_back is not None and "importlib" in str(frame.f_globals.get("__name__", "importlib")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
