"""The document as text for people: a table for each load, a row for each system, the best of every column marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser.traffic.document import Document, GroupDocument

BEST = "*"


@dataclass(frozen=True)
class _Column:
    head: str
    figure: str
    factor: float = 1.0
    digits: int = 1
    better: int = 0  # 1: more is better, -1: less is better, 0: no best is marked


_COLUMNS = (
    _Column("tok/s", "output_tokens_per_s", better=1),
    _Column("ms/token", "latency_per_token_mean", 1e3, better=-1),
    _Column("p99", "latency_per_token_p99", 1e3, better=-1),
    _Column("TTFT ms", "ttft_mean", 1e3, 0, better=-1),
    _Column("p99", "ttft_p99", 1e3, 0, better=-1),
    _Column("TPOT ms", "tpot_mean", 1e3, better=-1),
    _Column("p99", "tpot_p99", 1e3, better=-1),
    _Column("e2e s", "e2e_mean", 1.0, 2, better=-1),
    _Column("goodput %", "goodput_share", 1e2, better=1),
    _Column("accepted %", "acceptance", 1e2),
    _Column("wasted rows %", "wasted_share", 1e2),
    _Column("length", "mean_length", 1.0, 2),
    _Column("lost", "lost", 1.0, 0),
)


def render(document: Document, reference: str | None) -> str:
    """`reference` is the system that ratios are taken against; None: no ratios."""
    loads = list(dict.fromkeys((group.rate, group.concurrency) for group in document.groups))
    tables = [
        _table([g for g in document.groups if (g.rate, g.concurrency) == load], reference, _title(*load))
        for load in loads
    ]
    repeated = any(group.repeats > 1 for group in document.groups)
    notes = [f"{BEST} best of its column; medians of the repeats" if repeated else f"{BEST} best"]
    if reference is not None:
        notes.append(f"×: throughput and latency per token against {reference}, above 1 is better")
    if any(group.partial for group in document.groups):
        notes.append("(partial): interrupted")
    return "\n\n".join([*tables, "; ".join(notes)])


def _title(rate: float | None, concurrency: int | None) -> str:
    if concurrency is not None:
        return f"{concurrency} at a time"
    return "one load" if rate is None else f"{shown_rate(rate)} requests/s"


def shown_rate(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}"


def _table(groups: Sequence[GroupDocument], reference: str | None, title: str) -> str:
    shown = [column for column in _COLUMNS if any(group.figures[column.figure] is not None for group in groups)]
    against = next((group for group in groups if group.system == reference), None)
    rows = [["", *(column.head for column in shown)] + (["tok/s ×", "ms/token ×"] if against is not None else [])]
    for group in groups:
        cells = [group.system + (" (partial)" if group.partial else "")]
        cells += [_cell(group, column, groups) for column in shown]
        if against is not None:
            cells += [_ratio(group, against, "output_tokens_per_s"), _ratio(against, group, "latency_per_token_mean")]
        rows.append(cells)
    return f"{title}\n{aligned(rows)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _median(group: GroupDocument, figure: str) -> float | None:
    spread = group.figures[figure]
    return None if spread is None else spread.median


def _cell(group: GroupDocument, column: _Column, groups: Sequence[GroupDocument]) -> str:
    value = _median(group, column.figure)
    if value is None:
        return "–"
    known = [found for found in (_median(each, column.figure) for each in groups) if found is not None]
    best = column.better and len(known) > 1 and value == (max(known) if column.better > 0 else min(known))
    return f"{value * column.factor:.{column.digits}f}{BEST if best else ' '}"


def _ratio(over: GroupDocument, under: GroupDocument, figure: str) -> str:
    above, below = _median(over, figure), _median(under, figure)
    return f"{above / below:.2f}" if above is not None and below else "–"
