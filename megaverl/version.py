"""The version: of a release RELEASE; of what runs from a checkout, or from a wheel of one, 0.2.0+dev."""

from __future__ import annotations

import os

RELEASE = "0.2.0"
_MARKS = (".git", f"megaverl-{RELEASE}+dev.dist-info")  # beside the package: of a checkout, of such a wheel
_above = os.path.join(os.path.dirname(__file__), "..")
__version__ = RELEASE + ("+dev" if any(os.path.exists(os.path.join(_above, mark)) for mark in _MARKS) else "")
