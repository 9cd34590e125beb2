"""Charts as SVG text: lines with bands, bars, stacked bars, grids and time lines.

Knows scales, ticks, labels and colours. Knows nothing of benchmarks, and loads nothing. Colours are CSS variables, so
that a page draws them light or dark; `standalone` writes their light values in. Every text is escaped: what is not
`Markup` is a word of somebody else's. A missing value is a gap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

# Light and dark. The lines of a chart also differ by label and dash, never by colour alone.
PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#0b0c0f"),
    "card": ("#ffffff", "#131519"),
    "line": ("#e3e5ea", "#262a31"),
    "grid": ("#eceef2", "#1f2329"),
    "text": ("#15171c", "#eceef2"),
    "muted": ("#5a606c", "#9ca3b0"),
    "track": ("#eef0f3", "#23272e"),
    "grey": ("#727986", "#8a92a0"),
    "blue": ("#0b62c4", "#5aa9ff"),
    "orange": ("#c25a00", "#f5a742"),
    "purple": ("#8b3a9c", "#d695e6"),
    "brown": ("#8a6a00", "#d9bd4f"),
    "red": ("#c0262d", "#ff7b7b"),
    "pink": ("#c2448f", "#ff9ad2"),
    "violet": ("#5038c8", "#a99bff"),
    "sky": ("#2b8fc7", "#7ccdf5"),
    "green-1": ("#8fc9b6", "#2f6b59"),
    "green-2": ("#66b39b", "#3f8871"),
    "green-3": ("#419c81", "#52a58a"),
    "green-4": ("#218468", "#68c0a3"),
    "green-5": ("#0e6b52", "#84d8bd"),
    "green-6": ("#07513d", "#abecd7"),
    "idle": ("#c9ced6", "#3a404a"),
    "good": ("#0d7a4d", "#3ecf8e"),
    "bad": ("#c0262d", "#ff7b7b"),
}

STYLE = """
.chart text { font: 12px ui-sans-serif, -apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", Arial, sans-serif;
  fill: var(--muted); font-variant-numeric: tabular-nums; }
.chart text.strong { fill: var(--text); font-weight: 600; }
.chart text.inside { fill: var(--card); font-weight: 600; }
.chart text.small { font-size: 11px; }
.chart .gridline { stroke: var(--grid); }
.chart .baseline { stroke: var(--grey); stroke-opacity: .6; }
.chart .lead { stroke: var(--grey); stroke-opacity: .5; }
.chart .stroke { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.chart .band { fill-opacity: .13; }
.chart .track { fill: var(--track); }
.chart .whisker { stroke: var(--text); stroke-width: 1.25; fill: none; }
"""

# Outlines of markers around (0, 0). A circle has no corners.
_OUTLINES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "up": ((0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
    "down": ((0, 1.2), (1.2, -0.9), (-1.2, -0.9)),
    "left": ((-1.2, 0), (0.9, -1.2), (0.9, 1.2)),
    "right": ((1.2, 0), (-0.9, -1.2), (-0.9, 1.2)),
    "star": ((0, -1.5), (0.4, -0.5), (1.4, -0.5), (0.6, 0.2), (0.9, 1.2), (0, 0.6), (-0.9, 1.2), (-0.6, 0.2),
             (-1.4, -0.5), (-0.4, -0.5)),
    "plus": ((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4), (0.4, 1.2), (-0.4, 1.2),
             (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
    "cross": ((0, -0.6), (0.7, -1.3), (1.3, -0.7), (0.6, 0), (1.3, 0.7), (0.7, 1.3), (0, 0.6), (-0.7, 1.3),
              (-1.3, 0.7), (-0.6, 0), (-1.3, -0.7), (-0.7, -1.3)),
    "hourglass": ((-1.1, -1.2), (1.1, -1.2), (-1.1, 1.2), (1.1, 1.2)),
    "bow": ((-1.2, -1.1), (-1.2, 1.1), (1.2, -1.1), (1.2, 1.1)),
}  # fmt: skip
_HOLLOW = "hollow "
MARKERS = (
    *_OUTLINES,
    *(_HOLLOW + name for name in ("circle", "square", "diamond", "up", "down", "left", "right", "star")),
)
MARKER = 3.2  # pixels, from its middle

LETTER = 6.5  # pixels, of 12 px text on average


@dataclass(frozen=True)
class Size:
    """Of a drawing, in its own pixels. Height follows from the content where it is 0."""

    width: int
    height: int = 0


@dataclass(frozen=True)
class Look:
    """How one thing is drawn wherever it appears."""

    colour: str  # in PALETTE
    dash: str = ""
    thickness: float = 1.75
    pale: bool = False  # figures inside it are dark
    marker: str = "circle"  # in MARKERS: the points of a line

    @property
    def paint(self) -> str:
        return f"var(--{self.colour})"


@dataclass(frozen=True)
class Axis:
    """What an axis measures. `most` ends it there; a `wide` one turns logarithmic where values lie far apart."""

    label: str
    show: Callable[[float], str]
    whole: bool = False
    most: float | None = None
    wide: bool = False


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
    """One row of parts; `text` stands at its end."""

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
    """Traces over the same time that share an axis."""

    axis: Axis
    traces: tuple[Trace, ...]
    height: int = 84


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def node(tag: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is class, `stroke_width` is stroke-width; None leaves an attribute out."""
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    opened = Markup("").join(Markup(' {}="{}"').format(name, _brief(value)) for name, value in named)
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, opened, inner) if inner else Markup("<{0}{1}/>").format(tag, opened)


