"""`python -m tests.faults.rank train ...`: a rank of the real command, on the node and with the fault that its
environment names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tests.faults.injector import install
from tests.faults.networks import VARIABLE, enter


def main(argv: Sequence[str]) -> int:
    if VARIABLE in os.environ:
        enter(os.environ[VARIABLE], int(os.environ["RANK"]))
    install(os.environ, int(os.environ["RANK"]))
    code: int = importlib.import_module(f"megaverl.cli.{argv[0]}").main(list(argv[1:]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
