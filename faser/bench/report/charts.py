"""Charts as SVG: lines with bands, bars, stacked bars, grids and time lines.

Knows axes, labels and layout. Knows nothing of benchmarks. A missing value is a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from faser.bench.report.scales import Axis, Scale, spaced, spread_out, ticks, value_scale
from faser.bench.report.svg import (
    Look,
    Size,
    label,
    marker_at,
    node,
    path_of,
    shortened,
    stroke_of,
    svg,
    tooltip,
    width_of,
)

PANEL_HEIGHT = 84  # pixels


@dataclass(frozen=True)
class Point:
    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    tip: str = ""


@dataclass(frozen=True)
class Line:
    name: str
    look: Look
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Bar:
    name: str
    value: float | None
    text: str
    look: Look
    low: float | None = None
    high: float | None = None
    tip: str = ""


@dataclass(frozen=True)
class Stack:
    """A bar of several parts; `text` stands at its end."""

    name: str
    parts: tuple[float, ...]
    text: str
    tips: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    name: str
    look: Look
    values: tuple[float | None, ...]
    filled: bool = False


@dataclass(frozen=True)
class Panel:
    """Traces that share an axis."""

    axis: Axis
    traces: tuple[Trace, ...]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _levels(levels: Sequence[float], place: Scale, axis: Axis, left: float, right: float) -> list[Markup]:
    drawn = []
    for level in levels:
        y, kind = place(level), "baseline" if level == levels[0] else "gridline"
        drawn.append(node("line", class_=kind, x1=left, x2=right, y1=y, y2=y))
        drawn.append(label(axis.show(level), left - 8, y + 4, "end"))
    return drawn


def _columns(levels: Sequence[float], place: Scale, show: Callable[[float], str], bottom: float) -> list[Markup]:
    drawn = []
    for level in levels:
        x = place(level)
        drawn.append(node("line", class_="baseline", x1=x, x2=x, y1=bottom, y2=bottom + 4))
        drawn.append(label(show(level), x, bottom + 17, "middle"))
    return drawn


def _legend(entries: Sequence[tuple[str, Look]], left: float, right: float, y: float) -> tuple[list[Markup], float]:
    """Swatches with names, in as many rows as needed; returns the last row's y too."""
    drawn, x = [], left
    for name, look in entries:
        needed = 16 + width_of(name) + 14
        if x > left and x + needed - 14 > right:
            x, y = left, y + 18
        drawn.append(node("rect", x=x, y=y - 9, width=10, height=10, rx=2, fill=look.paint))
        drawn.append(label(name, x + 16, y))
        x += needed
    return drawn, y


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def line_chart(title: str, lines: Sequence[Line], across: Axis, up: Axis, size: Size) -> Markup:
    """Lines with bands, named at their right ends."""
    lines = [line for line in lines if any(point.y is not None for point in line.points)]
    places = sorted({point.x for line in lines for point in line.points})
    seen = [v for line in lines for point in line.points for v in (point.y, point.low, point.high) if v is not None]
    top, bottom = 30.0, size.height - 40.0
    y, levels = value_scale(up, seen, bottom, top, 5)
    left = 14 + max(width_of(up.show(level)) for level in levels)
    names = min(max((width_of(line.name) for line in lines), default=0.0) + 27, size.width * 0.36)
    right = size.width - names - 4
    first, last = (places[0], places[-1]) if places else (0.0, 1.0)
    x = Scale(first, last, left + 8, right - 8, _lie_far_apart(places))

    drawn = [*_levels(levels, y, up, left, right), label(up.label + (", logarithmic" if y.wide else ""), 0, 12)]
    drawn += _columns(spaced(places, x, across.show), x, across.show, bottom)
    drawn.append(label(across.label, (left + right) / 2, size.height - 4, "middle"))
    ends = [_end(line, x, y) for line in lines]
    labels = spread_out([end[1] for end in ends], 14, top, bottom)
    for line, end, label_y in zip(lines, ends, labels, strict=True):
        drawn.append(_line(line, x, y, end, label_y, right + 18, names - 27))
    return svg(title, size.width, size.height, *drawn)


