"""The documents as a site: it builds without a warning, loads nothing from elsewhere, and fits a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, browser, why_absent
from tests.docs.pages import PAGES, ROOT

PHONE = 400
# The ratio of two colours' luminances, as WCAG 2.2 defines it, of the texts of a page with what lies behind them.
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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=quiet, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def window(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if why_absent():
        pytest.skip(why_absent())
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_it_builds_and_every_page_is_in_it(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []
    assert "pictures/grids.svg" in (site / "concepts.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        loaded = re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert loaded == [], f"{page.name} loads {loaded}"


def test_every_page_fits_a_phone_and_can_be_read(site: Path, window: Browser) -> None:
    wrong = []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        name = str(page.relative_to(site))
        window.resize(PHONE, 800, phone=True)
        window.open(page)
        window.run("document.head.insertAdjacentHTML('beforeend', '<style>* {transition: none !important}</style>')")
        width = window.run("return document.documentElement.scrollWidth")
        if width > PHONE:
            wrong.append(f"{name}: {width} pixels wide")
        for scheme in ("default", "slate"):
            window.run("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
            least = window.run(CONTRASTS)
            if least is not None and least[0] < 4.5:
                wrong.append(f"{name}, {scheme}: contrast {least[0]:.1f} of {least[1]!r}")
        wrong += [f"{name}: {entry['message']}" for entry in window.log("browser") if entry["level"] == "SEVERE"]
    assert wrong == [], "\n".join(wrong)
