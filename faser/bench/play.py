"""Plays a workload through an engine in this process, request by request as they fall due.

Knows the engine, its statistics and a clock. Knows nothing of models, files or HTTP. Time is an argument: a test plays
minutes in no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from faser.bench.records import Item, Moment, Record, Run, Workload
from faser.engine import Engine
from faser.errors import InvalidRequest
from faser.policy import make_policy
from faser.stats import EngineStats
from faser.types import Finish, FinishReason, IntArray, Progress, Request, SamplingParams

NUM_MOMENTS = 200  # about as many in a run whose length is known from its arrivals
LEAST_SLICE = 0.1  # seconds of a moment
CLOSED_SLICE = 0.5  # of a closed loop, whose length is not known
LONGEST_SLEEP = 0.05  # seconds, so that an interrupt is seen soon
WARM_TOKENS = 16

Update = Callable[[int], None]  # requests that have ended, lost ones included


@dataclass(frozen=True)
class Clock:
    """Seconds, and how to wait for some."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


REAL_CLOCK = Clock()


def never() -> bool:
    return False


def no_update(ended: int) -> None: ...


def warm_ups_of(workload: Workload, size: int) -> tuple[Workload, Workload]:
    """Its first requests, short: at once, and then few at a time, for steps of either size."""
    short = (replace(i, arrival=0.0, max_tokens=min(i.max_tokens, WARM_TOKENS)) for i in workload.items[:size])
    items = tuple(short)
    return Workload(items), Workload(items, concurrency=2)


def set_policy(engine: Engine, text: str) -> None:
    """For the next run; the engine must be empty. A GPU captures the graphs of its lengths first."""
    policy = make_policy(text)
    engine.scheduler.policy = policy
    prepare = getattr(engine.executor, "prepare", None)
    if prepare is not None:
        prepare(getattr(policy, "max_length", 0))


def play(
    engine: Engine,
    workload: Workload,
    system: str,
    *,
    temperature: float = 0.0,
    clock: Clock = REAL_CLOCK,
    stopped: Callable[[], bool] = never,
    update: Update = no_update,
) -> Run:
    """One run. It ends with its last request, or early, and then partial, when `stopped` says so."""
    return _Play(engine, workload, temperature, clock).run(system, stopped, update)


@dataclass
class _Open:
    """A request that is in the engine."""

    index: int
    item: Item
    arrival: float
    first: float | None = None
    num_tokens: int = 0

    def record(self, end: float | None = None, error: str | None = None, finish: Finish | None = None) -> Record:
        known = {}
        if finish is not None:
            stats = finish.stats
            known = {name: getattr(stats, name) for name in ("drafted", "verified", "accepted", "steps", "lengths")}
        return Record(
            index=self.index,
            category=self.item.category,
            num_prompt=len(self.item.prompt_token_ids),
            arrival=self.arrival,
            first=self.first,
            end=end if error is None else None,
            num_tokens=self.num_tokens,
            error=error,
            **known,
        )


