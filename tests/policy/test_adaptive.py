"""`faser`: who drafts, how much, and when nobody does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.profile import ProfiledCost
from faser.policy.adaptive import DEPTH, LOOK_GAIN, MOST_LOOKED_AT, Adaptive
from faser.policy.base import BatchView
from faser.policy.evidence import UNTRUSTED_LENGTH
from tests.policy.profiles import H200, SMOOTH, make_outcome, make_view

GOOD, BAD = {"accepted": 190, "judged": 200}, {"accepted": 2, "judged": 200}


def lengths_of(view: BatchView, policy: Adaptive | None = None) -> list[int]:
    return (policy or Adaptive()).lengths(view).tolist()


def tokens_per_second(view: BatchView, lengths: np.ndarray, survival: np.ndarray) -> float:
    """As the policy itself should see it, from the definition."""
    cost, size, context = view.cost, view.num_requests, float(view.num_tokens.sum())
    seconds = float(cost.verify(size + int(lengths.sum()), context)) + cost.host
    each = context / size
    for level in range(int(lengths.max())):
        num = int((lengths > level).sum())
        seconds += float((cost.next_draft if level else cost.first_draft)(num, num * each))
    taken = np.arange(survival.shape[1]) < lengths[:, None]
    return (size + survival[taken].sum()) / seconds


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_lengths_are_the_best_of_all_there_are(size):
    random = np.random.default_rng(size)
    for _ in range(5):
        judged = random.integers(0, 100, size)
        view = make_view(size, limit=4, judged=judged, accepted=(judged * random.uniform(0, 1, size)).astype(int))
        policy = Adaptive()
        survival = policy._acceptance.rates_of(view).cumprod(axis=1)
        every = np.stack(np.meshgrid(*[np.arange(5)] * size, indexing="ij"), axis=-1).reshape(-1, size)
        best = max(tokens_per_second(view, lengths, survival) for lengths in every)
        assert tokens_per_second(view, policy.lengths(view), survival) >= 0.995 * best


@pytest.mark.parametrize("profile", [H200, SMOOTH])
def test_a_busier_batch_never_drafts_more(profile):
    means = [np.mean(lengths_of(make_view(size, profile=profile, **GOOD))) for size in (1, 4, 16, 64, 128, 256)]
    assert means == sorted(means, reverse=True)
    assert means[0] >= 4
    assert means[-1] <= 1


def test_the_surest_drafts_longest_and_the_hopeless_not_at_all():
    accepted, judged = [200, 150, 100, 2], [200, 200, 200, 200]
    for size in (1, 8):
        view = make_view(4 * size, accepted=accepted * size, judged=judged * size)
        lengths = np.array(lengths_of(view)).reshape(size, 4)
        assert (np.diff(lengths, axis=1) <= 0).all()
        assert (lengths[:, 0] > lengths[:, 2]).all()
        assert (lengths[:, 3] == 0).all()


def test_where_nothing_pays_nobody_drafts():
    assert not any(lengths_of(make_view(16, **BAD)))
    assert not any(lengths_of(make_view(256, accepted=60, judged=100)))


def test_limits_hold():
    lengths = lengths_of(make_view(4, limit=[0, 1, 3, 32], **GOOD))
    assert lengths[0] == 0
    assert lengths[1] == 1
    assert lengths[2] <= 3
    assert lengths[3] <= DEPTH
    assert lengths_of(make_view(3, limit=0, **GOOD)) == [0, 0, 0]


def test_prompts_in_the_step_are_no_reason_to_stop_when_they_are_rare():
    plain, beside = (np.sum(lengths_of(make_view(8, prefill_rows=rows, **GOOD))) for rows in (0, 700))
    assert 0 < beside <= plain


def test_where_every_step_has_prompts_nobody_drafts():
    """Every row then costs its full share, whoever it belongs to, and a drafted token saves one row at most."""
    policy = Adaptive()
    for _ in range(1000):
        policy.learn(make_outcome([1] * 64, [1] * 64, prefill_rows=900))
    assert not any(lengths_of(make_view(64, prefill_rows=900, **GOOD), policy))


def test_a_draft_that_fell_behind_catches_up_if_the_request_goes_on_long_enough():
    def lengths(remaining: int, lag: int) -> list[int]:
        view = make_view(2, lag=[1, lag], num_tokens=4000, **GOOD)
        return lengths_of(replace(view, remaining=np.array([500, remaining]), num_output=np.array([500, 500])))

    assert all(lengths(500, 3000))
    first, second = lengths(3, 3000)
    assert first > 0
    assert second == 0, "it would not live to see its catch-up pay"
    assert all(lengths(3, 2)), "nothing to catch up with"


def test_it_learns_to_leave_it_and_comes_back():
    policy = Adaptive()
    for _ in range(60):
        policy.learn(make_outcome([3] * 16, [0] * 16))
    assert not any(lengths_of(make_view(16), policy))
    for _ in range(3000):
        policy.learn(make_outcome([0] * 16, [0] * 16))
    assert any(lengths_of(make_view(16), policy)), "what was bad long ago is worth a try"


def looked_at(size: int, stop_seconds: float | None, **counts: int) -> tuple[BatchView, Adaptive]:
    view = make_view(size, **counts)
    profile = replace(H200, stop_seconds=stop_seconds)
    return replace(view, cost=ProfiledCost(profile)), Adaptive()


def test_few_drafts_are_looked_at_while_they_are_made():
    view, policy = looked_at(1, 50e-6, **GOOD)
    assert lengths_of(view, policy) == [DEPTH]
    rule = policy.stopping()
    assert rule is not None
    watch = rule.watch(np.array([0]))
    assert watch.goes_on([0.99])
    assert watch.goes_on([0.99])
    assert not watch.goes_on([0.01])


@pytest.mark.parametrize("size", [1, 2])
def test_a_look_may_take_a_share_of_what_it_can_save(size):
    """Which is drafting, however long a verification takes: a 32B must not make looks at a 0.6B seem worthwhile."""
    most = LOOK_GAIN / size * float(ProfiledCost(H200).next_draft(size, 0.0))
    for stop_seconds, looks in ((0.99 * most, True), (1.01 * most, False)):
        view, policy = looked_at(size, stop_seconds, **GOOD)
        policy.lengths(view)
        assert (policy.stopping() is not None) == looks


@pytest.mark.parametrize(
    ("size", "stop_seconds", "counts"),
    [(MOST_LOOKED_AT + 1, 0.0, GOOD), (1, None, GOOD), (1, 1.0, GOOD), (1, 0.0, BAD)],
    ids=["a batch", "it cannot be done", "it is too dear", "nothing to draft"],
)
def test_others_are_as_long_as_they_were_given(size, stop_seconds, counts):
    view, policy = looked_at(1, 0.0, **GOOD)
    policy.lengths(view)
    assert policy.stopping() is not None
    policy.lengths(looked_at(size, stop_seconds, **counts)[0])
    assert policy.stopping() is None, "the rule of an earlier step must not stay"


def test_drafts_that_were_looked_at_say_nothing_of_others_but_by_their_first_token():
    policy = Adaptive()
    outcome = make_outcome([4], [4])
    for _ in range(300):
        policy.learn(replace(outcome, confidence=np.full((1, DEPTH), 0.9)))
    before = policy._acceptance.rates
    assert before[0] > 0.9
    assert before[1:] == pytest.approx(Adaptive()._acceptance.rates[1:])
    assert policy._looked_at.rates[3] > 0.9


@pytest.mark.parametrize(
    ("size", "lag", "remaining", "pays"),
    [(64, 400, 200, True), (64, 400, 6, False), (128, 4000, 200, False), (160, 1000, 2, False)],
)
def test_a_batch_that_fell_behind_catches_up_together_if_they_live_to_see_it_pay(size, lag, remaining, pays):
    view = make_view(size, lag=lag, accepted=150, judged=200)
    view = replace(view, remaining=np.full(size, remaining), num_output=np.full(size, 100))
    assert np.array(lengths_of(view)).all() == pays
    assert np.array(lengths_of(view)).any() == pays


def test_costs_that_cannot_be_trusted_get_short_drafts():
    class Unsure(ProfiledCost):
        error = 1.0

    seen = {"accepted": np.array([990]), "tried": np.array([1000])}
    sure, unsure = (replace(BatchView.alike(1, 100, kind(H200)), **seen) for kind in (ProfiledCost, Unsure))
    assert Adaptive().lengths(sure).max() > UNTRUSTED_LENGTH
    assert 0 < Adaptive().lengths(unsure).max() <= UNTRUSTED_LENGTH
