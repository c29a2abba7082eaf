"""The environment that has inspect-ai and lm-eval (launch/test.sh)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def harness_python() -> str:
    """Return the interpreter with inspect-ai and lm-eval. The test is skipped if there is none."""
    default = Path(sys.prefix) / "harnesses" / "bin" / "python"
    python = os.environ.get("MEGAVERL_TEST_HARNESSES", str(default))
    if not Path(python).exists():
        pytest.skip("./launch/test.sh installs inspect-ai and lm-eval")
    return python
