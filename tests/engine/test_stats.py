import numpy as np

from faser.engine.stats import EngineStats
from faser.policy import Fixed
from tests.oracle import World, make_request


def test_totals_are_those_of_the_steps_and_positions_count_runs():
    world, stats = World(Fixed(3), agreement=0.5), EngineStats()
    runs: list[int] = []
    for name in "abc":
        world.add(make_request(name, [1, 2, ord(name) % 5], 20))
    while world.scheduler.has_work:
        plan = world.scheduler.plan()
        result = world.executor.execute(plan)
        progress = world.scheduler.commit(plan, result).progress
        world.receive(progress)
        begin = float(stats.steps)
        stats.record(plan, result, progress, started=begin, planned=begin + 0.25, ended=begin + 1, predicted=0.5)
        runs += list(zip(result.num_verified.tolist(), result.num_accepted.tolist(), strict=True))
    assert stats.emitted == 60
    assert stats.drafted == stats.verified == sum(v for v, _ in runs)
    assert stats.accepted == sum(a for _, a in runs)
    assert stats.verified_per_position.tolist() == [sum(v > t for v, _ in runs) for t in range(3)]
    assert stats.accepted_per_position.tolist() == [sum(a > t for _, a in runs) for t in range(3)]
    assert stats.acceptance == stats.accepted / stats.verified
    assert (stats.plan_seconds, stats.step_seconds) == (0.25 * stats.steps, stats.steps)
    assert stats.predicted_seconds == 0.5 * stats.steps
    assert stats.lengths.sum() == sum(progress.finish.stats.steps for progress in world.finished.values())
    assert (stats.lengths * range(stats.lengths.size)).sum() == stats.drafted
    each = [progress.finish.stats for progress in world.finished.values()]
    assert all(sum(one.lengths) == one.steps for one in each)
    assert all(sum(k * count for k, count in enumerate(one.lengths)) == one.drafted for one in each)


def test_lengths_are_counted_by_context(monkeypatch):
    monkeypatch.setattr("faser.engine.stats.CONTEXT_BOUNDS", np.array([12, 100, 200, 300]))
    world, stats = World(Fixed(3), agreement=0.5), EngineStats()
    counts: list[list[int]] = []
    for name, size in (("short", 4), ("long", 20)):
        world.add(make_request(name, [1] * size, 20))
    while world.scheduler.has_work:
        plan = world.scheduler.plan()
        result = world.executor.execute(plan)
        progress = world.scheduler.commit(plan, result).progress
        world.receive(progress)
        stats.record(plan, result, progress, started=0.0, planned=0.0, ended=1.0)
        some = (result.num_drafted, result.num_verified, result.num_accepted)
        columns = np.stack((plan.num_tokens > 12, np.ones_like(plan.num_tokens), *some), axis=1)
        counts += columns[plan.samples].tolist()
    for place in (0, 1):
        mine = [each[1:] for each in counts if each[0] == place]
        assert stats.by_context[:, place].tolist() == [sum(column) for column in zip(*mine, strict=True)]
    assert stats.by_context[:, 2:].sum() == 0
    assert stats.by_context[0].sum() == stats.lengths.sum()
    assert stats.by_context[1:].sum(axis=1).tolist() == [stats.drafted, stats.verified, stats.accepted]
    assert (stats.by_context[1, :2] > 0).all()
