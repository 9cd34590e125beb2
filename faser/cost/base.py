"""What policies ask about costs."""

from __future__ import annotations

from typing import Protocol

from faser.arrays import FloatArray, IntArray
from faser.cost.curve import Context, Rows

MAX_STEADY_LAG = 2  # context tokens a draft computes first in steady state: the bonus, and the last draft if accepted


class Cost(Protocol):
    """Seconds, by rows and context. Rows may be arrays; the answer has their shape."""

    @property
    def row_sizes(self) -> IntArray:
        """Graph sizes of a verification, ascending; empty where its seconds rise with every row."""
        ...

    @property
    def error(self) -> float:
        """Mean error of recent predictions, as a share of the seconds."""
        ...

    @property
    def host(self) -> float:
        """Seconds of every step outside both models."""
        ...

    @property
    def stop_seconds(self) -> float | None:
        """Seconds of a confidence check between two drafted tokens; None: checks are not possible."""
        ...

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of SMs that drafting may have to itself beside a verification, as profiled; 0: all are shared."""
        ...

    @property
    def await_seconds(self) -> float:
        """Seconds added to a step that cannot begin before the result of the step before it is known."""
        ...

    def hidden(self, draft: float, verify: float, requests: int, draft_sms: int = 0, draft_rows: int = 0) -> float:
        """Seconds that overlapping saves: draft + verify - both at once.

        `draft_rows`, where it exceeds `requests`: rows of a draft with branches.
        """
        ...

    def verify(self, rows: Rows, context: Context, prompt_rows: int = 0) -> FloatArray:
        """The target over `rows` rows of decoding requests, with `prompt_rows` beside them."""
        ...

    def first_draft(self, requests: Rows, context: Context, rows: int = 0) -> FloatArray:
        """The draft's first token. `rows`: rows of that forward if any draft fell behind; 0: none did."""
        ...

    def next_draft(self, requests: Rows, context: Context) -> FloatArray:
        """Each further drafted token."""
        ...
