"""Which drafts leave a verification early, and when that is worth it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from faser.cost.profile import Curve, Profile, ProfiledCost
from faser.errors import ConfigError
from faser.policy.early_exit import (
    LEAST_JUDGED,
    EarlyExit,
    Exiting,
    ExitPoint,
    ExitRule,
    can_pay,
    features_of,
    kept_by,
    make_point,
)
from faser.runtime.profiling.profiler import Batch, Steps
from faser.step import ExitReadings, StepResult
from tests.policy.profiles import H200
from tests.runtime.profiling.test_profiler import make_subject

LAYERS = 32
RANDOM = np.random.default_rng(0)


def plan_of(num_requests: int, length: int):
    steps = Steps(make_subject(), lambda: 0.0)
    tokens = np.full(num_requests, 64)
    return steps.plan(Batch.decoding(tokens, np.full(num_requests, length)))


def cost_with(check: float, profile: Profile = H200) -> ProfiledCost:
    return ProfiledCost(replace(profile, exit_check=Curve((1, 512), (check, check), (0.0, 0.0))))


def trial_of(plan, accepted, rank) -> StepResult:
    """Every draft seen at every point with this rank, by request and place."""
    lengths = plan.lengths
    owner = np.repeat(np.arange(lengths.size), lengths)
    place = np.arange(owner.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    zeros = np.zeros(owner.size)
    seen = features_of(rank(owner, place), zeros, zeros + 0.5, place)
    readings = ExitReadings(owner, place, np.stack([seen] * 3), np.stack([lengths] * 3))
    return StepResult(lengths, lengths, accepted, np.zeros(0, dtype=np.int64), exits=readings)


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


def test_a_point_that_was_not_looked_at_teaches_nothing():
    plan = plan_of(32, 3)
    exits = EarlyExit("on", LAYERS, trials=1)
    for _ in range(12):
        rule = exits.rule_for(plan)
        assert rule is not None
        exiting = Exiting(rule, plan.lengths, 32)
        size = exiting.owner.size
        exiting.take(np.zeros(size, int), np.zeros(size), RANDOM.random(size))
        for _ in rule.points[1:]:
            exiting.skip()
        accepted = RANDOM.integers(0, 4, 32)
        result = StepResult(plan.lengths, plan.lengths, accepted, np.zeros(0, int), exits=exiting.readings)
        exits.learn(rule, plan, result)
    assert [point.layer for point in exits.rules] == [0]


def test_a_fitted_point_keeps_what_would_be_accepted_and_finds_what_would_not():
    count = 4000
    accepted = RANDOM.random(count) < 0.6
    rank = np.where(accepted, RANDOM.poisson(0.5, count), RANDOM.poisson(6.0, count))
    sure = np.where(accepted, RANDOM.beta(6, 2, count), RANDOM.beta(2, 3, count))
    features = features_of(rank, RANDOM.random(count), sure, RANDOM.integers(0, 4, count))
    drops = make_point(16, features, accepted).drops(features)
    by_rank = features[:, 1] > np.quantile(features[accepted, 1], 0.99)
    assert (~drops)[accepted].mean() == pytest.approx(0.99, abs=0.002)
    assert drops[~accepted].mean() > by_rank[~accepted].mean() > 0.5, "confidence adds to the rank"


@pytest.mark.parametrize("accepted", [np.zeros(300, bool), np.ones(300, bool)])
def test_a_point_of_one_kind_of_drafts_alone_is_finite_in_its_weights(accepted):
    point = make_point(8, features_of(np.arange(300), np.zeros(300), np.full(300, 0.5), np.zeros(300, int)), accepted)
    assert np.isfinite(point.weights).all()


def test_nothing_is_tried_where_even_perfect_knowledge_would_not_pay():
    flat = replace(H200, verify=Curve((512,), (4e-3,), (0.0,), 512), prompts=Curve((512,), (4e-3,), (0.0,)))
    assert EarlyExit("auto", LAYERS, cost_with(1e-5, flat)).rule_for(plan_of(8, 3)) is None
    assert EarlyExit("auto", LAYERS, ProfiledCost(H200)).rule_for(plan_of(32, 3)) is None, "no price of a look"
    assert EarlyExit("on", LAYERS).rule_for(plan_of(8, 0)) is None, "nothing is drafted"


def test_an_exit_can_pay_where_auto_would_choose_it_for_some_batch():
    cheap, dear = cost_with(1e-5), cost_with(1.0)
    assert can_pay(cheap, 16, LAYERS, max_requests=256)
    assert not can_pay(dear, 16, LAYERS, max_requests=256)
    assert can_pay(dear, 0, LAYERS, max_requests=256), "before the first layer nothing is checked in the target"
    assert not can_pay(cheap, 16, LAYERS, max_requests=256, length=1), "verifying one draft less saves nothing"
    flat = replace(H200, verify=Curve((512,), (4e-3,), (0.0,), 512), prompts=Curve((512,), (4e-3,), (0.0,)))
    assert not can_pay(cost_with(0.0, flat), 16, LAYERS, max_requests=256), "all numbers of rows cost the same"


def test_auto_goes_from_trials_to_a_rule_if_the_rule_saves_more_than_it_costs():
    """A middle layer that knows: rank 0 if accepted, 50 if not."""
    plan = plan_of(32, 3)
    accepted = np.arange(32) % 3
    result = trial_of(plan, accepted, lambda owner, place: np.where(place < accepted[owner], 0, 50))
    cheap, dear = (EarlyExit("auto", LAYERS, cost_with(check)) for check in (1e-5, 1.0))
    rules = []
    for _ in range(120):
        rules.append(cheap.rule_for(plan))
        if rules[-1] is not None and rules[-1].is_trial:
            assert rules[-1].layers == (0, 16, 24)
            cheap.learn(rules[-1], plan, result)
    trials = [rule is not None and rule.is_trial for rule in rules]
    assert 0 < sum(trials) < 20
    assert not any(trials[-60:]), "there is a rule"
    rule = rules[-1]
    assert rule is not None
    assert len(rule.points) == 1
    assert cheap.stats.trials * 64 >= LEAST_JUDGED
    assert cheap.stats.false_share == 0
    tried = {rule.layers for rule in (dear.rule_for(plan) for _ in range(20)) if rule is not None}
    assert tried == {(0,)}, "only what costs nothing is tried"


def test_what_was_learned_can_be_told_to_another():
    plan = plan_of(32, 3)
    accepted = np.arange(32) % 3
    result = trial_of(plan, accepted, lambda owner, place: np.where(place < accepted[owner], 0, 50))
    old, new = (EarlyExit("on", LAYERS, trials=8) for _ in range(2))
    while old.rule_for(plan).is_trial:
        old.learn(ExitRule(tuple(score.trial_point for score in old._scores.values()), True), plan, result)
    new.restore(json.loads(json.dumps(old.to_dict())))
    assert new.rules == old.rules
    assert new.to_dict() == old.to_dict()
    assert not new.rule_for(plan).is_trial
    EarlyExit("on", 8).restore(old.to_dict())  # other layers: nothing to take over
    for wrong in ({}, {"scores": [{"layer": 16}]}, {"scores": [{**old.to_dict()["scores"][0], "weights": [1.0]}]}):
        with pytest.raises(ConfigError, match="no calibration of an early exit"):
            EarlyExit("on", LAYERS).restore(wrong)


def test_one_step_in_many_stays_a_trial():
    plan = plan_of(32, 3)
    accepted = np.arange(32) % 3
    result = trial_of(plan, accepted, lambda owner, place: np.where(place < accepted[owner], 0, 50))
    exits = EarlyExit("on", LAYERS, trials=10)
    kinds = []
    for _ in range(60):
        rule = exits.rule_for(plan)
        assert isinstance(rule, ExitRule)
        kinds.append(rule.is_trial)
        if rule.is_trial:
            exits.learn(rule, plan, result)
    assert kinds[30:] == [(step + 1) % 10 == 0 for step in range(30, 60)]
