"""A rank of the real command, or of a program, on the node and with the fault that its
environment names: `python -m tests.faults.rank train ...`, or `command` by
`tests.launcher`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from megaverl.cli.main import main as megaverl
from tests.faults.injector import install
from tests.faults.networks import VARIABLE, enter


def command(arguments: list[str], folder: str | None = None) -> NoReturn:
    """Run `python ARGUMENTS` where the first is a .py file, else `megaverl ARGUMENTS`; in a folder, if one is given."""
    if folder is not None:
        os.chdir(folder)
    sys.exit(_program(arguments) if arguments[0].endswith(".py") else main(arguments))


def _program(arguments: list[str]) -> int:
    """To what an interpreter does at its end."""
    sys.argv, code = arguments, 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    return code


def main(argv: Sequence[str]) -> int:
    if VARIABLE in os.environ:
        enter(os.environ[VARIABLE], int(os.environ["RANK"]))
    install(os.environ, int(os.environ["RANK"]))
    return megaverl(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
