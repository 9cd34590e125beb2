"""What is played, what is recorded of it, and the result of a benchmark: one document, written as JSON and read back.

Knows the names of its parts and their version. Knows nothing of how they were measured or how they are drawn. Times are
seconds from the start of a run, rates are per second. Tokens are counted as tokens, never as stream events. A figure
that a system does not report is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from faser.errors import ConfigError

VERSION = 1
DIGITS = 6  # after the decimal point

# The figures of one run, in the order of the table; docs/metrics.md defines them.
FIGURES = (
    "requests", "lost", "output_tokens", "seconds", "output_tokens_per_s", "requests_per_s",
    "latency_per_token_mean", "latency_per_token_p50", "latency_per_token_p99",
    "ttft_mean", "ttft_p50", "ttft_p99",
    "tpot_mean", "tpot_p50", "tpot_p99",
    "e2e_mean", "e2e_p50", "e2e_p99",
    "goodput_share", "goodput_per_s",
    "acceptance", "wasted_rows", "wasted_share", "mean_length",
)  # fmt: skip

Summary = Mapping[str, float | None]  # every name of FIGURES


@dataclass(frozen=True)
class Item:
    """One request of a workload."""

    arrival: float
    prompt_token_ids: Sequence[int]
    max_tokens: int
    category: str = ""


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    With `concurrency` it is a closed loop: that number of requests is open at any time, the next is sent when one
    ends, and arrivals do not matter.
    """

    items: tuple[Item, ...]
    concurrency: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # options and sizes, for the report


@dataclass(frozen=True)
class Record:
    """What became of one request. A value that the system does not report is None."""

    index: int  # in the workload
    category: str
    num_prompt: int
    arrival: float  # when it was due; in a closed loop, when it was sent
    first: float | None  # when its first token came
    end: float | None  # when its last token came; None if it never ended
    num_tokens: int  # of its output
    error: str | None = None  # why it was lost: refused, dropped, failed
    drafted: int | None = None
    verified: int | None = None
    accepted: int | None = None
    steps: int | None = None
    lengths: tuple[int, ...] = ()  # index k: steps in which it drafted k tokens


@dataclass(frozen=True)
class Moment:
    """A slice of a run, for time lines."""

    time: float  # its end
    running: int
    waiting: int
    emitted: int  # tokens, in the slice
    drafted: int
    accepted: int
    mean_length: float  # drafted tokens per request and step, 0 included
    speculating: float  # share of its steps in which any request drafted
    away: float = 0.0  # share of its time in which the draft was away


@dataclass(frozen=True)
class Run:
    """One workload played once through one system."""

    system: str  # e.g. "off", "fixed:3", "vLLM K=4"
    records: tuple[Record, ...]
    seconds: float  # from the first arrival to the last token
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase: draft, verify, host, idle
    verified_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    context_rows: int | None = None  # rows the target computed, without those of drafts
    moments: tuple[Moment, ...] = ()
    partial: bool = False  # interrupted
    about: Mapping[str, Any] = field(default_factory=dict)  # models, device, versions, the rate it was played at


# ── the document ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Category:
    """The requests of one category of prompts. Counts of speculation are None if the system does not report them."""

    requests: int
    lost: int = 0
    output_tokens: int = 0
    drafted: int | None = None
    verified: int | None = None
    accepted: int | None = None
    lengths: tuple[int, ...] = ()  # index k: steps in which a request drafted k tokens


@dataclass(frozen=True)
class RunDocument:
    """One workload played once through one system."""

    system: str  # its name in tables: "off", "fixed:3", "vLLM K=4", a URL, a file's name
    policy: str | None  # None for a system that is not FASER in this process
    rate: float | None  # requests offered per second; None in a closed loop
    concurrency: int | None  # of a closed loop; None if requests arrive by the clock
    repeat: int  # from 0
    partial: bool  # interrupted: the rest was not measured
    summary: Summary
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds: draft, verify, host, idle
    verified_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    moments: tuple[Moment, ...] = ()  # empty for a server
    categories: Mapping[str, Category] = field(default_factory=dict)
    records: tuple[Record, ...] = ()  # empty if only a summary is known
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, float | None, int | None]:
        """The key that its repeats share."""
        return self.system, self.rate, self.concurrency


@dataclass(frozen=True)
class Spread:
    """One figure over the repeats of a run."""

    median: float
    min: float
    max: float


@dataclass(frozen=True)
class GroupDocument:
    """The repeats of one system under one load. Partial ones count only if all are partial."""

    system: str
    policy: str | None
    rate: float | None
    concurrency: int | None
    repeats: int
    partial: bool
    figures: Mapping[str, Spread | None]  # every name of FIGURES


@dataclass(frozen=True)
class Document:
    """Everything one command measured."""

    command: tuple[str, ...]
    created: str  # ISO 8601, UTC
    about: Mapping[str, Any]  # machine, device, model, draft, versions, slo
    workload: Mapping[str, Any]  # source, seed, sizes; `loads` lists the loads that were played
    runs: tuple[RunDocument, ...]
    groups: tuple[GroupDocument, ...]  # one per system and load, in the order of the runs
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Floats are rounded to DIGITS digits; of seconds, to microseconds."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded

    def without_details(self) -> Document:
        """Without records and moments, for one line of output."""
        return replace(self, runs=tuple(replace(run, records=(), moments=()) for run in self.runs))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError if `given` was not written by `faser bench`."""
        version = given.get("version")
        if version != VERSION:
            raise ConfigError(f"not a document of faser bench: version {version!r}; expected {VERSION}")
        try:
            parts = dict(given)
            parts["command"] = tuple(parts["command"])
            parts["runs"] = tuple(_run_of(run) for run in parts["runs"])
            parts["groups"] = tuple(_group_of(group) for group in parts["groups"])
            return cls(**parts)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"not a document of faser bench, though its version is {VERSION} ({reason})") from None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")


def _run_of(given: Mapping[str, Any]) -> RunDocument:
    parts = {
        "verified_per_position": tuple(given["verified_per_position"]),
        "accepted_per_position": tuple(given["accepted_per_position"]),
        "moments": tuple(Moment(**moment) for moment in given["moments"]),
        "categories": {name: Category(**_with_lengths(each)) for name, each in given["categories"].items()},
        "records": tuple(Record(**_with_lengths(record)) for record in given["records"]),
    }
    return RunDocument(**{**given, **parts})


def _with_lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "lengths": tuple(given["lengths"])}


def _group_of(given: Mapping[str, Any]) -> GroupDocument:
    figures = {name: None if spread is None else Spread(**spread) for name, spread in given["figures"].items()}
    return GroupDocument(**{**given, "figures": figures})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
