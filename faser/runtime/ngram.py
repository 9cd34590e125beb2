"""Prompt lookup: guess what comes next from what came next the last time.

Knows token ids and nothing else: no model, no request, no notion of whether the guess was right.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray


def lookup(tokens: IntArray, length: int, max_ngram: int = 4, min_ngram: int = 2) -> IntArray:
    """The `length` tokens that followed the most recent earlier occurrence of the longest repeated suffix of `tokens`.

    The suffix has max_ngram down to min_ngram tokens; without a repeated one the answer is empty. The occurrence may
    overlap the suffix. A continuation that reaches the end of `tokens` goes on with itself, so periodic text is
    continued at its period.
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

    Occurrences of n tokens are those of n - 1 whose token before agrees too, so each round only narrows the last.
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
