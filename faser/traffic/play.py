"""Plays a workload through an engine in this process: each request is sent when it is due.

Knows the engine, its statistics and a clock. Knows nothing of models, files or HTTP. The clock is an argument: a test
and the simulator play in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from faser.arrays import IntArray
from faser.engine.engine import Engine
from faser.errors import InvalidRequest
from faser.policy import Policy, make_policy
from faser.request import Finish, FinishReason, Progress, Request, SamplingParams
from faser.traffic.document import Item, Moment, Record, Run, Workload

NUM_MOMENTS = 200  # per run, about, if its length is known from its arrivals
LEAST_SLICE = 0.1  # seconds of a moment
CLOSED_SLICE = 0.5  # seconds of a moment in a closed loop, whose length is not known
LONGEST_SLEEP = 0.05  # seconds, so that an interrupt is noticed soon
MOVE_SLEEP = 0.002  # seconds, while the draft moves
WARM_TOKENS = 16  # output of a request in a warm-up

Update = Callable[[int], None]  # called with the number of requests that have ended, lost ones included
Stopped = Callable[[], bool]  # whether a run should end early


@dataclass(frozen=True)
class Clock:
    """The time in seconds, and how to wait."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


REAL_CLOCK = Clock()


def never() -> bool:
    return False


def no_update(ended: int) -> None: ...


def warm_ups_of(workload: Workload, size: int) -> tuple[Workload, Workload]:
    """Its first `size` requests with short outputs: all at once, then two at a time, for large and small steps."""
    first = workload.items[:size]
    items = tuple(replace(item, arrival=0.0, max_tokens=min(item.max_tokens, WARM_TOKENS)) for item in first)
    return Workload(items), Workload(items, concurrency=2)


def set_policy(engine: Engine, text: str) -> None:
    """Set the policy of the next run; the engine must be empty. A GPU first captures the graphs of its lengths."""
    take_policy(engine, make_policy(text))


def take_policy(engine: Engine, policy: Policy) -> None:
    if engine.residency is not None:
        engine.residency.bring_back()  # every run begins alike, and graphs of the draft may be captured
    engine.scheduler.drafts.policy = policy
    prepare = getattr(engine.executor, "prepare", None)
    if prepare is not None:
        prepare(policy.max_length)


def play(
    engine: Engine,
    workload: Workload,
    system: str,
    *,
    temperature: float = 0.0,
    clock: Clock = REAL_CLOCK,
    stopped: Stopped = never,
    update: Update = no_update,
) -> Run:
    """One run. It ends with its last request, or early, as partial, when `stopped` returns true."""
    return _Play(engine, workload, temperature, clock).run(system, stopped, update)


@dataclass(slots=True)
class _Open:
    """A request that is in the engine."""

    index: int
    item: Item
    arrival: float
    first: float | None = None
    num_tokens: int = 0

    def record(self, end: float | None = None, error: str | None = None, finish: Finish | None = None) -> Record:
        names = ("drafted", "verified", "accepted", "steps", "lengths")
        counts = {} if finish is None else {name: getattr(finish.stats, name) for name in names}
        return Record(
            index=self.index,
            category=self.item.category,
            num_prompt=len(self.item.prompt_token_ids),
            arrival=self.arrival,
            first=self.first,
            end=end if error is None else None,
            num_tokens=self.num_tokens if finish is None else finish.stats.accepted + finish.stats.steps,
            error=error,
            **counts,
        )


@lru_cache(maxsize=4096)  # many requests have the same parameters
def _params(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)


class Ledger:
    """The open requests of a run, and the records of those that ended."""

    def __init__(self, temperature: float = 0.0) -> None:
        self._temperature = temperature
        self._open: dict[str, _Open] = {}
        self._records: list[Record] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_ended(self) -> int:
        """Lost ones included."""
        return len(self._records)

    def send(self, engine: Engine, index: int, item: Item, arrival: float) -> bool:
        """Add a request to the engine; returns False if the engine refused it, which makes it a lost one."""
        opened = _Open(index, item, arrival)
        try:
            params = _params(item.max_tokens, self._temperature)
            engine.add(Request(id=str(index), prompt_token_ids=item.prompt_token_ids, params=params, seed=index))
        except InvalidRequest as error:
            self._records.append(opened.record(error=str(error)))
            return False
        self._open[str(index)] = opened
        return True

    def receive(self, progress: Iterable[Progress], now: float) -> int:
        """Record the progress of a step; returns the number of requests that ended."""
        before = len(self._records)
        for request_id, token_ids, _, finish in progress:
            opened = self._open.get(request_id)
            if opened is None:  # NOBODY: tokens of several requests together
                continue
            opened.num_tokens += len(token_ids)
            if opened.first is None and token_ids:
                opened.first = now
            if finish is not None:
                failed = finish.reason in (FinishReason.FAILED, FinishReason.CANCELLED)
                error = (finish.error or finish.reason.value) if failed else None
                self._records.append(self._open.pop(request_id).record(now, error, finish))
        return len(self._records) - before

    def lose_all(self, error: str) -> None:
        self._records += [opened.record(error=error) for opened in self._open.values()]
        self._open.clear()

    def records(self) -> tuple[Record, ...]:
        """By index. A request that is still open has no end."""
        still = [opened.record() for opened in self._open.values()]
        return tuple(sorted(self._records + still, key=lambda record: record.index))


