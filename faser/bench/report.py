"""A benchmark's document as one page for people, and its charts as images for a README.

Knows what each figure means and which way is better. Knows nothing of how it was measured, and draws no line itself:
`charts` does, in the looks of `legend`. The page, report.html, loads nothing and can be read without scripts, which
only add tooltips and highlighting. What the document does not hold leaves a gap. `about["ablation"]`, a list of systems
each of which adds one thing to the one before, asks for the chart of gains.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from faser.bench import charts
from faser.bench.charts import Axis, Bar, Line, Look, Panel, Point, Size, Stack, Trace
from faser.bench.legend import System, systems_of
from faser.traffic.document import Document, GroupDocument, RunDocument, Spread
from faser.traffic.records import Moment

TEMPLATE = Path(__file__).with_name("report.html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MOST_SLICES = 180  # of a time line; more would not be seen
BROWSER_SECONDS = 60.0  # for one image
HALF, FULL, NARROW = 508, 1050, 334  # pixels: a chart beside another, alone, on a phone

PHASES = {
    "draft": Look("orange"),
    "verify": Look("blue"),
    "host": Look("brown"),
    "idle": Look("idle", pale=True),
}
SPARE_LOOKS = tuple(Look(colour) for colour in ("red", "sky", "pink"))  # of phases without a look
CROWDED = 8  # systems; charts of more take the whole width


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Figure:
    """One figure of a run: how it is called, written and judged."""

    name: str  # in the document
    label: str
    kind: str  # seconds, share, count or number
    better: int  # 1: more, -1: less, 0: neither


SPEED = {
    "Output": (Figure("output_tokens_per_s", "tokens/s", "number", 1),),
    "Latency per output token": (
        Figure("latency_per_token_mean", "mean", "seconds", -1),
        Figure("latency_per_token_p50", "p50", "seconds", -1),
        Figure("latency_per_token_p99", "p99", "seconds", -1),
    ),
    "Goodput": (
        Figure("goodput_share", "of requests", "share", 1),
        Figure("goodput_per_s", "requests/s", "number", 1),
    ),
    "Requests": (Figure("requests", "sent", "count", 0), Figure("lost", "lost", "count", -1)),
}
REST = {
    "Time to first token": (
        Figure("ttft_mean", "mean", "seconds", -1),
        Figure("ttft_p50", "p50", "seconds", -1),
        Figure("ttft_p99", "p99", "seconds", -1),
    ),
    "Time per output token": (
        Figure("tpot_mean", "mean", "seconds", -1),
        Figure("tpot_p50", "p50", "seconds", -1),
        Figure("tpot_p99", "p99", "seconds", -1),
    ),
    "End to end": (
        Figure("e2e_mean", "mean", "seconds", -1),
        Figure("e2e_p50", "p50", "seconds", -1),
        Figure("e2e_p99", "p99", "seconds", -1),
    ),
    "Speculation": (
        Figure("acceptance", "acceptance", "share", 0),
        Figure("mean_length", "mean length", "number", 0),
        Figure("wasted_share", "wasted rows", "share", 0),
    ),
}
THROUGHPUT, LATENCY = SPEED["Output"][0], SPEED["Latency per output token"][0]

DEFINITIONS = (
    ("Output tokens/s", "tokens put out, divided by the seconds from the first arrival to the last token"),
    ("Latency per output token", "from a request's arrival to its last token, divided by its tokens; waiting included"),
    ("Time to first token (TTFT)", "from a request's arrival to its first token"),
    ("Time per output token (TPOT)", "from the first token to the last, divided by the tokens after the first"),
    ("End to end", "from a request's arrival to its last token"),
    ("Mean, p50, p99", "over the requests of a run that ended; p99 is what 99 of 100 stay below"),
    ("Goodput", "requests that met every latency the command asked for with --slo: their share, and how many a second"),
    ("Lost", "requests that were refused, dropped or failed; no other figure but goodput counts them"),
    ("Acceptance", "accepted tokens, divided by verified ones; by position, from 1, of those verified there"),
    ("Mean length", "tokens a request drafted in a step, on average; 0 is a normal value"),
    ("Wasted rows", "drafted tokens the target verified and did not accept, as a share of all rows it computed"),
    ("Speculating", "share of the steps in a slice of time in which any request drafted"),
    ("Load", "requests offered per second; in a closed loop, requests open at any time"),
    ("Spread", "a figure is the median over repeats; the range under it, and the band around a line, is least to most"),
    ("Ratio", "how many times better a system's median is than the other's: above 1× is more tokens or less time"),
)


@dataclass(frozen=True)
class Load:
    """What was offered: by the clock, in a closed loop, or untold."""

    rate: float | None
    concurrency: int | None

    @classmethod
    def of(cls, run: RunDocument | GroupDocument) -> Load:
        """Rates that differ in the fourth digit are the same load, measured by two clocks."""
        return cls(None if run.rate is None else float(f"{run.rate:.3g}"), run.concurrency)

    @property
    def unit(self) -> str:
        if self.rate is not None:
            return "requests offered per second"
        return "requests open at a time" if self.concurrency is not None else "load not told"

    @property
    def short_unit(self) -> str:
        return "requests/s" if self.rate is not None else "open" if self.concurrency is not None else "not told"

    @property
    def amount(self) -> float:
        return self.rate if self.rate is not None else float(self.concurrency or 0)

    @property
    def label(self) -> str:
        known = self.rate is not None or self.concurrency is not None
        return f"{self.amount:g} {self.short_unit}" if known else self.short_unit


@dataclass(frozen=True)
class Results:
    """A document, looked up by system and load."""

    document: Document
    systems: tuple[System, ...]
    loads: tuple[Load, ...]
    groups: Mapping[tuple[str, Load], GroupDocument]
    runs: Mapping[tuple[str, Load], Sequence[RunDocument]]  # partial ones only where there is nothing else

    @property
    def is_crowded(self) -> bool:
        return len(self.systems) > CROWDED

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a chart with a line for every system."""
        return (FULL, 420) if self.is_crowded else (HALF, 340)

    def spread(self, system: System, load: Load, figure: Figure) -> Spread | None:
        group = self.groups.get((system.name, load))
        spread = None if group is None else group.figures.get(figure.name)
        known = spread is not None and all(map(math.isfinite, (spread.min, spread.median, spread.max)))
        return spread if known else None

    def median(self, system: System, load: Load, figure: Figure) -> float | None:
        spread = self.spread(system, load, figure)
        return None if spread is None else spread.median

    def best(self, systems: Iterable[System], load: Load, figure: Figure) -> System | None:
        found = [(value, s) for s in systems if (value := self.median(s, load, figure)) is not None]
        return max(found, key=lambda each: figure.better * each[0])[1] if found else None

    def references(self, load: Load, figure: Figure) -> list[System]:
        """What ratios are taken of: `off`, and the best system that is not FASER."""
        off = [system for system in self.systems if system.name == "off"]
        other = self.best((system for system in self.systems if system.other), load, figure)
        return [*off, *([other] if other is not None else [])]


