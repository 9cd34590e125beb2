"""Sizes that bound a step: what a scheduler and its executor agree on, and how long drafts may be."""

from __future__ import annotations

from dataclasses import dataclass

from faser.errors import EngineError

HARD_MAX_LENGTH = 32  # drafted tokens per request and step: no policy may give more
ADAPTIVE_MAX_LENGTH = 7  # for policies that search for a length: 7 drafts + 1 row is a size that GPU graphs have


@dataclass(frozen=True)
class Limits:
    """The sizes a scheduler and its executor agree on."""

    max_running: int  # slots
    max_batch_tokens: int  # rows of one step
    max_model_len: int  # tokens of one request, prompt and output
    draft_max_len: int | None = None  # tokens of context the draft model can read; longer requests do not draft

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise EngineError(
                f"max_running={self.max_running} must be from 1 to max_batch_tokens={self.max_batch_tokens}"
            )
