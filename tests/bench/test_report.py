"""The report of a benchmark: what it says, and what it must not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from benchmarks.lib.ablation import LADDER, explained
from faser.bench.report import charts, drawings, figures, legend, page, svg, tables
from faser.bench.report.charts import Bar, BarPart, Line, Point
from faser.bench.report.scales import Axis
from faser.bench.report.svg import Look, Size
from faser.policy import POLICIES as POLICY_NAMES
from faser.policy import make_policy
from faser.traffic.document import FIGURES, Category, Document, Moment, Record, RunDocument
from faser.traffic.summary import group_runs
from tests.bench.markup import box, reading

EXAMPLE = Path(__file__).with_name("example.json")
SHIPPED = Path(__file__).parents[2] / "docs" / "results"
POLICIES = ("off", "fixed:1", "fixed:3", "goodput", "faser")


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
    return page.render(page.compose(given))


def words(page: str) -> str:
    return re.sub(r"\s+", " ", " ".join(reading(page).text))


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_nests_and_names_every_system_load_and_part() -> None:
    html = page_of(full(ablation=["off", "fixed:3", "faser"]))
    text = words(html)
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
    parts = reading(html).parts
    assert parts[:4] == ["Headline", "Systems", "All figures", "Over time"]
    assert set(parts[4:]) == {"Acceptance", "Where time goes", "Ablation", "What the figures mean"}
    assert "faser bench --policies off,fixed:1..3 --report 'a folder'" in text


def test_the_page_refers_to_nothing_outside_itself() -> None:
    html = page_of(full()).replace("http://www.w3.org/2000/svg", "")
    for tag, attributes in reading(html).tags:
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), f"{tag} loads {attributes[name]}"
    assert not re.search(r"https?://|@import|url\((?!#|data:)", html)


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
    results = figures.read(full((1.0,)))
    table = tables.figure_table(results, results.loads[0], figures.SPEED)
    assert table.columns[:3] == ("tokens/s", "× off", "× vLLM K=4")
    off, faser, other = table.rows[0], table.rows[4], table.rows[5]
    assert (off.cells[0].text, off.cells[0].spread, off.cells[1].text) == ("134", "132–137", "1.00×")
    assert (faser.cells[1].text, faser.cells[1].tone) == ("1.80×", "good")
    assert [cell.best for cell in (off.cells[0], faser.cells[0], other.cells[0])] == [False, False, True]
    assert table.columns[3] == "mean, ms"


def test_lower_is_better_for_times() -> None:
    results = figures.read(full((1.0,)))
    table = tables.load_table(results, figures.LATENCY)
    assert [row.cells[0].best for row in table.rows] == [False] * 5 + [True]
    assert [row.cells[0].tone for row in table.rows] == [""] + ["good"] * 5
    assert all(float(row.cells[0].ratio.rstrip("×")) > 1 for row in table.rows[1:])


def test_a_first_place_within_the_spread_of_others_is_called_level() -> None:
    results = figures.read(full((1.0,)))
    clear = tables.winner(results, results.loads[0], figures.LATENCY)
    assert clear is not None
    assert (clear.system.name, clear.level) == ("vLLM K=4", 0)
    close = [run("off", 1.0, 0, "off", 1.0), run("off", 1.0, 1, "off", 1.1), run("faser", 1.0, 0, "faser", 1.08)]
    results = figures.read(document(close))
    level = tables.winner(results, results.loads[0], figures.LATENCY)
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
    html = page_of(given)
    reader = reading(html)
    assert "alert('x')" not in "".join(reader.scripts)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not any("onclick" in attributes for _, attributes in reader.tags)
    assert "&lt;script&gt;" in html


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
    html = page_of(document([run("faser", 1.0, 0, "faser", 1.0)]))
    assert 'class="ratio' not in html
    assert len(page.compose(document([run("faser", 1.0, 0, "faser", 1.0)])).latency) == 1
    assert re.search(r'class="card sticky" hidden', html)


def test_a_value_that_a_system_does_not_report_is_a_gap() -> None:
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
    results = figures.read(given)
    rows = [
        [row.system.name for row in tables.figure_table(results, load, figures.SPEED).rows] for load in results.loads
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
    made = page.compose(document(runs))
    at = made.loads[made.chosen]
    assert (made.seen[made.traced].name, at.load.rate) == opens
    assert made.seen[made.traced].name in at.timelines
    checked = {a["id"] for tag, a in reading(page.render(made)).tags if tag == "input" and "checked" in a}
    assert checked == {f"load-{made.chosen}", f"system-{made.traced}"}


def test_systems_without_a_time_line_are_crossed_out_and_say_why() -> None:
    html = page_of(document([run("off", 1.0, 0, "off", 1.0), run("faser", 1.0, 0, "faser", 1.0),
                             unseen("off", 2.0, "off"), run("faser", 2.0, 0, "faser", 1.0)]))  # fmt: skip
    crossed = re.findall(r"body:has\(#load-(\d):checked\) label:has\(#system-(\d)\)", html)
    assert crossed == [("1", "0")]
    assert "No time line of off at 2 requests/s: its run has no record of the steps." in words(html)
    assert "Systems crossed out have no time line at 2 requests/s." in words(html)


# ── the systems ──────────────────────────────────────────────────────────────────────────────────────────────────────


def looks(names: Sequence[str | None]) -> list[Look]:
    runs = [run(name or f"server {i}", 1.0, 0, name, 1.0) for i, name in enumerate(names)]
    return [system.look for system in figures.read(document(runs)).systems]


def test_twenty_systems_have_a_marker_each_so_that_colour_is_not_needed() -> None:
    names = ["off", *(f"fixed:{k}" for k in range(1, 7)), *legend.POLICIES, "a", "b", "c", "+ off", None]
    found = looks(list(dict.fromkeys(names)))
    assert len(found) >= 19
    assert len({look.marker for look in found}) == len(found)


def test_forty_systems_still_look_different() -> None:
    found = looks([*(f"policy {i}" for i in range(20)), *(f"fixed:{k}" for k in range(1, 13)), *[None] * 8])
    assert len({(look.colour, look.dash, look.marker) for look in found}) == 40


def test_the_lines_and_the_legend_draw_the_marker() -> None:
    shapes = {str(svg.swatch(Look("blue", marker=marker))) for marker in svg.MARKERS}
    assert len(shapes) == len(svg.MARKERS) == 20
    points = (Point(1, 1.0), Point(2, 2.0))
    drawn = [
        charts.line_chart("t", [Line("a", Look("blue", marker=marker), points)], Axis("x", str), Axis("y", str), size)
        for marker in svg.MARKERS
        for size in [Size(500, 300)]
    ]
    assert len(set(drawn)) == len(svg.MARKERS)


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
    html = page_of(given)
    assert "all of <it>" in words(html)
    assert "<it>" not in html
    assert "unused" not in html
    assert "old off" in words(page_of(document([run("old off", 1.0, 0, "off", 1.0)])))
    assert legend.explain("old off", "off").endswith("; from a file of results")


def test_the_systems_of_the_benchmarks_are_explained() -> None:
    names = [*LADDER, "+ early exit", "+ overlap", "+ overlap on", "vLLM off", "vLLM K=2"]
    given = explained(document([run(name, 1.0, 0, None if "vLLM" in name else name, 1.0) for name in names]))
    meanings = [system.meaning for system in figures.read(given).systems]
    assert len(set(meanings)) == len(names)
    assert not {legend.UNKNOWN, legend.OTHER} & set(meanings)
    plain_policies = document([run("off", 1.0, 0, "off", 1.0)])
    assert explained(plain_policies) == plain_policies


def test_charts_of_many_systems_take_the_whole_width() -> None:
    many = document([run(f"fixed:{k}", rate, 0, f"fixed:{k}", 1.0) for k in range(1, 10) for rate in (1.0, 2.0)])
    assert box(page.compose(many).latency[0].wide)[0] == figures.FULL
    assert box(page.compose(full()).latency[0].wide)[0] == figures.HALF
    assert 'class="pair crowded"' in page_of(many)


def test_closed_loops_and_clocks_do_not_share_an_axis() -> None:
    made = page.compose(full((None, 1.0, 2.0)))
    assert [chart.name for chart in made.latency] == ["latency", "latency-open"]


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
    assert all("ablation" not in at.charts for at in page.compose(full()).loads)
    at = page.compose(full((1.0,), ablation=["off", "fixed:1", "no such system"])).loads[0]
    assert "+20.0%" in at.charts["ablation"].wide


def test_fifty_runs_stay_below_three_megabytes_and_records_are_not_in_it() -> None:
    given = full((0.5, 1.0, 1.5), 3)
    records = tuple(Record(i, "secret", 5, 0.0, 1.0, 2.0, 9) for i in range(500))
    given = replace(given, runs=tuple(replace(each, records=records) for each in given.runs))
    html = page_of(given)
    assert len(given.runs) > 50
    assert len(html.encode()) < 3_000_000
    assert "secret" not in html


def test_a_long_time_line_is_put_together_without_losing_tokens() -> None:
    moments = [Moment(0.1 * (i + 1), i % 5, 0, 1 + i % 7, 2, 1, 2.0, 1.0) for i in range(7001)]
    merged = drawings.slices(moments)
    assert len(merged) <= drawings.MOST_SLICES
    assert sum(moment.emitted for moment in merged) == sum(moment.emitted for moment in moments)
    assert merged[-1].time == moments[-1].time
    assert all(moment.mean_length == pytest.approx(2.0) for moment in merged)


def moved(away: Sequence[float]) -> RunDocument:
    """A run whose draft was away for these shares of its slices."""
    given = run("faser", 1.0, 0, "faser", 1.0)
    return replace(given, moments=tuple(replace(m, away=a) for m, a in zip(given.moments, away, strict=True)))


def test_the_time_line_has_a_band_where_the_draft_was_away() -> None:
    html = page_of(document([moved([0.0] * 20 + [1.0] * 15 + [0.0] * 25)]))
    assert "draft offloaded" in words(html)
    (told,) = set(re.findall(r'data-moments="([^"]+)"', html))
    traces = dict(json.loads(unescape(told))["traces"])
    assert traces["draft offloaded"] == [0.0] * 20 + [1.0] * 15 + [0.0] * 25
    still = page_of(document([moved([0.0] * 60)]))
    assert "draft offloaded" not in words(still)


def test_a_merged_time_line_keeps_the_share_of_the_time_away() -> None:
    moments = [Moment(0.1 * (i + 1), 1, 0, 1, 0, 0, 0.0, 0.0, away=float(i >= 360)) for i in range(720)]
    shares = [moment.away for moment in drawings.slices(moments)]
    assert shares == [0.0] * 90 + [1.0] * 90


def test_documents_from_before_drafts_moved_can_be_read() -> None:
    given = full((1.0,), 1).to_dict()
    for each in given["runs"]:
        for moment in each["moments"]:
            del moment["away"]
    read = Document.from_dict(given)
    assert {moment.away for each in read.runs for moment in each.moments} == {0.0}
    assert "draft offloaded" not in words(page_of(read))


def test_a_short_time_line_is_left_as_it_is() -> None:
    moments = [Moment(0.1 * (i + 1), 0, 0, 4, 2, 1, 0.5, 0.5) for i in range(50)]  # none runs when a slice ends
    assert drawings.slices(moments) == moments


def test_the_example_of_the_schema_can_be_drawn() -> None:
    if not EXAMPLE.is_file():
        pytest.skip("no example.json beside the tests")
    given = Document.from_dict(json.loads(EXAMPLE.read_text(encoding="utf-8")))
    text = words(page_of(given))
    assert all(group.system in text for group in given.groups)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SHIPPED.glob("*/results.json")))
def test_a_shipped_page_explains_its_systems_and_opens_on_a_time_line(name: str) -> None:
    given = Document.from_dict(json.loads((SHIPPED / name / "results.json").read_text(encoding="utf-8")))
    html = (SHIPPED / name / "report.html").read_text(encoding="utf-8")
    for system in figures.read(explained(given)).systems:
        assert system.meaning not in (legend.UNKNOWN, legend.OTHER)
        assert str(escape(system.meaning)) in html, system.name
    opened = re.findall(r'id="(load|system)-(\d+)" checked', html)
    load, system_number = (number for _, number in opened)
    assert re.search(rf'<div data-load="{load}" data-system="{system_number}"><div class="drawing"', html)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_browser_there_is_a_page_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "browser", lambda: None)
    said: list[str] = []
    written = page.write_report(tmp_path / "new" / "folder", full((1.0,), 1), said.append)
    assert written == (tmp_path / "new" / "folder" / "report.html",)
    assert len(said) == 1
    assert "no PNGs" in said[0]


def test_a_browser_that_fails_leaves_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "browser", lambda: "/bin/false")
    said: list[str] = []
    assert len(page.write_report(tmp_path, full((1.0,), 1), said.append)) == 1
    assert len(said) == 1


def test_a_browser_that_fails_takes_its_helpers_with_it(tmp_path: Path) -> None:
    """The helper holds a pipe, which closes when it ends."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.CalledProcessError):
        page._run_alone(["sh", "-c", f"exec 3> {fifo}; (sleep 60; echo survived >&3) & exit 3"])
    os.set_blocking(held, True)
    assert os.read(held, 100) == b""
    os.close(held)


