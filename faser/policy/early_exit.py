"""Early exit: which rule a verification drops drafts by (faser/rules/early_exit.py), and when that pays.

Knows what exit points read, what became of the drafts, and what forwards cost; no tensors and no clocks. Scores are
fitted, and limits set so that 99 % of the drafts that would be accepted stay, on trials: a sample of steps in which
nothing is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from faser.arrays import BoolArray, FloatArray
from faser.cost.profiled_cost import ProfiledCost, Work, work_of
from faser.errors import ConfigError
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.estimates import step_seconds
from faser.rules.early_exit import BY_RANK, DEPTHS, NUM_FEATURES, ExitPoint, ExitReadings, ExitRule, kept_by, layers_at
from faser.step import StepPlan, StepResult

MODES = ("auto", "on", "off")
KEEP = 0.99  # share of the drafts that would be accepted, which a limit keeps
WINDOW = 4096  # tried drafts of the latest trials, which a score is fitted to
RECENT_TRIALS = 64  # of which dropped_share and false_share are taken
MIN_TRIED = 256  # tried drafts before there is a score
TRIAL_INTERVAL = 128  # drafting steps between two trials, once there is a score
WARMUP_TRIAL_FACTOR = 16  # trials are this many times as frequent before there is one
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests, for which `can_pay` asks
LIKELY_RATES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)  # acceptance rates
CONTEXT = 512  # tokens of each request
RIDGE = 1e-2
NEWTON_STEPS = 8


class EarlyExit:
    """Gives plans a rule where that saves time, and learns from their results.

    `on`: every point, in every step that drafts. `auto`: the one point that saves most seconds by the profile, if any
    saves; a point at which dropping every rejected draft would save nothing is not even tried. `rule` fixes the rule,
    for measurements and tests. `depths`: shares of the layers after which points may be; 0.0: before the first.
    """

    def __init__(
        self,
        mode: str,
        num_layers: int,
        cost: ProfiledCost | None = None,
        rule: ExitRule | None = None,
        *,
        depths: Sequence[float] = DEPTHS,
        trials: int = TRIAL_INTERVAL,
    ) -> None:
        self.stats = ExitStats()
        self._mode = mode
        self._num_layers = num_layers
        self._cost = cost
        self._fixed = rule
        self._trial_interval = trials
        candidates = cost.profile.exit_candidates if cost is not None else 0
        self._scores = {
            layer: ExitScore(layer, candidates if layer else 0) for layer in sorted(layers_at(depths, num_layers))
        }
        self._num_drafting_steps = 0

    @property
    def rules(self) -> list[ExitPoint]:
        """The points as fitted so far; none before there have been enough trials."""
        points = [score.point for score in self._scores.values()]
        return [point for point in points if point is not None]

    def to_dict(self) -> dict[str, Any]:
        """The fitted points, to restore them in another engine with the same pair of models."""
        return {"scores": [score.to_dict() for score in self._scores.values() if score.point is not None]}

    def restore(self, known: Mapping[str, Any]) -> None:
        """Begin with points that `to_dict` gave; other layers are ignored. ConfigError if they cannot be read."""
        try:
            scores = [(int(each["layer"]), each) for each in known["scores"]]
            for layer, each in scores:
                if layer in self._scores:
                    self._scores[layer].restore(each)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no calibration of an early exit ({type(error).__name__}: {error})") from None

    def rule_for(self, plan: StepPlan) -> ExitRule | None:
        """The rule of the step; None: no exit."""
        if self._mode == "off" or not plan.lengths.any() or plan.overlap is not None:
            return None
        if self._fixed is not None:
            return self._fixed
        self._num_drafting_steps += 1
        work, drafted = work_of(plan), int(plan.lengths.sum())
        scores = self._worth_trying(work, drafted)
        if not scores:
            return None
        points = tuple(score.trial_point for score in scores)
        is_ready = all(score.point is not None for score in scores)
        interval = self._trial_interval if is_ready else max(1, self._trial_interval // WARMUP_TRIAL_FACTOR)
        if self._num_drafting_steps % interval == 0:
            return ExitRule(points, is_trial=True)
        if not is_ready:
            return None
        savings = [self._seconds_saved(plan, work, drafted, score) for score in scores]
        saved = max(savings)
        if self._mode == "on":
            return ExitRule(points, predicted=saved)
        if saved <= 0:
            return None
        return ExitRule((points[savings.index(saved)],), row_sizes=self._row_sizes(work), predicted=saved)

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

    def _worth_trying(self, work: Work, drafted: int) -> list[ExitScore]:
        """The layers at which dropping exactly the drafts that will be rejected would save time; with `on`, all."""
        share = self.stats.rejected_share
        return [
            score
            for score in self._scores.values()
            if self._mode == "on" or self._saving(work, drafted, score.layer, share) > 0
        ]

    def _seconds_saved(self, plan: StepPlan, work: Work, drafted: int, score: ExitScore) -> float:
        """Seconds of rows not computed, less those to produce the wrongly dropped tokens again."""
        if self._cost is None:
            return 0.0
        seconds_per_token = self._cost.predict(plan) / max(1, int(plan.samples.sum()))
        lost = score.false_share * drafted * seconds_per_token
        return self._saving(work, drafted, score.layer, score.dropped_share) - lost

    def _saving(self, work: Work, drafted: int, layer: int, share: float) -> float:
        """Seconds of the layers behind the point, less the check's own, if that share of the drafts is dropped."""
        cost = self._cost
        if cost is None or cost.profile.exit_check is None:
            return 0.0
        rest = work.rows - round(share * drafted)
        all_rows, kept = (cost.verify(rows, work.context, work.prompt_rows) for rows in (work.rows, rest))
        check = cost.exit_check(drafted) if layer else cost.profile.stop_seconds or 0.0
        return float(all_rows - kept) * (1 - layer / self._num_layers) - check

    def _row_sizes(self, work: Work) -> tuple[int, ...]:
        if self._cost is None:
            return ()
        profile = self._cost.profile
        if work.prompt_rows:
            return profile.prompts.sizes
        beyond = tuple(size for size in profile.prompts.sizes if size > profile.verify.max_rows)
        return profile.verify.sizes + beyond if profile.verify.sizes else ()


