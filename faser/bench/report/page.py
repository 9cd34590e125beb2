"""The page of a report: everything report.html shows, and the file itself.

The page loads nothing and can be read without scripts, which only add tooltips and highlighting.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from faser.bench.report.drawings import Chart, ablation, category_grid, over_load, phases, positions, timeline
from faser.bench.report.figures import (
    DEFINITIONS,
    LATENCY,
    REST,
    SPEED,
    THROUGHPUT,
    Load,
    Results,
    enumerated,
    facts,
    headed,
    read,
    when,
)
from faser.bench.report.images import write_images
from faser.bench.report.legend import System
from faser.bench.report.svg import PALETTE, STYLE, swatch
from faser.bench.report.tables import Table, Winner, figure_table, load_table, losses, winner
from faser.traffic.document import Document

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class AtLoad:
    """The parts of the page for one load."""

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
    """The content of the template."""

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
        """Why this load has no time line, and which loads have one."""
        played = bool(self.results.runs.get((system.name, at.load)))
        why = "its run has no record of the steps" if played else "this load was not played"
        where = enumerated([each.load.label for each in self.loads if system.name in each.timelines])
        return f"No time line of {system.name} at {at.load.label}: {why}. There is one at {where}."

    @property
    def images(self) -> dict[str, Markup]:
        """Charts by file name: those over load, and those of the load and system shown first."""
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
    """The middle load, preferably one with a time line."""
    traced = [number for number, at in enumerate(loads) if at.timelines]
    return traced[len(traced) // 2] if traced else len(loads) // 2


def _first_traced(seen: Sequence[System], at: AtLoad) -> int:
    """`faser` if it has a time line under this load, else the last policy that has."""
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
        palette=PALETTE,
        chart_style=Markup(STYLE),
        title=headed(document.about),
        command=shlex.join(document.command),
        when=when(document.created),
        about=facts(document.about, ("ablation", "systems")),
        swatch=swatch,
        workload=facts(document.workload, ("loads",)),
        repeats=sorted({group.repeats for group in document.groups}),
        partial=[f"{run.system} at {Load.of(run).label}" for run in document.runs if run.partial],
        latency_table=load_table(results, LATENCY),
        throughput_table=load_table(results, THROUGHPUT),
        losses=losses(results),
        definitions=DEFINITIONS,
    )


def write_report(directory: Path, document: Document, say: Callable[[str], None] | None = None) -> tuple[Path, ...]:
    """report.html and, with a browser, PNGs. Returns the files written; `say` is told why PNGs are missing."""
    page = compose(document)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.html"
    path.write_text(render(page), encoding="utf-8")
    return path, *write_images(directory, page.images, say or _complain)


def _complain(line: str) -> None:
    print(line, file=sys.stderr)
