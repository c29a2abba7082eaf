"""Findings of the doctor, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        section: section of the report.
        name: what was checked.
        status: ok; note: good to know; warn: works, at a cost or a risk; fail: training cannot work like this.
        found: what was found, and its consequences.
        fix: what to do; required for warn and fail.
    """

    section: str
    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.fix:
            raise ValueError(
                f"{self.section}, {self.name}: names a problem without a fix"
            )


MARKS = {"ok": "ok  ", "note": "note", "warn": "WARN", "fail": "FAIL"}


def as_text(findings: Sequence[Finding]) -> str:
    """Format the findings by section, one line each, with the fix below each problem."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        first, *rest = finding.found.splitlines() or [""]
        lines.append(f"  {MARKS[finding.status]}  {finding.name:<{width}}  {first}")
        indent = " " * (width + 10)
        lines += [indent + line for line in rest]
        if finding.fix:
            lines.append(f"{indent}-> {finding.fix}")
    return "\n".join([*lines[1:], "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Summarise the findings, e.g. "1 failing, 2 warnings: ...", or say that nothing is wrong."""
    counts = Counter(finding.status for finding in findings)
    if not counts["fail"] and not counts["warn"]:
        return "Nothing is wrong."
    return f"{counts['fail']} failing, {counts['warn']} warnings: the lines that begin with -> say what to do."


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for `--json`; `healthy` says that nothing fails."""
    sections: dict[str, list[dict[str, str]]] = {}
    for finding in findings:
        entry = {"name": finding.name, "status": finding.status, "found": finding.found}
        sections.setdefault(finding.section, []).append(
            entry | ({"fix": finding.fix} if finding.fix else {})
        )
    return {
        "healthy": all(finding.status != "fail" for finding in findings),
        "sections": sections,
    }
