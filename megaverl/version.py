"""The version: RELEASE for a release, 0.2.0+dev for a checkout or a wheel built from one."""

from __future__ import annotations

import os

RELEASE = "0.2.0"
# Beside the package: of a checkout, of such a wheel.
_MARKS = (".git", f"megaverl-{RELEASE}+dev.dist-info")
_above = os.path.join(os.path.dirname(__file__), "..")
__version__ = RELEASE + (
    "+dev" if any(os.path.exists(os.path.join(_above, mark)) for mark in _MARKS) else ""
)
