"""Interpreters of packages that need versions of their own, as launch/bootstrap.sh installs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def harness_python(name: str) -> str:
    """Return the interpreter that has a package, or skip the module.

    Args:
        name: of the lock file without its Python, such as nemo-gym.
    """
    variable = f"MEGAVERL_TEST_{name.upper().replace('-', '_')}"
    installed = Path(sys.prefix, name, "bin", "python")
    python = os.environ.get(variable, str(installed))
    if not Path(python).exists():
        pytest.skip(
            f"{python} is not there: launch/test.sh makes it where Python 3.12 is found",
            allow_module_level=True,
        )
    return python
