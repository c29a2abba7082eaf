"""The version. A release is RELEASE; what runs from a checkout says that it is not one: 0.2.0+dev."""

from __future__ import annotations

import os

RELEASE = "0.2.0"
__version__ = RELEASE + ("+dev" if os.path.exists(os.path.join(os.path.dirname(__file__), "..", ".git")) else "")
