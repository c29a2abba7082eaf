"""The notebooks run from top to bottom in an empty folder, their outputs are there, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs import notebook
from tests.docs.pages import LINK, ROOT, anchors
from tests.launcher import Launcher

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PROGRAM = str(Path(notebook.__file__))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(
    path: Path, launch: Launcher, tmp_path: Path
) -> None:
    ended = launch.command(
        [PROGRAM, str(path), str(tmp_path)],
        ranks=1,
        logs=tmp_path / "logs",
        deadline=300,
    )
    assert ended.codes == [0], ended.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_reader_sees(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code), (
        "run it, so that its outputs are shown"
    )
    shown = "".join(
        "".join(output.get("text", ())) for cell in code for output in cell["outputs"]
    )
    assert shown and not re.search(r"Traceback|(?<![\w.:/%])/\w+/", shown), (
        "nothing of the machine that it ran on"
    )
    for link in (
        link for text in notebook.cells(path, "markdown") for link in LINK.findall(text)
    ):
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve()
        assert found.is_file() and (not anchor or anchor in anchors(found)), (
            f"{link} leads nowhere"
        )


def test_all_are_in_the_site() -> None:
    named = re.findall(
        r"notebooks/(\w+\.ipynb)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    )
    assert sorted(named) == [path.name for path in NOTEBOOKS] and len(named) == 4
