from __future__ import annotations

import pytest

from faser.policy.rivals.batch_size import Ema
from tests.policy.profiles import make_outcome, make_view


def length(policy: Ema, size: int) -> int:
    (given,) = set(policy.lengths(make_view(size, profile=None)).tolist())
    return given


def teach(policy: Ema, size: int, steps: int, accepted: int) -> None:
    """Steps with the lengths the policy gives, of which at most `accepted` are accepted."""
    for _ in range(steps):
        drafted = length(policy, size)
        policy.learn(make_outcome([drafted] * size, min(accepted, drafted)))


@pytest.mark.parametrize(("size", "first"), [(1, 3), (7, 3), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0), (256, 0)])
def test_every_size_of_batch_starts_with_its_own_tier(size, first):
    assert length(Ema(), size) == first


def test_nothing_changes_in_the_warm_up_then_accepted_drafts_move_up_by_tiers():
    policy = Ema()
    teach(policy, 1, 14, accepted=7)
    assert length(policy, 1) == 3
    teach(policy, 1, 1, accepted=7)
    assert length(policy, 1) == 5
    teach(policy, 1, 4, accepted=7)
    assert length(policy, 1) == 5
    teach(policy, 1, 31, accepted=7)
    assert length(policy, 1) == 7


def test_rejected_drafts_fall_to_the_lowest_tier():
    policy = Ema()
    teach(policy, 1, 15, accepted=0)
    assert length(policy, 1) == 1, "a small batch always drafts"


def test_a_tier_without_drafts_is_left_after_five_steps():
    policy, seen = Ema(), []
    for _ in range(30):
        seen.append(length(policy, 8))
        teach(policy, 8, 1, accepted=0)
    assert seen == [3] * 15 + [0] * 5 + [1] * 5 + [0] * 5


def test_each_range_of_batch_sizes_has_its_own_average():
    policy = Ema()
    teach(policy, 8, 15, accepted=0)
    assert (length(policy, 1), length(policy, 8), length(policy, 40)) == (3, 0, 1)


def test_a_step_without_drafts_does_not_change_the_average():
    policy = Ema()
    for _ in range(100):
        policy.learn(make_outcome([0, 0], 0, prefill_rows=30))
    assert length(policy, 2) == 3


def test_a_large_batch_never_drafts():
    policy = Ema()
    teach(policy, 64, 100, accepted=7)
    assert length(policy, 64) == 0
