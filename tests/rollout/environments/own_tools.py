"""Tools that fail, each in its own way."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megaverl.errors import EnvironmentFault


def slow() -> str:
    time.sleep(60)
    return "late"


def leaves() -> str:
    os._exit(0)


def breaks() -> str:
    raise RuntimeError("no state")


def refuses() -> str:
    raise ValueError("of these arguments")


def unreachable() -> str:
    raise ConnectionRefusedError("port 7")


def says_so() -> str:
    raise EnvironmentFault("the index is being built")


def twice(path: str) -> str:
    """Return whether a file is there, and make it."""
    if Path(path).exists():
        return "there"
    Path(path).touch()
    raise ConnectionResetError("once")
