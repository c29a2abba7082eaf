"""What is said of learning curves: every run, also one that failed or did not learn; what is done is not done again."""

from __future__ import annotations

from pathlib import Path

from tools.learning_curves import ALGORITHMS, MARKS, Result, draw, main, page, stored, table, write

RESULTS = [
    Result("grpo", 0, [(0, 0.1), (50, 0.5), (100, 0.9)], 60.0, None),
    Result("grpo", 1, [(0, 0.2), (50, 0.4), (100, 0.6)], 60.0, None),
    Result("gpg", 0, [(0, 0.1), (50, 0.2), (100, 0.3)], 60.0, None),
    Result("ppo", 0, [(0, 0.1)], 3.0, "TrainingStopped: the loss is not finite"),
]


def test_every_preset_that_needs_no_teacher_and_no_turns_is_tried() -> None:
    from megaverl.config.presets import PRESETS

    assert set(ALGORITHMS) == set(PRESETS) - {"distillation", "gkd", "turn_ppo", "turn_grpo"}


def test_the_table_hides_nothing() -> None:
    rows = {line.split("|")[1].strip(): line for line in table(RESULTS).splitlines()[2:]}
    assert list(rows) == ["ppo", "grpo", "gpg"], "in the order of the algorithms"
    assert "| 90.0%, 60.0% | +60.0% | +40.0% | yes |" in rows["grpo"]
    assert "+20.0% | NO |" in rows["gpg"] and "not finite" in rows["ppo"]
    assert "ppo, seed 0: TrainingStopped" in page(RESULTS)
    assert "1 of 3 gain 30 points or more in the mean of their seeds, 1 of 3 on each seed." in page(RESULTS)


def test_results_are_kept_and_drawn(tmp_path: Path) -> None:
    for result in RESULTS:
        write(tmp_path, result)
    assert sorted(stored(tmp_path)) == sorted(RESULTS)
    draw(list(stored(tmp_path)), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["run", "--out", str(tmp_path), "--algorithms", "grpo", "--seeds", "0", "1"]) == 0, "all is done"
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    assert main(["report", "--out", str(tmp_path), "--docs", str(tmp_path), "--readme", str(readme)]) == 0
    assert table(RESULTS) in (tmp_path / "learning_curves.md").read_text()
    assert readme.read_text() == f"before\n{MARKS[0]}\n{table(RESULTS)}\n{MARKS[1]}\nafter\n"


def test_the_readme_shows_the_picture_and_the_table_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text()
    shown = readme.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()
    assert (
        len(shown.splitlines()) == 2 + len(ALGORITHMS) and shown in (root / "docs" / "learning_curves.md").read_text()
    )
    assert "(docs/learning_curves.png)" in readme
