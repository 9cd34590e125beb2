"""Charts as SVG: lines with bands, bars, grids and time lines.

Knows axes, labels and layout. Knows nothing of benchmarks. A missing value is a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

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

PANEL_HEIGHT, BAR_HEIGHT, CELL_HEIGHT = 84, 28, 28  # pixels
BAND_OPACITY = 0.16


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
class BarPart:
    """A piece of a bar; `text` stands inside if it fits."""

    value: float
    look: Look
    tip: str = ""
    text: str = ""


@dataclass(frozen=True)
class Bar:
    """Parts one after another; `text` stands at the end. Without parts the value is missing."""

    name: str
    parts: tuple[BarPart, ...]
    text: str
    low: float | None = None
    high: float | None = None


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
    x = Scale(first, last, left + 8, right - 8, wide=len(places) > 2 and first > 0 and last / first > 20)

    drawn = [*_levels(levels, y, up, left, right), label(up.label + (", logarithmic" if y.wide else ""), 0, 12)]
    drawn += _columns(spaced(places, x, across.show), x, across.show, bottom)
    drawn.append(label(across.label, (left + right) / 2, size.height - 4, "middle"))
    ends = [[(x(point.x), y(point.y)) for point in line.points if point.y is not None][-1] for line in lines]
    labels = spread_out([end[1] for end in ends], 14, top, bottom)
    for line, end, label_y in zip(lines, ends, labels, strict=True):
        lead = [(end[0] + 5, end[1]), (right + 9, label_y)]
        parts = [node("path", class_="lead", fill="none", d=path_of(lead)), *_line(line, x, y)]
        parts += [marker_at(line.look, right + 15, label_y), _line_name(line, right + 23, label_y + 4, names - 27)]
        drawn.append(node("g", *parts, class_="series", data_name=line.name))
    return svg(title, size.width, size.height, *drawn)


def _line(line: Line, x: Scale, y: Scale) -> list[Markup]:
    """Its bands, strokes and markers."""
    look, parts = line.look, []
    for run in (list(run) for known, run in groupby(line.points, lambda point: point.y is not None) if known):
        if len(run) > 1 and all(point.low is not None and point.high is not None for point in run):
            upper = [(x(point.x), y(point.high or 0.0)) for point in run]
            lower = [(x(point.x), y(point.low or 0.0)) for point in reversed(run)]
            parts.append(node("path", class_="band", fill=look.paint, d=path_of([*upper, *lower]) + "Z"))
        path = path_of([(x(point.x), y(point.y or 0.0)) for point in run])
        parts.append(stroke_of(path, look))
    for point in line.points:
        if point.y is not None:
            parts.append(marker_at(look, x(point.x), y(point.y), tooltip(point.tip)))
    return parts


def _line_name(line: Line, x: float, y: float, room: float) -> Markup:
    words, kind = shortened(line.name, room), "strong" if line.look.thickness > 2 else None
    whole = tooltip(line.name if words != line.name else "")
    return node("text", words, whole, x=x, y=y, class_=kind, style=f"fill:{line.look.paint}")


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bar_chart(title: str, bars: Sequence[Bar], size: Size, legend: Sequence[tuple[str, Look]] = ()) -> Markup:
    """One bar a row, with its spread as a whisker. The legend of the parts, or else the title, stands on top."""
    names = min(max((width_of(bar.name) for bar in bars), default=0.0), size.width * 0.34)
    texts = max((width_of(bar.text) for bar in bars), default=0.0)
    high = max((max(sum(part.value for part in bar.parts), bar.high or 0.0) for bar in bars), default=0.0)
    left = names + 10
    x = Scale(0.0, high or 1.0, left, size.width - texts - 12)
    drawn, y = [label(title, 0, 12)], 12.0
    if legend:
        drawn, y = _legend(legend, left if size.width > 450 else 0, size.width, y)
    top = y + 12
    for index, bar in enumerate(bars):
        drawn.append(_bar(bar, x, top + BAR_HEIGHT * (index + 0.5), names))
    bottom = top + BAR_HEIGHT * len(bars)
    drawn.append(node("line", class_="baseline", x1=left, x2=left, y1=top, y2=bottom))
    return svg(title, size.width, bottom + 6, *drawn)


def _bar(bar: Bar, x: Scale, middle: float, room: float) -> Markup:
    drawn, total, end = [label(shortened(bar.name, room), x.start - 10, middle + 4, "end")], 0.0, x.start
    for part in bar.parts:
        start, end = x(total), x(total + part.value)
        total += part.value
        gap = 1.0 if len(bar.parts) > 1 and end - start > 3 else 0.0  # between neighbours
        drawn.append(node("rect", tooltip(part.tip), x=start, y=middle - 8, width=end - start - gap, height=16,
                          fill=part.look.paint))  # fmt: skip
        if part.text and width_of(part.text) + 8 < end - start:
            kind = "small" if part.look.pale else "inside small"
            drawn.append(label(part.text, (start + end) / 2, middle + 4, "middle", kind))
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        start, end = x(bar.low), x(bar.high)
        drawn.append(node("path", class_="whisker", d=f"M{start:.1f},{middle - 4:.1f}v8m0,-4H{end:.1f}m0,-4v8"))
    drawn.append(label(bar.text, end + 7, middle + 4, kind="strong"))
    return node("g", *drawn, class_="series", data_name=bar.name)


# ── grids ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def grid(
    title: str, rows: Sequence[str], columns: Sequence[str], shares: Mapping[tuple[str, str], BarPart], size: Size
) -> Markup:
    """A table of shares by row and column; a larger share has a darker cell."""
    names = min(max((width_of(row) for row in rows), default=0.0), size.width * 0.3)
    left, room = names + 10, size.width - names - 10
    tilted = any(width_of(column) + 6 > min(room / len(columns), 92.0) for column in columns)
    overhang = 28.0 if tilted else 0.0  # of the last name, to the right of its column
    width = min((room - overhang) / len(columns), 92.0)
    top = 24 + (min(max(map(width_of, columns)), 96.0) * 0.72 if tilted else 0)
    drawn = []
    for index, column in enumerate(columns):
        x = left + width * (index + 0.5)
        turned = node("text", shortened(column, 96), transform=f"translate({x - 2:.1f} {top - 8:.1f}) rotate(-45)")
        drawn.append(turned if tilted else label(column, x, top - 8, "middle"))
    for row_index, row in enumerate(rows):
        y = top + CELL_HEIGHT * row_index
        drawn.append(label(shortened(row, names), left - 10, y + CELL_HEIGHT / 2 + 4, "end"))
        for index, column in enumerate(columns):
            drawn.append(_cell(shares.get((row, column)), left + width * index, y, width - 2))
    return svg(title, size.width, top + CELL_HEIGHT * len(rows) + 4, *drawn)


def _cell(part: BarPart | None, x: float, y: float, width: float) -> Markup:
    box = {"x": x, "y": y, "width": width, "height": CELL_HEIGHT - 2, "rx": 3}
    middle = (x + width / 2, y + CELL_HEIGHT / 2 + 3)
    if part is None:
        return node("g", node("rect", class_="track", **box), label("–", *middle, "middle", "strong"))
    shade = node("rect", fill=part.look.paint, fill_opacity=f"{0.55 * part.value**1.5:.2f}", **box)
    words = label(part.text, *middle, "middle", "strong")
    return node("g", tooltip(part.tip), node("rect", class_="track", **box), shade, words)


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(
    title: str, edges: Sequence[float], panels: Sequence[Panel], strip: Trace, band: Trace | None, size: Size
) -> Markup:
    """Panels of step lines over one time axis, a value from edge to edge.

    Strip and band are shares, darker where larger: the strip lies below the panels, the band behind them.
    """
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
        drawn += _shares(band, edges, x, top, PANEL_HEIGHT, BAND_OPACITY) if band is not None else []
        drawn += _panel(panel, edges, x, top, top + PANEL_HEIGHT)
        y = top + PANEL_HEIGHT + 16
    bottom = y + 30
    if band is not None:
        legend, _ = _legend([(band.name, band.look)], max(left, width_of(strip.name) + 14), right, y + 6)
        drawn += legend
    track = node("rect", class_="track", x=x.start, y=y + 14, width=x.end - x.start, height=10)
    drawn += [label(strip.name, 0, y + 6), track, *_shares(strip, edges, x, y + 14, 10)]
    enclosing = ticks(edges[0], edges[-1], max(3, int((right - left) / 80)))
    across = [tick for tick in enclosing if edges[0] <= tick <= edges[-1]]
    drawn.append(node("line", class_="baseline", x1=left, x2=right, y1=bottom, y2=bottom))
    drawn += _columns(across, x, lambda value: f"{value:g}", bottom)
    drawn.append(label("seconds since the start", (left + right) / 2, bottom + 34, "middle"))
    overlay = node("line", class_="lead cursor", x1=left, x2=left, y1=0, y2=bottom, visibility="hidden")
    return svg(title, size.width, bottom + 40, *drawn, overlay, data_left=left, data_right=right)


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


def _shares(
    trace: Trace, edges: Sequence[float], x: Scale, top: float, height: float, opacity: float = 1.0
) -> list[Markup]:
    """A rectangle from edge to edge, as opaque as the share is large; nothing where it is zero."""
    rounded = [None if value is None else round(value, 1) for value in trace.values]
    return [
        node("rect", x=x(start), y=top, width=x(end) - x(start), height=height, fill=trace.look.paint,
             fill_opacity=f"{opacity * value:.2g}")
        for run in _steps(rounded, edges) for start, end, value in run if value > 0
    ]  # fmt: skip
