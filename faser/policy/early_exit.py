"""Early exit: which drafts to drop in the midst of a verification, and when that pays.

Knows what a middle layer thinks of the drafts (`ExitReadings`), what became of them, and what forwards cost; no tensors
and no clocks. A rule travels with the plan. What it drops can cost a draft, never a token: of every request the row
before the first dropped draft goes through to the last layer.

After a layer the target's norm and head say how many candidates score above a draft (its rank there) and by how much
the best does (its margin): candidates are all tokens, or a shortlist of those that texts are full of. The paper drops a
draft, and those behind it, at a rank of K or more. Here a draft's score is linear in rank, margin, the draft model's
own confidence and the draft's place; the paper's rule is the special case of weight on the rank alone. The score is
fitted, and its limit set so that 99 % of what would be accepted stays, on a sample of steps that run to the end:
trials. A point before the first layer knows only the draft's confidence and place; it costs a look at the finished
draft at most, and spares what it drops the whole forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import ProfiledCost, Work, work_of
from faser.errors import ConfigError
from faser.policy.base import MOST_LENGTH
from faser.policy.estimates import step_seconds
from faser.step import ExitReadings, StepPlan, StepResult

MODES = ("auto", "on", "off")
KEEP = 0.99  # of the drafts that would be accepted
DEPTHS = (0.0, 0.5, 0.75)  # of the target's layers: where points are
SHORTLIST = 8192  # tokens; merges are numbered by how often they are made, so these are the first ones
NUM_FEATURES = 5  # one, log of the rank, margin, log-odds of the confidence, place in the draft
BY_RANK = (0.0, 1.0, 0.0, 0.0, 0.0)
WINDOW = 4096  # drafts of trials that a rule is made from
RECENT = 64  # trials that say what it would have done
LEAST_JUDGED = 256  # of them, before there is a rule
TRIALS = 128  # one in so many steps that draft, once there is a rule
AT_FIRST = 16  # times as many before
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests, for which `can_pay` asks
LIKELY_RATES = (0.5, 0.7, 0.8, 0.9, 0.95)  # acceptance rates
CONTEXT = 512  # tokens of each request
RIDGE = 1e-2
NEWTON_STEPS = 8


@dataclass(frozen=True)
class ExitPoint:
    """After `layer` layers a draft whose score is above the limit leaves, with those behind it; 0: before the first."""

    layer: int
    weights: tuple[float, ...]  # of its features
    limit: float
    candidates: int = 0  # the first so many tokens of the vocabulary; 0: all

    @classmethod
    def by_rank(cls, layer: int, k: int, candidates: int = 0) -> ExitPoint:
        """The paper's rule: at least k candidates are better."""
        return cls(layer, BY_RANK, float(np.log1p(k - 0.5)), candidates)

    def drops(self, features: FloatArray) -> NDArray[np.bool_]:
        """Which of the drafts [n, F] would go by themselves."""
        gone: NDArray[np.bool_] = features @ np.array(self.weights) > self.limit
        return gone


@dataclass(frozen=True)
class ExitRule:
    """Points of a verification, their layers ascending. In a trial nothing is dropped, and what they see is told.

    `row_sizes`, where given, are the rows at which a forward becomes dearer: what would leave it as dear stays.
    """

    points: tuple[ExitPoint, ...]
    is_trial: bool = False
    row_sizes: tuple[int, ...] = ()
    predicted: float = 0.0  # seconds it should save

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(point.layer for point in self.points)

    @property
    def looks_before(self) -> bool:
        """Whether the draft's confidence has to be known before the first layer."""
        return not self.points[0].layer

    def saves(self, rows_before: int, rows: int) -> bool:
        """Whether so many rows are cheaper."""
        if not self.row_sizes or rows_before > self.row_sizes[-1]:
            return rows < rows_before
        return bool(np.searchsorted(self.row_sizes, rows) < np.searchsorted(self.row_sizes, rows_before))


