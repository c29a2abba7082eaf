"""What `model.path` may name: a folder, or a model on a hub."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Whether a path reads as `org/name`, and nothing of that name is here."""
    return REPOSITORY.fullmatch(path) is not None and not Path(path).exists()
