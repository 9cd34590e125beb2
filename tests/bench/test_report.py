"""The report of a benchmark: what it says, what it must not, and where its charts draw."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup, escape

from benchmarks.lib.ablation import LADDER, explained
from faser.bench import charts, legend, report
from faser.bench.charts import Axis, Bar, Line, Look, Panel, Point, Scale, Size, Stack, Trace
from faser.policy import POLICIES as POLICY_NAMES
from faser.policy import make_policy
from faser.traffic.document import FIGURES, Category, Document, RunDocument
from faser.traffic.records import Moment, Record
from faser.traffic.summary import group_runs

EXAMPLE = Path(__file__).with_name("example.json")
SHIPPED = Path(__file__).parents[2] / "docs" / "results"
POLICIES = ("off", "fixed:1", "fixed:3", "goodput", "faser")
VOID = {"meta", "link", "input", "br"}  # elements of HTML that have no end


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(rate: float, speed: float, told: bool) -> dict[str, float | None]:
    """Figures that differ in every run, so that a wrong one in the page is seen."""
    times = {
        name: 0.013 / speed * (1 + index / 7)
        for index, name in enumerate(FIGURES)
        if name.endswith(("mean", "p50", "p99"))
    }
    figures: dict[str, float | None] = {
        **dict.fromkeys(FIGURES),
        **times,
        "requests": 40,
        "lost": 0,
        "output_tokens": 8000,
        "seconds": 60.0,
        "output_tokens_per_s": 131.7 * rate * speed,
        "goodput_share": 0.93,
        "goodput_per_s": 0.93 * rate,
    }
    speculation = {"acceptance": 0.71, "mean_length": 2.5, "wasted_rows": 320, "wasted_share": 0.12}
    return figures | (speculation if told else {})


def run(system: str, rate: float | None, repeat: int, policy: str | None, speed: float) -> RunDocument:
    told = policy is not None and policy != "off"
    moments = tuple(
        Moment(float(t), t % 9, max(0, t % 9 - 6), 40 * (t % 9), t, t // 2, 4 / (1 + t % 9), 1.0 if t % 9 < 5 else 0.0)
        for t in range(1, 61)
    )
    category = Category(10, 0, 2000, 500, 480, 300, (3, 4))
    return RunDocument(
        system=system,
        policy=policy,
        rate=rate,
        concurrency=None if rate is not None else 8,
        repeat=repeat,
        partial=False,
        summary=summary(rate or 1.0, speed * (1 + repeat / 50), told),
        phases={"draft": 3.0, "verify": 20.0, "host": 2.5, "idle": 34.5} if policy is not None else {},
        verified_per_position=(400, 300, 200) if told else (),
        accepted_per_position=(320, 200, 90) if told else (),
        moments=moments if policy is not None else (),
        categories={"code": category, "chat": replace(category, accepted=200)} if told else {},
    )


def document(runs: Sequence[RunDocument], about: Mapping[str, Any] | None = None) -> Document:
    return Document(
        command=("faser", "bench", "--policies", "off,fixed:1..3", "--report", "a folder"),
        created="2026-11-15T09:31:00+00:00",
        about={"model": "big", "draft": "small", "device": "cpu", "versions": {"faser": "0.1.0"}, **(about or {})},
        workload={"source": "poisson", "seed": 3, "loads": [1.0, 2.0]},
        runs=tuple(runs),
        groups=group_runs(runs),
    )


def full(rates: Sequence[float | None] = (0.5, 1.0, 2.0), repeats: int = 3, **about: Any) -> Document:
    systems = [(name, name) for name in POLICIES] + [("vLLM K=4", None)]
    runs = [
        run(name, rate, repeat, policy, 1 + index / 5)
        for rate in rates
        for index, (name, policy) in enumerate(systems)
        for repeat in range(repeats)
    ]
    return document(runs, about)


def page_of(given: Document) -> str:
    return report.render(report.compose(given))


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


def words(page: str) -> str:
    return re.sub(r"\s+", " ", " ".join(reading(page).text))


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_nests_and_names_every_system_load_and_part() -> None:
    page = page_of(full(ablation=["off", "fixed:3", "faser"]))
    text = words(page)
    for name in (
        *POLICIES,
        "vLLM K=4",
        "0.5 requests/s",
        "2 requests/s",
        "big",
        "small",
        "15 November 2026, 09:31 UTC",
    ):
        assert name in text
    parts = reading(page).parts
    assert parts[:4] == ["Headline", "Systems", "All figures", "Over time"]
    assert set(parts[4:]) == {"Acceptance", "Where time goes", "Ablation", "What the figures mean"}
    assert "faser bench --policies off,fixed:1..3 --report 'a folder'" in text


def test_the_page_refers_to_nothing_outside_itself() -> None:
    page = page_of(full()).replace("http://www.w3.org/2000/svg", "")
    for tag, attributes in reading(page).tags:
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), f"{tag} loads {attributes[name]}"
    assert not re.search(r"https?://|@import|url\((?!#|data:)", page)


def test_every_figure_of_the_tables_is_the_documents_own() -> None:
    given = full()
    shown = {a["data-value"] for tag, a in reading(page_of(given)).tags if tag == "td" and "data-value" in a}
    untold = {"output_tokens", "seconds", "wasted_rows"}  # not in the tables
    for group in given.groups:
        for name, spread in group.figures.items():
            if spread is not None and name not in untold:
                assert str(spread.median) in shown, f"{group.system} {name}"
    medians = {str(spread.median) for group in given.groups for spread in group.figures.values() if spread is not None}
    assert shown <= medians


def test_a_cell_shows_median_range_and_ratio() -> None:
    results = report.read(full((1.0,)))
    table = report.figure_table(results, results.loads[0], report.SPEED)
    assert table.columns[:3] == ("tokens/s", "× off", "× vLLM K=4")
    off, faser, other = table.rows[0], table.rows[4], table.rows[5]
    assert (off.cells[0].text, off.cells[0].spread, off.cells[1].text) == ("134", "132–137", "1.00×")
    assert (faser.cells[1].text, faser.cells[1].tone) == ("1.80×", "good")
    assert [cell.best for cell in (off.cells[0], faser.cells[0], other.cells[0])] == [False, False, True]
    assert table.columns[3] == "mean, ms"


def test_lower_is_better_for_times() -> None:
    results = report.read(full((1.0,)))
    table = report.load_table(results, report.LATENCY)
    assert [row.cells[0].best for row in table.rows] == [False] * 5 + [True]
    assert [row.cells[0].tone for row in table.rows] == [""] + ["good"] * 5
    assert all(float(row.cells[0].ratio.rstrip("×")) > 1 for row in table.rows[1:])


def test_a_first_place_within_the_spread_of_others_is_called_level() -> None:
    results = report.read(full((1.0,)))
    clear = report.winner(results, results.loads[0], report.LATENCY)
    assert clear is not None
    assert (clear.system.name, clear.level) == ("vLLM K=4", 0)
    close = [run("off", 1.0, 0, "off", 1.0), run("off", 1.0, 1, "off", 1.1), run("faser", 1.0, 0, "faser", 1.08)]
    results = report.read(document(close))
    level = report.winner(results, results.loads[0], report.LATENCY)
    assert level is not None
    assert (level.level, [tone for _, _, tone in level.ratios]) == (1, [""])


@pytest.mark.parametrize("where", ["model", "system", "category", "error", "command", "workload", "phase", "about"])
def test_a_string_of_the_document_is_never_markup(where: str) -> None:
    evil = "<script>alert('x')</script><b onclick=\"y\">&amp;]]>"
    one = run("off", 1.0, 0, "off", 1.0)
    drafting = run("faser", 1.0, 0, "faser", 1.2)
    lost = Record(0, "chat", 5, 0.0, None, None, 0, error=evil)
    changed = {
        "system": replace(drafting, system=evil),
        "category": replace(drafting, categories={evil: Category(1, verified=9, accepted=3)}),
        "error": replace(drafting, summary={**drafting.summary, "lost": 1}, records=(lost,)),
        "phase": replace(drafting, phases={evil: 3.0}),
    }
    given = document(
        [one, changed.get(where, drafting)], {"model": evil} if where == "model" else {evil: {evil: [evil]}}
    )
    given = replace(given, command=(evil,) if where == "command" else ("faser",))
    given = replace(given, workload={"source": evil} if where == "workload" else {})
    page = page_of(given)
    reader = reading(page)
    assert "alert('x')" not in "".join(reader.scripts)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not any("onclick" in attributes for _, attributes in reader.tags)
    assert "&lt;script&gt;" in page


def test_a_partial_run_is_marked() -> None:
    whole, cut = run("off", 1.0, 0, "off", 1.0), replace(run("faser", 1.0, 0, "faser", 1.2), partial=True)
    text = words(page_of(document([whole, cut])))
    assert "Partial. 1 of 2 runs was interrupted" in text
    assert "faser partial" in text
    assert "Partial." not in words(page_of(document([whole])))


def test_a_document_without_runs_is_still_a_page() -> None:
    assert "holds no runs" in words(page_of(document([])))
    bare = Document(("x",), "whenever", {}, {}, (), ())
    assert "whenever" in words(page_of(bare))


def test_one_run_draws_bars_and_asks_for_no_choice_of_load() -> None:
    page = page_of(document([run("faser", 1.0, 0, "faser", 1.0)]))
    assert 'class="ratio' not in page
    assert len(report.compose(document([run("faser", 1.0, 0, "faser", 1.0)])).latency) == 1
    assert re.search(r'class="card sticky" hidden', page)


def test_what_a_system_does_not_tell_is_a_gap() -> None:
    silent = replace(run("elsewhere", 1.0, 0, None, 1.0), summary=dict.fromkeys(FIGURES), phases={})
    reader = reading(page_of(document([silent])))
    assert "elsewhere" in reader.text
    assert reader.parts == ["Headline", "Systems", "All figures", "What the figures mean"]
    short = replace(run("faser", 1.0, 0, "faser", 1.0), summary={**summary(1, 1, True), "ttft_mean": float("nan")})
    assert "nan" not in page_of(document([short, silent]))


def test_a_load_that_one_system_did_not_play_leaves_its_row_out() -> None:
    given = document(
        [run("off", 1.0, 0, "off", 1.0), run("faser", 1.0, 0, "faser", 2.0), run("off", 2.0, 0, "off", 1.0)]
    )
    results = report.read(given)
    rows = [
        [row.system.name for row in report.figure_table(results, load, report.SPEED).rows] for load in results.loads
    ]
    assert rows == [["off", "faser"], ["off"]]
    missing = "No time line of faser at 2 requests/s: this load was not played. There is one at 1 requests/s."
    assert missing in words(page_of(given))


def unseen(system: str, rate: float, policy: str) -> RunDocument:
    return replace(run(system, rate, 0, policy, 1.0), moments=())


@pytest.mark.parametrize(
    ("runs", "opens"),
    [
        ([run("off", 1.0, 0, "off", 1.0), run("+ off", 2.0, 0, "+ off", 1.0)], ("+ off", 2.0)),
        (
            [run("faser", 1.0, 0, "faser", 1.0), unseen("faser", 2.0, "faser"), unseen("off", 3.0, "off")],
            ("faser", 1.0),
        ),
        ([run("faser", 1.0, 0, "faser", 1.0), run("+ off", 1.0, 0, "+ off", 1.0)], ("faser", 1.0)),
        ([run("off", 1.0, 0, "off", 1.0), run("ema", 1.0, 0, "ema", 1.0)], ("ema", 1.0)),
    ],
)
def test_the_page_opens_on_a_time_line_that_exists(runs: list[RunDocument], opens: tuple[str, float]) -> None:
    page = report.compose(document(runs))
    at = page.loads[page.chosen]
    assert (page.seen[page.traced].name, at.load.rate) == opens
    assert page.seen[page.traced].name in at.timelines
    checked = {a["id"] for tag, a in reading(report.render(page)).tags if tag == "input" and "checked" in a}
    assert checked == {f"load-{page.chosen}", f"system-{page.traced}"}


def test_systems_without_a_time_line_are_crossed_out_and_say_why() -> None:
    page = page_of(document([run("off", 1.0, 0, "off", 1.0), run("faser", 1.0, 0, "faser", 1.0),
                             unseen("off", 2.0, "off"), run("faser", 2.0, 0, "faser", 1.0)]))  # fmt: skip
    crossed = re.findall(r"body:has\(#load-(\d):checked\) label:has\(#system-(\d)\)", page)
    assert crossed == [("1", "0")]
    assert "No time line of off at 2 requests/s: its run has no record of the steps." in words(page)
    assert "Systems crossed out have no time line at 2 requests/s." in words(page)


# ── the systems ──────────────────────────────────────────────────────────────────────────────────────────────────────


def looks(names: Sequence[str | None]) -> list[Look]:
    runs = [run(name or f"server {i}", 1.0, 0, name, 1.0) for i, name in enumerate(names)]
    return [system.look for system in report.read(document(runs)).systems]


def test_twenty_systems_have_a_marker_each_so_that_colour_is_not_needed() -> None:
    names = ["off", *(f"fixed:{k}" for k in range(1, 7)), *legend.POLICIES, "a", "b", "c", "+ off", None]
    found = looks(list(dict.fromkeys(names)))
    assert len(found) >= 19
    assert len({look.marker for look in found}) == len(found)


def test_forty_systems_still_look_different() -> None:
    found = looks([*(f"policy {i}" for i in range(20)), *(f"fixed:{k}" for k in range(1, 13)), *[None] * 8])
    assert len({(look.colour, look.dash, look.marker) for look in found}) == 40


def test_the_lines_and_the_legend_draw_the_marker() -> None:
    shapes = {str(charts.swatch(Look("blue", marker=marker))) for marker in charts.MARKERS}
    assert len(shapes) == len(charts.MARKERS) == 20
    points = (Point(1, 1.0), Point(2, 2.0))
    drawn = [
        charts.line_chart("t", [Line("a", Look("blue", marker=marker), points)], Axis("x", str), Axis("y", str), size)
        for marker in charts.MARKERS
        for size in [Size(500, 300)]
    ]
    assert len(set(drawn)) == len(charts.MARKERS)


@pytest.mark.parametrize(
    ("policy", "meaning"),
    [
        ("fixed:1", "every request drafts 1 token in every step"),
        ("table:64=3/128=1", "a length by batch size, as in vLLM: 3 up to 64 requests, 1 up to 128 requests, 0 above"),
        ("mine", legend.UNKNOWN),
        (None, legend.OTHER),
    ],
)
def test_a_name_is_explained(policy: str | None, meaning: str) -> None:
    name = policy or "http://x"
    text = words(page_of(document([run(name, 1.0, 0, policy, 1.0)])))
    assert f"{name} {meaning}" in text


def test_every_policy_is_explained() -> None:
    for name in POLICY_NAMES:
        assert legend.explain(name, make_policy(name).name) != legend.UNKNOWN, name


def test_the_document_explains_its_own_systems() -> None:
    given = document([run("+ off", 1.0, 0, "+ off", 1.0)], {"systems": {"+ off": "all of <it>", "else": "unused"}})
    page = page_of(given)
    assert "all of <it>" in words(page)
    assert "<it>" not in page
    assert "unused" not in page
    assert "old off" in words(page_of(document([run("old off", 1.0, 0, "off", 1.0)])))
    assert legend.explain("old off", "off").endswith("; from a file of results")


def test_the_systems_of_the_benchmarks_are_explained() -> None:
    names = [*LADDER, "+ early exit", "+ overlap", "+ overlap on", "vLLM off", "vLLM K=2"]
    given = explained(document([run(name, 1.0, 0, None if "vLLM" in name else name, 1.0) for name in names]))
    meanings = [system.meaning for system in report.read(given).systems]
    assert len(set(meanings)) == len(names)
    assert not {legend.UNKNOWN, legend.OTHER} & set(meanings)
    plain_policies = document([run("off", 1.0, 0, "off", 1.0)])
    assert explained(plain_policies) == plain_policies


def test_charts_of_many_systems_take_the_whole_width() -> None:
    many = document([run(f"fixed:{k}", rate, 0, f"fixed:{k}", 1.0) for k in range(1, 10) for rate in (1.0, 2.0)])
    assert box(report.compose(many).latency[0].wide)[0] == report.FULL
    assert box(report.compose(full()).latency[0].wide)[0] == report.HALF
    assert 'class="pair crowded"' in page_of(many)


def test_closed_loops_and_clocks_do_not_share_an_axis() -> None:
    page = report.compose(full((None, 1.0, 2.0)))
    assert [chart.name for chart in page.latency] == ["latency", "latency-open"]


def test_lost_requests_are_listed_with_their_reasons() -> None:
    records = tuple(
        Record(i, "chat", 5, 0.0, None, None, 0, error=why) for i, why in enumerate(("full", "full", "reset"))
    )
    one = run("off", 1.0, 1, "off", 1.0)
    lossy = replace(one, summary={**one.summary, "lost": 3}, records=records)
    assert "2 × full; 1 × reset" in words(page_of(document([lossy])))
    assert "Lost requests" in reading(page_of(document([lossy]))).parts
    assert "Lost requests" not in reading(page_of(document([one]))).parts


def test_the_ablation_shows_gains_only_where_the_document_names_its_steps() -> None:
    assert all(at.ablation is None for at in report.compose(full()).loads)
    at = report.compose(full((1.0,), ablation=["off", "fixed:1", "no such system"])).loads[0]
    assert at.ablation is not None
    assert "+20.0%" in at.ablation.wide


def test_fifty_runs_stay_below_three_megabytes_and_records_are_not_in_it() -> None:
    given = full((0.5, 1.0, 1.5), 3)
    records = tuple(Record(i, "secret", 5, 0.0, 1.0, 2.0, 9) for i in range(500))
    given = replace(given, runs=tuple(replace(each, records=records) for each in given.runs))
    page = page_of(given)
    assert len(given.runs) > 50
    assert len(page.encode()) < 3_000_000
    assert "secret" not in page


def test_a_long_time_line_is_put_together_without_losing_tokens() -> None:
    moments = [Moment(0.1 * (i + 1), i % 5, 0, 1 + i % 7, 2, 1, 2.0, 1.0) for i in range(7001)]
    merged = report.slices(moments)
    assert len(merged) <= report.MOST_SLICES
    assert sum(moment.emitted for moment in merged) == sum(moment.emitted for moment in moments)
    assert merged[-1].time == moments[-1].time
    assert all(moment.mean_length == pytest.approx(2.0) for moment in merged)


def test_a_short_time_line_is_left_as_it_is() -> None:
    moments = [Moment(0.1 * (i + 1), 0, 0, 4, 2, 1, 0.5, 0.5) for i in range(50)]  # none runs when a slice ends
    assert report.slices(moments) == moments


def test_the_example_of_the_schema_can_be_drawn() -> None:
    if not EXAMPLE.is_file():
        pytest.skip("no example.json beside the tests")
    given = Document.from_dict(json.loads(EXAMPLE.read_text(encoding="utf-8")))
    text = words(page_of(given))
    assert all(group.system in text for group in given.groups)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SHIPPED.glob("*/results.json")))
def test_a_shipped_page_explains_its_systems_and_opens_on_a_time_line(name: str) -> None:
    given = Document.from_dict(json.loads((SHIPPED / name / "results.json").read_text(encoding="utf-8")))
    page = (SHIPPED / name / "report.html").read_text(encoding="utf-8")
    for system in report.read(explained(given)).systems:
        assert system.meaning not in (legend.UNKNOWN, legend.OTHER)
        assert str(escape(system.meaning)) in page, system.name
    opened = re.findall(r'id="(load|system)-(\d+)" checked', page)
    load, system_number = (number for _, number in opened)
    assert re.search(rf'<div data-load="{load}" data-system="{system_number}"><div class="drawing"', page)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_browser_there_is_a_page_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "browser", lambda: None)
    said: list[str] = []
    written = report.write_report(tmp_path / "new" / "folder", full((1.0,), 1), said.append)
    assert written == (tmp_path / "new" / "folder" / "report.html",)
    assert len(said) == 1
    assert "no PNGs" in said[0]


def test_a_browser_that_fails_leaves_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "browser", lambda: "/bin/false")
    said: list[str] = []
    assert len(report.write_report(tmp_path, full((1.0,), 1), said.append)) == 1
    assert len(said) == 1


def test_a_browser_that_fails_takes_its_helpers_with_it(tmp_path: Path) -> None:
    """The helper holds a pipe, which closes when it ends."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.CalledProcessError):
        report._run_alone(["sh", "-c", f"exec 3> {fifo}; (sleep 60; echo survived >&3) & exit 3"])
    os.set_blocking(held, True)
    assert os.read(held, 100) == b""
    os.close(held)