def _lie_far_apart(places: Sequence[float]) -> bool:
    return len(places) > 2 and places[0] > 0 and places[-1] / places[0] > 20


def _end(line: Line, x: Scale, y: Scale) -> tuple[float, float]:
    last = [point for point in line.points if point.y is not None][-1]
    return x(last.x), y(last.y or 0.0)


def _line(
    line: Line, x: Scale, y: Scale, end: tuple[float, float], label_y: float, label_x: float, room: float
) -> Markup:
    look = line.look
    parts = []
    for run in _unbroken(line.points):
        if len(run) > 1 and all(point.low is not None and point.high is not None for point in run):
            upper = [(x(point.x), y(point.high or 0.0)) for point in run]
            lower = [(x(point.x), y(point.low or 0.0)) for point in reversed(run)]
            parts.append(node("path", class_="band", fill=look.paint, d=path_of([*upper, *lower]) + "Z"))
        path = path_of([(x(point.x), y(point.y or 0.0)) for point in run])
        parts.append(stroke_of(path, look))
    for point in line.points:
        if point.y is not None:
            parts.append(marker_at(look, x(point.x), y(point.y), tooltip(point.tip)))
    parts.append(node("path", class_="lead", fill="none", d=path_of([(end[0] + 5, end[1]), (label_x - 9, label_y)])))
    parts.append(marker_at(look, label_x - 3, label_y))
    words = shortened(line.name, room)
    whole = tooltip(line.name if words != line.name else "")
    kind = "strong" if look.thickness > 2 else None
    parts.append(node("text", words, whole, x=label_x + 5, y=label_y + 4, class_=kind, style=f"fill:{look.paint}"))
    return node("g", *parts, class_="series", data_name=line.name)


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """Runs of points without a missing value."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a bar chart are: names to the left of the bars, a text after each."""

    left: float
    scale: Scale
    top: float
    height: int

    @classmethod
    def fit(cls, rows: Sequence[Bar] | Sequence[Stack], high: float, top: float, height: int, size: Size) -> _Rows:
        names = min(max((width_of(row.name) for row in rows), default=0.0), size.width * 0.34)
        texts = max((width_of(row.text) for row in rows), default=0.0)
        return cls(names + 10, Scale(0.0, high or 1.0, names + 10, size.width - texts - 12), top, height)

    def middle(self, index: int) -> float:
        return self.top + self.height * (index + 0.5)

    def name(self, row: Bar | Stack, index: int) -> Markup:
        return label(shortened(row.name, self.left - 10), self.left - 10, self.middle(index) + 4, "end")

    def text(self, row: Bar | Stack, index: int, end: float) -> Markup:
        return label(row.text, end + 7, self.middle(index) + 4, kind="strong")


def bar_chart(title: str, bars: Sequence[Bar], axis: Axis, size: Size) -> Markup:
    """One bar a row, with its spread as a whisker."""
    seen = [value for bar in bars for value in (bar.value, bar.high) if value is not None]
    high = axis.most if axis.most is not None else max(seen, default=1.0)
    rows = _Rows.fit(bars, high, 26, 26, size)
    left, x = rows.left, rows.scale
    drawn = [label(axis.label, 0, 12)]
    for index, bar in enumerate(bars):
        middle, end = rows.middle(index), x(bar.value or 0.0)
        parts: list[object] = [tooltip(bar.tip), rows.name(bar, index)]
        parts.append(node("rect", x=left, y=middle - 8, width=end - left, height=16, rx=2, fill=bar.look.paint))
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            start, end = x(bar.low), x(bar.high)
            shape = f"M{start:.1f},{middle - 4:.1f}v8m0,-4H{end:.1f}m0,-4v8"
            parts.append(node("path", class_="whisker", d=shape))
        parts.append(rows.text(bar, index, end))
        drawn.append(node("g", *parts, class_="series", data_name=bar.name))
    bottom = rows.top + rows.height * len(bars)
    drawn.append(node("line", class_="baseline", x1=left, x2=left, y1=rows.top, y2=bottom))
    return svg(title, size.width, bottom + 6, *drawn)


