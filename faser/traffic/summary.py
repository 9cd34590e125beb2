"""From the records of a run to its figures, as docs/metrics.md defines them.

Knows records and arithmetic, and nothing of the system that was measured: all systems have the same definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median

from faser.errors import ConfigError
from faser.traffic.document import FIGURES, Category, GroupDocument, Record, Run, RunDocument, Spread, Summary


def ttft(record: Record) -> float | None:
    """Seconds to the first token."""
    return None if record.first is None else record.first - record.arrival


def e2e(record: Record) -> float | None:
    """Seconds to the last token."""
    return None if record.end is None else record.end - record.arrival


def tpot(record: Record) -> float | None:
    """Seconds per token after the first; None for a single token."""
    if record.first is None or record.end is None or record.num_tokens < 2:
        return None
    return (record.end - record.first) / (record.num_tokens - 1)


def latency_per_token(record: Record) -> float | None:
    """Seconds from the arrival to the last token, divided by the tokens."""
    return None if record.end is None or not record.num_tokens else (record.end - record.arrival) / record.num_tokens


LATENCIES: dict[str, Callable[[Record], float | None]] = {
    "latency_per_token": latency_per_token,
    "ttft": ttft,
    "tpot": tpot,
    "e2e": e2e,
}


@dataclass(frozen=True)
class Slo:
    """A service level objective: the most seconds of some latencies."""

    most: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=0.5,tpot=0.05`."""
        most = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                most[name] = float(value)
            except ValueError:
                most[name] = math.nan
            if name not in LATENCIES or not 0 < most[name] < math.inf:
                raise ConfigError(
                    f"--slo {text}: expected seconds by name, as in ttft=0.5; names: {', '.join(LATENCIES)}"
                )
        return cls(most)

    def met_by(self, record: Record) -> bool:
        """Only a request that ended can meet it. A latency that the request does not have is met."""
        if record.end is None or record.error is not None:
            return False
        seen = ((LATENCIES[name](record), most) for name, most in self.most.items())
        return all(value is None or value <= most for value, most in seen)


def summarize(run: Run, slo: Slo | None = None) -> Summary:
    """Every figure of FIGURES. Latencies are over requests that ended; lost requests count only as lost."""
    kept = [record for record in run.records if record.error is None]
    ended = [record for record in kept if record.end is not None]
    output_tokens = sum(record.num_tokens for record in kept)
    figures: dict[str, float | None] = {
        "requests": len(run.records),
        "lost": len(run.records) - len(kept),
        "output_tokens": output_tokens,
        "seconds": run.seconds,
        "output_tokens_per_s": output_tokens / run.seconds if run.seconds else None,
        "requests_per_s": len(ended) / run.seconds if run.seconds else None,
    }
    for name, latency in LATENCIES.items():
        figures |= _quantiles(name, [value for value in map(latency, ended) if value is not None])
    figures |= {"goodput_share": None, "goodput_per_s": None}
    if slo is not None and run.records:
        met = sum(map(slo.met_by, run.records))
        figures["goodput_share"] = met / len(run.records)
        figures["goodput_per_s"] = met / run.seconds if run.seconds else None
    return {**figures, **_speculation(run)}


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys((f"{name}_mean", f"{name}_p50", f"{name}_p99"))
    return {f"{name}_mean": fmean(values), f"{name}_p50": rank(values, 0.5), f"{name}_p99": rank(values, 0.99)}


def rank(values: Sequence[float], share: float) -> float:
    """The value at index int(share * n) of the sorted ones, as scripts for other systems compute it."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _speculation(run: Run) -> dict[str, float | None]:
    drafted, verified, accepted = (total(run.records, name) for name in ("drafted", "verified", "accepted"))
    tried = drafted if verified is None else verified  # a server reports only what it drafted
    wasted = None if tried is None or accepted is None else tried - accepted
    rows = None if run.context_rows is None or tried is None else run.context_rows + tried
    lengths = added(record.lengths for record in run.records)
    steps = sum(lengths)
    return {
        "acceptance": accepted / tried if tried and accepted is not None else None,
        "wasted_rows": wasted,
        "wasted_share": wasted / rows if rows and wasted is not None else None,
        "mean_length": sum(k * count for k, count in enumerate(lengths)) / steps if steps else None,
    }


def total(records: Iterable[Record], name: str) -> int | None:
    """The sum over the records that have the value; None if none has."""
    values = [value for value in (getattr(record, name) for record in records) if value is not None]
    return sum(values) if values else None


def added(counts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Element by element; a short one counts as followed by zeros."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def categories(records: Iterable[Record]) -> dict[str, Category]:
    """By name, in the order of first appearance."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.category, []).append(record)
    return {name: _category(members) for name, members in found.items()}


def _category(records: Sequence[Record]) -> Category:
    return Category(
        requests=len(records),
        lost=sum(record.error is not None for record in records),
        output_tokens=sum(record.num_tokens for record in records if record.error is None),
        drafted=total(records, "drafted"),
        verified=total(records, "verified"),
        accepted=total(records, "accepted"),
        lengths=added(record.lengths for record in records),
    )


def group_runs(runs: Iterable[RunDocument]) -> tuple[GroupDocument, ...]:
    """Median and spread over repeats. An interrupted repeat counts only if all are interrupted."""
    found: dict[tuple[str, float | None, int | None], list[RunDocument]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    return tuple(_group(members) for members in found.values())


def _group(runs: Sequence[RunDocument]) -> GroupDocument:
    whole = [run for run in runs if not run.partial] or list(runs)
    first = whole[0]
    return GroupDocument(
        system=first.system,
        policy=first.policy,
        rate=first.rate,
        concurrency=first.concurrency,
        repeats=len(whole),
        partial=first.partial,
        figures={name: _spread([run.summary[name] for run in whole]) for name in FIGURES},
    )


def _spread(given: Iterable[float | None]) -> Spread | None:
    values = [value for value in given if value is not None]
    return Spread(median(values), min(values), max(values)) if values else None