def _brief(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def _text(words: str, x: float, y: float, anchor: str = "start", kind: str | None = None) -> Markup:
    return node("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=kind)


def width_of(words: str) -> float:
    return LETTER * len(words)


def shortened(words: str, room: float) -> str:
    """The words, or as many letters of them as fit."""
    most = max(2, int(room / LETTER))
    return words if len(words) <= most else words[: most - 1] + "…"


def standalone(chart: Markup) -> Markup:
    """A chart as a file of its own, in light colours."""
    style = node("style", Markup(STYLE))
    body = chart.replace(Markup("<svg "), Markup('<svg xmlns="http://www.w3.org/2000/svg" '), 1)
    opened, closed, rest = body.partition(Markup(">"))
    return Markup(re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: PALETTE[found[1]][0], opened + closed + style + rest))


# ── scales ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that enclose low and high, in steps of 1, 2, 2.5 or 5."""
    span = high - low if high > low else abs(high) or 1.0
    rough = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def wide_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Numbers that enclose two positive ones over several powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        every = [factor * 10.0**power for power in powers for factor in factors]
        first = max((i for i, tick in enumerate(every) if tick <= low * 1.0001), default=0)
        last = min((i for i, tick in enumerate(every) if tick >= high * 0.9999), default=len(every) - 1)
        found = every[first : max(last, first + 1) + 1]
        if len(found) <= most + 1:
            break
    return [float(f"{tick:.12g}") for tick in found]


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    wide: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.wide:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high != low else 0.5
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)


def _value_scale(axis: Axis, values: Sequence[float], start: float, end: float, most: int) -> tuple[Scale, list[float]]:
    """From zero, or logarithmic where the axis may be and one value is more than 25 times another."""
    high = axis.most if axis.most is not None else max(values, default=1.0)
    low = min(values, default=0.0)
    if axis.wide and low > 0 and high / low > 25:
        levels = wide_ticks(low, high, most)
        return Scale(levels[0], levels[-1], start, end, wide=True), levels
    levels = ticks(0.0, high, most, axis.whole)
    return Scale(levels[0], levels[-1], start, end), levels


def _spaced(values: Sequence[float], place: Scale, show: Callable[[float], str]) -> list[float]:
    """Those whose labels do not touch the one before."""
    kept: list[float] = []
    for value in values:
        room = (width_of(show(value)) + width_of(show(kept[-1]))) / 2 + 8 if kept else 0.0
        if not kept or place(value) - place(kept[-1]) >= room:
            kept.append(value)
    return kept


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in their order, at least `gap` apart and between low and high while they fit.

    Labels that would touch form a block around their mean.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, int]] = []  # where its first label would like to be, and how many they are

    def first(block: tuple[float, int]) -> float:
        return min(max(block[0], low), high - gap * (block[1] - 1))

    for index in order:
        block = (wanted[index], 1)
        while blocks and first(blocks[-1]) + gap * blocks[-1][1] > first(block):
            start, number = blocks.pop()
            total = number + block[1]
            block = ((start * number + (block[0] - gap * number) * block[1]) / total, total)
        blocks.append(block)
    spread = [first(block) + gap * rank for block in blocks for rank in range(block[1])]
    places = dict(zip(order, spread, strict=True))
    return [places[index] for index in range(len(wanted))]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _svg(title: str, width: float, height: float, *children: object, **attributes: object) -> Markup:
    box = f"0 0 {width:.0f} {height:.0f}"
    return node("svg", *children, class_="chart", viewBox=box, role="img", aria_label=title, **attributes)


