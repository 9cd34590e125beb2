from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from faser.policy.rivals.nightjar import FIRST_PLAYS, LONGEST, MAX_BLOCK, Nightjar
from tests.policy.profiles import MS, make_outcome, make_view

Losses = dict[int, float]  # ms per token of a request, by length

SPECULATION_PAYS = {0: 4.0, 1: 3.0, 2: 2.5, 3: 2.2, 4: 2.6, 5: 3.0}
IT_DOES_NOT = {0: 4.0, 1: 5.0, 2: 6.0, 3: 7.0, 4: 8.0, 5: 9.0}
LONGER_IS_BETTER = {0: 4.0, 1: 3.6, 2: 3.3, 3: 3.0, 4: 2.7, 5: 2.0}


def play(
    policy: Nightjar,
    losses: Losses,
    steps: int,
    size: int = 16,
    lag_after_off: int = 1,
    noise: Callable[[], float] = lambda: 1.0,
) -> list[int]:
    """Steps of a machine with these losses; returns the lengths given."""
    after_off, after_on = make_view(size, lag=lag_after_off), make_view(size)
    given, was_off = [], True
    for _ in range(steps):
        length = int(policy.lengths(after_off if was_off else after_on)[0])
        accepted = length // 2
        seconds = MS * losses[length] * (accepted + 1) * noise()
        policy.learn(make_outcome([length] * size, accepted, seconds=seconds, lag=min(length, 1)))
        was_off = length == 0
        given.append(length)
    return given


def test_every_arm_is_tried_before_one_is_preferred():
    given = play(Nightjar(), SPECULATION_PAYS, 6 * FIRST_PLAYS)
    assert set(given) == set(range(LONGEST + 1))


@pytest.mark.parametrize(
    ("losses", "best"), [(SPECULATION_PAYS, 3), (IT_DOES_NOT, 0), (LONGER_IS_BETTER, 5)], ids=["3", "0", "5"]
)
def test_the_best_arm_is_found_and_exploration_stays_bounded(losses, best):
    random = np.random.default_rng(1)
    given = play(Nightjar(), losses, 6000, noise=lambda: random.normal(1, 0.1))
    later = np.array(given[1000:])
    assert (later == best).mean() > 0.92, "all but a 24th of the bins, and some of those"
    assert (later != best).any(), "or no change would ever be seen"


def test_arms_are_kept_for_a_bin():
    given = np.array(play(Nightjar(), SPECULATION_PAYS, 6000))[2 * MAX_BLOCK :]
    changes = np.flatnonzero(np.diff(given))
    assert changes.size
    assert np.diff(changes).min() >= int(MAX_BLOCK**0.5)


@pytest.mark.parametrize(
    ("before", "after", "best"), [(SPECULATION_PAYS, IT_DOES_NOT, 0), (IT_DOES_NOT, LONGER_IS_BETTER, 5)]
)
def test_a_change_of_the_traffic_is_followed(before, after, best):
    policy = Nightjar()
    play(policy, before, 4000)
    given = play(policy, after, 12000)
    assert np.mean(np.array(given[-3000:]) == best) > 0.9


def test_batches_of_other_sizes_have_losses_of_their_own():
    policy = Nightjar()
    for _ in range(1200):
        play(policy, SPECULATION_PAYS, 1, size=4)
        play(policy, IT_DOES_NOT, 1, size=200)
    small = [play(policy, SPECULATION_PAYS, 1, size=5)[0] for _ in range(200)]
    large = [play(policy, IT_DOES_NOT, 1, size=255)[0] for _ in range(200)]
    assert np.median(small) == 3
    assert np.median(large) == 0


def longest_pause(given: list[int]) -> int:
    runs = "".join("0" if length == 0 else "1" for length in given).split("1")
    return max(map(len, runs))


def test_speculation_is_not_resumed_for_less_than_its_catch_up_costs():
    nearly_even = {0: 4.0, 1: 3.9, 2: 4.1, 3: 4.2, 4: 4.3, 5: 4.4}
    bin_size = int(MAX_BLOCK**0.5)
    kept_up = play(Nightjar(), nearly_even, 8000, size=64)
    behind = play(Nightjar(), nearly_even, 8000, size=64, lag_after_off=500)
    assert longest_pause(kept_up[1000:]) <= 2 * bin_size
    assert longest_pause(behind[1000:]) > 4 * bin_size


def test_the_same_seed_explores_alike_and_another_does_not():
    first, again, other = (play(Nightjar(seed), SPECULATION_PAYS, 1500) for seed in (3, 3, 4))
    assert first == again != other


def test_steps_that_are_not_the_arms_own_teach_nothing():
    policy, taught = Nightjar(), Nightjar()
    for each in (policy, taught):
        play(each, SPECULATION_PAYS, 6 * FIRST_PLAYS)
    for length in range(LONGEST + 1):
        drafted = [length] * 16
        taught.learn(make_outcome(drafted, 0, seconds=9.0, prefill_rows=100))  # it had prompts in it
        taught.learn(make_outcome(drafted, 0, seconds=9.0, lag=70))  # the draft came back from a pause
        taught.learn(make_outcome(drafted, length, seconds=0.0))  # no time was measured
    taught.learn(make_outcome([0] * 16, 0, seconds=9.0, lag=8))  # nothing but catching up
    assert play(policy, SPECULATION_PAYS, 500) == play(taught, SPECULATION_PAYS, 500)


def test_a_step_cut_by_limits_counts_for_the_longest_length_drafted():
    policy = Nightjar()
    play(policy, SPECULATION_PAYS, 6 * FIRST_PLAYS)
    for _ in range(400):  # somebody has opted out, somebody is at the end: still steps of length 5, and the best
        policy.learn(make_outcome([0, 2] + [5] * 14, [0, 2] + [5] * 14, seconds=MS))
    given = play(policy, SPECULATION_PAYS, 30)
    assert np.median(given) == 5


def test_a_batch_that_may_not_draft_is_given_nothing():
    policy = Nightjar()
    assert not any(policy.lengths(make_view(4, limit=0)).any() for _ in range(300))
