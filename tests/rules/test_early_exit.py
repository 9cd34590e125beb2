"""Which drafts leave a verification early."""

from __future__ import annotations

import numpy as np

from faser.rules.early_exit import Exiting, ExitPoint, ExitRule, features_of, kept_by


def test_drafts_go_from_the_first_on_that_has_k_better_candidates():
    rank = np.array([0, 3, 0, 5, 0, 0])
    owner, place = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 1, 2, 0, 1, 0])
    features = features_of(rank, np.zeros(6), np.full(6, np.nan), place)
    assert ExitPoint.by_rank(16, 3).drops(features).tolist() == [False, True, False, True, False, False]
    assert ExitPoint.by_rank(16, 4).drops(features).tolist() == [False, False, False, True, False, False]
    drops = ExitPoint.by_rank(16, 3).drops(features)
    assert kept_by(drops, owner, place, np.array([3, 2, 1, 0])).tolist() == [1, 0, 1, 0]


def test_what_would_leave_the_forward_as_dear_stays():
    point = ExitPoint(0, (0.0, 0.0, 0.0, 0.0, 1.0), 0.5)  # drops all but the first
    none = np.zeros(6)
    for sizes, left in (((4, 8), [1, 1]), ((6, 8), [1, 1]), ((3, 8), [3, 3]), ((), [1, 1])):  # 8 rows would become 4
        exiting = Exiting(ExitRule((point,), row_sizes=sizes), np.array([3, 3]), 2)
        exiting.take(none.astype(int), none, none + 0.5)
        assert exiting.left.tolist() == left
    assert ExitRule((point,), row_sizes=(4, 8)).saves(8, 4)
    assert not ExitRule((point,), row_sizes=(4, 8)).saves(8, 5)
    assert ExitRule((point,), row_sizes=(4, 8)).saves(10, 9), "beyond the sizes every row counts"
    assert ExitRule((point,)).saves(8, 7)