def _levels(levels: Sequence[float], place: Scale, axis: Axis, left: float, right: float) -> list[Markup]:
    drawn = []
    for level in levels:
        y, kind = place(level), "baseline" if level == levels[0] else "gridline"
        drawn.append(node("line", class_=kind, x1=left, x2=right, y1=y, y2=y))
        drawn.append(_text(axis.show(level), left - 8, y + 4, "end"))
    return drawn


def _columns(levels: Sequence[float], place: Scale, show: Callable[[float], str], bottom: float) -> list[Markup]:
    drawn = []
    for level in levels:
        x = place(level)
        drawn.append(node("line", class_="baseline", x1=x, x2=x, y1=bottom, y2=bottom + 4))
        drawn.append(_text(show(level), x, bottom + 17, "middle"))
    return drawn


def _legend(entries: Sequence[tuple[str, Look]], left: float, right: float, y: float) -> tuple[list[Markup], float]:
    """Swatches with names from the left, in as many rows as it takes; also where they end."""
    drawn, x = [], left
    for name, look in entries:
        needed = 16 + width_of(name) + 14
        if x > left and x + needed - 14 > right:
            x, y = left, y + 18
        drawn.append(node("rect", x=x, y=y - 9, width=10, height=10, rx=2, fill=look.paint))
        drawn.append(_text(name, x + 16, y))
        x += needed
    return drawn, y


def _tip(words: str) -> Markup:
    return node("title", words) if words else Markup("")


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def line_chart(title: str, lines: Sequence[Line], across: Axis, up: Axis, size: Size) -> Markup:
    """Lines with bands, named at their right ends."""
    lines = [line for line in lines if any(point.y is not None for point in line.points)]
    places = sorted({point.x for line in lines for point in line.points})
    seen = [v for line in lines for point in line.points for v in (point.y, point.low, point.high) if v is not None]
    top, bottom = 30.0, size.height - 40.0
    y, levels = _value_scale(up, seen, bottom, top, 5)
    left = 14 + max(width_of(up.show(level)) for level in levels)
    names = min(max((width_of(line.name) for line in lines), default=0.0) + 27, size.width * 0.36)
    right = size.width - names - 4
    first, last = (places[0], places[-1]) if places else (0.0, 1.0)
    x = Scale(first, last, left + 8, right - 8, _lie_far_apart(places))

    drawn = [*_levels(levels, y, up, left, right), _text(up.label + (", logarithmic" if y.wide else ""), 0, 12)]
    drawn += _columns(_spaced(places, x, across.show), x, across.show, bottom)
    drawn.append(_text(across.label, (left + right) / 2, size.height - 4, "middle"))
    ends = [_end(line, x, y) for line in lines]
    labels = spread_out([end[1] for end in ends], 14, top, bottom)
    for line, end, label in zip(lines, ends, labels, strict=True):
        drawn.append(_line(line, x, y, end, label, right + 18, names - 27))
    return _svg(title, size.width, size.height, *drawn)


def _lie_far_apart(places: Sequence[float]) -> bool:
    return len(places) > 2 and places[0] > 0 and places[-1] / places[0] > 20


def _end(line: Line, x: Scale, y: Scale) -> tuple[float, float]:
    last = [point for point in line.points if point.y is not None][-1]
    return x(last.x), y(last.y or 0.0)


def _line(
    line: Line, x: Scale, y: Scale, end: tuple[float, float], label: float, label_x: float, room: float
) -> Markup:
    look = line.look
    parts = []
    for run in _unbroken(line.points):
        if len(run) > 1 and all(point.low is not None and point.high is not None for point in run):
            upper = [(x(point.x), y(point.high or 0.0)) for point in run]
            lower = [(x(point.x), y(point.low or 0.0)) for point in reversed(run)]
            parts.append(node("path", class_="band", fill=look.paint, d=_path([*upper, *lower]) + "Z"))
        path = _path([(x(point.x), y(point.y or 0.0)) for point in run])
        parts.append(_stroke(path, look))
    for point in line.points:
        if point.y is not None:
            parts.append(_marker(look, x(point.x), y(point.y), _tip(point.tip)))
    parts.append(node("path", class_="lead", fill="none", d=_path([(end[0] + 5, end[1]), (label_x - 9, label)])))
    parts.append(_marker(look, label_x - 3, label))
    words = shortened(line.name, room)
    whole = _tip(line.name if words != line.name else "")
    kind = "strong" if look.thickness > 2 else None
    parts.append(node("text", words, whole, x=label_x + 5, y=label + 4, class_=kind, style=f"fill:{look.paint}"))
    return node("g", *parts, class_="series", data_name=line.name)


