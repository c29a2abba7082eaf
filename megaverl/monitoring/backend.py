"""What a tracker is, and what it is told of the run: the contract for trackers of one's own too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Backend(Protocol):
    """Where metrics go. A write may raise anything: the tracker then leaves this backend out."""

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """What a backend needs to know of the run."""

    run_dir: Path
    name: str
    project: str
    config: Mapping[str, Any]
    resume_step: int | None  # the last step that counts, None for a fresh run
