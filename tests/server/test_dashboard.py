"""The dashboard in a real browser against a real server, and the Grafana board that draws the same figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from faser.server.dashboard.pages import dashboard_page
from tests.server.web import html_parsers, outside_references, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "docs" / "grafana.json"
REPETITIVE = "one two three four one two three four one two three four one two"  # what an n-gram draft guesses well


# ---- the file ----


def test_the_page_refers_to_nothing_outside_itself() -> None:
    assert outside_references(dashboard_page()) == []


def test_the_page_never_parses_what_the_server_sends_as_html() -> None:
    assert html_parsers(dashboard_page()) == []


# ---- the page ----


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Page]:
    """The dashboard after its first answer."""
    with watched_page(browser, server.url) as page:
        _open(page, server)
        yield page


def _open(page: Page, server: Any) -> None:
    page.goto(f"{server.url}/dashboard")
    page.wait_for_function("document.getElementById('state').textContent === 'ready'")


def _number(page: Page, element: str) -> float:
    return float(page.get_attribute(f"#{element}", "data-value") or "nan")


def _send(server: Any, count: int, max_tokens: int = 24) -> None:
    def complete(index: int) -> None:
        body = {"model": server.model, "prompt": f"{index} {REPETITIVE}", "max_tokens": max_tokens, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        request = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(complete, range(count)))


def test_the_numbers_move_with_the_traffic(page: Page, server: Any) -> None:
    finished = _number(page, "finished")
    drafted = _number(page, "drafted-accepted") + _number(page, "drafted-rejected")
    _send(server, count=6)
    value = "document.getElementById('{}').dataset.value".format
    page.wait_for_function(f"Number({value('finished')}) >= {finished + 6}")
    page.wait_for_function(f"Number({value('drafted-accepted')}) + Number({value('drafted-rejected')}) > {drafted}")
    page.wait_for_function("Number(document.getElementById('output-chart').dataset.highest) > 0")
    assert page.locator("#output-chart path.series").count() >= 1


def test_every_figure_has_text(page: Page) -> None:
    for element in (
        "output-rate", "running", "waiting", "kv-used", "speculation", "drafted-accepted", "drafted-rejected",
        "drafted-pruned", "finished", "state",
    ):  # fmt: skip
        text = page.text_content(f"#{element}")
        assert text, f"#{element} is empty"
        assert text != "–", f"#{element} was never filled"
    data = page.evaluate("fetch('/dashboard/data').then(answer => answer.json())")
    assert page.text_content("#model") == data["server"]["model"]


def test_pointing_at_a_chart_shows_exact_values(page: Page) -> None:
    page.wait_for_function("document.querySelector('#output-chart path.series') !== null")
    page.hover("#output-chart")
    page.wait_for_selector("#tooltip:not([hidden])")
    assert re.search(r"\d\d:\d\d:\d\d", page.inner_text("#tooltip"))
    assert "all output" in page.inner_text("#tooltip")
    assert page.locator("#requests-chart .crosshair").count() == 1, "the crosshair runs through all time charts"


def test_the_theme_follows_the_system_and_the_button_overrides_it(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert dark != light
    page.click("#theme")  # auto, light, dark, auto
    assert page.evaluate(background) == light
    page.click("#theme")
    assert page.evaluate(background) == dark


def test_a_narrow_screen_does_not_scroll_sideways(page: Page, server: Any) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    _open(page, server)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_the_page_says_that_the_server_does_not_answer_until_it_does(browser: Browser, server: Any) -> None:
    page = browser.new_page()  # of its own: the browser logs each failed request as an error
    _open(page, server)
    page.route("**/dashboard/data", lambda route: route.abort())
    page.wait_for_selector("#banner", state="visible")
    assert re.search(r"no answer from the server for \d+ s", page.text_content("#banner") or "")
    page.unroute("**/dashboard/data")
    page.wait_for_selector("#banner", state="hidden")
    assert page.text_content("#state") == "ready"
    page.close()


def test_a_server_with_a_key_asks_for_it_and_the_tab_remembers_it(browser: Browser, paced: Any) -> None:
    with paced("--api-key", "se cret") as server:
        page = browser.new_page()  # of its own: the browser logs each 401 as an error
        page.goto(server.url)  # the root leads to the dashboard
        page.wait_for_selector("#key-form", state="visible")
        assert page.url == f"{server.url}/dashboard"
        assert page.text_content("#state") == "key needed"
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_function("document.getElementById('key-note').textContent.includes('does not accept')")
        page.fill("#key", "se cret")
        page.click("#key-form button")
        page.wait_for_function("document.getElementById('state').textContent === 'ready'")
        assert not page.is_visible("#key-form")
        page.reload()
        page.wait_for_function("document.getElementById('state').textContent === 'ready'")
        assert not page.is_visible("#banner")
        page.close()


# What the server answers, for situations the tiny one is never in. The page must show them without a console error.
QUIET: dict[str, Any] = {
    "server": {
        "model": "<img src=x onerror=alert(1)>", "draft": None, "policy": "off", "device": "cpu", "dtype": "float32",
        "version": "0", "uptime_seconds": 1.0, "state": "starting", "max_running": 4,
    },
    "now": {
        "running": 0, "waiting": 0, "output_rate": 0.0, "kv_used": 0.0, "kv_tokens": 64, "kv_gained": None,
        "draft_kv_used": None, "speculation": "idle", "speculating": False, "ttft_p50": None, "ttft_p99": None,
        "tpot_p50": None, "tpot_p99": None, "step_ms": None, "predicted_ms": None, "prefix_hit_rate": None,
    },
    "history": {
        "time": [], "output_rate": [], "running": [], "waiting": [], "kv_used": [], "kv_gained": [], "step_ms": [],
        "predicted_ms": [], "accepted_rate": [], "mean_length": [],
    },
    "lengths": [],
    "positions": {"verified": [], "accepted": []},
    "contexts": None,
    "drafted": {span: {"accepted": 0, "rejected": 0, "pruned": 0} for span in ("minute", "total")},
    "exits": "",
    "residency": "",
    "draft_failure": "",
    "requests": dict.fromkeys(("finished", "stop", "length", "cancelled", "failed", "refused"), 0),
}  # fmt: skip


def test_without_a_draft_and_without_data_the_page_says_so(page: Page) -> None:
    page.route("**/dashboard/data", lambda route: route.fulfill(json=QUIET))
    page.wait_for_function("document.getElementById('state').textContent === 'starting'")
    assert "no draft model; nothing is drafted" in (page.text_content("#no-draft") or "")
    assert page.is_visible("#no-draft")
    assert not page.is_visible("#lengths-chart")
    assert "no data yet" in (page.text_content("#output-chart") or "")


@pytest.mark.parametrize(("milliseconds", "labels"), [(30_000.0, ["0 s", "10 s", "30 s"]), (80.0, ["0 ms", "80 ms"])])
def test_the_axis_of_step_times_has_a_unit_that_fits(page: Page, milliseconds: float, labels: list[str]) -> None:
    times = [1000.0, 1001.0]
    history = {name: [0.0, 0.0] for name in QUIET["history"]} | {"time": times, "step_ms": [milliseconds] * 2}
    page.route("**/dashboard/data", lambda route: route.fulfill(json={**QUIET, "history": history}))
    page.wait_for_function("document.getElementById('state').textContent === 'starting'")
    found = page.locator("#step-chart text").all_text_contents()
    assert set(labels) <= set(found)
    assert not [text for text in found if text.endswith("k")]


def _answer(page: Page, history: dict[str, list[Any]], now: dict[str, Any] | None = None, **more: Any) -> None:
    """Let the server answer with a draft and this history, for the page's next question."""
    server = {**QUIET["server"], "draft": "small", "state": "draining"}
    shown = {name: [0.0] * len(history["time"]) for name in QUIET["history"]} | history
    answer = {**QUIET, "server": server, "now": {**QUIET["now"], **(now or {})}, "history": shown, **more}
    page.route("**/dashboard/data", lambda route: route.fulfill(json=answer))
    page.wait_for_function("document.getElementById('state').textContent === 'draining'")