def features_of(rank: IntArray, margin: FloatArray, confidence: FloatArray, place: IntArray) -> FloatArray:
    """[n, F]. A confidence that nobody knows is NaN, and says nothing."""
    sure = np.clip(np.nan_to_num(confidence, nan=0.5), 1e-4, 1 - 1e-4)
    columns = np.ones(rank.size), np.log1p(rank), np.clip(margin, 0.0, 100.0), np.log(sure / (1 - sure)), place
    return np.stack(columns, axis=1).astype(np.float64)


def kept_by(drops: NDArray[np.bool_], owner: IntArray, place: IntArray, lengths: IntArray) -> IntArray:
    """[B] drafts that stay of `lengths`, where the n drafts looked at are `place` in the drafts of `owner`."""
    kept = lengths.copy()
    np.minimum.at(kept, owner[drops], place[drops])
    return kept


class Exiting:
    """The drafts of a verification on its way through the points of a rule; what reads them is the executor's part.

    n drafts, by owner and place. Rows lie request by request, those of a request's drafts last; there are `num_others`
    that are no draft's.
    """

    def __init__(self, rule: ExitRule, num_drafted: IntArray, num_others: int) -> None:
        self.owner: IntArray = np.repeat(np.arange(num_drafted.size), num_drafted)  # [n] index in the plan
        self.place: IntArray = np.arange(self.owner.size) - np.repeat(np.cumsum(num_drafted) - num_drafted, num_drafted)
        self.left = num_drafted  # [B] drafts that are still there
        self._rule = rule
        self._num_others = num_others
        self._features = np.full((len(rule.points), self.owner.size, NUM_FEATURES), np.nan)
        self._kept: list[IntArray] = []

    @property
    def seen(self) -> NDArray[np.bool_]:
        """[n] which are still there."""
        there: NDArray[np.bool_] = self.place < self.left[self.owner]
        return there

    def rows_before(self, counts: IntArray) -> IntArray:
        """[seen] the row before each, by which it is judged, where requests have so many rows [B] in all."""
        rows: IntArray = (np.cumsum(counts) - 1 - self.left)[self.owner] + self.place
        return rows[self.seen]

    def take(self, rank: IntArray, margin: FloatArray, confidence: FloatArray) -> None:
        """What the next point saw of those that are there [seen]; some may leave."""
        index, seen = len(self._kept), self.seen
        self._features[index, seen] = features_of(rank, margin, confidence, self.place[seen])
        if not self._rule.is_trial:
            gone = np.zeros(seen.size, dtype=np.bool_)
            gone[seen] = self._rule.points[index].drops(self._features[index, seen])
            left = kept_by(gone, self.owner, self.place, self.left)
            if self._rule.saves(self._num_others + int(self.left.sum()), self._num_others + int(left.sum())):
                self.left = left
        self._kept.append(self.left)

    def skip(self) -> None:
        """The next point could not be looked at: it drops nothing, and has nothing to say."""
        self._kept.append(self.left)

    @property
    def readings(self) -> ExitReadings:
        """Behind the last point."""
        return ExitReadings(self.owner, self.place, self._features, np.stack(self._kept))


