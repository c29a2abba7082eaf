"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
        section: which part of the report it belongs to.
        name: what was looked at.
        status: ok; note: good to know; warn: works, at a cost or a risk; fail: training cannot work so.
        found: what is there, and what follows from it.
        mend: what to do; never empty where the status is warn or fail.
    """

    section: str
    name: str
    status: Status
    found: str
    mend: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.mend:
            raise ValueError(f"{self.section}, {self.name}: says what is wrong and not what to do")