def _marker(look: Look, x: float, y: float, tip: object = "") -> Markup:
    outline, hollow = _OUTLINES[look.marker.removeprefix(_HOLLOW)], look.marker.startswith(_HOLLOW)
    paint = {
        "fill": "var(--card)" if hollow else look.paint,
        "stroke": look.paint,
        "stroke_width": 1.5 if hollow else 0.5,
    }
    if not outline:
        return node("circle", tip, cx=x, cy=y, r=MARKER, **paint)
    corners = [(x + MARKER * dx, y + MARKER * dy) for dx, dy in outline]
    return node("path", tip, class_="marker", d=_path(corners) + "Z", **paint)


def swatch(look: Look) -> Markup:
    """A piece of the line with its marker, for a table."""
    line = node("path", d="M1,6h26", stroke=look.paint, stroke_width=2.5, stroke_dasharray=look.dash or None)
    return node("svg", line, _marker(look, 14, 6), class_="swatch", viewBox="0 0 28 12", aria_hidden="true")


def _stroke(path: str, look: Look) -> Markup:
    return node("path", class_="stroke", stroke=look.paint, stroke_width=look.thickness, d=path,
                stroke_dasharray=look.dash or None)  # fmt: skip


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches without a missing value."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bar_chart(title: str, bars: Sequence[Bar], axis: Axis, size: Size) -> Markup:
    """One bar a row, its spread as a whisker and its text at the end."""
    row, top = 26, 26
    names = min(max((width_of(bar.name) for bar in bars), default=0.0), size.width * 0.34)
    texts = max((width_of(bar.text) for bar in bars), default=0.0)
    left, right = names + 10, size.width - texts - 10
    seen = [value for bar in bars for value in (bar.value, bar.high) if value is not None]
    high = axis.most if axis.most is not None else max(seen, default=1.0) or 1.0
    x = Scale(0.0, high, left, right)
    drawn = [_text(axis.label, 0, 12)]
    for index, bar in enumerate(bars):
        middle = top + row * index + row / 2
        words = shortened(bar.name, names)
        end = x(bar.value or 0.0)
        parts: list[object] = [_tip(bar.tip), _text(words, left - 10, middle + 4, "end")]
        parts.append(node("rect", x=left, y=middle - 8, width=end - left, height=16, rx=2, fill=bar.look.paint))
        after = end
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            start, after = x(bar.low), x(bar.high)
            shape = f"M{start:.1f},{middle - 4:.1f}v8m0,-4H{after:.1f}m0,-4v8"
            parts.append(node("path", class_="whisker", d=shape))
        parts.append(_text(bar.text, after + 7, middle + 4, kind="strong"))
        drawn.append(node("g", *parts, class_="series", data_name=bar.name))
    bottom = top + row * len(bars)
    drawn.append(node("line", class_="baseline", x1=left, x2=left, y1=top, y2=bottom))
    return _svg(title, size.width, bottom + 6, *drawn)


def stacked_bars(
    title: str, stacks: Sequence[Stack], parts: Sequence[tuple[str, Look]], size: Size, show: Callable[[float], str]
) -> Markup:
    """Rows of parts of a whole, each as wide as its share of the longest row; the legend on top."""
    row = 28
    names = min(max((width_of(stack.name) for stack in stacks), default=0.0), size.width * 0.34)
    texts = max((width_of(stack.text) for stack in stacks), default=0.0)
    left, right = names + 10, size.width - texts - 12
    high = max((sum(stack.parts) for stack in stacks), default=1.0) or 1.0
    x = Scale(0.0, high, left, right)
    drawn, end = _legend(parts, left if size.width > 450 else 0, size.width, 12)
    top = end + 12
    for index, stack in enumerate(stacks):
        middle = top + row * index + row / 2
        drawn.append(_text(shortened(stack.name, names), left - 10, middle + 4, "end"))
        drawn += _stack(stack, [look for _, look in parts], x, middle, show)
        drawn.append(_text(stack.text, x(sum(stack.parts)) + 7, middle + 4, kind="strong"))
    return _svg(title, size.width, top + row * len(stacks) + 4, *drawn)


