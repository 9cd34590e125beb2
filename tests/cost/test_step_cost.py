import numpy as np

from faser.cost.step_cost import StepCost
from faser.engine.pages import NO_WRITES
from faser.step import StepPlan, StepSeconds


def plan(num_rows: list[int], lengths: list[int], num_tokens: int = 100) -> StepPlan:
    rows, drafts = np.array(num_rows), np.array(lengths)
    size = np.arange(rows.size)
    tokens = np.full(rows.size, num_tokens)
    return StepPlan((), (), size, tokens, tokens - rows, rows, drafts, tokens - 1,
                    np.minimum(drafts, 1), drafts < 0, NO_WRITES, NO_WRITES)  # fmt: skip


def seconds(p: StepPlan) -> float:
    """A machine: a fixed cost, one per row of the target, one per pass of the draft."""
    return 1e-3 * (5 + 0.4 * (p.num_rows + p.lengths).sum() + 2 * p.lengths.max() + 0.001 * p.num_tokens.sum())


def test_nothing_is_predicted_before_a_step_was_seen():
    assert StepCost().predict(plan([1], [0])) is None


def test_predictions_become_right_after_many_steps():
    random, cost, errors = np.random.default_rng(0), StepCost(), []
    for _ in range(300):
        size = int(random.integers(1, 20))
        p = plan(
            random.integers(1, 9, size).tolist(), random.integers(0, 5, size).tolist(), int(random.integers(9, 900))
        )
        predicted = cost.predict(p)
        measured = seconds(p) * random.normal(1, 0.05)
        if predicted is not None:
            errors.append(abs(predicted - measured) / measured)
        cost.learn(p, StepSeconds(), measured)
    assert np.median(errors[100:]) < 0.1


def test_predictions_follow_a_machine_that_becomes_slower():
    cost, p = StepCost(), plan([1, 1], [2, 1])
    for factor in (1, 3):
        for _ in range(300):
            cost.learn(p, StepSeconds(), factor * seconds(p))
        assert abs(cost.predict(p) / (factor * seconds(p)) - 1) < 0.1
