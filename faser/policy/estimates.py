"""What a step is expected to take and to bring, by the lengths of its drafts: seconds and tokens.

Knows views, costs and acceptance rates; none of the rules. Drafting is priced as it runs: each position with the
requests that reach it. Catching up is left out, as in the papers of the rival policies: their drafts never pause.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.base import BatchView

TYPICAL_REST = 128  # tokens a request is expected to go on for, plus as many as it has generated


def survival(rates: FloatArray, limit: IntArray, max_length: int) -> FloatArray:
    """[max_length, B] P(a draft is accepted up to and including each position); 0 beyond the request's limit."""
    powers = np.broadcast_to(rates, (max_length, rates.size)).cumprod(axis=0)
    return np.where(reaches(limit, max_length), powers, 0.0)


def expected_tokens(chances: FloatArray) -> FloatArray:
    """[max_length + 1] tokens of a step in which all requests draft 0, 1, … tokens, given their survival."""
    tokens: FloatArray = chances.shape[1] + np.concatenate(([0.0], chances.sum(axis=1).cumsum()))
    return tokens


def seconds_by_length(view: BatchView, max_length: int) -> FloatArray:
    """[max_length + 1] seconds of a step in which all requests draft 0, 1, … tokens, each up to its limit."""
    assert view.cost is not None
    reached = reaches(view.limit, max_length)
    positions = np.tri(max_length + 1, max_length, -1, dtype=np.int64)  # length k has the positions 1 … k
    drafting, read = positions * reached.sum(axis=1), positions * (reached @ view.cost.read_by_draft(view.num_tokens))
    context = float(view.num_tokens.sum())
    return ragged_seconds(view.cost, view.num_requests, context, drafting, read, view.num_prefill_rows)


def typical_rest(view: BatchView) -> IntArray:
    """[B] tokens that requests are expected to go on for: plus as many as they have generated."""
    return np.minimum(view.remaining, TYPICAL_REST + view.num_output)


def step_seconds(
    cost: ProfiledCost, lengths: IntArray, num_tokens: IntArray, catch_up_rows: int = 0, prompt_rows: int = 0
) -> float:
    """Seconds of a step with these lengths. `catch_up_rows`: rows of the first draft forward if any draft is behind."""
    reached = reaches(lengths, max(1, int(lengths.max())))
    drafting, read, context = reached.sum(axis=1), reached @ cost.read_by_draft(num_tokens), float(num_tokens.sum())
    return float(ragged_seconds(cost, lengths.size, context, drafting, read, prompt_rows, catch_up_rows))


def ragged_seconds(
    cost: ProfiledCost,
    num_requests: int,
    context: float,
    drafting: IntArray,
    read: IntArray,
    prompt_rows: int = 0,
    catch_up_rows: int = 0,
) -> FloatArray:
    """[…] seconds of steps, given by position […, depth] the requests that draft and the context they read."""
    verify = cost.verify(num_requests + drafting.sum(axis=-1), context, prompt_rows)
    first = cost.first_draft(drafting[..., 0], read[..., 0], catch_up_rows)
    further = cost.next_draft(drafting[..., 1:], read[..., 1:]).sum(axis=-1)
    seconds: FloatArray = verify + first + further + cost.host
    return seconds


def likeliest(chances: FloatArray, count: int) -> IntArray:
    """[B] lengths that take the `count` likeliest of [max_length, B], none of chance 0. Chances fall with depth."""
    flat = chances.ravel()
    count = min(count, int(np.count_nonzero(flat)))
    if count <= 0:
        return np.zeros(chances.shape[1], dtype=np.int64)
    least = np.partition(flat, flat.size - count)[flat.size - count]
    taken = flat > least
    ties = np.flatnonzero(flat == least)  # the shallower first
    taken[ties[: count - int(np.count_nonzero(taken))]] = True
    lengths: IntArray = taken.reshape(chances.shape).sum(axis=0)
    return lengths


def reaches(limit: IntArray, max_length: int) -> BoolArray:
    """[max_length, B] whether a request may draft that position."""
    return np.arange(1, max_length + 1)[:, None] <= limit