class _Play:
    def __init__(self, engine: Engine, workload: Workload, temperature: float, clock: Clock) -> None:
        self._engine = engine
        self._workload = workload
        self._temperature = temperature
        self._clock = clock
        self._next = 0  # of the workload's items
        self._open: dict[str, _Open] = {}
        self._records: list[Record] = []
        self._before = copy(engine.stats)
        last = workload.items[-1].arrival if workload.items else 0.0
        is_closed = workload.concurrency is not None
        self._timeline = _Timeline(engine, CLOSED_SLICE if is_closed else max(LEAST_SLICE, last / NUM_MOMENTS))
        self._started = clock.now()

    def run(self, system: str, stopped: Callable[[], bool], update: Update) -> Run:
        idle = 0.0
        while self._next < len(self._workload.items) or self._open:
            if stopped():
                return self._result(system, idle, partial=True)
            self._send_due()
            if self._engine.has_work:
                self._step()
            else:
                idle += self._wait()
            self._timeline.reach(self._now())
            update(len(self._records))
        return self._result(system, idle, partial=False)

    def _now(self) -> float:
        return self._clock.now() - self._started

    def _is_due(self) -> bool:
        if self._next == len(self._workload.items):
            return False
        most = self._workload.concurrency
        return len(self._open) < most if most is not None else self._workload.items[self._next].arrival <= self._now()

    def _send_due(self) -> None:
        while self._is_due():
            index = self._next
            self._next += 1
            self._send(index, self._workload.items[index])

    def _send(self, index: int, item: Item) -> None:
        arrival = self._now() if self._workload.concurrency is not None else item.arrival
        opened = _Open(index, item, arrival)
        try:
            params = SamplingParams(max_tokens=item.max_tokens, temperature=self._temperature, ignore_eos=True)
            self._engine.add(Request(id=str(index), prompt_token_ids=item.prompt_token_ids, params=params, seed=index))
            self._open[str(index)] = opened
        except InvalidRequest as error:
            self._records.append(opened.record(error=str(error)))

    def _step(self) -> None:
        try:
            progress = self._engine.step()
        except Exception as error:
            self._engine.abandon()
            self._lose_all(f"a step failed ({type(error).__name__}: {error})")
            return
        now = self._now()
        self._timeline.stepped()
        for item in progress:
            self._receive(item, now)

    def _receive(self, item: Progress, now: float) -> None:
        opened = self._open[item.request_id]
        opened.num_tokens += len(item.token_ids)
        if opened.first is None and item.token_ids:
            opened.first = now
        if item.finish is not None:
            del self._open[item.request_id]
            failed = item.finish.reason in (FinishReason.FAILED, FinishReason.CANCELLED)
            error = (item.finish.error or item.finish.reason.value) if failed else None
            self._records.append(opened.record(now, error, item.finish))

    def _lose_all(self, error: str) -> None:
        self._records += [opened.record(error=error) for opened in self._open.values()]
        self._open.clear()

    def _wait(self) -> float:
        """Until the next request is due, or a part of that; returns the seconds waited."""
        started = self._now()
        if self._next < len(self._workload.items):
            self._clock.sleep(min(LONGEST_SLEEP, max(0.0, self._workload.items[self._next].arrival - started)))
        return self._now() - started

    def _result(self, system: str, idle: float, partial: bool) -> Run:
        wall = self._now()
        if partial:
            self._records += [opened.record() for opened in self._open.values()]
            self._engine.abandon(FinishReason.CANCELLED)
        before, after = self._before, self._engine.stats
        records = tuple(sorted(self._records, key=lambda record: record.index))
        return Run(
            system=system,
            records=records,
            seconds=seconds_of(records, wall),
            phases=_phases(before, after, wall, idle),
            verified_per_position=_gained(before.verified_per_position, after.verified_per_position),
            accepted_per_position=_gained(before.accepted_per_position, after.accepted_per_position),
            context_rows=after.context_rows - before.context_rows,
            moments=self._timeline.moments(wall),
            partial=partial,
        )


def seconds_of(records: Sequence[Record], wall: float) -> float:
    """From the first arrival to the last end, or to now where a request that was not lost has none."""
    kept = [record for record in records if record.error is None]
    first = min((record.arrival for record in records), default=0.0)
    return max((wall if record.end is None else record.end for record in kept), default=wall) - first


def _phases(before: EngineStats, after: EngineStats, wall: float, idle: float) -> dict[str, float]:
    """Host is all that is neither in a model nor waiting for a request: planning, committing, this loop."""
    draft, verify = after.draft_seconds - before.draft_seconds, after.verify_seconds - before.verify_seconds
    host = max(0.0, wall - idle - draft - verify)
    return {"draft": draft, "verify": verify, "exit check": 0.0, "host": host, "idle": idle}


def _gained(before: IntArray, after: IntArray) -> tuple[int, ...]:
    """Counts of this run; positions nobody reached are left out."""
    return tuple(np.trim_zeros(after - np.pad(before, (0, after.size - before.size)), "b").tolist())


class _Timeline:
    """Cuts a run into slices of the engine's statistics."""

    def __init__(self, engine: Engine, width: float) -> None:
        self._engine = engine
        self._width = width
        self._moments: list[Moment] = []
        self._last = engine.stats.last
        self._begin(0.0)

    def _begin(self, time: float) -> None:
        self._until = time + self._width
        self._before = copy(self._engine.stats)
        self._num_decoding_steps = self._num_drafting_steps = 0

    def stepped(self) -> None:
        last = self._engine.stats.last
        if last is not None and last is not self._last:  # a step that only reads prompts leaves it as it was
            self._last = last
            self._num_decoding_steps += 1
            self._num_drafting_steps += last.num_drafting > 0

    def reach(self, now: float) -> None:
        """A slice ends with the first step that reaches its end, so that no step is cut."""
        if now >= self._until:
            self._moments.append(self._moment(now))
            self._begin(now)

    def moments(self, now: float) -> tuple[Moment, ...]:
        """All, the one that has not reached its end included."""
        rest = self._moment(now)
        return (*self._moments, rest) if rest.emitted else tuple(self._moments)

    def _moment(self, now: float) -> Moment:
        before, after, scheduler = self._before, self._engine.stats, self._engine.scheduler
        lengths = _gained(before.lengths, after.lengths)
        return Moment(
            time=now,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            emitted=after.emitted - before.emitted,
            drafted=after.drafted - before.drafted,
            accepted=after.accepted - before.accepted,
            mean_length=sum(k * count for k, count in enumerate(lengths)) / max(1, sum(lengths)),
            speculating=self._num_drafting_steps / max(1, self._num_decoding_steps),
        )
