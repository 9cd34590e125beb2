"""The page of a report: everything report.html shows, the file itself, and its charts as PNG files.

The page loads nothing and can be read without scripts, which only add tooltips and highlighting. A browser of this
machine draws the PNG files; without one there are none.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
    LoadPoint,
    Results,
    enumerated,
    facts,
    headed,
    read,
    when,
)
from faser.bench.report.legend import SystemLook
from faser.bench.report.svg import PALETTE, STYLE, standalone, swatch
from faser.bench.report.tables import ReportTable, Winner, figure_table, load_table, losses, winner
from faser.traffic.document import Document

TEMPLATE = Path(__file__).with_name("report.html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER_SECONDS = 60.0  # for one image
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class AtLoad:
    """The parts of the page for one load."""

    load: LoadPoint
    speed: ReportTable
    rest: ReportTable
    fastest: Winner | None  # by latency
    busiest: Winner | None  # by throughput
    charts: Mapping[str, Chart]  # positions, categories, phases and ablation, those of them that can be drawn
    timelines: Mapping[str, Chart]  # by system


def _at(results: Results, load: LoadPoint) -> AtLoad:
    lines = {s.name: timeline(s, load, results.runs.get((s.name, load), ())) for s in results.systems}
    drawn = [draw(results, load) for draw in (positions, category_grid, phases, ablation)]
    return AtLoad(
        load=load,
        speed=figure_table(results, load, SPEED),
        rest=figure_table(results, load, REST),
        fastest=winner(results, load, LATENCY),
        busiest=winner(results, load, THROUGHPUT),
        charts={chart.name: chart for chart in drawn if chart is not None},
        timelines={name: line for name, line in lines.items() if line is not None},
    )


@dataclass(frozen=True)
class Page:
    """The content of the template."""

    results: Results
    loads: tuple[AtLoad, ...]
    chosen: int  # load shown first
    seen: tuple[SystemLook, ...]  # systems with a time line under any load
    traced: int  # the one of them shown first; it has a time line under the load shown first
    latency: tuple[Chart, ...]
    throughput: tuple[Chart, ...]

    def untraced(self, at: AtLoad) -> list[int]:
        """Numbers of the systems in `seen` without a time line under this load."""
        return [number for number, system in enumerate(self.seen) if system.name not in at.timelines]

    def absence(self, system: SystemLook, at: AtLoad) -> str:
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
            found += [at.timelines[self.seen[self.traced].name]] if self.seen else []
            found += at.charts.values()
        return {f"{chart.name}.png": chart.wide for chart in found}


def compose(document: Document) -> Page:
    results = read(document)
    loads = tuple(_at(results, load) for load in results.loads)
    seen = tuple(s for s in results.systems if any(s.name in at.timelines for at in loads))
    traced = [number for number, at in enumerate(loads) if at.timelines]
    chosen = traced[len(traced) // 2] if traced else len(loads) // 2  # the middle one, preferably with a time line
    return Page(
        results=results,
        loads=loads,
        chosen=chosen,
        seen=seen,
        traced=_first_traced(seen, loads[chosen]) if seen else 0,
        latency=tuple(over_load(results, LATENCY, "mean latency per output token, ms", "latency")),
        throughput=tuple(over_load(results, THROUGHPUT, "output tokens per second", "throughput")),
    )


def _first_traced(seen: Sequence[SystemLook], at: AtLoad) -> int:
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
        partial=[f"{run.system} at {LoadPoint.of(run).label}" for run in document.runs if run.partial],
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
    return path, *write_images(directory, page.images, say or partial(print, file=sys.stderr))


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def write_images(directory: Path, images: Mapping[str, Markup], say: Callable[[str], None]) -> list[Path]:
    """Returns the files written. After the first failure none is tried: the next would fail too."""
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
    """A chart on white at twice its size. The browser has a temporary profile."""
    width, height = (int(number) for number in chart.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "chart.html", Path(folder) / "chart.png"
        style = f"body{{margin:16px;background:#fff}}svg{{width:{width}px;display:block}}"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{standalone(chart)}", "utf-8")
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            "--hide-scrollbars", "--force-device-scale-factor=2", f"--window-size={width + 32},{height + 32}",
            f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        _run_alone([program, *flags])
        shutil.copyfile(picture, path)


def _run_alone(command: Sequence[str]) -> None:
    """In its own session: Ctrl-C in the terminal does not reach it, and its child processes end with it."""
    quiet, process = subprocess.DEVNULL, None
    try:
        with _signals_held():
            process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        status = process.wait(BROWSER_SECONDS)
    finally:
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        raise subprocess.CalledProcessError(status, command[0])


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block: their handlers raise, and a process would be lost."""
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in HELD_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
