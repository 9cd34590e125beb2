"""Sizes that bound a step: what a scheduler and its executor agree on, and how long drafts may be."""

from __future__ import annotations

from dataclasses import dataclass

from faser.errors import EngineError

HARD_MAX_LENGTH = 32  # drafted tokens per request and step: no policy may give more
ADAPTIVE_MAX_LENGTH = 7  # for policies that search for a length: 7 drafts + 1 row is a size that GPU graphs have


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

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise EngineError(
                f"max_running={self.max_running} must be from 1 to max_batch_tokens={self.max_batch_tokens}"
            )
