"""When drafting should overlap with verification, by what forwards cost and how often drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING, Curve
from faser.cost.overlap import OverlapProfile
from faser.engine.pages import NO_WRITES
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.overlap import (
    BATCH_SIZES,
    LEADS,
    MARGIN_TO_BEGIN,
    RIDING_CHUNKS,
    STEPS_BETWEEN_DECISIONS,
    Overlap,
    lead_speed,
    plain_speed,
    ride_speed,
    worthwhile,
)
from faser.rules.overlap import OverlapPlan
from faser.step import StepPlan
from tests.policy.profiles import H200, MS, make_outcome, make_view


def view_of(size: int, rate: object, share: float | dict[int, float] | None, await_seconds: float = 0.0):
    """Of the shorter of drafting and verification that share is not hidden; or those shares, by split."""
    judged = np.full(size, 10_000)
    shares = share if isinstance(share, dict) else {} if share is None else {0: share}
    besides = tuple(
        OverlapProfile(split, NOTHING, NOTHING, NOTHING, Curve((1, 64), (left, left), (0.0, 0.0)))
        for split, left in shares.items()
    )
    profile = replace(H200, besides=besides, await_seconds=await_seconds)
    return make_view(size, profile=profile, accepted=(np.array(rate) * judged).astype(int), tried=judged)


def draft_seconds(view, length: int) -> float:
    """Seconds of drafting `length` tokens for everybody."""
    cost, size, context = view.cost, view.num_requests, float(view.num_tokens.sum())
    return float(cost.first_draft(size, context)) + (length - 1) * float(cost.next_draft(size, context))


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
    seconds = max(draft_seconds(view, chunk), float(cost.verify(rows, context))) + cost.host
    found = ride_speed(view, np.array([rate]), chunk) * seconds
    assert found == pytest.approx(tokens_by_chance(rate, chunk), rel=0.02)


def leads_by_chance(rates: list[float], lead: int, steps: int = 200_000) -> tuple[float, float]:
    """Tokens a step of all requests, and the share of steps that anybody has a lead in."""
    random = np.random.default_rng(0)
    right = random.random((steps, len(rates), lead + 1)) < np.array(rates)[:, None]
    runs = right.cumprod(axis=2).sum(axis=2)  # the last is the first token behind what is verified
    tokens = np.minimum(runs, lead) + 1
    missed = runs <= lead
    return float(tokens.sum() / steps), float(missed.any(axis=1).mean())


@pytest.mark.parametrize(
    ("rates", "lead"), [([0.6], 1), ([0.6], 4), ([0.9], 3), ([0.95], 6), ([0.9, 0.7], 2), ([0.95, 0.9, 0.97], 3)]
)
def test_leads_come_as_often_as_chance_has_somebody_miss(rates, lead):
    wait, size = 0.3 * MS, len(rates)
    view = view_of(size, rates, {0: 0.9, 16: 0.25}, wait)
    cost, rows, context = view.cost, size * (lead + 1), float(view.num_tokens.sum())
    tokens, share = leads_by_chance(rates, lead)
    if size == 1:
        held = rates[0] ** (lead + 1)
        assert (tokens, share) == pytest.approx(((1 - held) / (1 - rates[0]), 1 - held), rel=0.02)
    draft = float(cost.first_draft(size, context)) + lead * float(cost.next_draft(size, context))
    verify = float(cost.verify(rows, context))
    seconds = max(draft, verify) + 0.25 * min(draft, verify) + share * draft_seconds(view, lead) + cost.host + wait
    found = lead_speed(view, np.array(rates), lead, 16)
    assert found == pytest.approx(tokens / seconds, rel=0.01)


@pytest.mark.parametrize(("size", "lead"), [(1, 3), (1, 7), (2, 5), (4, 3)])
def test_a_way_is_priced_as_its_plan_is(size, lead):
    """Of a step behind a hit: else what is learned from plans would not mend what ways are chosen by."""
    view = view_of(size, 0.9, {0: 0.9, 16: 0.25})
    plan = hit_plan(view, lead)
    rates = np.full(size, 1 - 1e-12)  # nobody misses
    seconds = size * (lead + 1) / lead_speed(view, rates, lead, 16)
    assert seconds == pytest.approx(view.cost.predict(plan), rel=1e-6)


def hit_plan(view, lead: int) -> StepPlan:
    """Everybody has a frontier and drafts the next."""
    size = view.num_requests
    each = np.ones(size, dtype=np.int64)
    return StepPlan(
        (), (), np.arange(size), view.num_tokens, view.num_tokens - 1, each, (lead + 1) * each,
        view.num_tokens + lead - 1, each, each < 0, NO_WRITES, NO_WRITES,
        overlap=OverlapPlan(lead * each, 0 * each, leads=True, draft_sms=16),
    )  # fmt: skip


def test_nobody_overlaps_where_nothing_is_known_nothing_is_drafted_or_nothing_is_hidden():
    three = np.full(4, 3)
    assert Overlap("auto").chunks(view_of(4, 0.95, None), three) is None
    assert Overlap("auto").chunks(make_view(4, profile=None), three) is None
    assert Overlap("auto").chunks(view_of(4, 0.95, 0.0), 0 * three) is None
    for rate in (0.3, 0.6, 0.9, 0.99):
        assert Overlap("auto").chunks(view_of(4, rate, 1.0), three) is None
        assert chosen(view_of(1, rate, 1.0), ADAPTIVE_MAX_LENGTH) is None


def rates_of(view):
    return Acceptance(ADAPTIVE_MAX_LENGTH).request_rates(view)


def ways_of(view) -> dict[tuple[int, int, int], float]:
    """Tokens per second by chunk, lead and split."""
    rates, ways = rates_of(view), {}
    for split in view.cost.overlap.splits:
        ways |= {(chunk, 0, split): ride_speed(view, rates, chunk, split) for chunk in RIDING_CHUNKS}
        ways |= {(lead + 1, lead, split): lead_speed(view, rates, lead, split) for lead in LEADS}
    return ways


def plain_speed_of(view) -> float:
    """At the best length there is."""
    size, rates = view.num_requests, rates_of(view)
    return max(plain_speed(view, rates, np.full(size, length)) for length in LEADS)


def chosen(view, most: int = 4) -> tuple[int, int, int] | None:
    """Chunk, lead and split; the same for all."""
    chunks = Overlap("auto").chunks(view, np.full(view.num_requests, most))
    if chunks is None:
        return None
    assert chunks.lengths.size == chunks.lead.size == view.num_requests
    ((chunk, lead),) = set(zip(chunks.lengths.tolist(), chunks.lead.tolist(), strict=True))
    assert chunks.leads == (lead > 0)
    return chunk, lead, chunks.draft_sms


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_hidden_decides_and_what_is_right(size):
    """The better drafts are and the more is hidden, the sooner; never where it is predicted to be slower."""
    for rate in (0.5, 0.7, 0.9, 0.95):
        taken = []
        for share in (0.0, 0.3, 0.6, 0.9):
            view = view_of(size, rate, share)
            way = chosen(view)
            taken.append(way is not None)
            if way is not None:
                assert ways_of(view)[way] > plain_speed_of(view)
        assert taken == sorted(taken, reverse=True)
    assert chosen(view_of(size, 0.95, 0.0)) is not None


@pytest.mark.parametrize("wait", [0.0, 0.2 * MS, 5 * MS])
def test_the_best_way_is_taken_if_it_is_better_than_none(wait):
    found = set()
    for size in (1, 2, 4):
        for rate in (0.5, 0.8, 0.9, 0.95, 0.985):
            for share in (0.0, 0.15, 0.3, 0.6, 0.9):
                view = view_of(size, rate, share, wait)
                ways, way = ways_of(view), chosen(view)
                best = max(ways, key=ways.__getitem__)
                is_better = ways[best] > (1 + MARGIN_TO_BEGIN) * plain_speed_of(view)
                assert way == (best if is_better else None)
                found.add("none" if way is None else "lead" if way[1] else "ride")
    assert found == ({"none", "lead", "ride"} if wait < 1 * MS else {"none", "ride"})


def test_one_request_leads_where_little_is_left_and_many_ride():
    """The miss of one keeps all waiting."""
    assert [chosen(view_of(size, 0.95, 0.1))[1] > 0 for size in (1, 4)] == [True, False]


def test_a_short_draft_is_no_reason_to_overlap():
    """What is compared are the best of both, not a long chunk with the short draft of the policy."""
    assert chosen(view_of(1, 0.985, 1.0), most=1) is None


def test_more_than_a_few_do_not_overlap():
    overlap = Overlap("auto")
    for size, overlaps in ((BATCH_SIZES[-1], True), (BATCH_SIZES[-1] + 1, False), (1, True)):
        chunks = overlap.chunks(view_of(size, 0.95, 0.0), np.full(size, 4))
        assert (chunks is not None) == overlaps


@pytest.mark.parametrize("shares", [{0: 0.3, 16: 0.1, 32: 0.2}, {0: 0.1, 16: 0.3}, {0: 0.9, 48: 0.0}])
def test_the_device_is_shared_in_the_way_that_leaves_least(shares):
    least = min(shares, key=shares.__getitem__)
    for size in (1, 4):
        way = chosen(view_of(size, 0.95, shares))
        assert way == chosen(view_of(size, 0.95, {least: shares[least]}))
        assert way[2] == least


def test_a_split_is_worth_what_it_hides_for_so_many_requests():
    small, large = Curve((1, 4), (0.1, 0.9), (0.0, 0.0)), Curve((1, 4), (0.9, 0.1), (0.0, 0.0))
    besides = tuple(OverlapProfile(sms, NOTHING, NOTHING, NOTHING, share) for sms, share in ((16, small), (48, large)))
    profile, judged = replace(H200, besides=besides), 10_000
    for size, split in ((1, 16), (4, 48)):
        assert chosen(make_view(size, profile=profile, accepted=9_500, tried=judged))[2] == split


def test_on_takes_the_lengths_of_the_policy():
    lengths = np.array([3, 0, 5])
    chunks = Overlap("on", draft_sms=16).chunks(make_view(3), lengths)
    assert (chunks.lengths.tolist(), chunks.lead.tolist(), chunks.draft_sms) == ([3, 0, 5], [0, 0, 0], 16)
    assert not chunks.leads


def test_with_leads_it_drafts_one_more_beside_as_a_check():
    chunks = Overlap("on", leads=True).chunks(make_view(3), np.array([3, 0, 5]))
    assert (chunks.lengths.tolist(), chunks.lead.tolist(), chunks.draft_sms) == ([4, 0, 6], [3, 0, 5], 0)
    assert chunks.leads


def test_a_batch_is_looked_at_again_when_it_changes_or_after_a_while():
    overlap, four = Overlap("auto"), np.full(4, 4)
    assert overlap.chunks(view_of(4, 0.95, 0.0), four) is not None
    later = [overlap.chunks(view_of(4, 0.95, 1.0), four) is not None for _ in range(STEPS_BETWEEN_DECISIONS)]
    assert later == [True] * (STEPS_BETWEEN_DECISIONS - 1) + [False]
    assert overlap.chunks(view_of(4, 0.95, 0.0), four) is None
    assert overlap.chunks(view_of(3, 0.95, 0.0), four[:3]) is not None


def overlaps(overlap: Overlap, view, lengths) -> bool:
    """Once it has looked at it."""
    found = [overlap.chunks(view, lengths) is not None for _ in range(STEPS_BETWEEN_DECISIONS)]
    return found[-1]


def test_of_a_request_nobody_has_seen_as_much_is_expected_as_of_all():
    new = replace(view_of(1, 0.5, {0: 0.9, 16: 0.35}), accepted=np.zeros(1, dtype=int), tried=np.zeros(1, dtype=int))
    seven, overlap = np.full(1, ADAPTIVE_MAX_LENGTH), Overlap("auto")
    assert overlap.chunks(new, seven) is None
    for _ in range(500):
        overlap.learn(make_outcome([7], [7]))
    assert overlaps(overlap, new, seven)


def test_a_device_is_prepared_for_the_splits_that_may_be_taken():
    assert worthwhile(view_of(1, 0.5, None).cost) == set()
    assert worthwhile(view_of(1, 0.5, 1.0).cost) == set()
    assert worthwhile(view_of(1, 0.5, {0: 0.9, 16: 0.1, 48: 0.5}).cost) == {16}


def test_once_begun_it_goes_on_until_the_other_way_is_better():
    overlap, size = Overlap("auto"), 4
    lengths = np.full(size, 4)
    shares = np.linspace(0.0, 1.0, 41)
    down = [overlaps(overlap, view_of(size, 0.9, share), lengths) for share in shares]
    up = [overlaps(overlap, view_of(size, 0.9, share), lengths) for share in shares[::-1]]
    assert down[0]
    assert not down[-1]
    assert sum(up) < sum(down), "to begin again it must be better by more"
