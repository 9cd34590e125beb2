"""A document looked up by system, load and figure; numbers in words.

Knows what each figure means and which way is better. Knows nothing of tables, charts or HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from faser.bench.report.legend import SystemLook, systems_of
from faser.traffic.document import Document, GroupDocument, RunDocument, Spread

HALF, FULL = 508, 1050  # pixels: a chart beside another, and alone
CROWDED = 8  # systems; charts of more take the whole width


@dataclass(frozen=True)
class Figure:
    """One figure of a run: its label, its unit and which way is better."""

    name: str  # in the document
    label: str
    kind: str  # seconds, share, count or number
    better: int  # 1: more, -1: less, 0: neither


def _quantiles(latency: str) -> tuple[Figure, ...]:
    return tuple(Figure(f"{latency}_{name}", name, "seconds", -1) for name in ("mean", "p50", "p99"))


SPEED = {
    "Output": (Figure("output_tokens_per_s", "tokens/s", "number", 1),),
    "Latency per output token": _quantiles("latency_per_token"),
    "Goodput": (
        Figure("goodput_share", "of requests", "share", 1),
        Figure("goodput_per_s", "requests/s", "number", 1),
    ),
    "Requests": (Figure("requests", "sent", "count", 0), Figure("lost", "lost", "count", -1)),
}
REST = {
    "Time to first token": _quantiles("ttft"),
    "Time per output token": _quantiles("tpot"),
    "End to end": _quantiles("e2e"),
    "Speculation": (
        Figure("acceptance", "acceptance", "share", 0),
        Figure("mean_length", "mean length", "number", 0),
        Figure("wasted_share", "wasted rows", "share", 0),
    ),
}
THROUGHPUT, LATENCY = SPEED["Output"][0], SPEED["Latency per output token"][0]

DEFINITIONS = (
    ("Output tokens/s", "output tokens, divided by the seconds from the first arrival to the last token"),
    ("Latency per output token", "from a request's arrival to its last token, divided by its tokens; waiting included"),
    ("Time to first token (TTFT)", "from a request's arrival to its first token"),
    ("Time per output token (TPOT)", "from the first token to the last, divided by the tokens after the first"),
    ("End to end", "from a request's arrival to its last token"),
    ("Mean, p50, p99", "over the requests of a run that ended; 99 % of the requests are below p99"),
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
class LoadPoint:
    """What was offered: a rate, a concurrency, or unknown."""

    rate: float | None
    concurrency: int | None

    @classmethod
    def of(cls, run: RunDocument | GroupDocument) -> LoadPoint:
        """Rates are compared in three digits: two systems measure the same load slightly differently."""
        return cls(None if run.rate is None else float(f"{run.rate:.3g}"), run.concurrency)

    @property
    def unit(self) -> str:
        if self.rate is not None:
            return "requests offered per second"
        return "requests open at a time" if self.concurrency is not None else "load unknown"

    @property
    def short_unit(self) -> str:
        return "requests/s" if self.rate is not None else "open" if self.concurrency is not None else "unknown"

    @property
    def amount(self) -> float:
        return self.rate if self.rate is not None else float(self.concurrency or 0)

    @property
    def label(self) -> str:
        return self.short_unit if self == LoadPoint(None, None) else f"{self.amount:g} {self.short_unit}"


@dataclass(frozen=True)
class Results:
    """A document, looked up by system and load."""

    document: Document
    systems: tuple[SystemLook, ...]
    loads: tuple[LoadPoint, ...]
    groups: Mapping[tuple[str, LoadPoint], GroupDocument]
    runs: Mapping[tuple[str, LoadPoint], Sequence[RunDocument]]  # partial ones only if all are partial

    @property
    def is_crowded(self) -> bool:
        return len(self.systems) > CROWDED

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a chart with a line for every system."""
        return (FULL, 420) if self.is_crowded else (HALF, 340)

    def spread(self, system: SystemLook, load: LoadPoint, figure: Figure) -> Spread | None:
        group = self.groups.get((system.name, load))
        spread = None if group is None else group.figures.get(figure.name)
        known = spread is not None and all(map(math.isfinite, (spread.min, spread.median, spread.max)))
        return spread if known else None

    def median(self, system: SystemLook, load: LoadPoint, figure: Figure) -> float | None:
        spread = self.spread(system, load, figure)
        return None if spread is None else spread.median

    def best(self, systems: Iterable[SystemLook], load: LoadPoint, figure: Figure) -> SystemLook | None:
        found = [(value, s) for s in systems if (value := self.median(s, load, figure)) is not None]
        return max(found, key=lambda each: figure.better * each[0])[1] if found else None

    def references(self, load: LoadPoint, figure: Figure) -> list[SystemLook]:
        """The systems ratios are taken against: `off`, and the best that is not FASER."""
        off = [system for system in self.systems if system.name == "off"]
        other = self.best((system for system in self.systems if system.other), load, figure)
        return [*off, *([other] if other is not None else [])]


def read(document: Document) -> Results:
    groups = {(group.system, LoadPoint.of(group)): group for group in document.groups}
    runs: dict[tuple[str, LoadPoint], list[RunDocument]] = {}
    for run in document.runs:
        runs.setdefault((run.system, LoadPoint.of(run)), []).append(run)
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


def shown(figure: Figure, value: float) -> str:
    """A value with its unit, for tooltips."""
    return {"seconds": milliseconds, "share": percent}.get(figure.kind, plain)(value)


def ranged(figure: Figure, spread: Spread) -> str:
    words = shown(figure, spread.median)
    if spread.max > spread.min:
        words += f" ({shown(figure, spread.min)} to {shown(figure, spread.max)})"
    return words


def _in_words(value: object) -> str:
    """A value of `about` or `workload` in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_name(key)} {_in_words(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_in_words, value[:8])) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def enumerated(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _name(key: object) -> str:
    return "SLO, seconds" if key == "slo" else str(key).replace("_", " ")


def facts(given: Mapping[str, Any], without: Sequence[str] = ()) -> list[tuple[str, str]]:
    kept = {key: value for key, value in given.items() if key not in without and value not in (None, "", [], {}, ())}
    return [(_name(key), _in_words(value)) for key, value in kept.items()]


def headed(about: Mapping[str, Any]) -> str:
    """The title of the page: the models."""
    model, draft = about.get("model"), about.get("draft")
    return f"{_in_words(model or 'Benchmark')}{f', drafted by {_in_words(draft)}' if draft else ''}"


def when(created: str) -> str:
    try:
        moment = datetime.fromisoformat(created).astimezone(UTC)
    except ValueError:
        return created
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