def read(document: Document) -> Results:
    groups = {(group.system, Load.of(group)): group for group in document.groups}
    runs: dict[tuple[str, Load], list[RunDocument]] = {}
    for run in document.runs:
        runs.setdefault((run.system, Load.of(run)), []).append(run)
    loads = sorted({load for _, load in groups}, key=lambda load: (load.unit, load.amount))
    whole = {key: [run for run in each if not run.partial] or each for key, each in runs.items()}
    return Results(document, systems_of(document.groups, document.about), tuple(loads), groups, whole)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: float) -> str:
    """About three digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 or value == 0 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%" if value in (0, 1) or 0.1 <= value <= 0.9 else f"{100 * value:.1f}%"


def tick(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10000 else f"{value:g}"


def share_tick(value: float) -> str:
    return f"{100 * value:.0f}%"


def milliseconds(value: float) -> str:
    return f"{plain(1000 * value)} ms" if value < 10 else f"{plain(value)} s"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _shown(figure: Figure, value: float) -> str:
    """With its unit, for tooltips."""
    return {"seconds": milliseconds, "share": percent}.get(figure.kind, plain)(value)


def _ranged(figure: Figure, spread: Spread) -> str:
    words = _shown(figure, spread.median)
    if spread.max > spread.min:
        words += f" ({_shown(figure, spread.min)} to {_shown(figure, spread.max)})"
    return words


def _told(value: object) -> str:
    """A value of `about` or `workload` in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_name(key)} {_told(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_told, value[:8])) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _enumerated(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _name(key: object) -> str:
    return "SLO, seconds" if key == "slo" else str(key).replace("_", " ")


def facts(given: Mapping[str, Any], without: Sequence[str] = ()) -> list[tuple[str, str]]:
    kept = {key: value for key, value in given.items() if key not in without and value not in (None, "", [], {}, ())}
    return [(_name(key), _told(value)) for key, value in kept.items()]


def headed(about: Mapping[str, Any]) -> str:
    """The models, or what the page is."""
    model, draft = about.get("model"), about.get("draft")
    return f"{_told(model or 'Benchmark')}{f', drafted by {_told(draft)}' if draft else ''}"


def when(created: str) -> str:
    try:
        moment = datetime.fromisoformat(created).astimezone(UTC)
    except ValueError:
        return created
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None  # as in the document
    spread: str = ""
    ratio: str = ""
    tone: str = ""  # of the ratio: good, bad
    best: bool = False


@dataclass(frozen=True)
class Row:
    system: System
    cells: tuple[Cell, ...]
    partial: bool = False


@dataclass(frozen=True)
class Table:
    heads: tuple[tuple[str, int], ...]  # with how many columns each spans
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: str = ""  # of all columns, where they share one


@dataclass(frozen=True)
class Column:
    """One figure under one load for every system, in one unit and with one number of digits."""

    figure: Figure
    unit: str
    cells: tuple[Cell, ...]


def _column(
    results: Results, load: Load, figure: Figure, unit: tuple[str, float], reference: System | None = None
) -> Column:
    name, factor = unit
    spreads = [results.spread(system, load, figure) for system in results.systems]
    known = [spread.median for spread in spreads if spread is not None]
    digits = _digits([factor * value for value in known]) if figure.kind != "count" else 0
    best = results.best(results.systems, load, figure) if figure.better and len(set(known)) > 1 else None
    base = results.spread(reference, load, figure) if reference is not None else None
    top = results.median(best, load, figure) if best is not None else None
    return Column(figure, name, tuple(_cell(figure, spread, factor, digits, top, base) for spread in spreads))


def _unit(results: Results, loads: Iterable[Load], figures: Iterable[Figure], figure: Figure) -> tuple[str, float]:
    """Its name, and how many make one of the document's. Figures that stand side by side share it."""
    if figure.kind == "seconds":
        every = (results.median(system, load, each) for system in results.systems for load in loads for each in figures)
        return ("s", 1.0) if max((value for value in every if value is not None), default=0.0) >= 10 else ("ms", 1000.0)
    return ("%", 100.0) if figure.kind == "share" else ("", 1.0)


def _digits(values: Sequence[float]) -> int:
    """Enough for three in the middle of the column."""
    sizes = sorted(abs(value) for value in values if value)
    middle = sizes[len(sizes) // 2] if sizes else 100.0
    return 0 if middle >= 100 else 1 if middle >= 10 else 2 if middle >= 1 else 3


def _cell(
    figure: Figure, spread: Spread | None, factor: float, digits: int, best: float | None, base: Spread | None
) -> Cell:
    if spread is None:
        return Cell("–")
    ratio, tone = _compared(figure, spread, base)
    low, middle, high = (f"{factor * value:,.{digits}f}" for value in (spread.min, spread.median, spread.max))
    return Cell(
        text=middle,
        value=spread.median,
        spread=f"{low}–{high}" if spread.max > spread.min else "",
        ratio=ratio,
        tone=tone,
        best=spread.median == best,
    )


def _compared(figure: Figure, own: Spread | None, base: Spread | None) -> tuple[str, str]:
    """How many times better, and whether that is good or bad: neither within 1 %, nor where the ranges overlap."""
    if own is None or base is None or not base.median or not own.median:
        return "", ""
    ratio = own.median / base.median if figure.better > 0 else base.median / own.median
    tone = "" if abs(ratio - 1) < 0.01 or _overlap(own, base) else "good" if ratio > 1 else "bad"
    return f"{ratio:.2f}×", tone


def _overlap(one: Spread, other: Spread) -> bool:
    return one.min <= other.max and other.min <= one.max


def _ratios(results: Results, load: Load, figure: Figure, reference: System) -> Column:
    base = results.spread(reference, load, figure)
    compared = [_compared(figure, results.spread(system, load, figure), base) for system in results.systems]
    name = f"× {charts.shortened(reference.name, 100)}"
    return Column(figure, name, tuple(Cell(ratio or "–", tone=tone) for ratio, tone in compared))


def figure_table(results: Results, load: Load, parts: Mapping[str, Sequence[Figure]]) -> Table:
    """Systems by figures under one load; a figure that none tells is left out."""
    heads, columns = [], []
    for head, figures in parts.items():
        found = [_column(results, load, figure, _unit(results, [load], figures, figure)) for figure in figures]
        found = [column for column in found if any(cell.value is not None for cell in column.cells)]
        for figure in (THROUGHPUT, LATENCY):
            if figure in figures and found and found[0].figure is figure:
                ratios = [_ratios(results, load, figure, each) for each in results.references(load, figure)]
                found[1:1] = ratios if len(results.systems) > 1 else []
        heads.append((head, len(found)))
        columns += found
    names = tuple(column.unit if column.unit.startswith("×") else _titled(column) for column in columns)
    return Table(tuple(head for head in heads if head[1]), names, _rows(results, load, columns))


def _titled(column: Column) -> str:
    return f"{column.figure.label}, {column.unit}" if column.unit else column.figure.label


def _rows(results: Results, load: Load | None, columns: Sequence[Column]) -> tuple[Row, ...]:
    rows = []
    for index, system in enumerate(results.systems):
        cells = tuple(column.cells[index] for column in columns)
        groups = [group for (name, at), group in results.groups.items() if name == system.name and load in (None, at)]
        if groups:
            rows.append(Row(system, cells, any(group.partial for group in groups)))
    return tuple(rows)


def load_table(results: Results, figure: Figure) -> Table:
    """One figure, systems by loads, with its ratio to `off`."""
    off = next((system for system in results.systems if system.name == "off"), None)
    unit = _unit(results, results.loads, [figure], figure)
    columns = [_column(results, load, figure, unit, off) for load in results.loads]
    return Table((), tuple(load.label for load in results.loads), _rows(results, None, columns), unit[0])


@dataclass(frozen=True)
class Winner:
    """The best system under one load by one figure."""

    system: System
    value: float
    text: str
    ratios: tuple[tuple[str, str, str], ...]  # text, of whom, tone
    level: int  # other systems whose repeats reach into its own: the first place is not certain


def winner(results: Results, load: Load, figure: Figure) -> Winner | None:
    best = results.best(results.systems, load, figure)
    own = results.spread(best, load, figure) if best is not None else None
    if best is None or own is None:
        return None
    references = [system for system in results.references(load, figure) if system != best]
    compared = [(_compared(figure, own, results.spread(system, load, figure)), system.name) for system in references]
    others = [results.spread(system, load, figure) for system in results.systems if system != best]
    return Winner(
        system=best,
        value=own.median,
        text=_shown(figure, own.median) + ("" if figure.kind == "seconds" else " tokens/s"),
        ratios=tuple((ratio, name, tone) for (ratio, tone), name in compared if ratio),
        level=sum(_overlap(own, other) for other in others if other is not None),
    )


@dataclass(frozen=True)
class Loss:
    """The requests a run lost, and why."""

    system: System
    load: Load
    repeat: int
    lost: int
    requests: int
    reasons: tuple[tuple[str, int], ...]


def losses(results: Results) -> list[Loss]:
    found = []
    systems = {system.name: system for system in results.systems}
    for run in results.document.runs:
        lost = int(run.summary.get("lost") or 0)
        if lost and run.system in systems:
            reasons = Counter(record.error for record in run.records if record.error is not None)
            requests = int(run.summary.get("requests") or 0)
            common = tuple(reasons.most_common(3))
            found.append(Loss(systems[run.system], Load.of(run), run.repeat, lost, requests, common))
    return found


# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Chart:
    """One drawing for a screen and one for a phone."""

    wide: Markup
    narrow: Markup
    name: str = ""  # of its image
    data: str = ""  # JSON, for the tooltip of a time line


def _both(name: str, draw: Callable[[Size], Markup], width: int, height: int = 0) -> Chart:
    return Chart(draw(Size(width, height)), draw(Size(NARROW, height)), name)


def over_load(results: Results, figure: Figure, title: str, name: str) -> list[Chart]:
    """A figure over the loads; bars where there is one load only. Clocks and closed loops do not share an axis."""
    drawn = []
    for unit in dict.fromkeys(load.unit for load in results.loads):
        loads = [load for load in results.loads if load.unit == unit]
        suffix = "" if unit == results.loads[0].unit else "-" + loads[0].unit.split()[1]
        make = _load_bars if len(loads) == 1 else _load_lines
        drawn.append(make(results, loads, figure, title, name + suffix))
    return drawn


def _load_lines(results: Results, loads: Sequence[Load], figure: Figure, title: str, name: str) -> Chart:
    factor = 1000.0 if figure.kind == "seconds" else 1.0
    lines = []
    for system in results.systems:
        points = []
        for load in loads:
            spread = results.spread(system, load, figure)
            if spread is None:
                points.append(Point(load.amount, None))
                continue
            tip = f"{system.name} at {load.label}\n{_ranged(figure, spread)}"
            middle, low, high = (factor * value for value in (spread.median, spread.min, spread.max))
            points.append(Point(load.amount, middle, low, high, tip))
        lines.append(Line(system.name, system.look, tuple(points)))
    across, up = Axis(loads[0].unit, tick), Axis(title, tick, wide=figure.kind == "seconds")
    return _both(name, lambda size: charts.line_chart(title, lines, across, up, size), *results.size)


def _load_bars(results: Results, loads: Sequence[Load], figure: Figure, title: str, name: str) -> Chart:
    factor = 1000.0 if figure.kind == "seconds" else 1.0
    bars = []
    for system in results.systems:
        spread = results.spread(system, loads[0], figure)
        if spread is None:
            bars.append(Bar(system.name, None, "–", system.look))
            continue
        low, high = factor * spread.min, factor * spread.max
        text, tip = plain(factor * spread.median), f"{system.name}\n{_ranged(figure, spread)}"
        bars.append(Bar(system.name, factor * spread.median, text, system.look, low, high, tip))
    return _both(name, lambda size: charts.bar_chart(title, bars, Axis(title, tick), size), HALF)


def positions(results: Results, load: Load) -> Chart | None:
    """Acceptance by position in the draft, repeats added up."""
    lines = []
    for system in results.systems:
        runs = results.runs.get((system.name, load), ())
        verified = _added(run.verified_per_position for run in runs)
        accepted = _added(run.accepted_per_position for run in runs)
        points = []
        for index, (seen, taken) in enumerate(zip(verified, accepted, strict=False)):
            if seen:
                tip = f"{system.name}, position {index + 1}\n{percent(taken / seen)}: {taken:,} of {seen:,}"
                points.append(Point(index + 1, taken / seen, tip=tip))
        if points:
            lines.append(Line(system.name, system.look, tuple(points)))
    if not lines:
        return None
    title = "accepted, of those verified"
    across, up = Axis("position in the draft", tick, whole=True), Axis(title, share_tick, most=1.0)
    return _both("positions", lambda size: charts.line_chart(title, lines, across, up, size), *results.size)


def _added(lists: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for values in lists:
        total += [0] * (len(values) - len(total))
        for index, value in enumerate(values):
            total[index] += value
    return total


def category_grid(results: Results, load: Load) -> Chart | None:
    """Acceptance by category and system, repeats added up."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}  # verified and accepted, by system, then category
    for system in results.systems:
        for run in results.runs.get((system.name, load), ()):
            for name, category in run.categories.items():
                seen = category.drafted if category.verified is None else category.verified
                if seen and category.accepted is not None:
                    before = counts.setdefault(system.name, {}).get(name, (0, 0))
                    counts[system.name][name] = (before[0] + seen, before[1] + category.accepted)
    if not counts:
        return None
    systems = list(counts)
    names = sorted({name for found in counts.values() for name in found}, key=lambda name: (name == "", name))
    shares = [[_share(counts[system].get(name)) for system in systems] for name in names]
    tips = [[_category_tip(system, name, counts[system].get(name)) for system in systems] for name in names]
    rows = [name or "no category" for name in names]
    title = "acceptance by category"
    if len(systems) == 1:
        bars = [_category_bar(*each) for each in zip(rows, shares, tips, strict=True)]
        axis = Axis(f"{systems[0]}: accepted, of those verified", share_tick, most=1.0)
        return _both("categories", lambda size: charts.bar_chart(title, bars, axis, size), HALF)
    width, _ = results.size
    return _both("categories", lambda size: charts.grid(title, rows, systems, shares, share_tick, tips, size), width)


def _category_bar(name: str, shares: Sequence[float | None], tips: Sequence[str]) -> Bar:
    share = shares[0]
    return Bar(name, share, "–" if share is None else percent(share), Look("blue"), tip=tips[0])


def _share(counts: tuple[int, int] | None) -> float | None:
    return counts[1] / counts[0] if counts else None


def _category_tip(system: str, name: str, counts: tuple[int, int] | None) -> str:
    head = f"{system}, {name or 'no category'}"
    return f"{head}\n{percent(counts[1] / counts[0])}: {counts[1]:,} of {counts[0]:,}" if counts else head


def phases(results: Results, load: Load) -> Chart | None:
    """Where the time of a run goes: shares, from seconds added over repeats."""
    found: dict[str, Counter[str]] = {}
    for system in results.systems:
        for run in results.runs.get((system.name, load), ()):
            if sum(run.phases.values()) > 0:
                found.setdefault(system.name, Counter()).update(run.phases)
    if not found:
        return None
    seen = {phase for each in found.values() for phase, seconds in each.items() if seconds > 0}
    names = [phase for phase in PHASES if phase in seen] + sorted(seen - PHASES.keys())
    spare = cycle(SPARE_LOOKS)
    parts = [(phase, PHASES.get(phase) or next(spare)) for phase in names]
    stacks = []
    for name, seconds in found.items():
        whole, repeats = sum(seconds.values()), len(results.runs[name, load])
        shares = tuple(seconds[phase] / whole for phase in names)
        tips = tuple(
            f"{name}, {phase}\n{percent(share)}: {seconds[phase] / repeats:.1f} s"
            for phase, share in zip(names, shares, strict=True)
        )
        stacks.append(Stack(name, shares, f"{plain(whole / repeats)} s", tips))
    return _both("phases", lambda size: charts.stacked_bars("where time goes", stacks, parts, size, share_tick), FULL)


def ablation(results: Results, load: Load) -> Chart | None:
    """Throughput as one thing after the other is added; only where the document names the steps."""
    named = results.document.about.get("ablation") or ()
    by_name = {system.name: system for system in results.systems}
    steps = [by_name[name] for name in named if isinstance(name, str) and name in by_name]
    bars = []
    before: float | None = None
    for system in steps:
        spread = results.spread(system, load, THROUGHPUT)
        if spread is None:
            continue
        gain = "" if not before else f"  {_signed(100 * (spread.median / before - 1))}%"
        tip = f"{system.name}\n{_ranged(THROUGHPUT, spread)} tokens/s"
        text = plain(spread.median) + gain
        bars.append(Bar(system.name, spread.median, text, system.look, spread.min, spread.max, tip))
        before = spread.median
    if len(bars) < 2:
        return None
    title = "output tokens per second, and the gain over the step before"
    return _both("ablation", lambda size: charts.bar_chart(title, bars, Axis(title, tick), size), FULL)


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(system: System, load: Load, runs: Sequence[RunDocument]) -> Chart | None:
    """Of the first repeat that shows its inside."""
    shown = sorted((run for run in runs if run.moments), key=lambda run: run.repeat)
    if not shown:
        return None
    moments = slices(shown[0].moments)
    at = [moment.time for moment in moments]
    starts = [charts.first_edge(at), *at[:-1]]
    spans = [end - start for start, end in zip(starts, at, strict=True)]
    rates = tuple(m.emitted / span if span > 0 else None for span, m in zip(spans, moments, strict=True))
    blue, orange = Look("blue"), Look("orange", "5 4")
    lengths = tuple(m.mean_length if m.emitted else None for m in moments)
    panels = (
        Panel(
            Axis("requests", tick, whole=True),
            (
                Trace("running", blue, tuple(float(m.running) for m in moments), filled=True),
                Trace("waiting", orange, tuple(float(m.waiting) for m in moments)),
            ),
        ),
        Panel(Axis("output tokens/s", tick), (Trace("output tokens/s", blue, rates, filled=True),)),
        Panel(Axis("mean length", tick), (Trace("mean length", blue, lengths, filled=True),)),
    )
    strip = Trace("speculating", Look("blue"), tuple(m.speculating for m in moments))
    traces = [*(trace for panel in panels for trace in panel.traces), strip]
    told = [[trace.name, [_rounded(value) for value in trace.values]] for trace in traces]
    edges = [round(time, 2) for time in (starts[0], *at)]
    data = json.dumps({"edges": edges, "traces": told}, separators=(",", ":"))
    title = f"time line of {system.name} at {load.label}"
    both = _both("timeline", lambda size: charts.timeline(title, at, panels, strip, size), FULL)
    return Chart(both.wide, both.narrow, both.name, data)


def slices(moments: Sequence[Moment]) -> list[Moment]:
    """At most MOST_SLICES, neighbours put together."""
    each = -(-len(moments) // MOST_SLICES)
    return [_together(moments[index : index + each]) for index in range(0, len(moments), each)]


def _together(moments: Sequence[Moment]) -> Moment:
    """Lengths weigh by the bonus tokens, of which a request gets one in every step."""
    number = len(moments)
    bonus = [moment.emitted - moment.accepted for moment in moments]
    weighted = sum(moment.mean_length * weight for moment, weight in zip(moments, bonus, strict=True))
    return Moment(
        time=moments[-1].time,
        running=round(sum(moment.running for moment in moments) / number),
        waiting=round(sum(moment.waiting for moment in moments) / number),
        emitted=sum(moment.emitted for moment in moments),
        drafted=sum(moment.drafted for moment in moments),
        accepted=sum(moment.accepted for moment in moments),
        mean_length=weighted / sum(bonus) if sum(bonus) else 0.0,
        speculating=sum(moment.speculating for moment in moments) / number,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AtLoad:
    """What the page shows of one load."""

    load: Load
    speed: Table
    rest: Table
    fastest: Winner | None  # by latency
    busiest: Winner | None  # by throughput
    positions: Chart | None
    categories: Chart | None
    phases: Chart | None
    ablation: Chart | None
    timelines: Mapping[str, Chart]


def _at(results: Results, load: Load) -> AtLoad:
    lines = {s.name: timeline(s, load, results.runs.get((s.name, load), ())) for s in results.systems}
    return AtLoad(
        load=load,
        speed=figure_table(results, load, SPEED),
        rest=figure_table(results, load, REST),
        fastest=winner(results, load, LATENCY),
        busiest=winner(results, load, THROUGHPUT),
        positions=positions(results, load),
        categories=category_grid(results, load),
        phases=phases(results, load),
        ablation=ablation(results, load),
        timelines={name: line for name, line in lines.items() if line is not None},
    )


@dataclass(frozen=True)
class Page:
    """Everything the template shows."""

    results: Results
    loads: tuple[AtLoad, ...]
    chosen: int  # load shown first
    seen: tuple[System, ...]  # systems with a time line under any load
    traced: int  # the one of them shown first; it has a time line under the load shown first
    latency: tuple[Chart, ...]
    throughput: tuple[Chart, ...]

    def untraced(self, at: AtLoad) -> list[int]:
        """Numbers of the systems in `seen` without a time line under this load."""
        return [number for number, system in enumerate(self.seen) if system.name not in at.timelines]

    def absence(self, system: System, at: AtLoad) -> str:
        """Why there is no time line here, and where there is one."""
        played = bool(self.results.runs.get((system.name, at.load)))
        why = "its run has no record of the steps" if played else "this load was not played"
        where = _enumerated([each.load.label for each in self.loads if system.name in each.timelines])
        return f"No time line of {system.name} at {at.load.label}: {why}. There is one at {where}."

    @property
    def images(self) -> dict[str, Markup]:
        """By file name: the charts over load, and those of the load and system shown first."""
        found = [*self.latency, *self.throughput]
        if self.loads:
            at = self.loads[self.chosen]
            line = at.timelines.get(self.seen[self.traced].name) if self.seen else None
            found += [c for c in (line, at.positions, at.categories, at.phases, at.ablation) if c is not None]
        return {f"{chart.name}.png": chart.wide for chart in found}


def compose(document: Document) -> Page:
    results = read(document)
    loads = tuple(_at(results, load) for load in results.loads)
    seen = tuple(s for s in results.systems if any(s.name in at.timelines for at in loads))
    chosen = _first_load(loads)
    return Page(
        results=results,
        loads=loads,
        chosen=chosen,
        seen=seen,
        traced=_first_traced(seen, loads[chosen]) if seen else 0,
        latency=tuple(over_load(results, LATENCY, "mean latency per output token, ms", "latency")),
        throughput=tuple(over_load(results, THROUGHPUT, "output tokens per second", "throughput")),
    )


def _first_load(loads: Sequence[AtLoad]) -> int:
    """The middle one, of those with a time line if there are any."""
    traced = [number for number, at in enumerate(loads) if at.timelines]
    return traced[len(traced) // 2] if traced else len(loads) // 2


def _first_traced(seen: Sequence[System], at: AtLoad) -> int:
    """`faser`, or else the last policy, of the systems with a time line under this load."""
    present = [number for number, system in enumerate(seen) if system.name in at.timelines]
    return max(present, key=lambda number: (seen[number].name == "faser", not seen[number].other, number))


def render(page: Page) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    results, document = page.results, page.results.document
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        page=page,
        results=results,
        document=document,
        palette=charts.PALETTE,
        chart_style=Markup(charts.STYLE),
        title=headed(document.about),
        command=shlex.join(document.command),
        when=when(document.created),
        about=facts(document.about, ("ablation", "systems")),
        swatch=charts.swatch,
        workload=facts(document.workload, ("loads",)),
        repeats=sorted({group.repeats for group in document.groups}),
        partial=[f"{run.system} at {Load.of(run).label}" for run in document.runs if run.partial],
        latency_table=load_table(results, LATENCY),
        throughput_table=load_table(results, THROUGHPUT),
        losses=losses(results),
        definitions=DEFINITIONS,
    )


def write_report(directory: Path, document: Document, say: Callable[[str], None] | None = None) -> tuple[Path, ...]:
    """report.html and, where a browser can draw them, PNGs. Returns what was written; `say` hears what was not."""
    page = compose(document)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.html"
    path.write_text(render(page), encoding="utf-8")
    return path, *write_images(directory, page.images, say or _complain)


def _complain(line: str) -> None:
    print(line, file=sys.stderr)


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def write_images(directory: Path, images: Mapping[str, Markup], say: Callable[[str], None]) -> list[Path]:
    """Those that could be drawn; the first failure is said and ends it, because the next would fail alike."""
    program = browser()
    if program is None:
        say(f"no PNGs beside the report: none of {', '.join(BROWSERS)} is on the path")
        return []
    written = []
    for name, chart in images.items():
        path = directory / name
        try:
            _photograph(program, chart, path)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"no {name} beside the report: {program} failed ({error})")
            break
        written.append(path)
    return written


def _photograph(program: str, chart: Markup, path: Path) -> None:
    """A chart on white at twice its size, by a browser with a profile of its own."""
    width, height = (int(number) for number in chart.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "chart.html", Path(folder) / "chart.png"
        style = f"body{{margin:16px;background:#fff}}svg{{width:{width}px;display:block}}"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{charts.standalone(chart)}", "utf-8")
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            "--hide-scrollbars", "--force-device-scale-factor=2", f"--window-size={width + 32},{height + 32}",
            f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        _run_alone([program, *flags])
        shutil.copyfile(picture, path)


def _run_alone(command: Sequence[str]) -> None:
    """In a session of its own: Ctrl-C in the terminal does not reach it, and its helpers end when it does."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            status = process.wait(BROWSER_SECONDS)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise subprocess.CalledProcessError(status, command[0])
