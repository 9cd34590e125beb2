"""Tries of a draft of which little is known: who, how often, and at what cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.adaptive import Adaptive
from faser.policy.base import PRIOR_RATE
from faser.policy.tries import FEW, MOST_ROWS, SHARE, Tries
from faser.vllm.costs import EngineCost
from tests.policy.profiles import H200, curve, make_outcome, make_view
from tests.policy.test_lookup import with_lookup

# A target so cheap that drafts pay from an acceptance between 0.7 and 0.9 on.
CHEAP = replace(
    H200, verify=curve((1, 4, 64, 256), (1.4, 1.6, 3.0, 6.0), 0.0), first_draft=curve((1, 256), (1.05, 2.2), 0.0)
)
GOOD, HOPELESS = 0.95, 0.0


def played(
    policy: Adaptive, accepted: float | Callable[[int], float], steps: int, *, size: int = 1, profile: Profile = CHEAP
) -> list[tuple[int, float]]:
    """The drafted tokens of each step, and the steps' worth of seconds that drafts took more, by the profile."""
    random, cost, found = np.random.default_rng(0), ProfiledCost(profile), []
    lag, going_on = np.full(size, 200), np.full(size, 300)
    plain = float(cost.verify(size, 200.0 * size)) + cost.host
    for step in range(steps):
        view = replace(make_view(size, profile=profile), lag=lag, num_output=going_on, remaining=going_on)
        lengths = policy.lengths(view)
        rate = accepted if isinstance(accepted, float) else accepted(step)
        right = np.minimum(lengths, (random.random((size, 32)) < rate).cumprod(axis=1).sum(axis=1))
        seconds, drafting = plain, int(np.count_nonzero(lengths))
        if drafting:
            rows = int(lag[lengths > 0].sum()) if lag[lengths > 0].max() > 2 else 0
            seconds = float(cost.verify(size + lengths.sum(), 200.0 * size)) + cost.host
            seconds += float(cost.first_draft(drafting, 200.0 * drafting, rows))
            seconds += float(cost.next_draft(drafting, 200.0 * drafting)) * (int(lengths.max()) - 1)
        policy.learn(make_outcome(lengths, right, seconds=seconds, lag=lag))
        found.append((int(lengths.sum()), seconds / plain - 1))
        lag = np.where(lengths > 0, 1, np.minimum(300, lag + 1))
    return found


def test_a_draft_that_its_prior_calls_useless_is_tried_and_used_if_it_is_good():
    for size in (1, 16):
        view = make_view(size, profile=CHEAP)
        assert not Adaptive()._paying(view).any(), f"at {PRIOR_RATE} it does not pay"
        drafted = [number for number, _ in played(Adaptive(), GOOD, 300, size=size)]
        assert min(drafted[-100:]) >= size


def test_a_try_is_short_and_of_few_requests():
    lengths = Adaptive().lengths(make_view(16))
    assert lengths.sum() == np.count_nonzero(lengths) == FEW


def test_tries_begin_with_drafts_that_have_the_least_to_catch_up():
    lag = [900, 100, 800, 300, 200, 950]
    assert Adaptive().lengths(make_view(6, lag=lag)).tolist() == [0, 1, 0, 0, 1, 0]
    assert sum(lag[index] for index in (1, 4)) <= MOST_ROWS
    assert Adaptive().lengths(make_view(3, lag=[900, 600, 700])).tolist() == [0, 1, 0], "one at least"
    assert Adaptive().lengths(make_view(3, lag=[1, 100, 100])).tolist() == [1, 0, 0], "it has caught up"


def test_tries_widen_as_drafts_are_accepted():
    policy, widths = Adaptive(), []
    view = make_view(32)
    for _ in range(3):
        lengths = policy._tries.lengths(view, ProfiledCost(H200), int(policy._acceptance.num_accepted), 2.0)
        widths.append(int(lengths.sum()))
        policy.learn(make_outcome(lengths, lengths))
    assert widths == [4, 4, 7]


def test_no_try_where_not_even_a_good_draft_would_pay():
    slow = replace(H200, first_draft=curve((1, 256), (60.0, 60.0), 0.0))
    assert not Adaptive().lengths(make_view(64, profile=slow)).any()
    cost = ProfiledCost(H200)
    assert Tries().lengths(make_view(1), cost, 0, 1.5).any()
    assert not Tries().lengths(make_view(1), cost, 0, 1.001).any(), "the hoped gain repays no try"


def test_no_try_beside_prompts_while_other_steps_come():
    assert Adaptive().lengths(make_view(4)).any()
    assert not Adaptive().lengths(make_view(4, prefill_rows=500)).any()


def test_where_every_step_has_prompts_a_try_is_made_beside_them():
    """Of long contexts, with a draft that does not read them whole: there drafts can pay beside prompts."""
    policy, view = Adaptive(), make_view(16, num_tokens=16_000, prefill_rows=500)
    view = replace(view, cost=ProfiledCost(H200, draft_span=1028))
    for _ in range(500):
        policy.learn(make_outcome([0] * 16, [0] * 16, prefill_rows=500))
    assert policy.lengths(view).tolist() == [1] * 4 + [0] * 12


