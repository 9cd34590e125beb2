"""Prompt lookup: drafts what followed the last time the same tokens were seen.

Knows token ids; no model, and not whether a draft was accepted.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.runtime.drafter import Drafts
from faser.step import StepPlan


class NgramDrafter:
    """Needs no model, and may find nothing. `history` int64 [max_slots, max_len] has the tokens of every slot."""

    def __init__(self, history: IntArray) -> None:
        self._history = history

    def draft(self, plan: StepPlan) -> Drafts:
        num_drafted = np.zeros_like(plan.lengths)
        for i in np.flatnonzero(plan.lengths).tolist():
            slot, num_tokens = int(plan.slots[i]), int(plan.num_tokens[i])
            found = lookup(self._history[slot, :num_tokens], int(plan.lengths[i]))
            self._history[slot, num_tokens : num_tokens + found.size] = found
            num_drafted[i] = found.size
        return Drafts(num_drafted)


def lookup(tokens: IntArray, length: int, max_ngram: int = 4, min_ngram: int = 2) -> IntArray:
    """The `length` tokens that followed the most recent earlier occurrence of the longest repeated suffix of `tokens`.

    The suffix has max_ngram down to min_ngram tokens; without a repeated suffix the answer is empty. The occurrence may
    overlap the suffix. A continuation that reaches the end of `tokens` repeats itself, so periodic text goes on at its
    period.
    """
    assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
    end = _last_occurrence(tokens, max_ngram, min_ngram)
    if end is None or length <= 0:
        return np.empty(0, np.int64)
    # the tokens known to follow: [period]
    following = tokens[end + 1 :]
    if length <= len(following):
        return following[:length].copy()
    return np.resize(following, length)


def _last_occurrence(tokens: IntArray, max_ngram: int, min_ngram: int) -> int | None:
    """Where the last earlier occurrence of the longest repeated suffix ends, or None.

    An occurrence of n tokens is one of n - 1 tokens whose token before agrees too, so each round narrows the last.
    """
    last, found = len(tokens) - 1, None
    if last < min_ngram:
        return None
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for size in range(1, max_ngram + 1):
        if size > 1:
            ends = ends[np.searchsorted(ends, size - 1) :]  # an end this early has no room for `size` tokens
            ends = ends[tokens[ends - (size - 1)] == tokens[last - (size - 1)]]
        if ends.size == 0:
            break
        if size >= min_ngram:
            found = int(ends[-1])
    return found