def _stack(stack: Stack, looks: Sequence[Look], x: Scale, middle: float, show: Callable[[float], str]) -> list[Markup]:
    """The parts of one row, with figures where they fit."""
    drawn, total = [], 0.0
    for value, look, tip in zip(stack.parts, looks, stack.tips, strict=True):
        start, end = x(total), x(total + value)
        total += value
        if end - start < 0.3:
            continue
        gap = 1.0 if end - start > 3 else 0.0  # a thin seam between neighbours
        bar = node("rect", _tip(tip), x=start, y=middle - 9, width=end - start - gap, height=18, fill=look.paint)
        drawn.append(bar)
        words = show(value)
        if width_of(words) + 8 < end - start:
            kind = "small" if look.pale else "inside small"
            drawn.append(_text(words, (start + end) / 2, middle + 4, "middle", kind))
    return drawn


# ── grids ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def grid(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]],
    show: Callable[[float], str], tips: Sequence[Sequence[str]], size: Size,
) -> Markup:  # fmt: skip
    """A table of shares, each cell the darker the larger its value."""
    names = min(max((width_of(row) for row in rows), default=0.0), size.width * 0.3)
    left = names + 10
    tilted = any(width_of(column) + 6 > min((size.width - left) / max(len(columns), 1), 92.0) for column in columns)
    overhang = 28.0 if tilted else 0.0  # what the last name needs to the right of its column
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
            drawn.append(_text(column, x, top - 8, "middle"))
    for row_index, row in enumerate(rows):
        y = top + row_height * row_index
        drawn.append(_text(shortened(row, names), left - 10, y + row_height / 2 + 4, "end"))
        for index, value in enumerate(values[row_index]):
            drawn.append(_cell(value, show, tips[row_index][index], left + cell * index, y, cell - 2, row_height - 2))
    return _svg(title, size.width, top + row_height * len(rows) + 4, *drawn)


def _cell(
    value: float | None, show: Callable[[float], str], tip: str, x: float, y: float, width: float, height: float
) -> Markup:
    words = "–" if value is None else show(value)
    strength = 0.0 if value is None else min(max(value, 0.0), 1.0)
    parts = [_tip(tip), node("rect", x=x, y=y, width=width, height=height, rx=3, class_="track")]
    if strength:
        parts.append(node("rect", x=x, y=y, width=width, height=height, rx=3, fill="var(--blue)",
                          fill_opacity=f"{0.55 * strength**1.5:.2f}"))  # fmt: skip
    parts.append(_text(words, x + width / 2, y + height / 2 + 4, "middle", "strong"))
    return node("g", *parts)


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(title: str, times: Sequence[float], panels: Sequence[Panel], strip: Trace | None, size: Size) -> Markup:
    """Panels of steps over one time axis; a value holds from the time before to its own. The strip is darker the
    larger its share."""
    edges = [first_edge(times), *times]
    labels = [panel.axis.show(level) for panel in panels for level in _panel_levels(panel)]
    left = 14 + max((width_of(label) for label in labels), default=20.0)
    right = size.width - 10.0
    x = Scale(edges[0], edges[-1], left, right)
    drawn: list[Markup] = []
    y = 0.0
    for panel in panels:
        y += 12
        drawn.append(_text(panel.axis.label, 0, y))
        entries = [(trace.name, trace.look) for trace in panel.traces]
        legend, _ = _legend(entries, max(left, width_of(panel.axis.label) + 14), right, y)
        drawn += legend if len(panel.traces) > 1 else []
        top = y + 14
        drawn += _panel(panel, edges, x, top, top + panel.height)
        y = top + panel.height + 16
    if strip is not None:
        y += 6
        drawn += [_text(strip.name, 0, y), *_strip(strip, edges, x, y + 8)]
        y += 30
    bottom = y - 6
    enclosing = ticks(edges[0], edges[-1], max(3, int((right - left) / 80)))
    across = [tick for tick in enclosing if edges[0] <= tick <= edges[-1]]
    drawn.append(node("line", class_="baseline", x1=left, x2=right, y1=bottom, y2=bottom))
    drawn += _columns(across, x, lambda value: f"{value:g}", bottom)
    drawn.append(_text("seconds since the start", (left + right) / 2, bottom + 34, "middle"))
    overlay = node("line", class_="lead cursor", x1=left, x2=left, y1=0, y2=bottom, visibility="hidden")
    return _svg(title, size.width, bottom + 40, *drawn, overlay, data_left=left, data_right=right)


def first_edge(times: Sequence[float]) -> float:
    """When the first slice began: it was about as long as the second, and none begins before the run."""
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
            drawn.append(_stroke(path, trace.look))
    return drawn


def _steps(values: Sequence[float | None], edges: Sequence[float]) -> list[list[tuple[float, float, float]]]:
    """Unbroken stretches of (from, to, value), equal neighbours joined."""
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