class EarlyExit:
    """Gives plans a rule where that saves time, and learns from what came of them.

    `on` takes every point there is whenever something is drafted; `auto` the one that saves most by the profile, if it
    saves anything, and tries no point where even a rule that knew everything would not pay. `rule` fixes it, for
    measuring and for tests. `depths` are shares of the layers after which it may look; 0.0: before the first.
    """

    def __init__(
        self,
        mode: str,
        num_layers: int,
        cost: ProfiledCost | None = None,
        rule: ExitRule | None = None,
        *,
        depths: Sequence[float] = DEPTHS,
        trials: int = TRIALS,
    ) -> None:
        self.stats = ExitStats()
        self._mode = mode
        self._num_layers = num_layers
        self._cost = cost
        self._fixed = rule
        self._trials = trials
        candidates = cost.profile.exit_candidates if cost is not None else 0
        self._scores = {
            layer: ExitScore(layer, candidates if layer else 0) for layer in sorted(layers_at(depths, num_layers))
        }
        self._steps = 0  # that drafted

    @property
    def rules(self) -> list[ExitPoint]:
        """The points as they are calibrated now; none before there have been enough trials."""
        points = [score.point for score in self._scores.values()]
        return [point for point in points if point is not None]

    def to_dict(self) -> dict[str, Any]:
        """What trials have taught it, to be told to another of the same pair of models."""
        return {"scores": [score.to_dict() for score in self._scores.values() if score.point is not None]}

    def restore(self, known: Mapping[str, Any]) -> None:
        """Begin with that; layers it does not look at are left out. ConfigError for what `to_dict` never gave."""
        try:
            scores = [(int(each["layer"]), each) for each in known["scores"]]
            for layer, each in scores:
                if layer in self._scores:
                    self._scores[layer].restore(each)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no calibration of an early exit ({type(error).__name__}: {error})") from None

    def rule_for(self, plan: StepPlan) -> ExitRule | None:
        """The rule for the step, where there is one."""
        if self._mode == "off" or not plan.lengths.any() or plan.overlap is not None:
            return None
        if self._fixed is not None:
            return self._fixed
        self._steps += 1
        work, drafted = work_of(plan), int(plan.lengths.sum())
        # in `auto`, where to drop every draft that will be refused would save anything
        share = self.stats.refused_share
        scores = [
            score
            for score in self._scores.values()
            if self._mode == "on" or self._saving(work, drafted, score.layer, share) > 0
        ]
        if not scores:
            return None
        is_ready = all(score.point is not None for score in scores)
        if self._steps % (self._trials if is_ready else max(1, self._trials // AT_FIRST)) == 0:
            return ExitRule(tuple(score.trial_point for score in scores), is_trial=True)
        if not is_ready:
            return None
        if self._mode == "on":
            saved = max(self._seconds_saved(plan, work, drafted, score) for score in scores)
            return ExitRule(tuple(score.trial_point for score in scores), predicted=saved)
        saved, best = max(
            ((self._seconds_saved(plan, work, drafted, score), score) for score in scores), key=lambda each: each[0]
        )
        return ExitRule((best.trial_point,), row_sizes=self._row_sizes(work), predicted=saved) if saved > 0 else None

    def learn(self, rule: ExitRule, plan: StepPlan, result: StepResult) -> None:
        readings = result.exits
        if readings is None:
            return
        if rule.is_trial:
            self.stats.record_trial(rule, readings, result)
            for features, layer in zip(readings.features, rule.layers, strict=True):
                if layer in self._scores and not np.isnan(features).any():
                    self._scores[layer].learn(readings, features, result)
        else:
            self.stats.record(rule, readings, result)
            self.stats.predicted_seconds += rule.predicted
            if self._cost is not None:
                self.stats.measured_seconds += self._cost.parts(plan).verify - result.seconds.verify

    # ── whether it pays ──────────────────────────────────────────────────────────────────────────────────────────────

    def _seconds_saved(self, plan: StepPlan, work: Work, drafted: int, score: ExitScore) -> float:
        if self._cost is None:
            return 0.0
        step = self._cost.predict(plan) / max(1, int(plan.samples.sum()))
        lost = score.false_share * drafted * step
        return self._saving(work, drafted, score.layer, score.dropped_share) - lost

    def _saving(self, work: Work, drafted: int, layer: int, share: float) -> float:
        """Seconds of the layers behind, less those of looking, if that share of the drafts is dropped."""
        cost = self._cost
        if cost is None or cost.profile.exit_check is None:
            return 0.0
        rest = work.rows - round(share * drafted)
        saved = cost.verify(work.rows, work.context, work.prompt_rows) - cost.verify(
            rest, work.context, work.prompt_rows
        )
        check = cost.exit_check(drafted) if layer else cost.stop_seconds or 0.0
        return float(saved) * (1 - layer / self._num_layers) - check

    def _row_sizes(self, work: Work) -> tuple[int, ...]:
        if self._cost is None:
            return ()
        profile = self._cost.profile
        if work.prompt_rows:
            return profile.prompts.sizes
        beyond = tuple(size for size in profile.prompts.sizes if size > profile.verify.most_rows)
        return profile.verify.sizes + beyond if profile.verify.sizes else ()


def can_pay(cost: ProfiledCost, layer: int, num_layers: int, max_requests: int, length: int | None = None) -> bool:
    """Whether `auto` could ever exit behind a layer: for some batch size and acceptance rate, if it knew everything.

    Drafts have `length` tokens; None: the length with the most tokens per second.
    """
    exits = EarlyExit("auto", num_layers, cost)
    for size in (each for each in BATCH_SIZES if each <= max_requests):
        context = np.full(size, CONTEXT)
        for rate in LIKELY_RATES:
            tokens = np.cumsum(rate ** np.arange(MOST_LENGTH + 1))  # by length, of one request, bonus included
            drafted = length
            if drafted is None:
                lengths = range(MOST_LENGTH + 1)
                drafted = max(lengths, key=lambda n: tokens[n] / step_seconds(cost, np.full(size, n), context))
            if not drafted:
                continue
            refused_share = 1 - rate * (1 - rate**drafted) / (1 - rate) / drafted
            work = Work(size * (drafted + 1), 0, size * CONTEXT, size, 0, size * CONTEXT)
            if exits._saving(work, size * drafted, layer, refused_share) > 0:
                return True
    return False


def candidates_of(vocab_size: int) -> tuple[int, ...]:
    """How many tokens a point may compare drafts with, as `ExitPoint.candidates` has it."""
    return (0, SHORTLIST) if vocab_size > 2 * SHORTLIST else (0,)


def layers_at(depths: Sequence[float], num_layers: int) -> tuple[int, ...]:
    return tuple(int(depth * num_layers) for depth in depths)


class ExitScore:
    """One layer's rule, from the latest trials."""

    def __init__(self, layer: int, candidates: int) -> None:
        self.layer = layer
        self._candidates = candidates
        self.point: ExitPoint | None = None
        self.dropped_share = 0.0  # of all drafts, by the rule as it stands, in the trials it is made from
        self.false_share = 0.0  # dropped and would have been accepted
        self._features: deque[FloatArray] = deque()  # of each trial: drafts that were judged
        self._accepted: deque[NDArray[np.bool_]] = deque()
        self._dropped: deque[tuple[int, int, int]] = deque()  # drafts, dropped, and of these wrongly
        self._count = 0

    def to_dict(self) -> dict[str, Any]:
        assert self.point is not None
        return {**asdict(self.point), "dropped_share": self.dropped_share, "false_share": self.false_share}

    def restore(self, known: Mapping[str, Any]) -> None:
        weights = tuple(map(float, known["weights"]))
        if len(weights) != NUM_FEATURES:
            raise ValueError(f"{len(weights)} weights instead of {NUM_FEATURES}")
        if int(known["candidates"]) != self._candidates:
            return
        self.point = ExitPoint(self.layer, weights, float(known["limit"]), self._candidates)
        self.dropped_share, self.false_share = float(known["dropped_share"]), float(known["false_share"])

    @property
    def trial_point(self) -> ExitPoint:
        """The point; before there is one, another that drops nothing."""
        return self.point or ExitPoint(self.layer, BY_RANK, np.inf, self._candidates)

    def learn(self, readings: ExitReadings, features: FloatArray, result: StepResult) -> None:
        """What a trial saw here [n, F]: every draft up to the first that was refused has been judged."""
        accepted = result.num_accepted[readings.owner]
        judged = readings.place <= accepted
        self._features.append(features[judged])
        self._accepted.append((readings.place < accepted)[judged])
        self._count += int(judged.sum())
        while self._count - self._accepted[0].size >= WINDOW:
            self._features.popleft()
            self._count -= self._accepted.popleft().size
        if self._count < LEAST_JUDGED:
            return
        found = make_point(self.layer, np.concatenate(self._features), np.concatenate(self._accepted))
        self.point = replace(found, candidates=self._candidates)
        drafted = result.num_drafted
        kept = kept_by(self.point.drops(features), readings.owner, readings.place, drafted)
        wrong = np.maximum(result.num_accepted - kept, 0)
        self._dropped.append((int(drafted.sum()), int((drafted - kept).sum()), int(wrong.sum())))
        if len(self._dropped) > RECENT:
            self._dropped.popleft()
        total, gone, false = (sum(column) for column in zip(*self._dropped, strict=True))
        self.dropped_share, self.false_share = gone / max(1, total), false / max(1, total)


def make_point(layer: int, features: FloatArray, accepted: NDArray[np.bool_]) -> ExitPoint:
    """A score that tells refused from accepted drafts, and the limit that `KEEP` of the accepted ones stay below."""
    weights = _fit(features, ~accepted)
    scores = np.sort((features @ weights)[accepted])
    limit = scores[int(np.ceil(KEEP * scores.size)) - 1] if scores.size else np.inf
    return ExitPoint(layer, tuple(weights.tolist()), float(limit))


def _fit(features: FloatArray, refused: NDArray[np.bool_]) -> FloatArray:
    """Logistic regression by Newton's steps on scaled features; the ridge keeps what is separable finite."""
    scale = np.abs(features).max(axis=0, initial=1e-9)
    x = features / scale
    weights: FloatArray = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gram = (x * (chance * (1 - chance))[:, None]).T @ x + RIDGE * np.eye(x.shape[1])
        weights = weights + np.linalg.solve(gram, x.T @ (refused - chance) - RIDGE * weights)
    found: FloatArray = weights / scale
    return found


class ExitStats:
    """What early exit did, since the engine started."""

    def __init__(self) -> None:
        self.pruned: dict[int, int] = {}  # tokens, by the layer they left after
        self.steps = self.trials = 0  # that had a rule, and that ran to the end to make one
        self.trial_pruned = self.trial_false = 0  # tokens that the rule of the time would have dropped, and wrongly
        self.predicted_seconds = 0.0  # saved, by the profile; and by the clock, against a verification of all rows
        self.measured_seconds = 0.0
        self._drafted = self._refused = 0  # of trials

    @property
    def false_share(self) -> float:
        """Of the tokens that are pruned, those that would have been accepted."""
        return self.trial_false / self.trial_pruned if self.trial_pruned else 0.0

    @property
    def refused_share(self) -> float:
        """Of the drafts; all of them, as long as nobody knows."""
        return self._refused / self._drafted if self._drafted else 1.0

    def record(self, rule: ExitRule, readings: ExitReadings, result: StepResult) -> None:
        self.steps += 1
        before = result.num_drafted
        for layer, kept in zip(rule.layers, readings.kept, strict=True):
            self.pruned[layer] = self.pruned.get(layer, 0) + int((before - kept).sum())
            before = kept

    def record_trial(self, rule: ExitRule, readings: ExitReadings, result: StepResult) -> None:
        """By the points as they were before."""
        self.trials += 1
        drafted, accepted = result.num_drafted, result.num_accepted
        self._drafted += int(drafted.sum())
        self._refused += int((drafted - accepted).sum())
        kept = drafted
        for point, features in zip(rule.points, readings.features, strict=True):
            kept = np.minimum(kept, kept_by(point.drops(features), readings.owner, readings.place, drafted))
        self.trial_pruned += int((drafted - kept).sum())
        self.trial_false += int(np.maximum(accepted - kept, 0).sum())
