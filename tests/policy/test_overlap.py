"""When drafting should overlap with verification, by what forwards cost and how often drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.policy.overlap import CHUNKS, Overlap, chunk_speed, plain_speed
from faser.profile import Curve
from tests.policy.profiles import H200, make_view


def view_of(size: int, rate: float, share: float | None):
    """Of the shorter of drafting and verification that share is not hidden."""
    judged = np.full(size, 10_000)
    curve = None if share is None else Curve((1, 64), (share, share), (0.0, 0.0))
    profile = replace(H200, overlap_share=curve)
    return make_view(size, profile=profile, accepted=(rate * judged).astype(int), judged=judged)


def tokens_by_chance(rate: float, chunk: int, steps: int = 200_000) -> float:
    """Tokens a step, of a request that is drafted for step by step."""
    right = np.random.default_rng(0).random((steps, chunk)) < rate
    frontier, tokens = 0, 0
    for draws in right.tolist():
        accepted = next((i for i in range(frontier) if not draws[i]), frontier)
        tokens += accepted + 1
        frontier = chunk - 1 if accepted == frontier and draws[frontier] else 0
    return tokens / steps


@pytest.mark.parametrize(("rate", "chunk"), [(0.6, 2), (0.6, 5), (0.9, 4), (0.95, 7)])
def test_the_tokens_of_a_step_are_those_of_chance(rate, chunk):
    view = view_of(1, rate, 0.0)
    cost, context = view.cost, float(view.num_tokens.sum())
    full = rate / (1 - rate**chunk + rate)
    rows = 1 + round(full * (chunk - 1))
    draft = float(cost.first_draft(1, context)) + (chunk - 1) * float(cost.next_draft(1, context))
    seconds = max(draft, float(cost.verify(rows, context))) + cost.host
    found = chunk_speed(view, np.array([rate]), chunk) * seconds
    assert found == pytest.approx(tokens_by_chance(rate, chunk), rel=0.02)


def test_nobody_overlaps_where_nothing_is_known_nothing_is_drafted_or_nothing_is_hidden():
    three = np.full(4, 3)
    assert Overlap("auto").chunks(view_of(4, 0.95, None), three) is None
    assert Overlap("auto").chunks(make_view(4, profile=None), three) is None
    assert Overlap("auto").chunks(view_of(4, 0.95, 0.0), 0 * three) is None
    for rate in (0.3, 0.6, 0.9, 0.99):
        assert Overlap("auto").chunks(view_of(4, rate, 1.0), three) is None


@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_is_hidden_decides_and_what_is_right(size):
    """The better drafts are and the more is hidden, the sooner; never where it is predicted to be slower."""
    for rate in (0.5, 0.7, 0.9, 0.95):
        taken = []
        for share in (0.0, 0.3, 0.6, 0.9):
            view = view_of(size, rate, share)
            chunks = Overlap("auto").chunks(view, np.full(size, 4))
            taken.append(chunks is not None)
            if chunks is not None:
                rates = np.full(size, rate)
                assert chunk_speed(view, rates, int(chunks[0])) > plain_speed(view, rates, np.full(size, 4))
                assert int(chunks[0]) in CHUNKS
        assert taken == sorted(taken, reverse=True)
    assert Overlap("auto").chunks(view_of(size, 0.95, 0.0), np.full(size, 4)) is not None


def test_on_takes_the_lengths_of_the_policy():
    lengths = np.array([3, 0, 5])
    assert Overlap("on").chunks(make_view(3), lengths) is lengths


def test_once_begun_it_goes_on_until_the_other_way_is_better():
    overlap, size = Overlap("auto"), 4
    lengths = np.full(size, 4)
    shares = np.linspace(0.0, 1.0, 41)
    down = [overlap.chunks(view_of(size, 0.9, share), lengths) is not None for share in shares]
    up = [overlap.chunks(view_of(size, 0.9, share), lengths) is not None for share in shares[::-1]]
    assert down[0]
    assert not down[-1]
    assert sum(up) < sum(down), "to begin again it must be better by more"
