from itertools import pairwise

import pytest

from faser.engine.residency import ResidencyStats
from faser.traffic.document import Item, Workload
from faser.traffic.play import play, set_policy, warm_ups_of
from tests.traffic.simulated import Time, make_engine, make_workload


def run(policy="fixed:3", size=40, rate=20.0, concurrency=None, **options):
    time = Time()
    engine = make_engine(time)
    set_policy(engine, policy)
    return engine, play(engine, make_workload(size, rate, concurrency), policy, clock=time.clock, **options)


def test_every_request_is_recorded_with_what_speculation_did():
    engine, played = run()
    assert [record.index for record in played.records] == list(range(40))
    for record in played.records:
        item = make_workload(40, 20.0).items[record.index]
        assert (record.num_tokens, record.num_prompt) == (item.max_tokens, len(item.prompt_token_ids))
        assert record.category == item.category
        assert record.arrival == item.arrival < record.first <= record.end
        assert record.accepted + record.steps == record.num_tokens
        assert sum(record.lengths) == record.steps
        assert sum(k * count for k, count in enumerate(record.lengths)) == record.drafted
    assert sum(record.verified for record in played.records) == sum(played.verified_per_position)
    assert played.context_rows == engine.stats.context_rows
    assert not engine.has_work


def test_the_phases_add_up_to_the_duration_of_the_run():
    engine, played = run()
    assert played.phases["draft"] == pytest.approx(engine.stats.draft_seconds)
    assert played.phases["verify"] == pytest.approx(engine.stats.verify_seconds)
    assert played.phases["idle"] > 0
    assert sum(played.phases.values()) == pytest.approx(played.seconds, abs=1e-3)


def test_moments_add_up_to_the_run():
    engine, played = run()
    moments = played.moments
    assert sum(moment.emitted for moment in moments) == sum(record.num_tokens for record in played.records)
    assert sum(moment.drafted for moment in moments) == engine.stats.drafted
    assert [moment.time for moment in moments] == sorted(moment.time for moment in moments)
    assert all(0 <= moment.mean_length <= 3 and 0 <= moment.speculating <= 1 for moment in moments)
    assert max(moment.speculating for moment in moments) > 0.5
    assert not any(moment.speculating for moment in run("off")[1].moments)


class AwayBetween:
    """A residency whose draft is away from one second to another of the engine's time."""

    def __init__(self, time: Time, start: float, end: float) -> None:
        self._time, self._start, self._end = time, start, end

    @property
    def stats(self) -> ResidencyStats:
        now = self._time.now()
        away = min(max(now, self._start), self._end) - self._start
        return ResidencyStats(not self._start <= now < self._end, away, 0, 128, 0, 0.0, None)

    def proceed(self) -> bool:
        return False


def test_moments_tell_when_the_draft_was_away():
    time = Time()
    engine = make_engine(time)
    start, end = 0.4, 0.93
    engine.residency = AwayBetween(time, time.now() + start, time.now() + end)
    moments = play(engine, make_workload(40, 20.0), "off", clock=time.clock).moments
    assert all(0 <= moment.away <= 1 for moment in moments)
    edges = [0.0, *(moment.time for moment in moments)]
    away = sum(moment.away * (after - before) for moment, (before, after) in zip(moments, pairwise(edges), strict=True))
    assert away == pytest.approx(end - start, abs=1e-3)
    assert {m.away for m, before in zip(moments, edges, strict=False) if before > end or m.time < start} == {0.0}
    assert 1.0 in {round(moment.away, 3) for moment in moments}


def test_the_second_run_of_an_engine_counts_only_itself():
    time = Time()
    engine = make_engine(time)
    runs = []
    for policy in ("fixed:3", "off"):
        set_policy(engine, policy)
        runs.append(play(engine, make_workload(10, 50.0), policy, clock=time.clock))
    assert runs[0].verified_per_position
    assert runs[1].verified_per_position == ()
    assert runs[1].phases["draft"] == 0
    assert runs[1].records[0].arrival == 0
    assert engine.executor.prepared == (3, 0)


def test_a_closed_loop_keeps_its_concurrency_and_ignores_arrivals():
    _, played = run(size=20, concurrency=3)
    times = sorted([(record.arrival, 1) for record in played.records] + [(r.end, -1) for r in played.records])
    count, most = 0, 0
    for _, change in times:
        count += change
        most = max(most, count)
    assert most == 3
    assert played.phases["idle"] == 0


def test_a_request_that_cannot_be_served_is_lost_and_the_others_are_not():
    time = Time()
    items = (*make_workload(3, 10.0).items, Item(0.3, tuple([1] * 500), 4), Item(0.3, (1, 2, 3), 4))
    played = play(make_engine(time), Workload(items), "off", clock=time.clock)
    assert [record.error is None for record in played.records] == [True, True, True, False, True]
    assert "500" in played.records[3].error
    assert played.records[3].end is None


def test_a_step_that_raises_loses_the_open_requests_and_the_run_goes_on(monkeypatch):
    time = Time()
    engine = make_engine(time)
    step, calls = engine.executor.execute, []

    def execute(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return step(plan)

    monkeypatch.setattr(engine.executor, "execute", execute)
    played = play(engine, make_workload(6, 5.0), "off", clock=time.clock)
    assert "a step failed (RuntimeError: out of luck)" in played.records[0].error
    assert played.records[-1].error is None
    assert not engine.has_work


def test_an_interrupt_leaves_a_partial_run_and_an_empty_engine():
    asked = iter([False] * 20 + [True])
    engine, played = run(stopped=lambda: next(asked))
    assert played.partial
    assert 0 < len(played.records) < 40
    assert all(record.error is None for record in played.records)
    assert any(record.end is None for record in played.records)
    assert not engine.has_work
    engine.scheduler.check()


def test_progress_counts_up_to_all_requests():
    seen = []
    run(size=10, update=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 10


def test_a_warm_up_sends_short_requests_all_at_once_then_two_at_a_time():
    all_at_once, few = warm_ups_of(make_workload(40, 1.0), 3)
    assert [(item.arrival, item.max_tokens) for item in few.items] == [(0.0, 4), (0.0, 11), (0.0, 16)]
    assert few.items == all_at_once.items
    assert (all_at_once.concurrency, few.concurrency) == (None, 2)
