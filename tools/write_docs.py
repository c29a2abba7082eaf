"""Write the generated parts of the documentation: docs/keys.md, tables of other pages, and pictures.

python tools/write_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from megaverl.config import Config
from megaverl.config.passthrough import PLACES
from megaverl.config.resuming import table
from megaverl.config.section import described_keys, field_meanings
from megaverl.config.successors import SUCCESSORS

ROOT = Path(__file__).resolve().parents[1]
# On a phone the style sheet puts a row's cells below each other, in the tables inside
# (docs/site.css).
TABLE_BEGINS, TABLE_ENDS = '<div class="keys" markdown>', "</div>"
INTRODUCTION = """\
# Every key of the configuration

This page is generated from the schema by `tools/write_docs.py`. `megaverl keys PREFIX` shows the same in a terminal,
and also the fields of other libraries (below) for the installed version.

- Write a key in YAML under its sections, or on the command line as `key=value`. N is the number of an entry in a list.
- `base: FILE` builds a configuration on another file, relative to its own folder, like the recipes in `configs/`.
  Mappings are merged and all other values are replaced. A base can have a base. A key of the base can be changed
  but not removed.

These keys accept fields of other libraries:

| Key | Fields of |
| --- | --- |
{places}
"""


def keys_page() -> str:
    """Return the text of docs/keys.md, section by section."""
    places = "\n".join(
        f"| `{place}` | {target.name} |" for place, target in PLACES.items()
    )
    lines = [INTRODUCTION.format(places=places)]
    meanings = field_meanings(Config)
    section = None
    for entry in described_keys(Config):
        top = entry.key.partition(".")[0]
        if top != section:
            lines += ["", TABLE_ENDS] if section is not None else []
            section = top
            lines += [f"## {top}", "", meanings[top], "", TABLE_BEGINS, ""]
            lines += ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
        cells = (f"`{entry.key}`", entry.type, f"`{entry.default}`", entry.meaning)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join([*_spaced(lines), "", TABLE_ENDS]) + "\n"


def _spaced(lines: list[str]) -> Iterator[str]:
    """Yield the lines with an empty line before each heading."""
    for number, line in enumerate(lines):
        if line.startswith("## ") and number:
            yield ""
        yield line


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#1c1e21}.s{fill:#6a7079;font-size:11.5px}"
    ".b{fill:#fff;stroke:#b9bec6}.a{fill:#dbe8fb;stroke:#2a6fdb}.o{fill:#fbe4d8;stroke:#d9622b}"
    ".g{fill:#d8f1e6;stroke:#1f9d6b}.p{fill:#efe0f6;stroke:#a14bc4}.l{stroke:#6a7079;stroke-width:1.4;fill:none;"
    "marker-end:url(#m)}.bg{fill:#fbfbfa}</style>"
    '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#6a7079"/></marker></defs>'
)


class Picture:
    """SVG picture of boxes, arrows and words."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(label)}">{STYLE}<rect class="bg" width="{width}" height="{height}" rx="8"/>'
        )
        self._parts: list[str] = []

    def box(
        self,
        x: int,
        y: int,
        w: int,
        h: int,
        text: str = "",
        small: str = "",
        kind: str = "b",
    ) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>'
        )
        middle = y + h / 2 + (4 if not small else -3)
        if text:
            self.text(x + w / 2, middle, text)
        if small:
            self.text(x + w / 2, middle + 16, small, small=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        small: bool = False,
        anchor: str = "middle",
    ) -> None:
        kind = ' class="s"' if small else ""
        self._parts.append(
            f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="l" points="{path}"/>')

    def __str__(self) -> str:
        return self._head + "".join(self._parts) + "</svg>\n"


def step_picture() -> str:
    """Draw one training step: operators on roles."""
    picture = Picture(900, 270, "one training step, from prompts to new weights")
    picture.box(15, 95, 90, 50, "prompts")
    picture.box(140, 95, 110, 50, "rollout", "vLLM", "o")
    for row, (name, role, kind) in enumerate(
        (
            ("reward", "rules, functions", "p"),
            ("old, ref log-probs", "actor, reference", "a"),
            ("values", "critic", "g"),
        )
    ):
        picture.box(300, 20 + 75 * row, 140, 55, name, role, kind)
        picture.arrow(
            (250, 120), (275, 120), (275, 47 + 75 * row), (298, 47 + 75 * row)
        )
        picture.arrow(
            (440, 47 + 75 * row), (465, 47 + 75 * row), (465, 120), (488, 120)
        )
    picture.box(490, 95, 110, 50, "advantages", "pure function")
    picture.box(650, 40, 110, 50, "critic update", "", "g")
    picture.box(650, 150, 110, 50, "actor update", "", "a")
    picture.arrow((600, 120), (625, 120), (625, 65), (648, 65))
    picture.arrow((600, 120), (625, 120), (625, 175), (648, 175))
    picture.box(800, 150, 85, 50, "reshard", "", "o")
    picture.arrow((760, 175), (798, 175))
    picture.arrow((842, 200), (842, 252), (195, 252), (195, 147))
    picture.arrow((105, 120), (138, 120))
    picture.text(
        520, 246, "new weights, straight into the engine's parameters", small=True
    )
    return str(picture)


def grids_picture() -> str:
    """Draw the same eight ranks under three grids."""
    picture = Picture(900, 240, "eight ranks, seen as three grids")
    grids = (
        (
            "actor: tp 2, pp 2, dp 2",
            [f"dp{r // 4} pp{r // 2 % 2} tp{r % 2}" for r in range(8)],
            "a",
        ),
        ("critic: tp 4, dp 2", [f"dp{r // 4} tp{r % 4}" for r in range(8)], "g"),
        (
            "rollout: vLLM tp 2, four engines",
            [f"engine{r // 2} tp{r % 2}" for r in range(8)],
            "o",
        ),
    )
    for rank in range(8):
        picture.text(230 + 82 * rank, 25, f"rank {rank}", small=True)
    for row, (name, cells, kind) in enumerate(grids):
        y = 45 + 64 * row
        picture.text(15, y + 28, name.partition(":")[0], anchor="start")
        picture.text(15, y + 44, name.partition(": ")[2], small=True, anchor="start")
        for rank, cell in enumerate(cells):
            first, _, rest = cell.partition(" ")
            picture.box(192 + 82 * rank, y, 76, 48, first, rest, kind)
    return str(picture)


def roles_picture() -> str:
    """Draw roles on nodes of their own."""
    picture = Picture(
        900,
        230,
        "three role groups with ranks of their own, and the group that joins them",
    )
    role_groups = (
        ("rollout", "vLLM, 8 ranks", "o"),
        ("actor, reference", "Megatron, 16 ranks", "a"),
        ("critic, reward", "8 ranks", "g"),
    )
    for number, (name, small, kind) in enumerate(role_groups):
        x = 30 + 295 * number
        picture.box(x, 25, 250, 95, name, small, kind)
        picture.text(x + 125, 112, "separate default process group", small=True)
        picture.arrow((x + 100, 122), (x + 100, 158))
        picture.arrow((x + 150, 158), (x + 150, 124))
    picture.box(
        30,
        160,
        840,
        50,
        "one group over all ranks",
        "transfers rows of batches and boxes of weights",
    )
    return str(picture)


def reshard_picture() -> str:
    """Draw one weight, cut in two ways, and the pieces that travel."""
    picture = Picture(
        900,
        270,
        "a weight split by Megatron over four ranks and by vLLM over two, and the boxes that are sent",
    )
    picture.text(150, 28, "Megatron: tp 2, pp 2")
    picture.text(740, 28, "vLLM: tp 2")
    for number in range(4):
        y = 45 + 52 * number
        picture.box(
            40,
            y,
            220,
            44,
            f"rank {number}",
            f"layers {number // 2 * 16}-{number // 2 * 16 + 15}, half {number % 2}",
            "a",
        )
    for number in range(2):
        y = 45 + 104 * number
        picture.box(
            640,
            y,
            220,
            96,
            f"ranks {number} and {number + 2}",
            f"all layers, half {number}",
            "o",
        )
    for number in range(4):
        target = number % 2
        picture.arrow(
            (260, 67 + 52 * number),
            (420, 67 + 52 * number),
            (520, 80 + 104 * target + 20 * (number // 2)),
            (638, 80 + 104 * target + 20 * (number // 2)),
        )
    picture.text(
        450,
        262,
        "plan = intersection of two layouts: each missing element is received once, from the nearest rank that has it",
        small=True,
    )
    return str(picture)


def pages() -> dict[Path, str]:
    """Return the path and the text of every file that this tool writes."""
    pictures = {
        "step": step_picture,
        "grids": grids_picture,
        "roles": roles_picture,
        "reshard": reshard_picture,
    }
    texts = {
        ROOT / "docs" / "pictures" / f"{name}.svg": draw()
        for name, draw in pictures.items()
    }
    checkpoints = ROOT / "docs" / "checkpoints.md"
    texts[checkpoints] = checkpoints_page(checkpoints.read_text(encoding="utf-8"))
    articles = ROOT / "docs" / "from_the_articles.md"
    texts[articles] = articles_page(articles.read_text(encoding="utf-8"))
    return {ROOT / "docs" / "keys.md": keys_page(), **texts}


RULES_BEGIN = "<!-- made by tools/write_docs.py from megaverl/config/resuming.py -->\n"
RULES_END = "\n<!-- end -->"


def checkpoints_page(text: str) -> str:
    """Return docs/checkpoints.md with the table of settings at a resume updated from the code."""
    before, rest = text.split(RULES_BEGIN)
    _, after = rest.split(RULES_END)
    return before + RULES_BEGIN + table() + RULES_END + after


SUCCESSORS_BEGIN = (
    "<!-- made by tools/write_docs.py from megaverl/config/successors.py -->\n"
)


def articles_page(text: str) -> str:
    """Return docs/from_the_articles.md with the table of other trainers' files updated from the code."""
    before, rest = text.split(SUCCESSORS_BEGIN)
    _, after = rest.split(RULES_END.lstrip("\n"))
    lines = ["| Elsewhere | Here | |", "| --- | --- | --- |"]
    lines += [
        f"| `{successor.pattern}` | `{successor.line}` | {_cell(successor.note)} |"
        for successor in SUCCESSORS
    ]
    return (
        before + SUCCESSORS_BEGIN + "\n" + "\n".join(lines) + "\n" + RULES_END + after
    )


def outdated() -> list[Path]:
    """Return the files whose text differs from the generated one."""
    return [
        path
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    described = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument(
        "--check",
        action="store_true",
        help="write nothing; 1 where a file is not current",
    )
    if described.parse_args().check:
        old = outdated()
        for path in old:
            print(
                f"{path.relative_to(ROOT)} is not current: python tools/write_docs.py",
                file=sys.stderr,
            )
        return 1 if old else 0
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