def stacked_bars(
    title: str, stacks: Sequence[Stack], parts: Sequence[tuple[str, Look]], size: Size, show: Callable[[float], str]
) -> Markup:
    """Rows of parts of a whole, each as wide as its share of the longest row; the legend on top."""
    high = max((sum(stack.parts) for stack in stacks), default=1.0)
    left = _Rows.fit(stacks, high, 0, 28, size).left
    drawn, end = _legend(parts, left if size.width > 450 else 0, size.width, 12)
    rows = _Rows.fit(stacks, high, end + 12, 28, size)
    for index, stack in enumerate(stacks):
        drawn.append(rows.name(stack, index))
        drawn += _stack(stack, [look for _, look in parts], rows.scale, rows.middle(index), show)
        drawn.append(rows.text(stack, index, rows.scale(sum(stack.parts))))
    return svg(title, size.width, rows.top + rows.height * len(stacks) + 4, *drawn)


def _stack(stack: Stack, looks: Sequence[Look], x: Scale, middle: float, show: Callable[[float], str]) -> list[Markup]:
    """The parts of one row, with their values if they fit."""
    drawn, total = [], 0.0
    for value, look, words in zip(stack.parts, looks, stack.tips, strict=True):
        start, end = x(total), x(total + value)
        total += value
        if end - start < 0.3:
            continue
        gap = 1.0 if end - start > 3 else 0.0  # between neighbours
        bar = node("rect", tooltip(words), x=start, y=middle - 9, width=end - start - gap, height=18, fill=look.paint)
        drawn.append(bar)
        figure = show(value)
        if width_of(figure) + 8 < end - start:
            kind = "small" if look.pale else "inside small"
            drawn.append(label(figure, (start + end) / 2, middle + 4, "middle", kind))
    return drawn


# ── grids ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def grid(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]],
    show: Callable[[float], str], tips: Sequence[Sequence[str]], size: Size,
) -> Markup:  # fmt: skip
    """A table of shares; a larger value has a darker cell."""
    names = min(max((width_of(row) for row in rows), default=0.0), size.width * 0.3)
    left = names + 10
    tilted = any(width_of(column) + 6 > min((size.width - left) / max(len(columns), 1), 92.0) for column in columns)
    overhang = 28.0 if tilted else 0.0  # of the last name, to the right of its column
    cell = min((size.width - left - overhang) / max(len(columns), 1), 92.0)
    top = 24 + (min(max(width_of(column) for column in columns), 96.0) * 0.72 if tilted else 0)
    row_height = 28
    drawn = []
    for index, column in enumerate(columns):
        x = left + cell * (index + 0.5)
        if tilted:
            turned = f"translate({x - 2:.1f} {top - 8:.1f}) rotate(-45)"
            drawn.append(node("text", shortened(column, 96), transform=turned))
        else:
            drawn.append(label(column, x, top - 8, "middle"))
    for row_index, row in enumerate(rows):
        y = top + row_height * row_index
        drawn.append(label(shortened(row, names), left - 10, y + row_height / 2 + 4, "end"))
        for index, value in enumerate(values[row_index]):
            drawn.append(_cell(value, show, tips[row_index][index], left + cell * index, y, cell - 2, row_height - 2))
    return svg(title, size.width, top + row_height * len(rows) + 4, *drawn)