def can_pay(cost: ProfiledCost, layer: int, num_layers: int, max_requests: int, length: int | None = None) -> bool:
    """Whether `auto` could exit behind a layer at some load. Drafts have `length` tokens; None: the fastest length."""
    exits = EarlyExit("auto", num_layers, cost)
    for size in (each for each in BATCH_SIZES if each <= max_requests):
        context = np.full(size, CONTEXT)
        for rate in LIKELY_RATES:
            tokens = np.cumsum(rate ** np.arange(ADAPTIVE_MAX_LENGTH + 1))  # by length, of one request, bonus included
            drafted = length
            if drafted is None:
                lengths = range(ADAPTIVE_MAX_LENGTH + 1)
                drafted = max(lengths, key=lambda n: tokens[n] / step_seconds(cost, np.full(size, n), context))
            if not drafted:
                continue
            refused_share = 1 - rate * (1 - rate**drafted) / (1 - rate) / drafted
            work = Work(size * (drafted + 1), 0, size * CONTEXT, size, 0, size * CONTEXT)
            if exits._saving(work, size * drafted, layer, refused_share) > 0:
                return True
    return False


class ExitScore:
    """The point of one layer, fitted to the latest trials."""

    def __init__(self, layer: int, candidates: int) -> None:
        self.layer = layer
        self._candidates = candidates
        self.point: ExitPoint | None = None
        self.dropped_share = 0.0  # of all drafts of recent trials, those that the point would have dropped
        self.false_share = 0.0  # of all drafts of recent trials, those dropped although they were accepted
        self._features: deque[FloatArray] = deque()  # of each trial: the tried drafts
        self._accepted: deque[BoolArray] = deque()  # the same drafts
        # of each recent trial: drafts, dropped, wrongly dropped
        self._dropped: deque[tuple[int, int, int]] = deque(maxlen=RECENT_TRIALS)
        self._num_tried = 0

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
        """The fitted point, or before there is one a point that drops nothing."""
        return self.point or ExitPoint(self.layer, BY_RANK, np.inf, self._candidates)

    def learn(self, readings: ExitReadings, features: FloatArray, result: StepResult) -> None:
        """Take in the features [n, F] of a trial. Tried: the accepted drafts + the first rejected of each request."""
        accepted = result.num_accepted[readings.owner]
        tried = readings.place <= accepted
        self._features.append(features[tried])
        self._accepted.append((readings.place < accepted)[tried])
        self._num_tried += int(tried.sum())
        while self._num_tried - self._accepted[0].size >= WINDOW:
            self._features.popleft()
            self._num_tried -= self._accepted.popleft().size
        if self._num_tried < MIN_TRIED:
            return
        found = make_point(self.layer, np.concatenate(self._features), np.concatenate(self._accepted))
        self.point = replace(found, candidates=self._candidates)
        self._count_dropped(self.point.drops(features), readings, result)

    def _count_dropped(self, drops: BoolArray, readings: ExitReadings, result: StepResult) -> None:
        drafted = result.num_drafted
        kept = kept_by(drops, readings.owner, readings.place, drafted)
        wrong = np.maximum(result.num_accepted - kept, 0)
        self._dropped.append((int(drafted.sum()), int((drafted - kept).sum()), int(wrong.sum())))
        total, dropped, false = (sum(column) for column in zip(*self._dropped, strict=True))
        self.dropped_share, self.false_share = dropped / max(1, total), false / max(1, total)


