"""The documents taken apart: code blocks with what stands around them, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "launch" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^(\s*)```(\w*)(?:\s+title=\"([^\"]+)\")?\s*$")
PLANNED = re.compile(r"<!-- planned: (.+) -->")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        title: the file that it is, if it says so.
        not_run: the reason that stands before it, if any.
        planned: of a configuration, options of `megaverl plan` that stand before it: the model and the machine.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str
    not_run: str
    planned: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        end = next(
            i for i in range(number + 1, len(lines)) if lines[i].strip() == "```"
        )
        before = lines[number - 1].strip() if number else ""
        reason, plan = NOT_RUN.fullmatch(before), PLANNED.fullmatch(before)
        text = (
            "\n".join(line.removeprefix(opened[1]) for line in lines[number + 1 : end])
            + "\n"
        )
        why, options = reason[1] if reason else "", plan[1] if plan else ""
        yield Block(page, number + 1, opened[2], opened[3] or "", text, why, options)
        number = end + 1


def prose(page: Path) -> str:
    """A page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def table_names(page: Path, heading: str) -> set[str]:
    """The code spans in the first column of the tables below a heading."""
    return {
        name
        for cell in table_column(page, heading)
        for name in re.findall(r"`([^`]+)`", cell)
    }


def table_column(page: Path, heading: str) -> list[str]:
    """The first cell of every row of the tables below a heading, without the first."""
    text = (
        page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    return [
        line.split("|")[1]
        for line in text.splitlines()
        if line.startswith("| ") and "---" not in line
    ][1:]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    return LINK.findall(prose(page))
