"""How fast one replica is under a policy, by the number of decoding requests: measured in the exact simulator.

Closed loops over the workload's own lengths give, at every batch size, the seconds of a step, its tokens, and what
prompts add to it. fluid.py simulates a thousand replicas with these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from faser.cost.profiled_cost import ProfiledCost
from faser.errors import ConfigError
from faser.sim.oracle import AcceptanceModel
from faser.sim.replica import Machine, make_replica
from faser.step import StepPlan, StepResult
from faser.traffic.document import Workload
from faser.traffic.play import Stopped, never, play

WARM_REQUESTS = 8  # the warm-up ends when this number + concurrency requests have ended
LEAST_REQUESTS = 24  # that end while it is measured, or
ROUNDS = 2  # times the concurrency, whichever is more
LEAST_STEPS = 8  # without prompts; if there are fewer, steps with prompts count too


@dataclass(frozen=True)
class ThroughputTable:
    """By the number of decoding requests, from 0 to max_running: [max_running + 1] each.

    Lists, which are faster to index than arrays.
    """

    step: list[float]  # seconds of a step without prompts
    gain: list[float]  # tokens of each request in that step
    prompt_step: list[float]  # seconds of a step with prompts, without their rows
    prompt_row: list[float]  # seconds of one prompt row in that step
    late_row: list[float]  # seconds of one prompt row in a later step, when the draft catches up
    prompt_gain: list[float]  # tokens of each decoding request in a step with prompts
    prompt_width: list[float]  # rows of each decoding request in a step with prompts, drafts included

    def rate(self, size: int) -> float:
        """Tokens per second of each request."""
        return self.gain[size] / self.step[size]


@dataclass(frozen=True)
class _Step:
    """One step of a closed loop."""

    decoding: int  # requests that decode
    tokens: int  # emitted by them
    rows: int  # computed for them
    prompt_rows: int
    seconds: float  # without prompts and catching up
    extra: float  # seconds of prompts and of drafts that catch up with them


class _Watcher:
    """Splits the seconds of every step: without prompts, and the rest."""

    def __init__(self, cost: ProfiledCost) -> None:
        self._cost = cost
        self.steps: list[_Step] = []

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        decodes = plan.samples & (plan.num_rows == 1)
        alone = plan.of(decodes)
        alone = replace(alone, draft_rows=np.minimum(alone.draft_rows, 1))  # as if no draft had to catch up
        extra = self._cost.predict(plan) - (self._cost.predict(alone) if alone.slots.size else 0.0)
        spent = result.seconds.total + self._cost.host
        count, drafted = int(np.count_nonzero(decodes)), int(plan.lengths.sum())
        self.steps.append(
            _Step(
                decoding=count,
                tokens=count + int(result.num_accepted.sum()),
                rows=count + drafted,
                prompt_rows=int(plan.num_rows.sum()) - count,
                seconds=spent - extra,
                extra=extra,
            )
        )


def measure_throughput(
    machine: Machine,
    policy: str,
    workload: Workload,
    acceptance: AcceptanceModel,
    seed: int,
    stopped: Stopped = never,
) -> ThroughputTable | None:
    """Over the workload's requests in a random order. None if `stopped` ends it."""
    loops = _Loops(machine, policy, workload, acceptance, seed, stopped)
    points = []
    for size in sizes_up_to(machine.max_running):
        steps = loops.steps_of(size)
        if stopped():
            return None
        if not steps:
            raise ConfigError("no request of the workload fits a replica: raise --max-model-len or --kv-tokens")
        points.append(_point(steps))
    return _table(points, machine.max_running)


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … and `most`."""
    doubled = [2**power for power in range(most.bit_length())]
    between = [3 * 2**power for power in range(most.bit_length())]
    return sorted({size for size in (*doubled, *between) if size < most} | {most})


@dataclass(frozen=True)
class _Loops:
    """Closed loops of one machine under one policy."""

    machine: Machine
    policy: str
    workload: Workload
    acceptance: AcceptanceModel
    seed: int
    stopped: Stopped

    def steps_of(self, size: int) -> list[_Step]:
        """The steps with `size` requests open, from the end of the warm-up until none is left to send."""
        warm = size + WARM_REQUESTS
        enough = warm + max(LEAST_REQUESTS, ROUNDS * size)
        order = np.random.default_rng([self.seed, 4]).permutation(len(self.workload.items))
        items = tuple(self.workload.items[i] for i in np.resize(order, enough + size).tolist())
        oracle = self.acceptance.oracle([item.category for item in items], self.seed)
        watcher = _Watcher(ProfiledCost(self.machine.profile))
        replica = make_replica(self.machine, self.policy, oracle, self.seed, watcher)
        ended, started = 0, 0

        def update(count: int) -> None:
            nonlocal ended, started
            ended = count
            if ended < warm:
                started = len(watcher.steps)

        def stopped() -> bool:
            return ended >= enough or self.stopped()

        loop, clock = Workload(items, concurrency=size), replica.time.clock
        play(replica.engine, loop, self.policy, clock=clock, stopped=stopped, update=update)
        return watcher.steps[started:] or watcher.steps


def _point(steps: Sequence[_Step]) -> dict[str, float]:
    """Means over the steps of a loop, by field of ThroughputTable.

    `at` and `prompt_at` are the mean numbers of decoding requests in steps without and with prompts.
    """
    plain = [step for step in steps if step.decoding and not step.prompt_rows]
    if len(plain) < LEAST_STEPS:
        plain = [step for step in steps if step.decoding] or list(steps)
    mixed = [step for step in steps if step.prompt_rows]
    base, row = _fitted(mixed)
    rows = sum(step.prompt_rows for step in mixed)
    late = sum(step.extra for step in steps if not step.prompt_rows)  # drafts that catch up with prompts
    return {
        "at": _mean(plain, "decoding"),
        "step": _mean(plain, "seconds"),
        "gain": _per_request(plain, "tokens"),
        "prompt_at": _mean(mixed, "decoding"),
        "prompt_step": _mean(mixed, "seconds") + base,
        "prompt_row": row,
        "late_row": late / max(1, rows),
        "prompt_gain": _per_request(mixed, "tokens"),
        "prompt_width": _per_request(mixed, "rows"),
    }


def _mean(steps: Sequence[_Step], name: str) -> float:
    return float(sum(getattr(step, name) for step in steps) / max(1, len(steps)))


def _per_request(steps: Sequence[_Step], name: str) -> float:
    decoding = sum(step.decoding for step in steps)
    return float(sum(getattr(step, name) for step in steps) / decoding) if decoding else 1.0


def _fitted(mixed: Sequence[_Step]) -> tuple[float, float]:
    """extra ≈ base + row · prompt_rows, in seconds, by least squares."""
    rows = np.array([step.prompt_rows for step in mixed], dtype=np.float64)
    extra = np.array([step.extra for step in mixed])
    if not rows.size:
        return 0.0, 0.0
    (base, row), *_ = np.linalg.lstsq(np.stack([np.ones_like(rows), rows], axis=1), extra, rcond=None)
    return (float(base), float(row)) if base >= 0 and row >= 0 else (0.0, float(extra.sum() / rows.sum()))


def _table(points: Sequence[dict[str, float]], most: int) -> ThroughputTable:
    def interpolated(name: str) -> list[float]:
        at = "at" if name in ("step", "gain") else "prompt_at"
        sizes, values = zip(*sorted((point[at], point[name]) for point in points), strict=True)
        found: list[float] = np.interp(np.arange(most + 1), sizes, values).tolist()
        return found

    return ThroughputTable(**{field.name: interpolated(field.name) for field in fields(ThroughputTable)})
