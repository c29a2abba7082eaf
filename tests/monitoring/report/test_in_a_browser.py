"""The page in a real browser: at the width of a desk and of a phone, dark and light, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megaverl.monitoring.report import write_report
from tests.browser import Browser, browser, why_absent
from tools.bench_report import make_run

pytestmark = pytest.mark.skipif(bool(why_absent()), reason=why_absent())


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("browser")
    page = write_report(
        [make_run(folder / name, 60, seed) for seed, name in enumerate("ab")],
        folder / "page.html",
    )
    with browser(folder) as found:
        found.open(page)
        yield found


@pytest.mark.parametrize(("width", "columns"), [(1280, 4), (390, 1)])
def test_it_fits_the_screen(
    window: Browser, width: int, columns: int, tmp_path: Path
) -> None:
    window.resize(width, 844, phone=width < 500)
    assert window.run("return document.documentElement.scrollWidth") == width, (
        "nothing sticks out to the side"
    )
    boxes = window.run(
        "return [...document.querySelectorAll('#curves > .charts > .chart')].map(c => c.getBoundingClientRect().x)"
    )
    assert len(set(boxes)) == columns
    small = window.run(
        "return [...document.querySelectorAll('.chart .tick')].filter(t => t.getBoundingClientRect().width > 0)"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert min(small) >= 8, "the axes can be read"
    cut = window.run(
        "return [...document.querySelectorAll('nav a')].filter(a => a.getBoundingClientRect().right > innerWidth)"
        ".map(a => a.textContent)"
    )
    assert cut == [], "every entry of the menu can be seen"
    assert window.picture(tmp_path / "page.png").stat().st_size > 50_000


def test_dark_and_light(window: Browser) -> None:
    def background() -> list[int]:
        colour = window.run("return getComputedStyle(document.body).backgroundColor")
        return [
            int(part)
            for part in colour.removeprefix("rgb(").removesuffix(")").split(",")
        ]

    for scheme, is_dark in (("light", False), ("dark", True)):
        window.devtools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        assert (max(background()) < 80) == is_dark
    window.run("document.getElementById('theme').click()")
    assert min(background()) > 200, "the button turns what the system says"
    window.run("delete document.documentElement.dataset.theme")


def test_the_pointer_shows_a_steps_values(window: Browser) -> None:
    window.resize(1280, 844)
    text = window.run(
        """
        const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.x + box.width * 0.6, clientY: box.y + 40}));
        return document.getElementById('tip').textContent;
        """
    )
    first, a, b = text.splitlines()
    assert first.startswith("step ") and 25 < int(first.split()[1]) < 45
    assert a.startswith("a  0.") and b.startswith("b  0.")


def test_the_page_asked_for_nothing_and_said_nothing(window: Browser) -> None:
    assert window.log("browser") == []
    asked = [
        entry["message"]
        for entry in window.log("performance")
        if "Network.requestWillBeSent" in entry["message"]
    ]
    assert not [message for message in asked if '"url":"http' in message]
