"""The dashboard's pages as the server sends them: whole, nothing is loaded from elsewhere.

Knows files. What index.html marks as shared, its looks and its helpers, takes the place of `shared` in video.html.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_SHARED = re.compile(r"^(/\*|//) ---- shared ----.*?\n(.*?)^\1 ---- end of shared ----", re.MULTILINE | re.DOTALL)


@cache
def dashboard_page() -> str:
    return (FOLDER / "index.html").read_text(encoding="utf-8")


@cache
def video_page() -> str:
    page = (FOLDER / "video.html").read_text(encoding="utf-8")
    for comment, place in (("/*", "/* shared */"), ("//", "// shared")):
        parts = [text for mark, text in _SHARED.findall(dashboard_page()) if mark == comment]
        page = page.replace(place, "".join(parts), 1)
    return page
