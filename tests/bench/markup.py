"""Reads HTML and SVG back."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from markupsafe import Markup

VOID = {"meta", "link", "input", "br"}  # elements of HTML that have no end


class Reader(HTMLParser):
    """Fails where elements do not nest; keeps tables, texts and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.parts: list[str] = []  # headings

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.parts += [data] if self.open[-1:] == ["h2"] else []
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.text).append(data)


def reading(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def box(chart: Markup) -> tuple[float, float]:
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', chart)[0]
    return float(width), float(height)
