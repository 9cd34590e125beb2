"""Sizes that bound a step: what a scheduler and its executor agree on, and how long drafts may be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.errors import EngineError

HARD_MAX_LENGTH = 32  # drafted tokens per request and step: no policy may give more
ADAPTIVE_MAX_LENGTH = 7  # for policies that search for a length: 7 drafts + 1 row is a size that GPU graphs have
DRAFT_SINKS = 4  # the first tokens of a context, which a draft sees beside its window


@dataclass(frozen=True)
class KeyWindow:
    """The keys that a row attends to: the first `sinks` tokens of its context and the last `size`, its own included."""

    size: int
    sinks: int = 0

    LEAST_SIZE = 64  # of a draft's: more than the drafts that a step in flight may take back

    @property
    def span(self) -> int:
        """Keys that a row sees at most."""
        return self.sinks + self.size

    def first(self, positions: IntArray) -> IntArray:
        """The first key behind the sinks that rows at these positions see."""
        found: IntArray = np.maximum(positions - self.size + 1, self.sinks)
        return found

    def most_pages(self, page_size: int, rows: int = 1) -> int:
        """Pages that a request needs at most, in steps of `rows` rows."""
        return -(-self.sinks // page_size) + -(-(self.size + rows - 1) // page_size) + 1


@dataclass(frozen=True)
class HeadLimits:
    """What a draft head asks of a plan. Its KV is computed from the target's features, so that of drafts is not kept.

    A block is drafted in one forward, whose rows begin at the last context token and lie in the head's pages.
    """

    block_rows: int = 0  # 0: it drafts token by token
    max_length: int = HARD_MAX_LENGTH  # tokens that it drafts in one step

    LEAST_CONTEXT = 2  # tokens: the features of the last but one are the first that exist


@dataclass(frozen=True)
class VisionLimits:
    """What a target that sees asks of a plan."""

    buffer_rows: int  # encoded tokens that the executor keeps
    max_positions: int  # of the rotary embedding: M-RoPE positions may run ahead of the context


@dataclass(frozen=True)
class Limits:
    """The sizes a scheduler and its executor agree on."""

    max_running: int  # slots
    max_batch_tokens: int  # rows of one step
    max_model_len: int  # tokens of one request, prompt and output
    draft_max_len: int | None = None  # tokens of context the draft model can read; longer requests do not draft
    head: HeadLimits | None = None  # of the draft, if it is a head
    vision: VisionLimits | None = None  # of the target, if it sees
    draft_window: KeyWindow | None = None  # what the draft attends to, if that is not the whole context

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise EngineError(
                f"max_running={self.max_running} must be from 1 to max_batch_tokens={self.max_batch_tokens}"
            )

    @property
    def draft_span(self) -> int | None:
        """Tokens of a context that the draft reads at most; None: all."""
        return None if self.draft_window is None else self.draft_window.span

    def draft_pages(self, num_pages: int, page_size: int) -> int:
        """Pages of the draft beside `num_pages` of the target: as many, or what the windows of all slots need."""
        return min(num_pages, self.most_draft_pages(page_size))

    def most_draft_pages(self, page_size: int) -> int:
        """Pages that the windows of all slots need. A catch-up of up to a page's tokens, and a block, come on top."""
        if self.draft_window is None:
            return 2**40
        behind = 1 if self.head is None else max(1, self.head.block_rows)
        return self.max_running * self.draft_window.most_pages(page_size, rows=page_size + behind)
