"""SVG text: elements, colours, markers. What every chart is made of.

Knows nothing of axes or benchmarks. Colours are CSS variables, so that a page draws them light or dark; `standalone`
writes their light values in. Every text is escaped; only `Markup` is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

# (light, dark). Lines also differ by label and dash, never by colour alone.
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

# Corners of markers around (0, 0), in units of MARKER; a circle has none.
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
MARKER = 3.2  # pixels, half the size of a marker

LETTER = 6.5  # pixels, the mean width of a letter of 12 px text


@dataclass(frozen=True)
class Size:
    """Of a drawing, in pixels. With height 0 it follows from the content."""

    width: int
    height: int = 0


@dataclass(frozen=True)
class Look:
    """How a system or a phase is drawn in every chart."""

    colour: str  # in PALETTE
    dash: str = ""
    thickness: float = 1.75
    pale: bool = False  # text inside it is dark
    marker: str = "circle"  # of the points of a line; in MARKERS

    @property
    def paint(self) -> str:
        return f"var(--{self.colour})"


def node(tag: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` becomes class, `stroke_width` stroke-width; an attribute that is None is left out."""
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    opened = Markup("").join(Markup(' {}="{}"').format(name, _brief(value)) for name, value in named)
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, opened, inner) if inner else Markup("<{0}{1}/>").format(tag, opened)


def _brief(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def label(words: str, x: float, y: float, anchor: str = "start", kind: str | None = None) -> Markup:
    return node("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=kind)


def width_of(words: str) -> float:
    return LETTER * len(words)


def shortened(words: str, room: float) -> str:
    """The words, cut to `room` pixels."""
    most = max(2, int(room / LETTER))
    return words if len(words) <= most else words[: most - 1] + "…"


def standalone(chart: Markup) -> Markup:
    """A chart as a complete SVG file in light colours."""
    style = node("style", Markup(STYLE))
    body = chart.replace(Markup("<svg "), Markup('<svg xmlns="http://www.w3.org/2000/svg" '), 1)
    opened, closed, rest = body.partition(Markup(">"))
    return Markup(re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: PALETTE[found[1]][0], opened + closed + style + rest))


def svg(title: str, width: float, height: float, *children: object, **attributes: object) -> Markup:
    box = f"0 0 {width:.0f} {height:.0f}"
    return node("svg", *children, class_="chart", viewBox=box, role="img", aria_label=title, **attributes)


def tooltip(words: str) -> Markup:
    return node("title", words) if words else Markup("")


def marker_at(look: Look, x: float, y: float, title: object = "") -> Markup:
    outline, hollow = _OUTLINES[look.marker.removeprefix(_HOLLOW)], look.marker.startswith(_HOLLOW)
    paint = {
        "fill": "var(--card)" if hollow else look.paint,
        "stroke": look.paint,
        "stroke_width": 1.5 if hollow else 0.5,
    }
    if not outline:
        return node("circle", title, cx=x, cy=y, r=MARKER, **paint)
    corners = [(x + MARKER * dx, y + MARKER * dy) for dx, dy in outline]
    return node("path", title, class_="marker", d=path_of(corners) + "Z", **paint)


def swatch(look: Look) -> Markup:
    """A short piece of the line with its marker, for tables."""
    line = node("path", d="M1,6h26", stroke=look.paint, stroke_width=2.5, stroke_dasharray=look.dash or None)
    return node("svg", line, marker_at(look, 14, 6), class_="swatch", viewBox="0 0 28 12", aria_hidden="true")


def stroke_of(path: str, look: Look) -> Markup:
    return node("path", class_="stroke", stroke=look.paint, stroke_width=look.thickness, d=path,
                stroke_dasharray=look.dash or None)  # fmt: skip


def path_of(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