def test_the_kv_chart_has_a_band_while_the_draft_is_away(page: Page) -> None:
    times = [1000.0 + second for second in range(300)]
    gained = [None] * 50 + [0.0, *[0.24] * 118, 0.0] + [None] * 130
    note = "The draft is offloaded: its memory holds 24 more KV pages (+24 %)."
    now = {"kv_used": 0.97, "kv_tokens": 19840, "kv_gained": 0.24}
    _answer(page, {"time": times, "kv_used": [0.97] * 300, "kv_gained": gained}, now, residency=note)
    assert page.text_content("#kv-chart .away-label") == "draft offloaded: +24% KV"
    assert page.locator("#kv-chart rect.away").count() == 1
    levels = page.locator("#kv-chart text").all_text_contents()
    assert {"0%", "100%"} <= set(levels)
    assert page.text_content("#kv-draft") == note
    assert page.text_content("#draft") == "small (offloaded)"
    assert "19,840 tokens" in (page.text_content("#kv-note") or "")
    assert not page.is_visible("#draft-failure")
    page.hover("#kv-chart")  # its middle, which the band covers
    page.wait_for_selector("#tooltip:not([hidden])")
    assert re.search(r"draft offloaded\s+\+24% KV", page.inner_text("#tooltip"))


def test_bands_whose_labels_would_meet_have_one_label(page: Page) -> None:
    times = [1000.0 + second for second in range(300)]
    gained = [0.24 if second // 10 % 2 else None for second in range(300)]
    _answer(page, {"time": times, "kv_gained": gained})
    assert page.locator("#kv-chart rect.away").count() == 15
    labels = [label.bounding_box() for label in page.locator("#kv-chart .away-label").all()]
    assert 1 <= len(labels) < 15
    assert all(left["x"] + left["width"] <= right["x"] for left, right in pairwise(labels) if left and right)


def test_the_page_says_that_the_draft_could_not_come_back(page: Page) -> None:
    text = "The draft is away: it could not be loaded (out of memory). Serving without speculation, trying again later."
    _answer(page, {"time": [1000.0]}, draft_failure=text)
    assert page.is_visible("#draft-failure")
    assert text in (page.text_content("#draft-failure") or "")


def test_lengths_are_shown_by_context(page: Page) -> None:
    contexts = [
        {"above": 0, "most": 512, "steps": 75, "drafted": 150, "verified": 150, "accepted": 75},
        {"above": 512, "most": 2048, "steps": 0, "drafted": 0, "verified": 0, "accepted": 0},
        {"above": 32768, "most": None, "steps": 25, "drafted": 100, "verified": 100, "accepted": 90},
    ]
    _answer(page, {"time": [1000.0]}, contexts=contexts)
    rows = [row.locator("th, td").all_text_contents() for row in page.locator("#contexts-rows tr").all()]
    assert rows == [
        ["up to 512", "75%", "2.00", "1.00", "50%"],
        ["512 to 2k", "0%", "–", "–", "–"],
        ["over 32k", "25%", "4.00", "3.60", "90%"],
    ]
    assert "100 steps" in (page.text_content("#contexts-note") or "")
    page.unroute_all()
    _answer(page, {"time": [1000.0]}, contexts=None)  # as the plugin in vLLM answers
    page.wait_for_selector("#contexts-card", state="hidden")


def test_a_model_name_is_text_whatever_it_contains(page: Page) -> None:
    page.route("**/dashboard/data", lambda route: route.fulfill(json=QUIET))
    page.wait_for_function("document.getElementById('state').textContent === 'starting'")
    assert page.text_content("#model") == QUIET["server"]["model"]
    assert page.locator("img").count() == 0


# ---- the Grafana board ----

METRICS = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_success_total", "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total", "faser:spec_decode_num_verified_tokens_total",
    "faser:spec_decode_num_pruned_tokens_total", "faser:draft_length_bucket", "faser:speculation_off_seconds_total",
    "faser:step_seconds_total", "faser:predicted_step_seconds_total", "faser:draft_resident",
    "faser:requests_refused_total", "faser:kv_pages", "faser:draft_pages_gained", "faser:draft_away_seconds_total",
    "faser:draft_moves_total", "faser:draft_last_move_seconds", "faser:context_steps_total",
    "faser:context_drafted_tokens_total", "faser:context_verified_tokens_total", "faser:context_accepted_tokens_total",
]  # fmt: skip


def _board() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(GRAFANA.read_text(encoding="utf-8"))
    return board


def _queries() -> list[str]:
    return [target["expr"] for panel in _board()["panels"] for target in panel.get("targets", [])]


def test_the_grafana_board_asks_for_every_metric() -> None:
    asked = {name for query in _queries() for name in re.findall(r"\b(?:vllm|faser):\w+", query)}
    assert set(METRICS) <= asked


def test_the_grafana_board_asks_for_no_metric_the_server_lacks(server: Any) -> None:
    _send(server, count=1)
    with urlopen(f"{server.url}/metrics", timeout=60) as answer:
        served = set(re.findall(r"^((?:vllm|faser):\w+)", answer.read().decode(), re.MULTILINE))
    asked = {name for query in _queries() for name in re.findall(r"\b(?:vllm|faser):\w+", query)}
    assert asked - served == set()


def test_the_grafana_board_has_unique_panels_that_do_not_overlap() -> None:
    panels = _board()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells = [
        (column, line)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24


def test_the_grafana_board_imports_anywhere() -> None:
    board = _board()
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "model_name"}
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    for query in _queries():
        assert query.count("(") == query.count(")")
        assert 'model_name=~"$model_name"' in query
