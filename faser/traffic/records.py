"""What is played and what is recorded: the values that workloads, drivers, summaries and reports share.

Seconds are counted from the start of a run. Tokens are counted as tokens, never as stream events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
