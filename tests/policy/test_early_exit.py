"""Which exit rule a step gets, and how rules are learned."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.policy import Fixed
from faser.policy.early_exit import MIN_TRIED, WINDOW, EarlyExit, ExitScore, can_pay, make_point
from faser.rules.early_exit import Exiting, ExitPoint, ExitReadings, ExitRule, features_of
from faser.runtime.profiling.batches import Batch
from faser.runtime.profiling.steps import Steps
from faser.step import StepPlan, StepResult, StepSeconds
from tests.oracle import World, make_request
from tests.policy.profiles import H200
from tests.runtime.profiling.machine import make_subject

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


def test_a_point_that_was_skipped_teaches_nothing():
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
def test_weights_are_finite_if_all_or_no_drafts_were_accepted(accepted):
    point = make_point(8, features_of(np.arange(300), np.zeros(300), np.full(300, 0.5), np.zeros(300, int)), accepted)
    assert np.isfinite(point.weights).all()


def test_there_are_no_trials_where_even_perfect_knowledge_would_not_pay():
    flat = replace(H200, verify=Curve((512,), (4e-3,), (0.0,), 512), prompts=Curve((512,), (4e-3,), (0.0,)))
    assert EarlyExit("auto", LAYERS, cost_with(1e-5, flat)).rule_for(plan_of(8, 3)) is None
    assert EarlyExit("auto", LAYERS, ProfiledCost(H200)).rule_for(plan_of(32, 3)) is None, (
        "the profile has no price of a check"
    )
    assert EarlyExit("on", LAYERS).rule_for(plan_of(8, 0)) is None, "nothing is drafted"


def test_an_exit_can_pay_where_auto_would_choose_it_for_some_batch():
    cheap, dear = cost_with(1e-5), cost_with(1.0)
    assert can_pay(cheap, 16, LAYERS, max_requests=256)
    assert not can_pay(dear, 16, LAYERS, max_requests=256)
    assert can_pay(dear, 0, LAYERS, max_requests=256), "before the first layer nothing is checked in the target"
    assert not can_pay(cost_with(1e-3), 16, LAYERS, max_requests=1, length=1), (
        "one draft less saves less than the check"
    )
    assert can_pay(cheap, 16, LAYERS, max_requests=256, length=1), "most of 256 drafts may be rejected"
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
    assert cheap.stats.trials * 64 >= MIN_TRIED
    assert cheap.stats.false_share == 0
    tried = {rule.layers for rule in (dear.rule_for(plan) for _ in range(20)) if rule is not None}
    assert tried == {(0,)}, "only what costs nothing is tried"


def test_a_calibration_can_be_saved_and_restored():
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


def calibration(dropped_share: float, false_share: float) -> dict:
    """Of all three layers, as if learned from trials."""
    point = {"weights": [0.0, 1.0, 0.0, 0.0, 0.0], "limit": 1.0, "candidates": 0}
    shares = {"dropped_share": dropped_share, "false_share": false_share}
    return {"scores": [{"layer": layer, **point, **shares} for layer in (0, 16, 24)]}


@pytest.mark.parametrize(("false_share", "pays"), [(0.0, True), (0.3, False)])
def test_wrongly_dropped_drafts_count_as_a_loss(false_share, pays):
    exits = EarlyExit("auto", LAYERS, cost_with(1e-5))
    exits.restore(calibration(0.7, false_share))
    assert (exits.rule_for(plan_of(32, 3)) is not None) == pays


def test_the_rule_drops_at_the_layer_that_saves_most_and_nothing_that_reaches_no_smaller_size():
    exits = EarlyExit("auto", LAYERS, cost_with(1e-3))
    exits.restore(calibration(0.7, 0.0))
    rule = exits.rule_for(plan_of(32, 3))
    assert rule is not None
    assert rule.layers == (0,), "the check before the first layer is free, and saves the whole forward"
    assert set(H200.verify.rows) <= set(rule.row_sizes)


def test_trials_of_long_ago_are_forgotten():
    plan = plan_of(32, 3)
    accepted = np.arange(32) % 3
    known = trial_of(plan, accepted, lambda owner, place: np.where(place < accepted[owner], 0, 50))
    reverse = trial_of(plan, accepted, lambda owner, place: np.where(place < accepted[owner], 50, 0))
    changed, new = (ExitScore(16, 0) for _ in range(2))
    trials = 1 + WINDOW // int((accepted + 1).sum())
    for result in (known, reverse):
        for _ in range(trials):
            changed.learn(result.exits, result.exits.features[0], result)
    for _ in range(trials):
        new.learn(reverse.exits, reverse.exits.features[0], reverse)
    assert changed.point.weights == pytest.approx(new.point.weights)


class Taught(ProfiledCost):
    """Remembers the steps that taught it."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.plans: list[StepPlan] = []

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        self.plans.append(plan)


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_trial_does_not_teach_the_cost_model(is_trial):
    """A trial reads every point: no other step takes as long."""
    cost, world = Taught(H200), World(Fixed(3), agreement=0.5)
    rule = ExitRule((ExitPoint.by_rank(16, 1),), is_trial=is_trial)
    engine = Engine(world.scheduler, world.executor, cost=cost, exits=EarlyExit("on", LAYERS, cost, rule))
    world.add(make_request("a", [1, 2, 3], 20))
    while engine.has_work:
        world.receive(engine.step())
    assert engine.stats.drafted > 0
    assert cost.plans, "steps without a rule teach it"
    assert any(plan.lengths.any() for plan in cost.plans) == (not is_trial)


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
