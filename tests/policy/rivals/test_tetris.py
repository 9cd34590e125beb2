from __future__ import annotations

import pytest

from faser.cost.profiled_cost import ProfiledCost
from faser.policy.rivals.goodput import WINDOW, Tetris, capacity
from tests.policy.profiles import H200, SMOOTH, make_view


def test_the_capacity_is_the_knee_of_the_verification():
    assert capacity(ProfiledCost(H200)) == 128  # 5.6 ms are within 1.5 times 3.8, 7.8 are not
    assert capacity(ProfiledCost(SMOOTH)) == 133


@pytest.mark.parametrize(("size", "drafted"), [(1, WINDOW), (16, 16 * WINDOW), (64, 64), (100, 28), (128, 0), (256, 0)])
def test_drafts_fill_the_capacity_and_no_more(size, drafted):
    assert Tetris().lengths(make_view(size)).sum() == drafted


def test_requests_alike_share_the_capacity_evenly():
    assert Tetris().lengths(make_view(64)).tolist() == [1] * 64


def test_where_capacity_is_short_requests_of_low_acceptance_get_none():
    lengths = Tetris().lengths(make_view(100, accepted=[90, 0] * 50, tried=100))
    assert lengths[0::2].sum() == 28
    assert lengths[1::2].sum() == 0


def test_prompt_rows_use_capacity():
    assert Tetris().lengths(make_view(16, prefill_rows=100)).sum() == 12
    assert not Tetris().lengths(make_view(16, prefill_rows=512)).any()


def test_a_busier_batch_never_drafts_more():
    given = [int(Tetris().lengths(make_view(size)).max()) for size in range(1, 257)]
    assert given == sorted(given, reverse=True)


def test_capacity_beyond_a_requests_limit_goes_to_others():
    lengths = Tetris().lengths(make_view(64, limit=[0] * 32 + [32] * 32))
    assert lengths.tolist() == [0] * 32 + [2] * 32