def test_a_browser_draws_a_png_at_twice_its_size(tmp_path: Path) -> None:
    if report.browser() is None:
        pytest.skip("no Chromium: install the package chromium")
    chart = charts.bar_chart("t", [Bar("a", 1.0, "1", Look("blue"))], Axis("b", str), Size(200))
    (path,) = report.write_images(tmp_path, {"bars.png": chart}, pytest.fail)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") == 2 * (200 + 32)


def test_images_carry_their_own_colours() -> None:
    images = report.compose(full(ablation=["off", "faser"])).images
    names = ("latency", "throughput", "timeline", "positions", "categories", "phases", "ablation")
    assert list(images) == [f"{name}.png" for name in names]
    for chart in images.values():
        alone = charts.standalone(chart)
        assert "var(--" not in alone
        assert "<style>" in alone


# ── numbers in words ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0512, "0.05"), (5.571, "5.57"), (55.71, "55.7"), (557.1, "557"), (5571, "5,571")]
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert report.plain(value) == text


def test_times_and_dates_read_well() -> None:
    assert report.milliseconds(0.0557) == "55.7 ms"
    assert report.milliseconds(12.3) == "12.3 s"
    assert report.when("2026-11-15T10:31:00+01:00") == "15 November 2026, 09:31 UTC"
    assert report.facts({"a_b": {"c": 1.23456, "d": True}, "e": None, "f": list(range(10))}) == [
        ("a b", "c 1.235, d yes"),
        ("f", "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ]


# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (0, 7.3), (0, 1e-4), (3, 3), (0, 98765), (0.5, 120)])
@pytest.mark.parametrize("whole", [False, True])
def test_ticks_enclose_the_values_in_even_steps(low: float, high: float, whole: bool) -> None:
    found = charts.ticks(low, high, 5, whole)
    steps = [after - before for before, after in pairwise(found)]
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert not whole or all(tick == int(tick) for tick in found)


@pytest.mark.parametrize(("low", "high"), [(1, 1000), (5.57, 470), (0.003, 9000), (2, 60)])
def test_wide_ticks_enclose_the_values(low: float, high: float) -> None:
    found = charts.wide_ticks(low, high)
    assert found == sorted(found)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 9


@pytest.mark.parametrize("wide", [False, True])
def test_a_scale_is_monotone_and_stays_in_its_box(wide: bool) -> None:
    place = Scale(1, 100, 20, 300, wide)
    pixels = [place(value) for value in (0.5, 1, 2, 5, 40, 99, 100, 150)]
    assert pixels == sorted(pixels)
    assert (pixels[0], pixels[-1]) == (20, 300)


@pytest.mark.parametrize("wanted", [[50.0] * 9, [1, 2, 3, 99], [300, -20, 40], [7.0], []])
def test_labels_keep_their_order_and_distance(wanted: list[float]) -> None:
    places = charts.spread_out(wanted, 14, 0, 200)
    ordered = [place for _, place in sorted(zip(wanted, places, strict=True))]
    assert all(after - before >= 14 - 1e-9 for before, after in pairwise(ordered))
    assert all(-1e-9 <= place <= 200 + 1e-9 for place in places)


def coordinates(chart: Markup) -> Iterator[tuple[float, float]]:
    """Of every mark: circles, rectangles' corners, texts that are not turned, and paths of absolute points."""
    for tag, attributes in reading(str(chart)).tags:
        numbers = {name: float(value) for name, value in attributes.items() if re.fullmatch(r"-?[\d.]+", value or "")}
        if tag == "rect":
            yield numbers["x"], numbers["y"]
            yield numbers["x"] + numbers["width"], numbers["y"] + numbers["height"]
        elif tag == "circle":
            yield numbers["cx"], numbers["cy"]
        elif tag == "text" and "x" in numbers:
            yield numbers["x"], numbers["y"]
        elif tag == "path" and re.fullmatch(r"[ML\d.,Z-]+", attributes["d"] or ""):
            for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", attributes["d"] or ""):
                yield float(x), float(y)


def box(chart: Markup) -> tuple[float, float]:
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', chart)[0]
    return float(width), float(height)


def lines(number: int) -> list[Line]:
    points = tuple(Point(x, 3.0 + x * x, 2.0 + x * x, 4.5 + x * x, f"at {x}") for x in (0.5, 1.0, 2.0, 5.0))
    gap = (*points[:2], Point(2.0, None), points[3])
    return [Line(f"a rather long name {i}", Look("blue"), gap if i % 2 else points) for i in range(number)]


DRAWINGS = {
    "lines": lambda size: charts.line_chart("t", lines(9), Axis("x", str), Axis("y", str), replace(size, height=300)),
    "no lines": lambda size: charts.line_chart("t", [], Axis("x", str), Axis("y", str), replace(size, height=300)),
    "one point": lambda size: charts.line_chart(
        "t", [Line("a", Look("red"), (Point(1.0, 0.0),))], Axis("x", str), Axis("y", str), replace(size, height=300)
    ),
    "bars": lambda size: charts.bar_chart(
        "t", [Bar("off", 5.0, "5.00", Look("grey"), 4.0, 6.0), Bar("x" * 60, None, "–", Look("blue"))],
        Axis("y", str), size,
    ),
    "stacks": lambda size: charts.stacked_bars(
        "t", [Stack("a", (0.2, 0.8), "9 s", ("", "")), Stack("b", (0.0, 0.0), "0 s", ("", ""))],
        [("draft", Look("orange")), ("a phase with a long name", Look("blue"))], size, str,
    ),
    "grid": lambda size: charts.grid(
        "t", ["code", "chat"], [f"fixed:{k}" for k in range(1, 9)], [[0.5] * 8, [None, *[1.0] * 7]], str,
        [[""] * 8] * 2, size,
    ),
    "timeline": lambda size: charts.timeline(
        "t", [1.0, 2.0, 3.0], [Panel(Axis("y", str), (Trace("a", Look("blue"), (1.0, None, 3.0), True),))],
        Trace("on", Look("blue"), (0.0, 1.0, None)), size,
    ),
}  # fmt: skip


@pytest.mark.parametrize("width", [334, 508, 1050])
@pytest.mark.parametrize("name", DRAWINGS)
def test_every_mark_lies_within_the_box(name: str, width: int) -> None:
    chart = DRAWINGS[name](Size(width))
    right, bottom = box(chart)
    assert right == width
    for x, y in coordinates(chart):
        assert -0.01 <= x <= right
        assert -0.01 <= y <= bottom


def test_a_line_runs_from_left_to_right_and_breaks_at_a_gap() -> None:
    chart = charts.line_chart("t", lines(2), Axis("x", str), Axis("y", str), Size(500, 300))
    strokes = [a["d"] or "" for tag, a in reading(str(chart)).tags if tag == "path" and a.get("class") == "stroke"]
    assert len(strokes) == 3  # one whole line, and one of two pieces
    for stroke in strokes:
        xs = [float(x) for x in re.findall(r"([\d.]+),", stroke)]
        assert xs == sorted(xs)


def test_far_values_turn_a_wide_axis_logarithmic_and_say_so() -> None:
    far = [Line("a", Look("blue"), (Point(1, 1.0), Point(2, 900.0)))]
    assert "ms, logarithmic" in charts.line_chart("t", far, Axis("x", str), Axis("ms", str, wide=True), Size(500, 300))
    assert "logarithmic" not in charts.line_chart("t", far, Axis("x", str), Axis("ms", str), Size(500, 300))


def test_a_step_holds_from_the_time_before_to_its_own() -> None:
    panel = Panel(Axis("y", str), (Trace("a", Look("blue"), (1.0, 1.0, 0.0)),), height=100)
    chart = charts.timeline("t", [1.0, 2.0, 4.0], [panel], None, Size(500))
    (stroke,) = (a["d"] or "" for tag, a in reading(str(chart)).tags if tag == "path" and a.get("class") == "stroke")
    start, middle, end = (float(x) for x in re.findall(r"(?:M|H)([\d.]+)", stroke))
    assert (middle - start) == pytest.approx((end - start) / 2, abs=0.1)


def test_words_in_a_chart_are_escaped() -> None:
    chart = charts.bar_chart("<t>", [Bar("<i>", 1.0, "&", Look("blue"), tip='"<b>')], Axis("<u>", str), Size(300))
    assert not {"i", "b", "u", "t"} & {tag for tag, _ in reading(str(chart)).tags}
