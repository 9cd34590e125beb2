"""From a document to its charts: what is drawn, over which axis, with which words.

`about["ablation"]`, a list of systems each of which adds one thing to the one before, asks for the chart of gains.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise

from markupsafe import Markup

from faser.bench.report import charts
from faser.bench.report.charts import Bar, BarPart, Line, Panel, Point, Trace
from faser.bench.report.figures import (
    FULL,
    HALF,
    THROUGHPUT,
    Figure,
    LoadPoint,
    Results,
    percent,
    plain,
    ranged,
    share_tick,
    tick,
)
from faser.bench.report.legend import SystemLook
from faser.bench.report.scales import Axis
from faser.bench.report.svg import Look, Size
from faser.traffic.document import Moment, RunDocument, Spread
from faser.traffic.summary import added

MOST_SLICES = 180  # of a time line; more would not be seen
NARROW = 334  # pixels: a chart on a phone
NO_CATEGORY = "no category"

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


def _both(name: str, draw: Callable[[Size], Markup], width: int, height: int = 0, data: str = "") -> Chart:
    return Chart(draw(Size(width, height)), draw(Size(NARROW, height)), name, data)


def over_load(results: Results, figure: Figure, title: str, name: str) -> list[Chart]:
    """A figure over the loads; bars for a single load. Rates and concurrencies have charts of their own."""
    drawn = []
    for unit in dict.fromkeys(load.unit for load in results.loads):
        loads = [load for load in results.loads if load.unit == unit]
        suffix = "" if unit == results.loads[0].unit else "-" + unit.split()[1]
        if len(loads) > 1:
            drawn.append(_load_lines(results, loads, figure, title, name + suffix))
            continue
        bars = [_bar(system, figure, results.spread(system, loads[0], figure)) for system in results.systems]
        drawn.append(_both(name + suffix, partial(charts.bar_chart, title, bars), HALF))
    return drawn


def _load_lines(results: Results, loads: Sequence[LoadPoint], figure: Figure, title: str, name: str) -> Chart:
    factor = _factor(figure)
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
    return _both(name, partial(charts.line_chart, title, lines, across, up), *results.size)


def _factor(figure: Figure) -> float:
    """Charts show seconds as milliseconds."""
    return 1000.0 if figure.kind == "seconds" else 1.0


def _bar(system: SystemLook, figure: Figure, spread: Spread | None, gain: str = "") -> Bar:
    if spread is None:
        return Bar(system.name, (), "–")
    middle, low, high = (_factor(figure) * value for value in (spread.median, spread.min, spread.max))
    part = BarPart(middle, system.look, f"{system.name}\n{ranged(figure, spread)}")
    return Bar(system.name, (part,), plain(middle) + gain, low, high)


def positions(results: Results, load: LoadPoint) -> Chart | None:
    """Acceptance by position in the draft, over all repeats."""
    lines = []
    for system in results.systems:
        runs = results.runs.get((system.name, load), ())
        verified = added(run.verified_per_position for run in runs)
        accepted = added(run.accepted_per_position for run in runs)
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
    across, up = Axis("position in the draft", tick), Axis(title, share_tick, most=1.0)
    return _both("positions", partial(charts.line_chart, title, lines, across, up), *results.size)


def category_grid(results: Results, load: LoadPoint) -> Chart | None:
    """Acceptance by category and system, over all repeats."""
    verified, accepted = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # by (category, system)
    for system in results.systems:
        for run in results.runs.get((system.name, load), ()):
            for name, category in run.categories.items():
                seen = category.drafted if category.verified is None else category.verified
                if seen and category.accepted is not None:
                    verified[name or NO_CATEGORY, system.name] += seen
                    accepted[name or NO_CATEGORY, system.name] += category.accepted
    if not verified:
        return None
    shares = {}
    for (name, of), seen in verified.items():
        taken = accepted[name, of]
        tip = f"{of}, {name}\n{percent(taken / seen)}: {taken:,} of {seen:,}"
        shares[name, of] = BarPart(taken / seen, Look("blue"), tip, share_tick(taken / seen))
    names = sorted({name for name, _ in verified}, key=lambda name: (name == NO_CATEGORY, name))
    systems = list(dict.fromkeys(of for _, of in verified))
    draw = partial(charts.grid, "acceptance by category", names, systems, shares)
    return _both("categories", draw, results.size[0])


def phases(results: Results, load: LoadPoint) -> Chart | None:
    """Shares of a run's time by phase, over all repeats."""
    found: dict[str, Counter[str]] = {}
    for system in results.systems:
        for run in results.runs.get((system.name, load), ()):
            if sum(run.phases.values()) > 0:
                found.setdefault(system.name, Counter()).update(run.phases)
    if not found:
        return None
    seen = {phase for each in found.values() for phase, seconds in each.items() if seconds > 0}
    looks = {phase: look for phase, look in PHASES.items() if phase in seen}
    looks |= dict(zip(sorted(seen - PHASES.keys()), cycle(SPARE_LOOKS), strict=False))
    bars = []
    for name, seconds in found.items():
        whole, repeats = sum(seconds.values()), len(results.runs[name, load])
        parts = []
        for phase, look in looks.items():
            share, mean = seconds[phase] / whole, seconds[phase] / repeats
            parts.append(BarPart(share, look, f"{name}, {phase}\n{percent(share)}: {mean:.1f} s", share_tick(share)))
        bars.append(Bar(name, tuple(parts), f"{plain(whole / repeats)} s"))
    return _both("phases", partial(charts.bar_chart, "where time goes", bars, legend=list(looks.items())), FULL)


