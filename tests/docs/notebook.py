"""Run a notebook's cells, one after the other, as a program: FILE, and the folder that they run in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# A notebook's kernel is a process of its own, and no rank of a job.
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def cells(path: Path, kind: str) -> list[str]:
    """The text of the cells of a kind (`code`, `markdown`)."""
    book = json.loads(path.read_text(encoding="utf-8"))
    return [
        "".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind
    ]


def main() -> None:
    path = Path(sys.argv[1])
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.chdir(sys.argv[2])
    sys.path.insert(0, "")  # as a notebook's kernel imports from its folder
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(cells(path, "code")):
        exec(compile(text, f"{path.name}, cell {number + 1}", "exec"), namespace)


if __name__ == "__main__":
    main()