def _cell(
    value: float | None, show: Callable[[float], str], tip: str, x: float, y: float, width: float, height: float
) -> Markup:
    words = "–" if value is None else show(value)
    strength = 0.0 if value is None else min(max(value, 0.0), 1.0)
    parts = [tooltip(tip), node("rect", x=x, y=y, width=width, height=height, rx=3, class_="track")]
    if strength:
        parts.append(node("rect", x=x, y=y, width=width, height=height, rx=3, fill="var(--blue)",
                          fill_opacity=f"{0.55 * strength**1.5:.2f}"))  # fmt: skip
    parts.append(label(words, x + width / 2, y + height / 2 + 4, "middle", "strong"))
    return node("g", *parts)


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(title: str, times: Sequence[float], panels: Sequence[Panel], strip: Trace | None, size: Size) -> Markup:
    """Panels of step lines over one time axis; a value holds from the previous time to its own.

    The strip is darker where its share is larger.
    """
    edges = [first_edge(times), *times]
    labels = [panel.axis.show(level) for panel in panels for level in _panel_levels(panel)]
    left = 14 + max(map(width_of, labels), default=20.0)
    right = size.width - 10.0
    x = Scale(edges[0], edges[-1], left, right)
    drawn: list[Markup] = []
    y = 0.0
    for panel in panels:
        y += 12
        drawn.append(label(panel.axis.label, 0, y))
        entries = [(trace.name, trace.look) for trace in panel.traces]
        legend, _ = _legend(entries, max(left, width_of(panel.axis.label) + 14), right, y)
        drawn += legend if len(panel.traces) > 1 else []
        top = y + 14
        drawn += _panel(panel, edges, x, top, top + PANEL_HEIGHT)
        y = top + PANEL_HEIGHT + 16
    if strip is not None:
        y += 6
        drawn += [label(strip.name, 0, y), *_strip(strip, edges, x, y + 8)]
        y += 30
    bottom = y - 6
    enclosing = ticks(edges[0], edges[-1], max(3, int((right - left) / 80)))
    across = [tick for tick in enclosing if edges[0] <= tick <= edges[-1]]
    drawn.append(node("line", class_="baseline", x1=left, x2=right, y1=bottom, y2=bottom))
    drawn += _columns(across, x, lambda value: f"{value:g}", bottom)
    drawn.append(label("seconds since the start", (left + right) / 2, bottom + 34, "middle"))
    overlay = node("line", class_="lead cursor", x1=left, x2=left, y1=0, y2=bottom, visibility="hidden")
    return svg(title, size.width, bottom + 40, *drawn, overlay, data_left=left, data_right=right)


def first_edge(times: Sequence[float]) -> float:
    """The start of the first slice: 0, or one slice length before its end if slices are shorter."""
    if len(times) < 2:
        return 0.0
    length = times[1] - times[0]
    return times[0] - length if times[0] > 1.5 * length else 0.0


def _panel_levels(panel: Panel) -> list[float]:
    seen = [value for trace in panel.traces for value in trace.values if value is not None]
    return ticks(0.0, max(seen, default=1.0) or 1.0, 3, panel.axis.whole)


def _panel(panel: Panel, edges: Sequence[float], x: Scale, top: float, bottom: float) -> list[Markup]:
    levels = _panel_levels(panel)
    y = Scale(levels[0], levels[-1], bottom, top)
    drawn = _levels(levels, y, panel.axis, x.start, x.end)
    for trace in panel.traces:
        for run in _steps(trace.values, edges):
            path = f"M{x(run[0][0]):.1f},{y(run[0][2]):.1f}"
            path += "".join(f"V{y(value):.1f}H{x(end):.1f}" for _, end, value in run)
            if trace.filled:
                area = f"{path}V{bottom:.1f}H{x(run[0][0]):.1f}Z"
                drawn.append(node("path", class_="band", fill=trace.look.paint, d=area))
            drawn.append(stroke_of(path, trace.look))
    return drawn


def _steps(values: Sequence[float | None], edges: Sequence[float]) -> list[list[tuple[float, float, float]]]:
    """Runs of (from, to, value) without a gap; equal neighbours are joined."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for (start, end), value in zip(pairwise(edges), values, strict=True):
        if value is None:
            runs.append([])
        elif runs[-1] and runs[-1][-1][2] == value:
            runs[-1][-1] = (runs[-1][-1][0], end, value)
        else:
            runs[-1].append((start, end, value))
    return [run for run in runs if run]


def _strip(strip: Trace, edges: Sequence[float], x: Scale, top: float) -> list[Markup]:
    drawn = [node("rect", class_="track", x=x.start, y=top, width=x.end - x.start, height=10)]
    rounded = [None if value is None else round(value, 1) for value in strip.values]
    for run in _steps(rounded, edges):
        for start, end, value in run:
            if value > 0:
                drawn.append(node("rect", x=x(start), y=top, width=x(end) - x(start), height=10, fill=strip.look.paint,
                                  fill_opacity=f"{value:.1f}"))  # fmt: skip
    return drawn