def make_point(layer: int, features: FloatArray, accepted: BoolArray) -> ExitPoint:
    """A score that tells rejected from accepted drafts, and the limit that `KEEP` of the accepted ones stay below."""
    weights = _fit(features, ~accepted)
    scores = np.sort((features @ weights)[accepted])
    limit = scores[int(np.ceil(KEEP * scores.size)) - 1] if scores.size else np.inf
    return ExitPoint(layer, tuple(weights.tolist()), float(limit))


def _fit(features: FloatArray, rejected: BoolArray) -> FloatArray:
    """Logistic regression by Newton steps on scaled features; the ridge keeps weights of separable data finite."""
    scale = np.abs(features).max(axis=0, initial=1e-9)
    x = features / scale
    weights: FloatArray = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gram = (x * (chance * (1 - chance))[:, None]).T @ x + RIDGE * np.eye(x.shape[1])
        weights = weights + np.linalg.solve(gram, x.T @ (rejected - chance) - RIDGE * weights)
    found: FloatArray = weights / scale
    return found


@dataclass
class ExitStats:
    """What early exit did since the engine started."""

    pruned: dict[int, int] = field(default_factory=dict)  # tokens, by the layer they left after
    steps: int = 0  # that had a rule which drops
    trials: int = 0  # steps that only read
    trial_pruned: int = 0  # tokens of trials that the rule of the time would have dropped
    trial_false: int = 0  # of trial_pruned, those that were accepted
    predicted_seconds: float = 0.0  # saved, by the profile
    measured_seconds: float = 0.0  # saved: predicted verification of all rows - measured verification
    _drafted: int = 0  # in trials
    _rejected: int = 0  # in trials

    @property
    def false_share(self) -> float:
        """Share of the pruned tokens that would have been accepted."""
        return self.trial_false / self.trial_pruned if self.trial_pruned else 0.0

    @property
    def rejected_share(self) -> float:
        """Share of the drafts that are rejected; 1 before the first trial."""
        return self._rejected / self._drafted if self._drafted else 1.0

    def record(self, rule: ExitRule, readings: ExitReadings, result: StepResult) -> None:
        self.steps += 1
        before = result.num_drafted
        for layer, kept in zip(rule.layers, readings.kept, strict=True):
            self.pruned[layer] = self.pruned.get(layer, 0) + int((before - kept).sum())
            before = kept

    def record_trial(self, rule: ExitRule, readings: ExitReadings, result: StepResult) -> None:
        """Count what the points would have dropped, as they were before this trial."""
        self.trials += 1
        drafted, accepted = result.num_drafted, result.num_accepted
        self._drafted += int(drafted.sum())
        self._rejected += int((drafted - accepted).sum())
        kept = drafted
        for point, features in zip(rule.points, readings.features, strict=True):
            kept = np.minimum(kept, kept_by(point.drops(features), readings.owner, readings.place, drafted))
        self.trial_pruned += int((drafted - kept).sum())
        self.trial_false += int(np.maximum(accepted - kept, 0).sum())
