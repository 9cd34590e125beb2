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
