"""The tables of a report: figures by system and load, ratios, winners, lost requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from faser.bench.report.figures import LATENCY, THROUGHPUT, Figure, LoadPoint, Results, shown
from faser.bench.report.legend import SystemLook
from faser.bench.report.svg import shortened
from faser.traffic.document import RunDocument, Spread


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None  # of the document
    spread: str = ""
    ratio: str = ""
    tone: str = ""  # of the ratio: good, bad
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    system: SystemLook
    cells: tuple[Cell, ...]
    partial: bool = False


@dataclass(frozen=True)
class ReportTable:
    heads: tuple[tuple[str, int], ...]  # (text, number of columns)
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    unit: str = ""  # of all columns, if they share one


Column = tuple[str, tuple[Cell, ...]]  # its head, and a cell for every system


def _cells(
    results: Results, load: LoadPoint, figure: Figure, factor: float, reference: SystemLook | None = None
) -> tuple[Cell, ...]:
    """One figure of every system under one load, with the same unit and digits."""
    spreads = [results.spread(system, load, figure) for system in results.systems]
    known = [spread.median for spread in spreads if spread is not None]
    digits = _digits([factor * value for value in known]) if figure.kind != "count" else 0
    best = max(known, key=lambda value: figure.better * value) if figure.better and len(set(known)) > 1 else None
    base = results.spread(reference, load, figure) if reference is not None else None
    return tuple(_cell(figure, spread, factor, digits, best, base) for spread in spreads)


def _unit(results: Results, loads: Iterable[LoadPoint], figures: Iterable[Figure], figure: Figure) -> tuple[str, float]:
    """Its name, and the factor from the document's unit. Figures side by side have the same unit."""
    if figure.kind == "seconds":
        every = (results.median(system, load, each) for system in results.systems for load in loads for each in figures)
        return ("s", 1.0) if max((value for value in every if value is not None), default=0.0) >= 10 else ("ms", 1000.0)
    return ("%", 100.0) if figure.kind == "share" else ("", 1.0)


def _digits(values: Sequence[float]) -> int:
    """Decimals that give the median value three digits."""
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
    """(ratio, tone): how many times better; no tone within 1 % or if the ranges overlap."""
    if own is None or base is None or not base.median or not own.median:
        return "", ""
    ratio = own.median / base.median if figure.better > 0 else base.median / own.median
    tone = "" if abs(ratio - 1) < 0.01 or _overlap(own, base) else "good" if ratio > 1 else "bad"
    return f"{ratio:.2f}×", tone


def _overlap(one: Spread, other: Spread) -> bool:
    return one.min <= other.max and other.min <= one.max


def _ratios(results: Results, load: LoadPoint, figure: Figure, reference: SystemLook) -> Column:
    base = results.spread(reference, load, figure)
    compared = [_compared(figure, results.spread(system, load, figure), base) for system in results.systems]
    return f"× {shortened(reference.name, 100)}", tuple(Cell(ratio or "–", tone=tone) for ratio, tone in compared)


def figure_table(results: Results, load: LoadPoint, parts: Mapping[str, Sequence[Figure]]) -> ReportTable:
    """Systems by figures under one load, without figures that no system reports."""
    heads, columns = [], list[Column]()
    for head, figures in parts.items():
        before = len(columns)
        for figure in figures:
            unit, factor = _unit(results, [load], figures, figure)
            cells = _cells(results, load, figure, factor)
            if any(cell.value is not None for cell in cells):
                columns.append((f"{figure.label}, {unit}" if unit else figure.label, cells))
                if figure in (THROUGHPUT, LATENCY) and len(results.systems) > 1:
                    columns += [_ratios(results, load, figure, each) for each in results.references(load, figure)]
        if len(columns) > before:
            heads.append((head, len(columns) - before))
    return _table(results, load, columns, tuple(heads))


def load_table(results: Results, figure: Figure) -> ReportTable:
    """One figure, systems by loads, with its ratio to `off`."""
    off = next((system for system in results.systems if system.name == "off"), None)
    unit, factor = _unit(results, results.loads, [figure], figure)
    columns = [(load.label, _cells(results, load, figure, factor, off)) for load in results.loads]
    return _table(results, None, columns, unit=unit)


def _table(
    results: Results,
    load: LoadPoint | None,
    columns: Sequence[Column],
    heads: tuple[tuple[str, int], ...] = (),
    unit: str = "",
) -> ReportTable:
    """Without systems that did not play this load; with load None, of all loads."""
    rows = []
    for index, system in enumerate(results.systems):
        groups = [group for (name, at), group in results.groups.items() if name == system.name and load in (None, at)]
        if groups:
            cells = tuple(cells[index] for _, cells in columns)
            rows.append(TableRow(system, cells, any(group.partial for group in groups)))
    return ReportTable(heads, tuple(head for head, _ in columns), tuple(rows), unit)


@dataclass(frozen=True)
class Winner:
    """The best system under one load by one figure."""

    system: SystemLook
    value: float
    text: str
    ratios: tuple[tuple[str, str, str], ...]  # (ratio, system, tone)
    level: int  # other systems whose range overlaps: the first place is not certain


def winner(results: Results, load: LoadPoint, figure: Figure) -> Winner | None:
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
        text=shown(figure, own.median) + ("" if figure.kind == "seconds" else " tokens/s"),
        ratios=tuple((ratio, name, tone) for (ratio, tone), name in compared if ratio),
        level=sum(_overlap(own, other) for other in others if other is not None),
    )


@dataclass(frozen=True)
class Loss:
    """The requests a run lost, and why."""

    system: SystemLook
    load: LoadPoint
    run: RunDocument
    reasons: list[tuple[str, int]]


def losses(results: Results) -> list[Loss]:
    found = []
    systems = {system.name: system for system in results.systems}
    for run in results.document.runs:
        if run.summary.get("lost") and run.system in systems:
            reasons = Counter(record.error for record in run.records if record.error is not None)
            found.append(Loss(systems[run.system], LoadPoint.of(run), run, reasons.most_common(3)))
    return found
