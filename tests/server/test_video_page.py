"""The video page in a real browser: a clip is sent, masks and answers appear, and whatever goes wrong is said."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faser.media.options import PictureOptions
from faser.media.pruning import PruningOptions
from faser.media.reader import FrameReader
from faser.server.dashboard.pages import video_page
from faser.watch import WatchOptions, windows
from tests.media.clips import clip, moving
from tests.server.running import running
from tests.server.seeing import settings
from tests.server.web import html_parsers, outside_references, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CLIP = clip(30, size=(112, 112), gop=16, draw=moving)  # its index stands at its end


# ---- the file ----


def test_the_page_refers_to_nothing_outside_itself_and_parses_nothing_as_html() -> None:
    assert outside_references(video_page()) == []
    assert html_parsers(video_page()) == []


def test_the_page_has_the_looks_and_helpers_of_the_dashboard() -> None:
    page = video_page()
    for part in ("--page: light-dark(", "const byId =", "function sessionKey()", "function showState(", ".legend {"):
        assert page.count(part) == 1, part
    assert not re.search(r"^(/\* shared \*/|// shared)$", page, re.MULTILINE)


# ---- the page ----


@pytest.fixture
def page(browser: Browser, seeing_server: Any) -> Iterator[Page]:
    """The page when it is ready."""
    with watched_page(browser, seeing_server.url, own=("data:", "blob:")) as page:
        _open(page, seeing_server)
        yield page


def _open(page: Page, server: Any) -> None:
    page.goto(f"{server.url}/dashboard/video")
    page.wait_for_function("document.getElementById('state').textContent === 'ready'")


def _start(page: Page, data: bytes = CLIP, name: str = "clip.mp4", **fields: str) -> None:
    """Let the page watch a clip at four times its speed, ten frames a second."""
    page.set_input_files("#file", {"name": name, "mimeType": "video/mp4", "buffer": data})
    chosen = {"speed": "4", "when_behind": "wait", "pruning": "codec", **fields}
    for field in ("pruning", "speed", "when_behind"):
        page.select_option(f"#{field}", chosen.pop(field))
    for field, value in {"window": "8", "stride": "4", "fps": "10", "max_tokens": "4", **chosen}.items():
        page.fill(f"#{field}", value)
    page.click("#start")


def _await_status(page: Page, text: str) -> None:
    page.wait_for_function(f"document.getElementById('status').textContent.includes({json.dumps(text)})")


def _notices(page: Page) -> str:
    return "\n".join(page.locator("#notices li").all_text_contents())


def test_a_clip_plays_with_its_masks_and_answers(page: Page) -> None:
    options = WatchOptions(8, 4, 10, PictureOptions(), PruningOptions(rule="codec"))
    right = list(windows(FrameReader(io.BytesIO(CLIP)), settings(1, 2), options))
    kept = {round(start, 3): grid.num_tokens for window in right
            for grid, start in zip(window.media.grids, window.times[:, 0].tolist(), strict=True)}  # fmt: skip
    page.evaluate("""window.seen = {}; setInterval(() => {
        const { start, kept, pruned } = document.getElementById("mask").dataset;
        if (start) seen[start] = [Number(kept), Number(kept) + Number(pruned)];
    }, 5)""")
    _start(page)
    _await_status(page, "every window was answered")
    page.wait_for_function("document.getElementById('player').ended")
    seen = page.evaluate("seen")
    assert len(seen) > len(kept) / 2
    assert {float(start): count for start, (count, _) in seen.items()}.items() <= kept.items()
    assert any(count < whole for count, whole in seen.values()), "something is pruned"
    assert page.locator("#strip rect").count() == len(kept)
    assert page.locator("#answers li").count() == len(right)
    first = page.locator("#answers li").last.text_content() or ""
    assert f"0.0 – {right[0].end:.1f} s" in first
    assert f"{100 * right[0].media.kept_share:.0f}% kept by codec · {right[0].media.num_tokens} video tokens" in first
    assert _notices(page) == ""
    assert page.text_content("#counts") == f"100% sent, {len(right)} answered, 0 skipped"


def test_what_the_browser_cannot_decode_is_watched_on_a_grey_frame_and_a_fallback_is_said(page: Page) -> None:
    _start(page, clip(12, size=(56, 112), kind="avi", codec="mpeg4", draw=moving), "clip.avi")
    _await_status(page, "every window was answered")
    page.wait_for_function("document.getElementById('mask').dataset.kept !== ''")
    assert not page.is_visible("#player")
    assert "This browser cannot decode the clip" in _notices(page)
    assert "Fell back to pruning by difference: the stream has no motion vectors" in _notices(page)
    box = page.locator("#stage").bounding_box()
    assert box is not None
    assert box["width"] == pytest.approx(2 * box["height"], rel=0.05), "the frame has the clip's shape"


def test_a_refusal_is_shown_and_another_start_succeeds(browser: Browser, seeing_server: Any) -> None:
    page = browser.new_page()  # of its own: the browser logs a refusal as an error
    _open(page, seeing_server)
    _start(page, window="7")
    _await_status(page, "refused (400)")
    assert "window=7: expected a multiple of 2" in _notices(page)
    _start(page, b"no video at all" * 1000)
    _await_status(page, "failed")
    assert page.locator("#notices li[data-tone=bad]").count() == 1
    assert page.is_enabled("#start")
    page.close()


def test_lost_connections_are_resumed_where_they_broke(browser: Browser, seeing_server: Any) -> None:
    page = browser.new_page()  # of its own: the browser logs a lost connection as an error
    _open(page, seeing_server)
    lost: dict[str, int] = {"chunk": 0, "events": 0}

    def lose(route: Any) -> None:
        kind = "chunk" if "/chunk" in route.request.url else "events"
        lost[kind] += 1
        if kind == "chunk" and lost[kind] == 2:
            route.abort()
        elif kind == "events" and lost[kind] == 1:
            route.fulfill(content_type="text/event-stream", body=": the stream ends here\n\n")
        else:
            route.continue_()

    page.route(re.compile(r"/v1/video/sessions/[^/]+/(chunk|events)"), lose)
    _start(page)
    _await_status(page, "every window was answered")
    for text in ("The connection was lost while sending", "Sending resumed at byte", "The stream of answers was lost",
                 "Answers resumed"):  # fmt: skip
        assert text in _notices(page)
    assert page.locator("#answers li").count() == 7
    assert lost["events"] == 2
    page.close()


def test_a_narrow_screen_does_not_scroll_sideways(page: Page, seeing_server: Any) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    _open(page, seeing_server)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_stop_ends_the_session_on_the_server(page: Page, seeing_server: Any) -> None:
    _start(page, speed="0.5")
    page.wait_for_function("document.querySelectorAll('#answers li').length > 0")
    assert seeing_server.metric("faser:video_sessions") == 1
    with page.expect_response(lambda answer: answer.request.method == "DELETE"):
        page.click("#stop")
    assert seeing_server.metric("faser:video_sessions") == 0
    assert page.text_content("#status") == "Stopped."


HOSTILE = "<img src=x onerror=alert(1)>"
WINDOW = {
    "number": 0, "start": 0.0, "end": 0.7, "text": HOSTILE, "finish_reason": "length", "frames": 8, "patches": 4,
    "kept": 0.5, "pruning": HOSTILE, "video_tokens": 1, "prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 1,
    "skipped": 3, "kv_reuse": {"is_on": False, "tokens": 0, "checks": 4, "differing": 3},
    "milliseconds": {"decode": 1, "first_token": 2, "answer": 3}, "dropped": 2,
    "masks": {"rows": 1, "columns": 2, "grids": [{"start": 0.0, "end": 0.7, "kept": "gA=="}]},
}  # fmt: skip
END = {"reason": HOSTILE, "frames_decoded": 8, "windows_answered": 1, "windows_skipped": 3, "windows_failed": 1,
       "dropped": 0}  # fmt: skip


def test_all_text_of_the_server_is_text_and_every_fallback_is_said(page: Page) -> None:
    events = [
        ("window", WINDOW),
        ("error", {"message": HOSTILE, "code": None, "number": 1, "dropped": 0}),
        ("end", END),
    ]
    body = "".join(f"id: {i}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for i, (name, data) in enumerate(events, 1))
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    _start(page, name=f"{HOSTILE}.mp4")
    _await_status(page, "The session ended")
    for text in ("2 events were lost", "Fell back to pruning by <img", "3 of 4 checked answers differed",
                 f"Window 1 has no answer: {HOSTILE}"):  # fmt: skip
        assert text in _notices(page)
    assert HOSTILE in (page.text_content("#answers") or "")
    assert "3 skipped" in (page.text_content("#counts") or "")
    page.wait_for_function("document.getElementById('mask').dataset.pruned === '1'")
    assert page.locator("img").count() == 0


def test_a_model_without_eyes_is_named_and_nothing_can_start(browser: Browser, server: Any) -> None:
    page = browser.new_page()
    _open(page, server)
    assert "The model tiny cannot see" in (page.text_content("#banner") or "")
    assert page.is_disabled("#start")
    page.goto(f"{server.url}/dashboard")
    page.wait_for_function("document.getElementById('state').textContent === 'ready'")
    assert not page.is_visible("#video-link")
    page.close()


def test_with_a_key_the_page_asks_for_it_and_uses_it_for_all_requests(
    browser: Browser, chat_folder: Path, tmp_path: Path
) -> None:
    with running(chat_folder, tmp_path, "--api-key", "k", factory="tests.server.seeing:make_seeing") as server:
        page = browser.new_page()  # of its own: the browser logs each 401 as an error
        page.goto(f"{server.url}/dashboard/video")
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_function("document.getElementById('key-note').textContent.includes('does not accept')")
        page.fill("#key", "k")
        page.press("#key", "Enter")
        page.wait_for_function("document.getElementById('state').textContent === 'ready'")
        _start(page)
        _await_status(page, "every window was answered")
        assert page.locator("#answers li").count() == 7
        page.click("text=Dashboard")
        page.click("#video-link")  # the tab remembers the key
        page.wait_for_function("document.getElementById('state').textContent === 'ready'")
        page.close()