class _Play:
    def __init__(self, engine: Engine, workload: Workload, temperature: float, clock: Clock) -> None:
        self._engine = engine
        self._workload = workload
        self._clock = clock
        self._next = 0  # of the workload's items
        self._ledger = Ledger(temperature)
        self._before = copy(engine.stats)
        last = workload.items[-1].arrival if workload.items else 0.0
        is_closed = workload.concurrency is not None
        self._timeline = _Timeline(engine, CLOSED_SLICE if is_closed else max(LEAST_SLICE, last / NUM_MOMENTS))
        self._started = clock.now()

    def run(self, system: str, stopped: Stopped, update: Update) -> Run:
        idle = 0.0
        while self._next < len(self._workload.items) or self._ledger.num_open:
            if stopped():
                return self._result(system, idle, partial=True)
            self._send_due()
            if self._engine.has_work:
                self._step()
            else:
                idle += self._wait()
            self._timeline.reach(self._now())
            update(self._ledger.num_ended)
        return self._result(system, idle, partial=False)

    def _now(self) -> float:
        return self._clock.now() - self._started

    def _is_due(self) -> bool:
        if self._next == len(self._workload.items):
            return False
        most = self._workload.concurrency
        if most is not None:
            return self._ledger.num_open < most
        return self._workload.items[self._next].arrival <= self._now()

    def _send_due(self) -> None:
        while self._is_due():
            index, item = self._next, self._workload.items[self._next]
            self._next += 1
            arrival = self._now() if self._workload.concurrency is not None else item.arrival
            self._ledger.send(self._engine, index, item, arrival)

    def _step(self) -> None:
        try:
            progress = self._engine.step()
        except Exception as error:
            self._engine.abandon()
            self._ledger.lose_all(f"a step failed ({type(error).__name__}: {error})")
            return
        self._timeline.stepped()
        self._ledger.receive(progress, self._now())

    def _wait(self) -> float:
        """Sleep until the next request is due, LONGEST_SLEEP at most; returns the seconds slept.

        The draft may come back meanwhile. Other work of idle moments is left: it would disturb the measurement.
        """
        started, residency = self._now(), self._engine.residency
        longest = MOVE_SLEEP if residency is not None and residency.proceed() else LONGEST_SLEEP
        if self._next < len(self._workload.items):
            self._clock.sleep(min(longest, max(0.0, self._workload.items[self._next].arrival - started)))
        return self._now() - started

    def _result(self, system: str, idle: float, partial: bool) -> Run:
        wall = self._now()
        records = self._ledger.records()
        if partial:
            self._engine.abandon(FinishReason.CANCELLED)
        before, after = self._before, self._engine.stats
        draft, verify = after.draft_seconds - before.draft_seconds, after.verify_seconds - before.verify_seconds
        host = max(0.0, wall - idle - draft - verify)  # planning, committing and this loop
        return Run(
            system=system,
            records=records,
            seconds=seconds_of(records, wall),
            phases={"draft": draft, "verify": verify, "host": host, "idle": idle},
            verified_per_position=gained(before.verified_per_position, after.verified_per_position),
            accepted_per_position=gained(before.accepted_per_position, after.accepted_per_position),
            context_rows=after.context_rows - before.context_rows,
            moments=self._timeline.moments(wall),
            partial=partial,
        )


def seconds_of(records: Sequence[Record], wall: float) -> float:
    """From the first arrival to the last end; a request that is neither ended nor lost ends at `wall`."""
    kept = [record for record in records if record.error is None]
    first = min((record.arrival for record in records), default=0.0)
    return max((wall if record.end is None else record.end for record in kept), default=wall) - first


def gained(before: IntArray, after: IntArray) -> tuple[int, ...]:
    """after - before, without trailing zeros."""
    counts = after.copy()
    counts[: before.size] -= before
    return tuple(counts[: np.flatnonzero(counts)[-1] + 1].tolist()) if counts.any() else ()


class _Timeline:
    """Slices of a run, from the engine's statistics."""

    def __init__(self, engine: Engine, width: float) -> None:
        self._engine = engine
        self._width = width
        self._moments: list[Moment] = []
        self._last = engine.stats.last
        self._begin(0.0)

    def _begin(self, time: float) -> None:
        self._began, self._until = time, time + self._width
        self._before = copy(self._engine.stats)
        self._away_before = self._away_seconds
        self._num_decoding_steps = self._num_drafting_steps = 0

    @property
    def _away_seconds(self) -> float:
        """So far, of the draft."""
        residency = self._engine.residency
        return residency.stats.away_seconds if residency is not None else 0.0

    def stepped(self) -> None:
        last = self._engine.stats.last
        if last is not None and last is not self._last:  # a step with prompts only does not change it
            self._last = last
            self._num_decoding_steps += 1
            self._num_drafting_steps += last.num_drafting > 0

    def reach(self, now: float) -> None:
        """A slice ends with the first step that reaches its end, so that no step is cut."""
        if now >= self._until:
            self._moments.append(self._moment(now))
            self._begin(now)

    def moments(self, now: float) -> tuple[Moment, ...]:
        """All slices, with the last one if it emitted tokens."""
        rest = self._moment(now)
        return (*self._moments, rest) if rest.emitted else tuple(self._moments)

    def _moment(self, now: float) -> Moment:
        before, after, scheduler = self._before, self._engine.stats, self._engine.scheduler
        lengths = gained(before.lengths, after.lengths)
        away = self._away_seconds - self._away_before
        return Moment(
            time=now,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            emitted=after.emitted - before.emitted,
            drafted=after.drafted - before.drafted,
            accepted=after.accepted - before.accepted,
            mean_length=sum(k * count for k, count in enumerate(lengths)) / max(1, sum(lengths)),
            speculating=self._num_drafting_steps / max(1, self._num_decoding_steps),
            away=min(1.0, away / (now - self._began)) if away else 0.0,
        )
