"""Ticks, scales and charts: where they draw, and what they must not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from markupsafe import Markup

from faser.bench.report import charts, scales
from faser.bench.report.charts import Bar, BarPart, Line, Panel, Point, Trace
from faser.bench.report.scales import Axis, Scale
from faser.bench.report.svg import Look, Size
from tests.bench.markup import box, reading


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (0, 7.3), (0, 1e-4), (3, 3), (0, 98765), (0.5, 120)])
@pytest.mark.parametrize("whole", [False, True])
def test_ticks_enclose_the_values_in_even_steps(low: float, high: float, whole: bool) -> None:
    found = scales.ticks(low, high, 5, whole)
    steps = [after - before for before, after in pairwise(found)]
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert not whole or all(tick == int(tick) for tick in found)


@pytest.mark.parametrize(("low", "high"), [(1, 1000), (5.57, 470), (0.003, 9000), (2, 60)])
def test_wide_ticks_enclose_the_values(low: float, high: float) -> None:
    found = scales.wide_ticks(low, high)
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
    places = scales.spread_out(wanted, 14, 0, 200)
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
        "t", [Bar("off", (BarPart(5.0, Look("grey")),), "5.00", 4.0, 6.0), Bar("x" * 60, (), "–")], size,
    ),
    "bars of parts": lambda size: charts.bar_chart(
        "t", [Bar("a", (BarPart(0.2, Look("orange"), text="20%"), BarPart(0.8, Look("blue"), text="80%")), "9 s"),
              Bar("b", (BarPart(0.0, Look("orange")), BarPart(0.0, Look("blue"))), "0 s")],
        size, [("draft", Look("orange")), ("a phase with a long name", Look("blue"))],
    ),
    "grid": lambda size: charts.grid(
        "t", ["code", "chat"], [f"fixed:{k}" for k in range(1, 9)],
        {("code", f"fixed:{k}"): BarPart(k / 8, Look("blue"), text="x") for k in range(1, 9)}, size,
    ),
    "grid of one column": lambda size: charts.grid(
        "t", ["code"], ["faser"], {("code", "faser"): BarPart(0.5, Look("blue"), text="50%")}, size
    ),
    "timeline": lambda size: charts.timeline(
        "t", [0.0, 1.0, 2.0, 3.0], [Panel(Axis("y", str), (Trace("a", Look("blue"), (1.0, None, 3.0), True),))],
        Trace("on", Look("blue"), (0.0, 1.0, None)), Trace("away", Look("red"), (0.0, 1.0, 0.5)), size,
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
    trace = Trace("a", Look("blue"), (1.0, 1.0, 0.0))
    chart = charts.timeline("t", [0.0, 1.0, 2.0, 4.0], [Panel(Axis("y", str), (trace,))], trace, None, Size(500))
    (stroke,) = (a["d"] or "" for tag, a in reading(str(chart)).tags if tag == "path" and a.get("class") == "stroke")
    start, middle, end = (float(x) for x in re.findall(r"(?:M|H)([\d.]+)", stroke))
    assert (middle - start) == pytest.approx((end - start) / 2, abs=0.1)


def test_a_band_lies_behind_every_panel_where_its_share_is_above_zero() -> None:
    trace = Trace("a", Look("blue"), (1.0, 1.0, 0.0, 0.0))
    band = Trace("away", Look("red"), (0.0, 1.0, 1.0, 0.5))
    panel = Panel(Axis("y", str), (trace,))
    chart = charts.timeline("t", [0.0, 1.0, 2.0, 4.0, 5.0], [panel, panel], trace, band, Size(500))
    found = [a for tag, a in reading(str(chart)).tags if tag == "rect" and a.get("fill") == "var(--red)"]
    *shaded, swatch = [(float(a["width"] or 0), float(a.get("fill-opacity") or 1)) for a in found]
    assert len(shaded) == 4, "two stretches in each of two panels"
    (long, dark), (short, pale) = shaded[:2]
    assert shaded[2:] == shaded[:2]
    assert long == pytest.approx(3 * short, abs=0.2)
    assert dark == 2 * pale == charts.BAND_OPACITY
    assert swatch == (10, 1)
    assert "away" in reading(str(chart)).text


def test_words_in_a_chart_are_escaped() -> None:
    parts = (BarPart(1.0, Look("blue"), tip='"<b>', text="<u>"),)
    chart = charts.bar_chart("<t>", [Bar("<i>", parts, "&")], Size(300))
    assert not {"i", "b", "u", "t"} & {tag for tag, _ in reading(str(chart)).tags}
