"""Early exit: the rule by which a verification drops drafts between two layers. A rule travels with the plan.

Knows what the target's middle layers say about the drafts; no tensors, no clocks, and nothing of who made the rule
(faser/policy/early_exit.py does). Dropping a draft never changes a token: the row before a request's first dropped
draft always runs through all layers.

After some layer the target's norm and head are applied to the row before each draft. They tell how many candidates
score above the draft (its rank) and by how much the best candidate does (its margin). Candidates are all tokens, or the
first SHORTLIST of the vocabulary. A draft's score is linear in rank, margin, the draft model's confidence and the
draft's place. A draft above the limit is dropped, with those behind it. The paper's rule (drop at a rank of K or more)
has weight on the rank alone. A point before the first layer knows only confidence and place, and saves the whole
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.rules.stopping import log_odds

DEPTHS = (0.0, 0.5, 0.75)  # of the target's layers: where points may be; 0.0: before the first layer
SHORTLIST = 8192  # tokens; BPE numbers merges by frequency, so these are the most frequent
NUM_FEATURES = 5  # constant 1, log(1 + rank), margin, log-odds of the confidence, place in the draft
BY_RANK = (0.0, 1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ExitPoint:
    """After `layer` layers, a draft whose score exceeds the limit is dropped with those behind it."""

    layer: int  # 0: before the first
    weights: tuple[float, ...]  # [NUM_FEATURES]
    limit: float
    candidates: int = 0  # ranks are among the first `candidates` tokens of the vocabulary; 0: among all

    @classmethod
    def by_rank(cls, layer: int, k: int, candidates: int = 0) -> ExitPoint:
        """The paper's rule: drop a draft that k or more candidates score above."""
        return cls(layer, BY_RANK, float(np.log1p(k - 0.5)), candidates)

    def drops(self, features: FloatArray) -> BoolArray:
        """[n] which drafts, given features [n, F], score above the limit."""
        dropped: BoolArray = features @ np.array(self.weights) > self.limit
        return dropped


@dataclass(frozen=True)
class ExitRule:
    """The points of a verification, in ascending order of layers. A trial drops nothing and only reads features."""

    points: tuple[ExitPoint, ...]
    is_trial: bool = False
    # row counts at which a forward becomes dearer: drafts stay if dropping them reaches no smaller one; (): each
    row_sizes: tuple[int, ...] = ()
    predicted: float = 0.0  # seconds it should save

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(point.layer for point in self.points)

    @property
    def needs_confidence(self) -> bool:
        """Whether the draft's confidence must be known before the first layer."""
        return not self.points[0].layer

    def saves(self, rows_before: int, rows: int) -> bool:
        """Whether a forward of `rows` rows is cheaper than one of `rows_before`."""
        if not self.row_sizes or rows_before > self.row_sizes[-1]:
            return rows < rows_before
        return bool(np.searchsorted(self.row_sizes, rows) < np.searchsorted(self.row_sizes, rows_before))


@dataclass(frozen=True)
class ExitReadings:
    """What the points of a rule read of n drafts, and what they kept."""

    owner: IntArray  # [n] index in the plan
    place: IntArray  # [n] within the owner's drafts, from 0
    features: FloatArray  # [points, n, F]; NaN at points that a draft did not reach
    kept: IntArray  # [points, B] drafts each request has left behind the point


class Exiting:
    """The n drafts of one verification on their way through a rule's points. A request's drafts are its last rows."""

    def __init__(self, rule: ExitRule, num_drafted: IntArray, num_others: int) -> None:
        self.owner: IntArray = np.repeat(np.arange(num_drafted.size), num_drafted)  # [n] index in the plan
        self.place: IntArray = np.arange(self.owner.size) - np.repeat(np.cumsum(num_drafted) - num_drafted, num_drafted)
        self.left = num_drafted  # [B] drafts not dropped so far
        self._rule = rule
        self._num_others = num_others  # rows that belong to no draft
        self._features = np.full((len(rule.points), self.owner.size, NUM_FEATURES), np.nan)
        self._kept: list[IntArray] = []

    @property
    def seen(self) -> BoolArray:
        """[n] drafts that the next point reads: those not dropped so far."""
        return self.place < self.left[self.owner]

    def rows_before(self, counts: IntArray) -> IntArray:
        """[seen] index of the row before each draft, which predicts it; requests have `counts` [B] rows."""
        rows: IntArray = (np.cumsum(counts) - 1 - self.left)[self.owner] + self.place
        return rows[self.seen]

    def take(self, rank: IntArray, margin: FloatArray, confidence: FloatArray) -> None:
        """Apply the next point to what it read [seen]."""
        index, seen = len(self._kept), self.seen
        self._features[index, seen] = features_of(rank, margin, confidence, self.place[seen])
        if not self._rule.is_trial:
            dropped = np.zeros(seen.size, dtype=np.bool_)
            dropped[seen] = self._rule.points[index].drops(self._features[index, seen])
            left = kept_by(dropped, self.owner, self.place, self.left)
            if self._rule.saves(self._num_others + int(self.left.sum()), self._num_others + int(left.sum())):
                self.left = left
        self._kept.append(self.left)

    def skip(self) -> None:
        """The next point could not be read: it drops nothing and its features stay NaN."""
        self._kept.append(self.left)

    @property
    def readings(self) -> ExitReadings:
        """Complete behind the last point."""
        return ExitReadings(self.owner, self.place, self._features, np.stack(self._kept))


def features_of(rank: IntArray, margin: FloatArray, confidence: FloatArray, place: IntArray) -> FloatArray:
    """[n, F]. An unknown confidence is NaN and counts as 0.5, whose log-odds are 0."""
    odds = log_odds(np.nan_to_num(confidence, nan=0.5))
    columns = np.ones(rank.size), np.log1p(rank), np.clip(margin, 0.0, 100.0), odds, place
    return np.stack(columns, axis=1).astype(np.float64)


def kept_by(drops: BoolArray, owner: IntArray, place: IntArray, lengths: IntArray) -> IntArray:
    """[B] drafts left of `lengths` if the marked ones of n drafts are dropped, each with those behind it."""
    kept = lengths.copy()
    np.minimum.at(kept, owner[drops], place[drops])
    return kept


def candidates_of(vocab_size: int) -> tuple[int, ...]:
    """The numbers of candidates that `ExitPoint.candidates` may have; 0: all."""
    return (0, SHORTLIST) if vocab_size > 2 * SHORTLIST else (0,)


def layers_at(depths: Sequence[float], num_layers: int) -> tuple[int, ...]:
    return tuple(int(depth * num_layers) for depth in depths)
