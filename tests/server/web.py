"""A real browser for tests of pages, and what every page must hold."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PAGES = ("dashboard/video", "../dashboard")  # that a page may link to


@contextmanager
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the package chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'faser[dev]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, server_url: str, own: tuple[str, ...] = ("data:",)) -> Iterator[Page]:
    """A new page. No console error, and no request to another host, passes unnoticed; `own` begin URLs of no host."""
    errors: list[str] = []
    requested: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    yield page
    page.close()
    assert errors == []
    assert {urlsplit(url).netloc for url in requested if not url.startswith(own)} == {urlsplit(server_url).netloc}


def outside_references(page: str) -> list[str]:
    """What the page refers to and does not contain, but for other pages of the dashboard."""
    page = page.replace("http://www.w3.org/2000/svg", "")
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)|url\(([^)]*)\)|@import\s+(\S+)""", page)
    found = ["".join(each) for each in references]
    hosts = re.findall(r"https?://\S+", page)
    return hosts + [each for each in found if not each.startswith(("data:", "#")) and each not in PAGES]


def html_parsers(page: str) -> list[str]:
    """Ways of the page's script to turn text into elements."""
    script = page.partition("<script>")[2]
    parsers = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(")
    return [parser for parser in parsers if parser in script]
