"""From a document to its charts: what is drawn, over which axis, with which words.

`about["ablation"]`, a list of systems each of which adds one thing to the one before, asks for the chart of gains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, zip_longest

from markupsafe import Markup

from faser.bench.report import charts
from faser.bench.report.charts import Bar, Line, Panel, Point, Stack, Trace
from faser.bench.report.figures import (
    FULL,
    HALF,
    THROUGHPUT,
    Figure,
    Load,
    Results,
    percent,
    plain,
    ranged,
    share_tick,
    signed,
    tick,
)
from faser.bench.report.legend import System
from faser.bench.report.scales import Axis
from faser.bench.report.svg import Look, Size
from faser.traffic.document import RunDocument
from faser.traffic.records import Moment

MOST_SLICES = 180  # of a time line; more would not be seen
NARROW = 334  # pixels: a chart on a phone

PHASES = {
    "draft": Look("orange"),
    "verify": Look("blue"),
    "host": Look("brown"),
    "idle": Look("idle", pale=True),
}
SPARE_LOOKS = tuple(Look(colour) for colour in ("red", "sky", "pink"))  # of phases without a look


@dataclass(frozen=True)
class Chart:
    """One drawing for a screen and one for a phone."""

    wide: Markup
    narrow: Markup
    name: str = ""  # of its image
    data: str = ""  # JSON for the tooltip of a time line


def _both(name: str, draw: Callable[[Size], Markup], width: int, height: int = 0) -> Chart:
    return Chart(draw(Size(width, height)), draw(Size(NARROW, height)), name)


def over_load(results: Results, figure: Figure, title: str, name: str) -> list[Chart]:
    """A figure over the loads; bars for a single load. Rates and concurrencies have charts of their own."""
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
            tip = f"{system.name} at {load.label}\n{ranged(figure, spread)}"
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
        text, tip = plain(factor * spread.median), f"{system.name}\n{ranged(figure, spread)}"
        bars.append(Bar(system.name, factor * spread.median, text, system.look, low, high, tip))
    return _both(name, lambda size: charts.bar_chart(title, bars, Axis(title, tick), size), HALF)


def positions(results: Results, load: Load) -> Chart | None:
    """Acceptance by position in the draft, over all repeats."""
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
    return list(map(sum, zip_longest(*lists, fillvalue=0)))


def category_grid(results: Results, load: Load) -> Chart | None:
    """Acceptance by category and system, over all repeats."""
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
    """Shares of a run's time by phase, over all repeats."""
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
    """Throughput as one part after another is added, if the document names the steps."""
    named = results.document.about.get("ablation") or ()
    by_name = {system.name: system for system in results.systems}
    steps = [by_name[name] for name in named if isinstance(name, str) and name in by_name]
    bars = []
    before: float | None = None
    for system in steps:
        spread = results.spread(system, load, THROUGHPUT)
        if spread is None:
            continue
        gain = "" if not before else f"  {signed(100 * (spread.median / before - 1))}%"
        tip = f"{system.name}\n{ranged(THROUGHPUT, spread)} tokens/s"
        text = plain(spread.median) + gain
        bars.append(Bar(system.name, spread.median, text, system.look, spread.min, spread.max, tip))
        before = spread.median
    if len(bars) < 2:
        return None
    title = "output tokens per second, and the gain over the step before"
    return _both("ablation", lambda size: charts.bar_chart(title, bars, Axis(title, tick), size), FULL)


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(system: System, load: Load, runs: Sequence[RunDocument]) -> Chart | None:
    """Of the first repeat that has moments."""
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
    """At most MOST_SLICES; neighbours are merged."""
    each = -(-len(moments) // MOST_SLICES)
    return [_merged(moments[index : index + each]) for index in range(0, len(moments), each)]


def _merged(moments: Sequence[Moment]) -> Moment:
    """Lengths are weighted by bonus tokens: one per request and step."""
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
