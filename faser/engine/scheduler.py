"""Who runs in each step, on which pages, drafting how much: `plan` before the step, `commit` after it.

Puts together the queue (admission.py), the running requests (slots.py), their drafts (drafting.py), the plans in flight
(ahead.py), the prefix cache (prefixes.py), pictures (vision.py) and what requests are told (reporter.py). Knows nothing
of tensors or clocks. There are no phases: a request has tokens the target has not computed, and prefill, decode and
verification differ only in how many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.admission import AdmissionQueue, check_size
from faser.engine.ahead import PlansInFlight
from faser.engine.drafting import Drafting, DraftPlanner
from faser.engine.lookup import PromptLookup
from faser.engine.overlap import OverlapState
from faser.engine.pages import PagePool, PagePools
from faser.engine.prefixes import Prefixes
from faser.engine.prompt_pace import StepPace, prompt_room, share_rows
from faser.engine.reporter import Reporter
from faser.engine.retained import RetainedContexts, check_reuse
from faser.engine.slots import OpenRequest, OutputChecker, SlotTable
from faser.engine.vision import Encoding, VisionPlanner, check_vision
from faser.engine.windows import DraftWindows, slide
from faser.errors import EngineError, InvalidRequest
from faser.limits import Limits
from faser.policy import Policy
from faser.policy.overlap import Overlap
from faser.request import FinishReason, Progress, Request
from faser.step import PageMoves, PageWrites, StepPlan, StepResult


class Committed(NamedTuple):
    """What became of a step."""

    plan: StepPlan  # with its true numbers, where it was planned ahead
    progress: list[Progress]


class Scheduler:
    """Continuous batching over two page pools.

    `draft_pages` is None where drafts need no KV (n-gram). `speculates` says whether there is any draft at all.
    `looks_up`: drafts are also, or only, found in the contexts of their requests.
    `pace` bounds the seconds of a step; without it only rows are bounded. `overlap`, and policy, cost and pace of
    `drafts`, may be exchanged between two steps. `reporter` is the class that turns tokens into progress.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        target_pages: PagePool,
        draft_pages: PagePool | None = None,
        *,
        speculates: bool = False,
        prefix_caching: bool = True,
        cost: ProfiledCost | None = None,
        overlap: Overlap | None = None,
        looks_up: bool = False,
        pace: StepPace | None = None,
        reporter: type[Reporter] = Reporter,
    ) -> None:
        self.limits = limits
        self.target_pages = target_pages
        self.draft_pages = draft_pages
        self.num_preemptions = 0
        self.num_planned = 0  # steps
        self.num_landed = 0  # of these, steps whose result was committed or given up
        self.last_drafted = 0  # num_landed after the latest step in which the draft was used
        self._speculates = speculates
        self._pools = PagePools(target_pages, draft_pages)
        self._slots = SlotTable(limits.max_running, limits.max_model_len)
        self.prefixes = Prefixes(self._slots, target_pages, draft_pages, prefix_caching)
        self._queue = AdmissionQueue(self._slots, target_pages, self.prefixes)
        self.drafts = DraftPlanner(limits, policy, self._slots, target_pages, draft_pages, self.prefixes)
        self._in_flight = PlansInFlight(self._slots, self.drafts)
        self.vision = VisionPlanner(limits.vision, self._slots) if limits.vision is not None else None
        self.retained = RetainedContexts(self._slots, target_pages)
        self._reporter = reporter(self._slots)
        self._requests: dict[str, OpenRequest] = {}
        self._num_added = 0
        self._untold: list[Progress] = []  # not handed out yet
        self._cancelling: list[OpenRequest] = []  # cancelled while a step was in flight
        self.drafts.cost, self.drafts.pace, self.overlap = cost, pace, overlap
        if looks_up:
            self.drafts.lookup = PromptLookup(self._slots)
        if limits.draft_window is not None and draft_pages is not None:
            self.drafts.windows = DraftWindows(limits.draft_window, self._slots, draft_pages, self.prefixes)

    @property
    def overlap(self) -> Overlap | None:
        return self.drafts.overlap.chooser if self.drafts.overlap is not None else None

    @overlap.setter
    def overlap(self, chooser: Overlap | None) -> None:
        if self.drafts.overlap is not None:  # requests may have frontiers
            self.drafts.overlap.chooser = chooser
        elif chooser is not None:
            self.drafts.overlap = OverlapState(chooser, self.drafts, self._slots, self.target_pages)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def num_running(self) -> int:
        return int(self._slots.running.size)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._untold)

    @property
    def lacks_pages(self) -> bool:
        """Whether the oldest waiting request fits into a slot but not into the target's pages."""
        return self._queue.lacks_pages

    @property
    def context_tokens(self) -> int:
        """Of all running requests."""
        return int(self._slots.num_tokens[self._slots.running].sum())

    # ── what the engine calls ────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request, checker: OutputChecker | None = None) -> None:
        """Queue a request, or refuse it at once if it can never be served."""
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is already in use; give every open request its own")
        check_size(request, self.limits.max_model_len, self.target_pages)
        check_vision(request, self.limits.vision)
        check_reuse(request)
        token_ids = np.asarray(request.prompt_token_ids, dtype=np.int64)
        added = OpenRequest(request, checker, self._num_added, token_ids)
        self._num_added += 1
        self._requests[request.id] = added
        self._queue.waiting.append(added)

    def cancel(self, request_id: str) -> bool:
        """End a request at any moment; False if it is not open. A step in flight finishes first: it writes pages."""
        request = self._requests.get(request_id)
        if request is None or request in self._cancelling:
            return False
        if request.runs and self._in_flight:
            self._cancelling.append(request)
        else:
            self._drop(request, FinishReason.CANCELLED)
        return True

    def take_ended(self) -> list[Progress]:
        """The ends that no step reported: cancelled requests."""
        untold, self._untold = self._untold, []
        return untold

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. With a step in flight, `advance` first."""
        if not self._in_flight.may_plan:
            raise EngineError("plan() was called before the last plan was committed or advanced")
        if self._reserve_next_tokens():
            self._admit()
        elif self._in_flight:
            return None  # a request must be preempted, and its last tokens are not known
        plan = self._make_plan()
        if plan is not None:
            self._in_flight.add(plan)
            self.num_planned += 1
        return plan

    def advance(self) -> None:
        """Count on the best result of the one plan in flight, so that another step can be planned."""
        self._in_flight.advance()

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Take in what a step produced: tokens, computed rows, full pages, ends."""
        landed = self._in_flight.land(plan, result)
        self.num_landed += 1
        if landed.settled.by_draft.has_drafts:
            self.last_drafted = self.num_landed
        plan, result, emitted = landed.plan, landed.result, landed.emitted
        self._slots.append(plan, emitted, result.token_ids)
        self._slots.counts.add(plan, result)
        for index, error in result.failures.items():
            self._drop(self._slots[int(plan.slots[index])], FinishReason.FAILED, error)
        self.prefixes.publish_prompts(plan.slots)
        self._drop_cancelled()
        for progress in self._reporter.report(plan.slots, emitted, result):
            if progress.finish is not None:
                self._close(self._requests[progress.request_id], keep=True)
            self._untold.append(progress)
        slots = self._in_flight.not_in_flight(self._slots.running)  # a plan in flight uses all its pages
        self._pools.truncate(slots, self._slots.num_tokens[slots], self._slots.draft_computed[slots])
        slide(self._pools, self._slots, self.prefixes, self._slots.running)
        self._in_flight.free_held()
        return Committed(landed.settled, self.take_ended())

    def abandon(self, reason: FinishReason, keep_waiting: bool = False) -> list[Progress]:
        """End every open request, whatever state a failed step left it in. `keep_waiting`: only those that run."""
        for moves in self._in_flight.clear():
            self.target_pages.forget(moves.destinations)
        self.num_landed = self.num_planned
        self._in_flight.free_held()
        if self.drafts.windows is not None:
            self.drafts.windows.forget()
        self._cancelling = []
        for request in list(self._requests.values()):
            if request.runs or not keep_waiting:
                self._drop(request, reason, publish=False)  # what the steps in flight computed or moved is not known
        if self.vision is not None:
            self.vision.abandon()
        self.retained.clear()
        return self.take_ended()

    def check(self) -> None:
        """Raise EngineError unless pages, slots and requests agree."""
        self._pools.check(empty=~self._slots.mask(self._slots.running))
        if not self._slots.is_consistent(self._in_flight.held):
            raise EngineError("a slot is lost or in two states")
        if self.num_waiting + self.num_running != len(self._requests):
            raise EngineError("a request is neither waiting nor running")
        if self.vision is not None:
            self.vision.check()
        self.retained.check()

    # ── residency ────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop_drafting(self) -> None:
        """No further plan drafts, and the draft's KV is void. Requests catch up if they ever draft again.

        Plans in flight may still write the draft's pages. Nobody takes these pages before `drafts.is_away` is reset.
        """
        assert self.draft_pages is not None
        self.drafts.is_away = True
        self.draft_pages.clear()
        self.prefixes.forget_draft()

    def expected_gain(self) -> float:
        """Expected speed of the running requests with drafts over their speed without, if the draft had kept up."""
        slots = self._slots.running
        slots = slots[self._slots.num_tokens[slots] - self._slots.num_computed[slots] == 1]
        if not slots.size:
            return 1.0
        view = self.drafts.view(slots, self._slots.num_tokens[slots], 0)
        return self.drafts.policy.expected_gain(replace(view, lag=np.ones_like(view.lag)))

    # ── made-up requests, for profiling while there are no real ones ─────────────────────────────────────────────────

    def lend_slots(self, num_tokens: IntArray) -> tuple[PageWrites, PageWrites] | None:
        """Pages of both models for made-up requests in the first slots; None if not idle or free pages are short."""
        if self.has_work or self._in_flight or self.drafts.is_away or not self._pools.lend(num_tokens):
            return None
        return self._pools.take_writes()

    def take_back_slots(self, num_slots: int) -> None:
        """Take back the first slots; the next plan tells the executor."""
        for slot in range(num_slots):
            self._pools.release(slot)
            self._slots.released.add(slot)

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _runnable(self) -> IntArray:
        """Running requests that can take another step: not those whose last token is surely on its way."""
        slots = self._slots.running
        if not self._in_flight:
            return slots
        return slots[(self._slots.num_tokens[slots] < self._slots.end[slots]) | self._in_flight.unsettled[slots]]

    def _reserve_next_tokens(self) -> bool:
        """Give every running request a page for its next token; False where pages were short.

        Without a step in flight the newest requests are then preempted until there are enough pages.
        """
        has_enough = True
        while self.num_running:
            slots = self._runnable()
            if self.target_pages.reserve(slots, self._slots.num_tokens[slots]):
                break
            if self.retained.drop_oldest():
                continue
            has_enough = False
            if self._in_flight:
                break
            self._preempt(self._slots[int(slots[-1])])
        return has_enough

    def _preempt(self, request: OpenRequest) -> None:
        """Send a request back to the queue, to compute its context again or find it in the prefix cache."""
        slots, slot = self._slots, request.slot
        request.token_ids = slots.tokens[slot, : slots.num_tokens[slot]].copy()
        request.stats, request.num_found = slots.stats(request), 0
        request.tried, request.lookup_tried = int(slots.counts.tried[slot]), int(slots.counts.lookup_tried[slot])
        self._vacate(request)
        self._queue.put_back(request)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Move the waiting requests into slots whose prompts get rows of this step."""
        if not (self._queue.waiting and self._slots.free):
            return
        while len(self.retained) and self._queue.lacks_pages:
            self.retained.drop_oldest()
        slots = self._runnable()
        reads = self._slots.num_tokens[slots] - self._slots.num_computed[slots] > 1
        decoding = slots[~reads]
        computed = self.prefixes.pages_in_flight(decoding) if self._in_flight else set()
        room = prompt_room(self.drafts.pace, self.limits.max_batch_tokens - decoding.size, decoding.size == 0)
        for request, num_found in self._queue.admit(slots[reads], room, computed):
            self._slots.occupy(request, num_found * self.target_pages.page_size)
            self.prefixes.admit(request, num_found)
            self.drafts.admit(request.slot)
            self._reporter.admit(request)
            reused = self.retained.take(request)
            request.stats = replace(request.stats, reused=reused)
            if self.vision is not None:
                self.vision.admit(request.slot, request.request.vision, request.request.reuse if reused else None)

    def _make_plan(self) -> StepPlan | None:
        slots = self._runnable()
        if slots.size == 0:
            return None
        self.retained.skip()
        start = self._slots.num_computed[slots]
        pending = self._slots.num_tokens[slots] - start
        decoding = pending == 1
        encoding = self._encode(slots, decoding)
        pending = self.retained.limit(slots, start, pending)
        if self.vision is not None:
            pending = self.vision.limit(slots, start, pending)
            decoding &= pending == 1  # a prompt may end with a picture that is not encoded yet
        drafting = self._plan_drafts(slots, start, pending, decoding)
        max_rows, num_judged = self.limits.max_batch_tokens, drafting.num_judged
        taken_seconds = drafting.catch_up_seconds + encoding.seconds
        num_rows = share_rows(self.drafts.pace, max_rows, start, pending, num_judged, taken_seconds, decoding)
        runs = num_rows > 0
        assert runs.any(), "who waits for a picture waits for a request that can run"
        if not runs.all():
            slots, start, num_rows, decoding = slots[runs], start[runs], num_rows[runs], decoding[runs]
        drafting = drafting.spread(decoding)
        moves = self._compact() if self.target_pages.num_beyond else None
        admitted, released = self._slots.take_changes()
        target_writes, draft_writes = self._pools.take_writes()
        return StepPlan(
            admitted=admitted,
            released=released,
            slots=slots,
            num_tokens=self._slots.num_tokens[slots],
            start=start,
            num_rows=num_rows,
            lengths=drafting.lengths,
            draft_start=self._slots.draft_computed[slots],
            draft_rows=drafting.rows,
            unsettled=self._in_flight.unsettled[slots],
            target_pages=target_writes,
            draft_pages=draft_writes,
            stopping=drafting.stopping,
            overlap=drafting.overlap,
            moves=moves,
            vision=self.vision.plan(encoding, slots, start, num_rows) if self.vision is not None else None,
            copies=self.retained.take_copies(),
            lookup=drafting.lookup,
            draft_first=self.drafts.windows.take_changes(slots[drafting.rows > 0]) if self.drafts.windows else None,
        )

    def _compact(self) -> PageMoves | None:
        """Move pages below the end of a pool that shrank. Kept contexts do not follow."""
        self.retained.clear_kept()
        return self.target_pages.compact(num_kept=self.num_running)

    def _encode(self, slots: IntArray, decoding: BoolArray) -> Encoding:
        """What the vision encoder does in this step."""
        if self.vision is None:
            return Encoding()
        return self.vision.encode(slots, self.drafts.pace, not decoding.any(), self.limits.max_batch_tokens)

    def _plan_drafts(self, slots: IntArray, start: IntArray, pending: IntArray, decoding: BoolArray) -> Drafting:
        """What the decoding requests draft."""
        slots = slots[decoding]
        if not (self._speculates and slots.size):
            return Drafting.none(slots.size)
        num_rows = share_rows(self.drafts.pace, self.limits.max_batch_tokens, start, pending, decoding=decoding)
        num_prefill_rows = int(num_rows.sum()) - slots.size
        return self.drafts.plan(slots, num_prefill_rows, self._in_flight.unsettled[slots])

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _drop(
        self, request: OpenRequest, reason: FinishReason, error: str | None = None, *, publish: bool = True
    ) -> None:
        """End a request that waits or runs. If its step went wrong, nothing it computed is offered to others."""
        finish = request.finish(reason, self._slots.stats(request), error=error)
        self._close(request, publish=publish and error is None)
        self._untold.append(Progress(request.request.id, [], None, finish))

    def _drop_cancelled(self) -> None:
        cancelling, self._cancelling = self._cancelling, []
        for request in cancelling:
            if request.request.id in self._requests:  # it may have failed
                self._drop(request, FinishReason.CANCELLED)

    def _close(self, request: OpenRequest, publish: bool = True, keep: bool = False) -> None:
        """Forget a request. `keep`: it has ended as it should, and its session may keep its context."""
        del self._requests[request.request.id]
        if request.runs:
            self._vacate(request, publish, keep and request.request.session is not None)
        else:
            self._queue.waiting.remove(request)

    def _vacate(self, request: OpenRequest, publish: bool = True, keep: bool = False) -> None:
        """Take a running request out of its slot and give back its pages, or keep the target's."""
        slot = request.slot
        if publish:
            self.prefixes.publish(slot)
        if keep:
            self.retained.keep(request)
        self.retained.vacate(slot)
        self._pools.release(slot)
        self._reporter.leave(request)
        self.drafts.vacate(slot)
        if self.vision is not None:
            self.vision.vacate(slot)
        self._slots.vacate(slot)
        self._in_flight.vacate(slot)
