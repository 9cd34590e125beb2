from __future__ import annotations

import numpy as np

from faser.policy.base import BatchView
from faser.policy.estimates import step_seconds
from faser.policy.gp import WINDOW, FaserGP
from tests.policy.profiles import make_outcome, make_view


def run(policy: FaserGP, view: BatchView, steps: int, factors: dict[int, float], rate: float = 0.75) -> list[int]:
    """Steps of a machine whose steps cost `factors` of what is predicted, by their longest length."""
    random, longest = np.random.default_rng(0), []
    for _ in range(steps):
        lengths = policy.lengths(view)
        accepted = np.minimum(random.geometric(1 - rate, lengths.size) - 1, lengths)
        most = int(lengths.max())
        seconds = factors.get(most, 1.0) * step_seconds(view.cost, lengths, view.num_tokens)
        policy.learn(make_outcome(lengths.tolist(), accepted.tolist(), seconds=seconds))
        longest.append(most)
    return longest


def test_before_the_first_observation_the_predicted_cost_decides():
    # by hand, at the band's acceptance of 0.75, tokens per ms: 0.98, 1.35, 1.53, 1.59, 1.44 (20 rows run as 64), …
    assert FaserGP().lengths(make_view(4, num_tokens=0)).tolist() == [3] * 4


def test_where_rows_are_dear_a_hopeless_request_is_not_drafted_for():
    lengths = FaserGP().lengths(make_view(64, accepted=[180, 0] * 32, tried=200))
    assert lengths[0::2].all()
    assert not lengths[1::2].any()


def test_a_request_that_is_accepted_more_never_drafts_less():
    lengths = FaserGP().lengths(make_view(8, accepted=[0, 30, 60, 90, 120, 150, 180, 200], tried=200))
    assert lengths.tolist() == sorted(lengths.tolist())


def test_a_full_batch_does_not_speculate():
    assert not FaserGP().lengths(make_view(256)).any()


def test_a_busier_batch_never_drafts_more_where_it_fills_graphs_alike():
    given = [int(FaserGP().lengths(make_view(size)).max()) for size in (1, 4, 16, 64, 256)]
    assert given == sorted(given, reverse=True)


def test_where_steps_are_as_predicted_it_settles_near_the_best_length():
    longest = run(FaserGP(), make_view(16), 300, {})
    assert np.mean(np.isin(longest[-100:], [2, 3, 4])) > 0.9


def test_uncertainty_makes_it_try_lengths_near_the_best():
    assert len(set(run(FaserGP(), make_view(16), 60, {}))) > 1


def test_lengths_that_cost_more_than_predicted_are_given_up():
    dear = dict.fromkeys(range(1, 8), 2.5)
    policy, view = FaserGP(), make_view(16)
    assert policy.lengths(view).all()
    longest = run(policy, view, 300, dear)
    assert np.mean(np.array(longest[-100:]) == 0) > 0.9


def test_lengths_that_cost_less_than_predicted_are_found():
    cheap = {2: 0.6}
    longest = run(FaserGP(), make_view(16), 300, cheap)
    assert np.mean(np.array(longest[-100:]) == 2) > 0.9


def test_a_machine_that_changes_is_followed():
    policy, view = FaserGP(), make_view(16)
    run(policy, view, 200, dict.fromkeys(range(1, 8), 2.0))
    assert not policy.lengths(view).any()
    longest = run(policy, view, 3500, {})
    assert np.mean(np.isin(longest[-100:], [2, 3, 4])) > 0.9


def test_observations_that_left_the_window_are_forgotten():
    policy, small = FaserGP(), make_view(1)
    fresh = FaserGP().lengths(small)
    run(policy, small, 200, dict.fromkeys(range(1, 8), 4.0))
    assert not policy.lengths(small).any()
    for size in (100, 150, 250):  # far away, and more kinds than the window holds
        for accepted in range(0, 101, 10):
            policy.lengths(make_view(size, accepted=accepted, tried=100))
            for length in range(8):
                seconds = step_seconds(small.cost, np.full(size, length), np.full(size, 200))
                policy.learn(make_outcome([length] * size, min(length, 2), seconds=seconds))
    assert WINDOW < 3 * 5 * 8
    assert policy.lengths(small).tolist() == fresh.tolist()


def test_steps_with_prompts_teach_only_acceptance():
    policy, view = FaserGP(), make_view(16)
    before = policy.lengths(view)
    for _ in range(100):
        policy.learn(make_outcome([3] * 16, [3, 3, 2, 2] * 4, seconds=1.0, prefill_rows=500))
    assert (policy.lengths(view) >= before).all()


def test_a_catch_up_is_not_held_against_the_length():
    caught_up, kept_up = FaserGP(), FaserGP()
    view = make_view(16)
    for policy, lag in ((caught_up, 400), (kept_up, 1)):
        policy.lengths(view)
        rows = 16 * lag if lag > 2 else 0
        seconds = step_seconds(view.cost, np.full(16, 3), view.num_tokens, rows)
        for _ in range(20):
            policy.learn(make_outcome([3] * 16, 2, seconds=seconds, lag=lag))
    assert caught_up.lengths(view).tolist() == kept_up.lengths(view).tolist()