def test_requests_that_find_something_look_it_up_beside_a_try_of_others():
    guesses = Adaptive().guesses(with_lookup(make_view(8, profile=CHEAP), [0.9] * 2 + [0.0] * 6))
    assert guesses.lengths[:2].min() > 1
    assert guesses.is_looked_up[:2].all()
    assert guesses.lengths[2:].tolist() == [1] * FEW + [0] * 2
    assert not guesses.is_looked_up[2:6].any()
    alone = Adaptive().guesses(with_lookup(make_view(1, profile=CHEAP), [0.9]))
    assert alone.is_looked_up.all()


@pytest.mark.parametrize("size", [1, 16])
def test_a_hopeless_draft_costs_one_try_and_then_a_share_of_all_steps(size):
    steps = 20_000
    costs = [cost for _, cost in played(Adaptive(), HOPELESS, steps, size=size)]
    first = sum(costs[:100])
    assert 0 < first < 8
    assert sum(costs) < first + 1.1 * SHARE * steps + 4, "the latest try may not be paid off yet"
    assert sum(costs[-5000:]) > 0, "tries never end"


def test_a_draft_that_becomes_good_is_found_out():
    policy = Adaptive()
    drafted = [number for number, _ in played(policy, lambda step: GOOD if step > 4000 else HOPELESS, 8000)]
    assert np.mean(np.array(drafted[1000:4000]) > 0) < 0.02
    assert np.mean(np.array(drafted[-1000:]) > 0) > 0.98


def test_what_drafting_gains_pays_off_the_tries_that_led_to_it():
    tries = Tries()
    for _ in range(20):
        tries.learn(steps=1.0)
    for _ in range(23):
        assert not tries.may_begin
        tries.end(gain=1.5)
    tries.end(gain=1.5)
    assert tries.may_begin


def test_no_request_is_caught_up_for_a_try_that_ends_before_it_is_repaid():
    late = make_view(1, num_tokens=16_000, lag=16_000)
    cost, short = ProfiledCost(H200), replace(late, remaining=np.array([10]))
    assert not Tries().lengths(short, cost, 0, 1.5).any()
    assert Tries().lengths(replace(late, remaining=np.array([120])), cost, 0, 1.5).any()


def test_an_open_try_goes_on_with_the_request_that_it_caught_up_and_with_no_other():
    tries, cost, late = Tries(), ProfiledCost(H200), replace(make_view(2, num_tokens=4000, lag=[4000, 4100]))
    assert tries.lengths(late, cost, 0, 2.0).tolist() == [1, 0]
    tries.learn(steps=5.0)
    assert tries.lengths(replace(late, lag=np.array([2000, 4100])), cost, 0, 2.0).tolist() == [1, 0]
    tries.learn(steps=1.0)
    assert tries.lengths(replace(late, lag=np.array([1, 4100])), cost, 0, 2.0).tolist() == [1, 0], "it has caught up"
    assert not tries.lengths(replace(late, slots=np.array([5, 6])), cost, 0, 2.0).any(), "others would have to catch up"
    tries.end()
    assert not tries.lengths(replace(late, lag=np.array([1, 1])), cost, 0, 2.0).any(), "nothing is paid off yet"


def test_a_try_counts_what_catching_up_cost_before_anything_is_drafted():
    policy, cost = Adaptive(), ProfiledCost(H200)
    view = replace(make_view(1, num_tokens=16_000, lag=16_000), remaining=np.array([500]), num_output=np.array([500]))
    assert policy.lengths(view).tolist() == [1]
    policy.learn(replace(make_outcome([0], [0]), lag=np.array([4096]), num_tokens=np.array([16_000])))
    assert policy._tries._owed > 0.9 * float(cost.first_draft(1, 16_000.0, 4096)) / float(cost.verify(1, 16_000.0))


def test_tries_end_after_so_many_first_tokens_whatever_fades_in_between():
    policy = Adaptive()
    for _ in range(16):
        policy.learn(make_outcome([1] * 4, [0] * 4))
    assert not policy._acceptance.may_be_tried
    for _ in range(7):
        policy.learn(make_outcome([0] * 4, [0] * 4))
        assert not policy._acceptance.may_be_tried


def test_where_a_draft_runs_for_the_whole_batch_a_try_costs_the_catch_up_of_all():
    view = replace(make_view(64, num_tokens=2000, lag=2000), remaining=np.full(64, 200), num_output=np.full(64, 200))
    assert Tries().lengths(view, ProfiledCost(H200), 0, 1.5).any()
    assert not Tries().lengths(view, EngineCost(H200), 0, 1.5).any()


def test_tries_are_no_evidence_of_what_drafting_gains():
    policy, told = Adaptive(), []
    policy._measured.learn = lambda outcome, seconds: told.append(outcome)
    policy.learn(make_outcome([1] * 8, [1] * 8))
    assert not told
    policy.learn(make_outcome([1] * 8, [1] * 8))
    assert len(told) == 1
