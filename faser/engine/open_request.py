"""A request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from faser.arrays import IntArray
from faser.request import Finish, FinishReason, Request, Stats


class StopChecker(Protocol):
    """Looks for stop strings in a request's output (faser/text/tokenizer.py)."""

    @property
    def text(self) -> str:
        """The output before the stop string, or all of it."""
        ...

    def push(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""
        ...


@dataclass(eq=False)
class OpenRequest:
    """A request that waits or runs. While it runs, its slot's arrays hold its tokens and counts."""

    request: Request
    checker: StopChecker | None
    number: int  # counts arrivals: an older request has a smaller number
    token_ids: IntArray  # the context, while the request waits
    page_names: list[bytes] = field(default_factory=list)  # of the full pages of the context
    num_found: int = 0  # pages found in the prefix cache when last looked for, while the request waits
    stats: Stats = field(default_factory=Stats)  # from before a preemption
    tried: int = 0  # drafts tried before a preemption: accepted + the first rejected of each step
    slot: int = -1  # -1: it waits

    @property
    def runs(self) -> bool:
        return self.slot >= 0

    def finish(
        self, reason: FinishReason, stats: Stats, stop_id: int | None = None, error: str | None = None
    ) -> Finish:
        return Finish(reason, stats, stop_id, error, self.checker.text if self.checker is not None else None)