def test_a_browser_draws_a_png_at_twice_its_size(tmp_path: Path) -> None:
    if page.browser() is None:
        pytest.skip("no Chromium: install the package chromium")
    chart = charts.bar_chart("t", [Bar("a", (BarPart(1.0, Look("blue")),), "1")], Size(200))
    (path,) = page.write_images(tmp_path, {"bars.png": chart}, pytest.fail)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") == 2 * (200 + 32)


def test_images_carry_their_own_colours() -> None:
    images = page.compose(full(ablation=["off", "faser"])).images
    names = ("latency", "throughput", "timeline", "positions", "categories", "phases", "ablation")
    assert list(images) == [f"{name}.png" for name in names]
    for chart in images.values():
        alone = svg.standalone(chart)
        assert "var(--" not in alone
        assert "<style>" in alone


# ── numbers in words ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0512, "0.05"), (5.571, "5.57"), (55.71, "55.7"), (557.1, "557"), (5571, "5,571")]
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert figures.plain(value) == text


def test_times_and_dates_read_well() -> None:
    assert figures.milliseconds(0.0557) == "55.7 ms"
    assert figures.milliseconds(12.3) == "12.3 s"
    assert figures.when("2026-11-15T10:31:00+01:00") == "15 November 2026, 09:31 UTC"
    assert figures.facts({"a_b": {"c": 1.23456, "d": True}, "e": None, "f": list(range(10))}) == [
        ("a b", "c 1.235, d yes"),
        ("f", "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ]
