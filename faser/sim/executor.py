"""The simulated executor: steps take the seconds of a profile, and an oracle decides which drafts are accepted.

Knows lengths, positions and time. Knows no tokens: all tokens it emits are zero. Steps run back to back, as on a GPU: a
step that is submitted while another runs begins when that one ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import HARD_MAX_LENGTH, Limits
from faser.rules.stopping import Stopping, WatchedPlan
from faser.sim.oracle import Oracle
from faser.step import Admission, Settling, StepPlan, StepResult, StepSeconds
from faser.traffic.play import Clock

Watch = Callable[[StepPlan, StepResult], None]  # called with every step


class VirtualTime:
    """Seconds from 0, which pass only when told to. An engine, its executor and the player of requests share one."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def reach(self, seconds: float) -> None:
        """Advance to `seconds`; never backwards."""
        self._seconds = max(self._seconds, seconds)

    def sleep(self, seconds: float) -> None:
        """Advances by at least one float step: a sleep too short to be added would repeat forever."""
        self._seconds = max(self._seconds + seconds, math.nextafter(self._seconds, math.inf))

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


def no_noise() -> float:
    return 1.0


class Noise:
    """A log-normal factor on the seconds of a step, with mean 1."""

    def __init__(self, spread: float, seed: int) -> None:
        self._spread = spread
        self._random = np.random.default_rng([seed, 3])

    def __call__(self) -> float:
        return float(self._random.lognormal(-(self._spread**2) / 2, self._spread))


