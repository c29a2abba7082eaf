"""What is wrong with a placement, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaverl.errors import ConfigError


class PlacementProblem(NamedTuple):
    """One thing to mend: the key, dotted as in the file, and what was found and would do."""

    key: str
    message: str


class PlacementError(ConfigError):
    """Carries all `problems` of a placement; its message lists them."""

    def __init__(self, problems: Sequence[PlacementProblem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  - {problem.key}: {problem.message}" for problem in problems]
        super().__init__("\n".join(["the roles cannot be placed:", *lines]))