def ablation(results: Results, load: LoadPoint) -> Chart | None:
    """Throughput as one part after another is added, if the document names the steps."""
    by_name = {system.name: system for system in results.systems}
    bars = []
    before: float | None = None
    for name in results.document.about.get("ablation") or ():
        system = by_name.get(str(name))
        spread = results.spread(system, load, THROUGHPUT) if system is not None else None
        if system is not None and spread is not None:
            gain = f"  {100 * (spread.median / before - 1):+.1f}%".replace("-", "−") if before else ""
            bars.append(_bar(system, THROUGHPUT, spread, gain))
            before = spread.median
    title = "output tokens per second, and the gain over the step before"
    return _both("ablation", partial(charts.bar_chart, title, bars), FULL) if len(bars) > 1 else None


# ── time lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def timeline(system: SystemLook, load: LoadPoint, runs: Sequence[RunDocument]) -> Chart | None:
    """Of the first repeat that has moments."""
    shown = sorted((run for run in runs if run.moments), key=lambda run: run.repeat)
    if not shown:
        return None
    moments = slices(shown[0].moments)
    edges = [_first_edge(moments), *(moment.time for moment in moments)]
    spans = [end - start for start, end in pairwise(edges)]
    rates = tuple(m.emitted / span if span > 0 else None for span, m in zip(spans, moments, strict=True))
    blue, orange = Look("blue"), Look("orange", "5 4")
    lengths = tuple(m.mean_length if m.emitted else None for m in moments)
    running = Trace("running", blue, tuple(float(m.running) for m in moments), filled=True)
    waiting = Trace("waiting", orange, tuple(float(m.waiting) for m in moments))
    panels = (
        Panel(Axis("requests", tick, whole=True), (running, waiting)),
        Panel(Axis("output tokens/s", tick), (Trace("output tokens/s", blue, rates, filled=True),)),
        Panel(Axis("mean length", tick), (Trace("mean length", blue, lengths, filled=True),)),
    )
    strip = Trace("speculating", blue, tuple(m.speculating for m in moments))
    away = Trace("draft offloaded", Look("purple"), tuple(m.away for m in moments))
    band = away if any(away.values) else None
    traces = [*(trace for panel in panels for trace in panel.traces), strip, *([band] if band is not None else [])]
    told = [[trace.name, [v if v is None else float(f"{v:.3g}") for v in trace.values]] for trace in traces]
    data = json.dumps({"edges": [round(time, 2) for time in edges], "traces": told}, separators=(",", ":"))
    draw = partial(charts.timeline, f"time line of {system.name} at {load.label}", edges, panels, strip, band)
    return _both("timeline", draw, FULL, data=data)


def _first_edge(moments: Sequence[Moment]) -> float:
    """The start of the first slice: 0, or one slice length before its end if slices are shorter."""
    first, length = moments[0].time, moments[1].time - moments[0].time if len(moments) > 1 else math.inf
    return first - length if first > 1.5 * length else 0.0


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
        away=sum(moment.away for moment in moments) / number,
    )
