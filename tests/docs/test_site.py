"""The documents as a site: it builds without a warning, loads nothing from elsewhere, and fits a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.browser import Browser, browser, why_absent
from tests.docs.pages import PAGES, ROOT

PHONE = 400
# The ratio of two colours' luminances, as WCAG 2.2 defines it, of the texts of a page
# with what lies behind them.
CONTRASTS = """
const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const parts = colour => colour.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const over = ([r, g, b, a = 1], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
const behind = element => {
  if (!element) return [255, 255, 255];
  const own = parts(getComputedStyle(element).backgroundColor);
  return own.length > 3 && own[3] === 0 ? behind(element.parentElement) : over(own, behind(element.parentElement));
};
return [...document.querySelectorAll('.md-content p, .md-content li, .md-content td, .md-content h2, .md-content code')]
  .filter(e => e.offsetParent && e.textContent.trim()).map(e => {
    const ground = behind(e), text = over(parts(getComputedStyle(e).color), ground);
    const [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
    return [(light + 0.05) / (dark + 0.05), e.textContent.trim().slice(0, 60)];
  }).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install 'megaverl[docs]'")
    pytest.importorskip("material", reason="pip install 'megaverl[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=quiet, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def window(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if why_absent():
        pytest.skip(why_absent())
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_it_builds_and_every_page_is_in_it(site: Path) -> None:
    pages = [
        page.relative_to(ROOT / "docs")
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    ]
    assert [
        page for page in pages if not (site / page.with_suffix(".html")).is_file()
    ] == []
    assert "pictures/grids.svg" in (site / "concepts.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'(?:src|<link[^>]*href)="(https?:[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], f"{page.name} loads {loaded}"


def test_links_between_pages_lead_somewhere(site: Path) -> None:
    """... also those of notebooks, whose links name the pages' sources."""
    pages = {
        page: page.read_text(encoding="utf-8")
        for page in site.rglob("*.html")
        if page.name != "404.html"
    }
    known = {
        page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()
    }
    wrong = []
    for page, text in pages.items():
        for link in set(re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text)):
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (
                anchor and path in known and unquote(anchor) not in known[path]
            ):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_the_menu_is_grouped_by_task() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    groups = re.findall(r"^  - (.+)$", text, re.MULTILINE)
    assert 3 < len(groups) < 10 and all(group.endswith(":") for group in groups)


@pytest.mark.parametrize("width", [360, PHONE])
def test_the_keys_can_be_read_on_a_phone(
    site: Path, window: Browser, width: int
) -> None:
    """Every cell is inside the screen, without scrolling to the side, and wide enough for words."""
    window.resize(width, 800, phone=True)
    window.open(site / "keys.html")
    cells = window.run(
        "return [...document.querySelectorAll('.keys td')].map(c => c.getBoundingClientRect())"
        ".map(c => [c.left, c.right])"
    )
    assert len(cells) > 1000
    assert all(
        left >= 0 and right <= width and right - left > 0.8 * width
        for left, right in cells
    )


def test_every_page_fits_a_phone_and_can_be_read(site: Path, window: Browser) -> None:
    wrong = []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        name = str(page.relative_to(site))
        window.resize(PHONE, 800, phone=True)
        window.open(page)
        window.run(
            "document.head.insertAdjacentHTML('beforeend', '<style>* {transition: none !important}</style>')"
        )
        width = window.run("return document.documentElement.scrollWidth")
        if width > PHONE:
            wrong.append(f"{name}: {width} pixels wide")
        for scheme in ("default", "slate"):
            window.run(
                "document.body.setAttribute('data-md-color-scheme', arguments[0])",
                scheme,
            )
            least = window.run(CONTRASTS)
            if least is not None and least[0] < 4.5:
                wrong.append(
                    f"{name}, {scheme}: contrast {least[0]:.1f} of {least[1]!r}"
                )
        wrong += [
            f"{name}: {entry['message']}"
            for entry in window.log("browser")
            if entry["level"] == "SEVERE"
        ]
    assert wrong == [], "\n".join(wrong)
