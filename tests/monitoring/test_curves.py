"""Pictures of a curve, in text and as a PNG."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megaverl.monitoring.curves import plot_curves, sparkline, text_curve


def test_sparkline_spans_smallest_to_largest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 0]) == "█▁"


def test_sparkline_of_hard_values() -> None:
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == ""
    assert sparkline([3, 3]) == "▅▅"
    assert sparkline([0, math.nan, 7]) == "▁ █"


def test_sparkline_averages_to_its_width() -> None:
    assert sparkline([0, 2, 6, 8], width=2) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)], width=33)) == 33


def test_text_curve_rises_with_its_values() -> None:
    lines = text_curve(
        [(0, 0.0), (10, 0.5), (20, 1.0)], "accuracy", height=4, low=0, high=1
    ).splitlines()
    assert lines[0] == "accuracy"
    assert lines[1] == "1 ┤  █"  # only the last reaches the top
    assert lines[2] == "  ┤  █"
    assert lines[3] == "  ┤ ██"
    assert lines[4] == "0 ┤▁██"
    assert lines[5] == "  └───"
    assert lines[6].split() == ["0", "20"]


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_text_curve_without_a_finite_value(values: list[float]) -> None:
    assert text_curve(list(enumerate(values)), "loss") == "loss: no finite values yet"


def test_text_curve_of_a_constant_and_of_one_point() -> None:
    assert "5.5" in text_curve([(3, 5.0)], "kl")
    with pytest.raises(ValueError, match="at least 2"):
        text_curve([(0, 1.0)], height=1)


def test_png_has_a_panel_for_each_curve(tmp_path: Path) -> None:
    curve = [(float(i), math.sin(i)) for i in range(20)]
    one = plot_curves({"reward/mean": curve}, tmp_path / "plots" / "one.png")
    gap = [(0.0, math.nan), (1.0, 2.0)]
    three = plot_curves(
        {"a": curve, "b": gap, "c": curve}, tmp_path / "three.png", "run"
    )
    for path in (one, three):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert png_size(three)[0] > png_size(one)[0]
    assert png_size(three)[1] > png_size(one)[1]
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(ValueError, match="no curve"):
        plot_curves({}, tmp_path / "none.png")


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[16:24]
    return int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