class SimExecutor:
    """An `AsyncExecutor`. With `runs_ahead` the engine plans the next step while one runs, as it does on a GPU.

    `cost` is its own, which nothing corrects. A request is known to the oracle by its seed, which is its index in the
    workload.
    """

    def __init__(
        self,
        limits: Limits,
        cost: ProfiledCost,
        oracle: Oracle,
        time: VirtualTime,
        *,
        runs_ahead: bool = True,
        noise: Callable[[], float] = no_noise,
        watch: Watch | None = None,
    ) -> None:
        self._cost = cost
        self._oracle = oracle
        self._time = time
        self._runs_ahead = runs_ahead
        self._noise = noise
        self._watch = watch
        self._flights: deque[tuple[float, StepResult]] = deque()  # when each ends
        self._free_at = 0.0  # when the device is done with all of them
        # one more position: a step planned ahead may sample behind the end of a request that has ended
        self._runs: IntArray = np.zeros((limits.max_running, limits.max_model_len + 1), dtype=np.int64)
        self._requests: IntArray = np.zeros(limits.max_running, dtype=np.int64)  # by slot
        self._num_prompt: IntArray = np.zeros(limits.max_running, dtype=np.int64)
        self._refused: IntArray = np.zeros(limits.max_running, dtype=np.int64)  # drafts of the slot's latest step
        self._missed: NDArray[np.bool_] = np.zeros(limits.max_running, dtype=np.bool_)  # what it drafted is void
        self._nothing: IntArray = np.zeros(limits.max_running, dtype=np.int64)
        self._tokens: IntArray = np.zeros(limits.max_running * (HARD_MAX_LENGTH + 1), dtype=np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        result = self._result(plan)
        spent = result.seconds
        started = max(self._time.now(), self._free_at)
        waiting = self._cost.overlap.await_seconds if plan.waits else 0.0
        self._free_at = started + spent.total + self._cost.host + waiting
        self._flights.append((self._free_at, result))

    def collect(self) -> StepResult:
        """Time goes on to the end of the step."""
        ended, result = self._flights.popleft()
        self._time.reach(ended)
        return result

    def finish_launch(self) -> None:
        """Nothing is left to launch: confidence checks are part of a step's seconds."""

    def may_run_ahead(self, plan: StepPlan) -> bool:
        return self._runs_ahead

    def discard(self) -> None:
        self._flights.clear()

    def close(self) -> None: ...

    def _result(self, plan: StepPlan) -> StepResult:
        for new in plan.admitted:
            self._admit(new)
        plan = self._settled(plan)
        planned = plan.judged
        confidence, num_looks = None, 0
        if plan.stopping is not None:
            drafted, confidence, num_looks = self._draft(plan, plan.stopping)
            plan = replace(plan, lengths=drafted)
        accepted, hits = self._judge(plan)
        self._refused[plan.slots] = planned - accepted
        self._missed[plan.slots] = False if hits is None else ~hits
        result = StepResult(
            num_drafted=plan.lengths,
            num_verified=plan.judged,
            num_accepted=accepted,
            token_ids=self._tokens[: int(accepted.sum()) + int(np.count_nonzero(plan.samples))],
            seconds=self._seconds(plan, num_looks),
            confidence=confidence,
            hits=hits,
        )
        if self._watch is not None:
            self._watch(plan, result)
        return result

    def _admit(self, new: Admission) -> None:
        size = new.params.max_tokens
        self._runs[new.slot, :size] = self._oracle.runs(new.seed, size)
        self._requests[new.slot] = new.seed
        self._num_prompt[new.slot] = new.num_prompt

    def _settled(self, plan: StepPlan) -> StepPlan:
        """As it stands now that the step before is judged. Rows are not: graphs run those the host counted on."""
        if not plan.unsettled.any():
            return plan
        overlap, missed = plan.overlap, self._missed[plan.slots]
        if overlap is not None and overlap.leads:
            return plan.settle(Settling(self._refused[plan.slots], np.zeros_like(missed), missed))
        refused = np.where(plan.unsettled, self._refused[plan.slots], 0)
        if overlap is not None:
            overlap, _ = overlap.settle(plan.unsettled & missed, plan.lengths, missed)
        return replace(plan, num_tokens=plan.num_tokens - refused, start=plan.start - refused, overlap=overlap)

    def _judge(self, plan: StepPlan) -> tuple[IntArray, NDArray[np.bool_] | None]:
        """How many drafts of each request are accepted, and, where drafting overlaps, whose new ones hold."""
        slots, judged = plan.slots, plan.judged
        overlap = plan.overlap if plan.drafts_beside else None
        if not judged.any() and overlap is None:
            return self._nothing[: slots.size], None
        run = self._runs[slots, plan.num_tokens - self._num_prompt[slots]]
        accepted: IntArray = np.minimum(judged, run)
        if overlap is None:
            return accepted, None
        return accepted, plan.samples & (run > judged) & (overlap.chunk_of(plan.lengths) > 0)

    def _draft(self, plan: StepPlan, stopping: Stopping) -> tuple[IntArray, FloatArray, int]:
        """Token by token, as long as the plan's rule says so.

        Returns how many each request has, how sure it is of them, and how often they were looked at.
        """
        lengths, depth = plan.lengths, stopping.rates.shape[1]
        confidence: FloatArray = np.full((lengths.size, depth), np.nan)
        for i in np.flatnonzero(lengths).tolist():
            first, size = int(plan.num_tokens[i] - self._num_prompt[plan.slots[i]]), int(lengths[i])
            confidence[i, :size] = self._oracle.confidence(int(self._requests[plan.slots[i]]), first, size)
        num_looks, watch = 0, WatchedPlan(stopping, lengths)
        for done in range(1, int(lengths.max(initial=0))):
            num_looks += 1
            if not watch.goes_on(confidence, done):
                lengths = np.minimum(lengths, done)
                break
        confidence[np.arange(depth) >= lengths[:, None]] = np.nan
        return lengths, confidence, num_looks

    def _seconds(self, plan: StepPlan, num_looks: int) -> StepSeconds:
        seconds, factor = self._cost.parts(plan), self._noise()
        looks = num_looks * (self._cost.profile.stop_seconds or 0.0)
        return StepSeconds(factor * (seconds.draft + looks), factor * seconds.verify, factor * seconds.hidden)
