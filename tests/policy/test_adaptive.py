"""`faser`: who drafts, how much, and when nobody does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.adaptive import CHECK_GAIN, DEPTH, MAX_CHECKED, MAX_RUNNING, Adaptive
from faser.policy.base import BatchView
from faser.policy.evidence import UNTRUSTED_LENGTH
from tests.policy.profiles import H200, SMOOTH, curve, make_outcome, make_view, proven

GOOD, BAD = {"accepted": 190, "tried": 200}, {"accepted": 2, "tried": 200}


def lengths_of(view: BatchView, policy: Adaptive | None = None) -> list[int]:
    return (policy or proven()).lengths(view).tolist()


def work_per_second(view: BatchView, lengths: np.ndarray, survival: np.ndarray) -> float:
    """As the policy itself should see it, from the definition: tokens, each worth its request's share of a plain step,
    over the mean share."""
    cost, size, context = view.cost, view.num_requests, float(view.num_tokens.sum())
    seconds = float(cost.verify(size + int(lengths.sum()), context)) + cost.host
    for level in range(int(lengths.max())):
        num, read = int((lengths > level).sum()), int(view.num_tokens[lengths > level].sum())
        seconds += float((cost.next_draft if level else cost.first_draft)(num, read))
    plain, alike = float(cost.verify(size, context)) + cost.host, float(cost.verify(size, 0.0)) + cost.host
    shares = alike / size + (plain - alike) * view.num_tokens / context
    tokens = 1 + (survival * (np.arange(survival.shape[1]) < lengths[:, None])).sum(axis=1)
    return float(tokens @ shares) / (plain / size) / seconds


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_lengths_are_the_best_of_all_combinations(size):
    random = np.random.default_rng(size)
    for longest in (200, 200, 200, 32_000, 32_000, 32_000):
        tried, contexts = random.integers(0, 100, size), random.integers(200, longest + 1, size)
        accepted = (tried * random.uniform(0, 1, size)).astype(int)
        view = make_view(size, limit=4, tried=tried, accepted=accepted, num_tokens=contexts)
        policy = proven()
        survival = policy._acceptance.position_rates(view).cumprod(axis=1)
        every = np.stack(np.meshgrid(*[np.arange(5)] * size, indexing="ij"), axis=-1).reshape(-1, size)
        best = max(work_per_second(view, lengths, survival) for lengths in every)
        assert work_per_second(view, policy.lengths(view), survival) >= 0.995 * best


@pytest.mark.parametrize("profile", [H200, SMOOTH])
def test_a_busier_batch_never_drafts_more(profile):
    means = [np.mean(lengths_of(make_view(size, profile=profile, **GOOD))) for size in (1, 4, 16, 64, 128, 256)]
    assert means == sorted(means, reverse=True)
    assert means[0] >= 4
    assert means[-1] <= 1


def test_the_surest_drafts_longest_and_the_hopeless_not_at_all():
    accepted, tried = [200, 150, 100, 2], [200, 200, 200, 200]
    for size in (1, 8):
        view = make_view(4 * size, accepted=accepted * size, tried=tried * size)
        lengths = np.array(lengths_of(view)).reshape(size, 4)
        assert (np.diff(lengths, axis=1) <= 0).all()
        assert (lengths[:, 0] > lengths[:, 2]).all()
        assert (lengths[:, 3] == 0).all()


def test_where_nothing_pays_nobody_drafts():
    assert not any(lengths_of(make_view(16, **BAD)))
    assert not any(lengths_of(make_view(256, accepted=60, tried=100)))


def test_no_request_drafts_more_than_its_limit():
    lengths = lengths_of(make_view(4, limit=[0, 1, 3, 32], **GOOD))
    assert lengths[0] == 0
    assert lengths[1] == 1
    assert lengths[2] <= 3
    assert lengths[3] <= DEPTH
    assert lengths_of(make_view(3, limit=0, **GOOD)) == [0, 0, 0]


def test_prompts_in_the_step_are_no_reason_to_stop_when_they_are_rare():
    plain, beside = (np.sum(lengths_of(make_view(8, prefill_rows=rows, **GOOD))) for rows in (0, 700))
    assert 0 < beside <= plain


def always_with_prompts() -> Adaptive:
    """A policy that has seen prompts in every step for long."""
    policy = proven()
    for _ in range(500):
        policy.learn(make_outcome([1] * 64, [1] * 64, prefill_rows=900))
    return policy


def test_where_every_step_has_prompts_short_contexts_do_not_draft():
    """A row beside prompts costs its full share, so drafts save no time that prompts could use."""
    assert not any(lengths_of(make_view(64, prefill_rows=900, **GOOD), always_with_prompts()))


@pytest.mark.parametrize("size", [4, 16, 32])
@pytest.mark.parametrize("accepted", [80, 110, 140])
def test_where_every_step_has_prompts_long_contexts_draft_as_much_as_saves_most_reading(size, accepted):
    """A step reads each context once, whatever the length: the best length adds the least seconds for each token."""
    policy, counts = always_with_prompts(), {"accepted": accepted, "tried": 200}
    view = make_view(size, profile=reading(0.0), num_tokens=16_000, prefill_rows=900, **counts)
    cost, rates = view.cost, policy._acceptance.position_rates(view)[0]

    def added(length: int) -> float:
        drafts = cost.first_draft(size, 0.0) + (length - 1) * cost.next_draft(size, 0.0) if length else 0.0
        verification = cost.verify(size * (1 + length), size * 16_000.0, 900) - cost.verify(0, 0.0, 900)
        return float(drafts + verification) / (1 + rates[:length].cumprod().sum())

    best = min(range(DEPTH + 1), key=added)
    assert 0 < best < DEPTH
    assert lengths_of(view, policy) == [best] * size


def test_a_profile_by_which_decoding_adds_nothing_to_prompts_is_no_error():
    free = curve((1, 256, 512), (13.5, 13.5, 13.5), 0.0, is_stepped=True)
    profile = replace(reading(0.0), verify=replace(H200.verify, per_token=(0.0,) * 7), prompts=free)
    assert not any(lengths_of(make_view(4, profile=profile, prefill_rows=200, **GOOD), always_with_prompts()))


def test_a_draft_that_fell_behind_catches_up_if_the_request_goes_on_long_enough():
    def lengths(remaining: int, lag: int) -> list[int]:
        view = make_view(2, lag=[1, lag], num_tokens=4000, **GOOD)
        return lengths_of(replace(view, remaining=np.array([500, remaining]), num_output=np.array([500, 500])))

    assert all(lengths(500, 3000))
    first, second = lengths(3, 3000)
    assert first > 0
    assert second == 0, "it ends before its catch-up has paid"
    assert all(lengths(3, 2)), "it kept up"


def test_bad_drafts_end_speculation_and_a_long_pause_gives_it_another_chance():
    policy = proven()
    for _ in range(60):
        policy.learn(make_outcome([3] * 16, [0] * 16))
    assert not any(lengths_of(make_view(16), policy))
    for _ in range(3000):
        policy.learn(make_outcome([0] * 16, [0] * 16))
    assert any(lengths_of(make_view(16), policy)), "old rejections must be forgotten"


def checked(size: int, stop_seconds: float | None, **counts: int) -> tuple[BatchView, Adaptive]:
    view = make_view(size, **counts)
    profile = replace(H200, stop_seconds=stop_seconds)
    return replace(view, cost=ProfiledCost(profile)), proven()


def test_drafts_of_a_single_request_get_confidence_checks():
    view, policy = checked(1, 50e-6, **GOOD)
    assert lengths_of(view, policy) == [DEPTH]
    rule = policy.stopping()
    assert rule is not None
    watch = rule.watch(np.array([0]))
    assert watch.goes_on([0.99])
    assert watch.goes_on([0.99])
    assert not watch.goes_on([0.01])


@pytest.mark.parametrize("size", [1, 2])
def test_a_confidence_check_may_take_a_share_of_the_drafting_it_can_save(size):
    """The seconds of a verification do not matter: a slow target does not make checks of a fast draft worthwhile."""
    most = CHECK_GAIN / size * float(ProfiledCost(H200).next_draft(size, 0.0))
    for stop_seconds, pays in ((0.99 * most, True), (1.01 * most, False)):
        view, policy = checked(size, stop_seconds, **GOOD)
        policy.lengths(view)
        assert (policy.stopping() is not None) == pays


def test_the_better_the_draft_the_less_a_confidence_check_may_cost():
    def checks(accepted: int, share: float) -> bool:
        view, policy = checked(1, share * CHECK_GAIN * float(ProfiledCost(H200).next_draft(1, 0.0)), **GOOD)
        for _ in range(40):
            policy.learn(make_outcome([1] * 100, np.arange(100) < accepted))
        policy.lengths(view)
        return policy.stopping() is not None

    assert checks(70, 0.9)
    assert checks(85, 0.4)
    assert not checks(85, 0.6)
    assert not checks(97, 0.4)


@pytest.mark.parametrize(
    ("size", "stop_seconds", "counts"),
    [(MAX_CHECKED + 1, 0.0, GOOD), (1, None, GOOD), (1, 1.0, GOOD), (1, 0.0, BAD)],
    ids=["a batch", "checks are not possible", "checks are too dear", "nothing to draft"],
)
def test_where_checks_do_not_pay_there_is_no_rule_to_stop_by(size, stop_seconds, counts):
    view, policy = checked(1, 0.0, **GOOD)
    policy.lengths(view)
    assert policy.stopping() is not None
    policy.lengths(checked(size, stop_seconds, **counts)[0])
    assert policy.stopping() is None, "the rule of an earlier step must not stay"


def test_of_checked_drafts_only_the_first_token_counts_for_unchecked_ones():
    policy = proven()
    outcome = make_outcome([4], [4])
    for _ in range(300):
        policy.learn(replace(outcome, confidence=np.full((1, DEPTH), 0.9)))
    before = policy._acceptance.rates
    assert before[0] > 0.9
    assert before[1:] == pytest.approx(proven()._acceptance.rates[1:])
    assert policy._checked_acceptance.rates[3] > 0.9


@pytest.mark.parametrize(
    ("size", "lag", "remaining", "pays"),
    [(64, 400, 200, True), (64, 400, 6, False), (128, 4000, 200, False), (160, 1000, 2, False)],
)
def test_a_batch_that_fell_behind_catches_up_together_if_that_pays_before_it_ends(size, lag, remaining, pays):
    view = make_view(size, lag=lag, accepted=150, tried=200)
    view = replace(view, remaining=np.full(size, remaining), num_output=np.full(size, 100))
    assert np.array(lengths_of(view)).all() == pays
    assert np.array(lengths_of(view)).any() == pays


def with_traffic(prompt_rows: int, steps: int = 5) -> Adaptive:
    """A policy that has seen a short burst: steps of 10 ms with `prompt_rows` prompt rows."""
    policy = proven()
    for _ in range(steps):
        policy.learn(make_outcome([1] * 16, [1] * 16, seconds=10e-3, prefill_rows=prompt_rows))
    return policy


def test_the_coming_batch_is_as_large_as_recent_prompts_will_make_it():
    view, cost = make_view(16, **GOOD), ProfiledCost(H200)
    sizes = [with_traffic(rows)._coming_size(view, cost) for rows in (0, 60, 120, 500)]
    assert sizes[0] == 16, "no prompts, no growth"
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == MAX_RUNNING
    assert with_traffic(500)._coming_size(make_view(300, **GOOD), cost) == 300


def test_in_a_burst_of_prompts_drafts_that_fell_behind_do_not_catch_up():
    """The batch is about to grow to a size at which drafts save nothing."""
    view = make_view(16, lag=400, **GOOD)
    assert all(lengths_of(view, with_traffic(0)))
    assert not any(lengths_of(view, with_traffic(500)))


def test_costs_that_cannot_be_trusted_get_short_drafts():
    def longest(error: float) -> int:
        view = BatchView.alike(1, 100, ProfiledCost(replace(H200, errors={"verify": error})))
        view = replace(view, accepted=np.array([990]), tried=np.array([1000]))
        return int(proven().lengths(view).max())

    assert longest(error=0.05) > UNTRUSTED_LENGTH
    assert 0 < longest(error=1.0) <= UNTRUSTED_LENGTH


def test_a_long_context_and_a_short_one_get_their_own_lengths():
    """New requests: what is known of them is how long their contexts are."""
    policy, contexts = proven(), np.array([200, 32_000])
    for _ in range(600):
        policy.learn(replace(make_outcome([4, 4], [4, 0]), num_tokens=contexts))
    short, long = policy.lengths(make_view(2, num_tokens=contexts, profile=H200)).tolist()
    assert short >= 3
    assert long <= 1


def test_a_draft_that_sees_a_window_drafts_longer_in_long_contexts():
    """Its reading costs the same however long they are."""
    profile = replace(H200, first_draft=curve((1, 256), (0.8, 2.2), 1e-7), next_draft=curve((1, 256), (0.7, 2.1), 1e-7))
    view = make_view(4, num_tokens=4000, profile=profile, accepted=80, tried=100)
    whole = proven().lengths(view)
    windowed = proven().lengths(replace(view, cost=ProfiledCost(profile, draft_span=1028)))
    assert windowed.sum() > whole.sum()


def reading(per_token: float) -> Profile:
    """A draft that takes so many seconds for each token of a context, at every number of requests."""
    first, following = (
        replace(each, per_token=(per_token,) * len(each.rows)) for each in (H200.first_draft, H200.next_draft)
    )
    return replace(H200, first_draft=first, next_draft=following)


@pytest.mark.parametrize("size", [8, 64])
def test_beside_short_contexts_a_long_one_that_is_dear_to_draft_for_does_not_draft(size):
    """A draft whose KV is nearly as large as the target's: it reads more for a long context than that saves."""
    contexts = [32_000] + [200] * (size - 1)
    view = make_view(size, num_tokens=contexts, profile=reading(36e-9), accepted=150, tried=200)
    long, *short = proven().lengths(view).tolist()
    assert long == 0
    assert min(short) >= 1
    windowed = replace(view, cost=ProfiledCost(reading(36e-9), draft_span=1028))
    assert proven().lengths(windowed)[0] >= 1, "with a window it reads as little as the others"


def test_beside_short_contexts_long_ones_that_are_cheap_to_draft_for_draft_longer():
    """The target reads a long context in every step: its tokens save more than those of the others."""
    contexts = np.array([32_000] * 8 + [200] * 56)
    view = make_view(64, num_tokens=contexts, profile=SMOOTH, accepted=150, tried=200)
    lengths = proven().lengths(replace(view, cost=ProfiledCost(SMOOTH, draft_span=1028)))
    assert lengths[:8].min() >= lengths[8:].max() + 2
    alike = proven().lengths(make_view(64, num_tokens=4175, profile=SMOOTH, accepted=150, tried=200))
    assert alike.min() == alike.max()


def test_a_long_context_that_fell_behind_catches_up_where_its_own_tokens_repay_it():
    contexts = np.array([200] * 4 + [32_000] * 4)

    def lengths_with(lag: int) -> list[int]:
        return lengths_of(make_view(8, num_tokens=contexts, lag=[1] * 4 + [lag] * 4, accepted=170, tried=200))

    assert min(lengths_with(16_000)) > 0
    assert lengths_with(32_000)[4:] == [0] * 4
