"""What the rival policies expect of a step: its seconds and tokens by length, and how often drafts are accepted.

Knows views and costs, and none of the rules. Drafting is priced as it runs here: at each depth with the requests that
get so far. Catching up is left out, as in the papers these policies come from: they know of no draft that stood still.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import Cost
from faser.policy.base import BatchView

PRIOR_RATE = 0.7  # of a request nobody has seen a draft of
PRIOR_WEIGHT = 8.0  # judged tokens it counts as


def request_rates(view: BatchView, prior: float = PRIOR_RATE) -> FloatArray:
    """[B] how often a drafted token of the request is accepted, between 0 and 1."""
    rates: FloatArray = (view.accepted + PRIOR_WEIGHT * prior) / (view.tried + PRIOR_WEIGHT)
    return np.clip(rates, 0.0, 1.0)


def survival(rates: FloatArray, limit: IntArray, most: int) -> FloatArray:
    """[most, B] the chance that a draft is accepted up to and including each position; 0 beyond the limit."""
    powers = np.broadcast_to(rates, (most, rates.size)).cumprod(axis=0)
    chances: FloatArray = np.where(reaches(limit, most), powers, 0.0)
    return chances


def expected_tokens(chances: FloatArray) -> FloatArray:
    """[most + 1] tokens of a step in which everybody drafts 0, 1, … `most`, given the survival of every slot."""
    tokens: FloatArray = chances.shape[1] + np.concatenate(([0.0], chances.sum(axis=1).cumsum()))
    return tokens


def seconds_by_length(view: BatchView, most: int) -> FloatArray:
    """[most + 1] seconds of a step in which everybody drafts 0, 1, … `most`, each up to its limit."""
    assert view.cost is not None
    reached = reaches(view.limit, most)
    depths = np.tri(most + 1, most, -1, dtype=np.int64)  # length k has the depths 1 … k
    drafting, read = depths * reached.sum(axis=1), depths * (reached @ view.num_tokens)
    return ragged_seconds(
        view.cost, view.num_requests, float(view.num_tokens.sum()), drafting, read, view.num_prefill_rows
    )


def step_seconds(cost: Cost, lengths: IntArray, num_tokens: IntArray, catch_up_rows: int = 0) -> float:
    """Seconds of a step with these lengths. `catch_up_rows`: those of the draft, if it fell behind with anybody."""
    reached = reaches(lengths, max(1, int(lengths.max())))
    drafting, read, context = reached.sum(axis=1), reached @ num_tokens, float(num_tokens.sum())
    return float(ragged_seconds(cost, lengths.size, context, drafting, read, catch_up_rows=catch_up_rows))


def ragged_seconds(
    cost: Cost,
    num_requests: int,
    context: float,
    drafting: IntArray,
    read: IntArray,
    prompt_rows: int = 0,
    catch_up_rows: int = 0,
) -> FloatArray:
    """[…] seconds of steps in which […, depth] requests draft so deep, and the draft reads so much of their context."""
    verify = cost.verify(num_requests + drafting.sum(axis=-1), context, prompt_rows)
    first = cost.first_draft(drafting[..., 0], read[..., 0], catch_up_rows)
    further = cost.next_draft(drafting[..., 1:], read[..., 1:]).sum(axis=-1)
    seconds: FloatArray = verify + first + further + cost.host
    return seconds


def likeliest(chances: FloatArray, count: int) -> IntArray:
    """[B] lengths that take the `count` likeliest slots of [most, B], none of which has no chance at all.

    A deeper slot is never likelier, so what is taken of a request is a prefix of its draft.
    """
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


def reaches(limit: IntArray, most: int) -> NDArray[np.bool_]:
    """[most, B] whether a request may draft so deep."""
    reached: NDArray[np.bool_] = np.arange(1, most + 1)[:, None] <= limit
    return reached
