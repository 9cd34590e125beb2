"""Which drafts leave a verification early."""

from __future__ import annotations

import numpy as np

from faser.rules.early_exit import SHORTLIST, Exiting, ExitPoint, ExitRule, candidates_of, features_of, kept_by


def test_a_draft_with_k_better_candidates_is_dropped_with_those_behind_it():
    rank = np.array([0, 3, 0, 5, 0, 0])
    owner, place = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 1, 2, 0, 1, 0])
    features = features_of(rank, np.zeros(6), np.full(6, np.nan), place)
    assert ExitPoint.by_rank(16, 3).drops(features).tolist() == [False, True, False, True, False, False]
    assert ExitPoint.by_rank(16, 4).drops(features).tolist() == [False, False, False, True, False, False]
    drops = ExitPoint.by_rank(16, 3).drops(features)
    assert kept_by(drops, owner, place, np.array([3, 2, 1, 0])).tolist() == [1, 0, 1, 0]


def test_drafts_stay_if_dropping_them_reaches_no_smaller_size():
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


def test_a_trial_drops_nothing_and_reads_every_point():
    point = ExitPoint(0, (1.0, 0.0, 0.0, 0.0, 0.0), 0.0)  # drops everything
    exiting = Exiting(ExitRule((point, point), is_trial=True), np.array([2, 1]), 2)
    for _ in range(2):
        exiting.take(np.zeros(3, int), np.zeros(3), np.full(3, 0.5))
    readings = exiting.readings
    assert readings.kept.tolist() == [[2, 1], [2, 1]]
    assert not np.isnan(readings.features).any()


def test_a_draft_is_scored_by_the_row_before_it():
    """Two requests of four and three rows; their drafts are the last two rows and the last one."""
    exiting = Exiting(ExitRule((ExitPoint.by_rank(16, 1),)), np.array([2, 1]), 4)
    assert exiting.rows_before(np.array([4, 3])).tolist() == [1, 2, 5]


def test_a_shortlist_is_offered_only_to_large_vocabularies():
    assert candidates_of(1000) == (0,)
    assert candidates_of(10 * SHORTLIST) == (0, SHORTLIST)
