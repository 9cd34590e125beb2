"""Planning ahead: the next step is planned while one runs.

`advance` counts on the best result of the plan in flight: one token for each request that samples, and every draft
accepted. `land` takes back what the true result lacks, from the slots and from the plan made ahead. A request that
turns out to have ended is by then part of that plan; what the step brings for it is dropped, and its slot is held until
the step has landed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.engine.drafting import DraftPlanner
from faser.engine.slots import SlotTable
from faser.errors import EngineError
from faser.step import PageMoves, Settling, StepPlan, StepResult


@dataclass(frozen=True)
class Landed:
    """A step whose result is known."""

    settled: StepPlan  # with its true numbers
    plan: StepPlan  # of the requests that have not ended
    result: StepResult  # of these requests
    emitted: IntArray  # [B] tokens of these requests


@dataclass(eq=False)
class _PlanInFlight:
    plan: StepPlan
    settled: StepPlan  # the plan with its true numbers, as far as they are known
    has_slot: BoolArray  # by slot
    is_advanced: bool = False


class PlansInFlight:
    """Plans that were handed out and not committed: two at most, of which the older is advanced."""

    def __init__(self, slots: SlotTable, drafts: DraftPlanner) -> None:
        self.unsettled: BoolArray = slots.mask([])  # by slot: drafts are counted on
        self.held: set[int] = set()  # slots of ended requests that a plan in flight still has
        self._plans: deque[_PlanInFlight] = deque()  # oldest first
        self._slots = slots
        self._drafts = drafts

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def may_plan(self) -> bool:
        return not self._plans or (len(self._plans) == 1 and self._plans[0].is_advanced)

    def add(self, plan: StepPlan) -> None:
        self._plans.append(_PlanInFlight(plan, plan, self._slots.mask(plan.slots)))

    def advance(self) -> None:
        """Count on the best result of the one plan in flight."""
        (flying,) = self._plans
        plan = flying.settled
        best = plan.best_result()
        self._move(plan, best, plan.emitted(best))
        self.unsettled[plan.slots] = plan.with_drafts
        flying.is_advanced = True

    def land(self, plan: StepPlan, result: StepResult) -> Landed:
        """The oldest plan has a result: set positions, and settle the plan behind it."""
        if not self._plans or plan is not self._plans[0].plan:
            raise EngineError("commit() was given another plan than the oldest in flight")
        flying = self._plans.popleft()
        settled = flying.settled
        self.unsettled[settled.slots] = False
        if self._plans and settled.has_drafts:
            settling = Settling.of(settled, result).spread(settled.slots, self._slots.max_running)
            behind = self._plans[0]
            behind.settled = behind.plan.settle(settling[behind.plan.slots])
        plan, result = self._without_ended(settled, result)
        emitted = plan.emitted(result)
        if not flying.is_advanced:
            self._move(plan, result, emitted)
        elif plan.has_drafts:
            settling = Settling.of(plan, result)
            self._slots.num_tokens[plan.slots] -= settling.refused
            self._slots.num_computed[plan.slots] -= settling.refused
            self._drafts.take_back(plan, settling)
        return Landed(settled, plan, result, emitted)

    def clear(self) -> list[PageMoves]:
        """Forget the plans; returns the page moves that may not have been made."""
        moves = [flying.plan.moves for flying in self._plans if flying.plan.moves is not None]
        self._plans.clear()
        self.unsettled[:] = False
        return moves

    def vacate(self, slot: int) -> None:
        """Free a slot that no request has: at once, or when no plan in flight has it."""
        if any(flying.has_slot[slot] for flying in self._plans):
            self.held.add(slot)
        else:
            self._slots.free.append(slot)

    def free_held(self) -> None:
        held, self.held = self.held, set()
        for slot in held:
            self.vacate(slot)

    def not_in_flight(self, slots: IntArray) -> IntArray:
        for flying in self._plans:
            slots = slots[~flying.has_slot[slots]]
        return slots

    def _move(self, plan: StepPlan, result: StepResult, emitted: IntArray) -> None:
        self._slots.move(plan, emitted)
        self._drafts.move(plan, result)

    def _without_ended(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Without the rows of requests that ended while the step ran."""
        if not self.held:
            return plan, result
        open_ones = ~self._slots.mask(list(self.held))[plan.slots]
        if open_ones.all():
            return plan, result
        emitted = plan.emitted(result)
        number = np.cumsum(open_ones) - 1  # a row's index in the smaller plan
        return plan.of(open_ones), replace(
            result,
            num_drafted=result.num_drafted[open_ones],
            num_verified=result.num_verified[open_ones],
            num_accepted=result.num_accepted[open_ones],
            token_ids=result.token_ids[np.repeat(open_ones, emitted)],
            logprobs={int(number[i]): value for i, value in result.logprobs.items() if open_ones[i]},
            failures={int(number[i]): value for i, value in result.failures.items() if open_ones[i]},
            confidence=None,
            hits=None if result.hits is None else result.hits[open_ones],
        )
