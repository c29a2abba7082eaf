"""Hook of MkDocs that translates links in the notebooks' pages.

Notebooks name pages by their sources (`../first_hour.md`), so that links work on GitHub. MkDocs translates such links
in pages that are Markdown, and leaves those of notebooks as they are.
"""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r'(<a\b[^>]*\bhref=")(?!\w+:)([^"#]+)\.(?:md|ipynb)(#[^"]*)?"')


def on_page_content(html: str, page: Any, **arguments: Any) -> str:
    """Replace a notebook's links to page sources by links to the pages. MkDocs calls this for every page."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return LINK.sub(r'\1\2.html\3"', html)
