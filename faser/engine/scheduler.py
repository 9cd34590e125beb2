"""Who runs each step, on which pages, drafting how much: `plan` before the step, `commit` after it.

Knows requests, their tokens and both page pools; asks the policy for lengths, and `prompt_pace` for what
prompts may take. Knows nothing of tensors or clocks. There are no phases: a request has tokens the target has not
computed, and prefill, decode and verification differ only in how many.

Per-request state lives in arrays indexed by slot, because a step over 256 requests must be planned and committed in
under a millisecond. For a running request, with n = num_tokens:

    0 ────────── num_computed ── n ───── n + length        target: rows num_computed … n - 1, then the drafted tokens
    0 ─── draft_computed ─────── n ───── n + length        draft: rows draft_computed … n - 1 (the lag), then drafting

num_computed is at most n - 1: the last token's row is computed in the step that samples its successor.

Where drafting overlaps with verification a request has drafts behind its n tokens that an earlier step made, its
frontier of f; then

    0 ── num_computed ── n ── n + f                        target: verifies the frontier
    0 ── draft_computed ───── n + f ─── n + f + length     draft: goes on behind it

The next step can be planned while one runs: `advance` counts on one token for each request that samples and on all of
its drafts, `commit` fills in the tokens (num_known of them are) and takes back the drafts that were refused, from the
step planned ahead too. A request that turns out to have ended is by then part of that step; what it brings for it is
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from faser.arrays import IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.pages import NO_WRITES, PagePool, page_hash
from faser.engine.prompt_pace import KEPT_UP, Room, StepPace, catch_up_work, fill_size, share, turns
from faser.errors import EngineError, InvalidRequest, RequestTooLong
from faser.limits import HARD_MAX_LENGTH, Limits
from faser.policy import BatchView, Policy
from faser.policy.overlap import Chunks, Overlap
from faser.request import Finish, FinishReason, Progress, Request, Stats, TokenLogprobs
from faser.rules.overlap import OverlapPlan
from faser.rules.stopping import Stopping
from faser.step import Admission, PageWrites, Settling, StepPlan, StepResult

if TYPE_CHECKING:
    from faser.text.tokenizer import StopChecker

MOST_CANDIDATES = 128  # waiting requests that compete for a step, oldest first: bounds the work of a plan
NOBODY = ""  # the id of no request: tokens of several requests together
MOST_HASHED = 1024  # their pages that one plan gives names; a longer prompt is named alone


@dataclass(eq=False)
class _Entry:
    """A request the scheduler answers for, waiting or running."""

    request: Request
    checker: StopChecker | None
    token_ids: IntArray  # up to date while it waits; while it runs the slot's row is
    number: int  # counts arrivals: a smaller one is older
    hashes: list[bytes] = field(default_factory=list)  # of the full pages of its context
    num_found: int = 0  # pages that were in the prefix cache when it was last looked for, while it waits
    stats: Stats = field(default_factory=Stats)  # from before a preemption
    judged: int = 0  # tokens the target judged before a preemption
    slot: int = -1


@dataclass(eq=False)
class _Flight:
    """A plan that was handed out and not committed."""

    plan: StepPlan
    settled: StepPlan  # the same, when what was unsettled in it is known
    names: NDArray[np.bool_]  # by slot, whether it is part of the plan
    advanced: bool = False


@dataclass(frozen=True)
class _Drafting:
    """What decoding requests draft in a step: arrays [B]."""

    lengths: IntArray
    lead: IntArray  # of these, those that the step verifies
    rows: IntArray  # that the draft computes first
    catching_up: float  # seconds that long catch-ups among these are expected to take
    chunks: Chunks | None  # None: drafting and verification do not overlap


class Scheduler:
    """Continuous batching over two page pools.

    `draft_pages` is None where drafts need no KV (n-gram). `speculates` says whether there is any draft at all.
    Without `reports_every_token` a commit reports only requests that begin or end, which a simulator can afford for
    256 requests a step.
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
        pace: StepPace | None = None,
        reports_every_token: bool = True,
    ) -> None:
        self.limits = limits
        self.pace = pace  # bounds the seconds of a step; None: only rows are bounded
        self.policy = policy
        self.overlap = overlap
        self.cost = cost  # what the policy may go by
        self.target_pages = target_pages
        self.draft_pages = draft_pages
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked for in the prefix cache
        self.num_prefix_hits = 0  # and found
        self._speculates = speculates
        self._caching = prefix_caching
        self._collect = self._collect_all if reports_every_token else self._collect_ends
        self._entries: dict[str, _Entry] = {}
        self._waiting: deque[_Entry] = deque()  # oldest request first
        self._num_added = 0
        self._at: list[_Entry | None] = [None] * limits.max_running  # by slot
        self._free_slots = list(range(limits.max_running))[::-1]
        self._running: IntArray = np.zeros(0, dtype=np.int64)  # slots, oldest request first
        self._ended: list[Progress] = []  # ends to report that no step produced
        self._cancelling: list[_Entry] = []  # cancelled while a step was in flight
        self._admitted: list[Admission] = []
        self._released: set[int] = set()
        self._flights: deque[_Flight] = deque()  # oldest first; two at most, the first of them advanced
        self._limbo: set[int] = set()  # slots of ended requests that a plan in flight still names

        def per_slot() -> IntArray:
            return np.zeros(limits.max_running, dtype=np.int64)

        self._tokens: IntArray = np.zeros((limits.max_running, limits.max_model_len), dtype=np.int64)
        self._num_tokens, self._num_prompt, self._end = per_slot(), per_slot(), per_slot()
        self._numbers = per_slot()  # of arrivals
        self._num_known = per_slot()  # tokens that are here; less than num_tokens while a step is in flight
        self._unsettled: NDArray[np.bool_] = np.zeros(limits.max_running, dtype=np.bool_)  # drafts are counted on
        self._num_computed, self._draft_computed, self._frontier = per_slot(), per_slot(), per_slot()
        self._num_published, self._draft_published = per_slot(), per_slot()  # pages
        self._max_draft = per_slot()
        self._drafted, self._verified, self._accepted, self._steps = per_slot(), per_slot(), per_slot(), per_slot()
        self._judged = per_slot()
        # steps, by length
        self._lengths: IntArray = np.zeros((limits.max_running, HARD_MAX_LENGTH + 1), dtype=np.int64)
        self._watched: NDArray[np.bool_] = np.zeros(limits.max_running, dtype=np.bool_)  # has stop strings or logprobs
        self._stop_ids: dict[int, int] = {}  # stop id → running requests that have it
        self._stop_array: IntArray = np.zeros(0, dtype=np.int64)

    # ── what the engine calls ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running.size)

    @property
    def has_work(self) -> bool:
        return bool(self._entries or self._ended)

    def add(self, request: Request, checker: StopChecker | None = None) -> None:
        """Queue a request, or refuse it at once if it can never be served."""
        if request.id in self._entries:
            raise InvalidRequest(f"request id {request.id!r} is already in use; give every open request its own")
        self._check_size(request)
        entry = _Entry(request, checker, np.asarray(request.prompt_token_ids, dtype=np.int64), self._num_added)
        self._num_added += 1
        self._entries[request.id] = entry
        self._waiting.append(entry)

    def cancel(self, request_id: str) -> bool:
        """End a request at any moment; False if it is not open. A step in flight finishes first: it writes pages."""
        entry = self._entries.get(request_id)
        if entry is None or entry in self._cancelling:
            return False
        if entry.slot >= 0 and self._flights:
            self._cancelling.append(entry)
        else:
            self._ended.append(self._drop(entry, FinishReason.CANCELLED))
        return True

    def take_ended(self) -> list[Progress]:
        """The ends that no step reported: cancelled requests."""
        ended, self._ended = self._ended, []
        return ended

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. With a step in flight, `advance` first."""
        if len(self._flights) > 1 or (self._flights and not self._flights[0].advanced):
            raise EngineError("plan() was called before the last plan was committed or advanced")
        if not self._reserve_decoding(ahead=bool(self._flights)):
            self._admit()
        elif self._flights:
            return None  # somebody must be preempted, and nobody's last token is known
        plan = self._build_plan()
        if plan is not None:
            self._flights.append(_Flight(plan, plan, self._are(plan.slots)))
        return plan

    def advance(self) -> None:
        """Count on what the one plan in flight will bring: a token for each that samples, and all drafts accepted."""
        (flight,) = self._flights
        plan = flight.settled
        hits = plan.overlap.chunk_of(plan.lengths) > 0 if plan.overlap is not None else None
        self._move(plan, np.where(plan.samples, plan.judged + 1, 0), plan.lengths, hits)
        self._unsettled[plan.slots] = plan.judged > 0 if hits is None else (plan.judged > 0) | hits
        flight.advanced = True

    @property
    def settled(self) -> StepPlan:
        """The oldest plan in flight, as it stands now that all before it are committed."""
        return self._flights[0].settled

    def commit(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in what a step produced: tokens, computed rows, full pages, ends."""
        if not self._flights or plan is not self._flights[0].plan:
            raise EngineError("commit() was given another plan than the oldest in flight")
        flight = self._flights.popleft()
        plan = flight.settled
        self._settle(plan, result)
        if self._limbo:  # somebody has ended whose rows these are, or those of the step behind
            alive = ~self._are(self._limbo)[plan.slots]
            if not alive.all():
                plan, result = _only(plan, result, alive)
        slots, samples = plan.slots, plan.samples
        emitted = np.where(samples, result.num_accepted + 1, 0)
        self._append(slots, plan.num_tokens, emitted, result.token_ids)
        drafts = plan.has_drafts
        if not flight.advanced:
            self._move(plan, emitted, result.num_drafted, result.hits)
        elif drafts:
            self._take_back(plan, Settling.of(plan, result))
        if drafts:
            self._drafted[slots] += result.num_drafted
            self._verified[slots] += result.num_verified
            self._accepted[slots] += result.num_accepted
            self._judged[slots] += np.minimum(result.num_accepted + 1, result.num_verified)
        self._steps[slots] += samples
        self._lengths[slots, np.minimum(result.num_drafted, HARD_MAX_LENGTH)] += samples
        for index, reason in result.failures.items():
            self._fail(int(slots[index]), reason)
        self._publish_prompts(slots)
        for entry in self._cancelling:
            if entry.request.id in self._entries:
                self._ended.append(self._drop(entry, FinishReason.CANCELLED))
        self._cancelling = []
        self._collect(slots, emitted, result)
        self._give_back_lookahead()
        self._leave_limbo()
        return self.take_ended()

    def _move(self, plan: StepPlan, emitted: IntArray, num_drafted: IntArray, hits: NDArray[np.bool_] | None) -> None:
        """Where the requests of a plan stand after it."""
        slots, num_tokens, samples = plan.slots, plan.num_tokens, plan.samples
        self._num_tokens[slots] = num_tokens + emitted
        self._num_computed[slots] = np.where(samples, num_tokens + emitted - 1, plan.start + plan.num_rows)
        # The draft computed its own tokens but the last; those the target refused, and what stands on them, are void.
        computed = plan.draft_start + plan.draft_rows + np.maximum(num_drafted - 1, 0)
        valid = np.where(samples, np.minimum(computed, num_tokens + emitted - 1), computed)
        frontier: IntArray | int = 0
        if hits is not None and plan.overlap is not None:
            frontier = np.where(hits, plan.overlap.chunk_of(num_drafted) - 1, 0)
            valid = np.where(hits, num_tokens + emitted + frontier - 1, valid)
        self._draft_computed[slots] = valid
        self._frontier[slots] = frontier

    def _take_back(self, plan: StepPlan, settling: Settling) -> None:
        """Where requests stand that drafts were counted on for. Draft pages may have been taken from some meanwhile."""
        self._num_tokens[plan.slots] -= settling.refused
        self._num_computed[plan.slots] -= settling.refused
        self._frontier[plan.slots[settling.missed if plan.drafts_beside else settling.refused > 0]] = 0
        moved = (settling.refused > 0) | settling.missed
        fewer = plan.slots[moved]
        computed = self._num_tokens[fewer] + self._frontier[fewer] - 1 - settling.short[moved]
        self._draft_computed[fewer] = np.minimum(self._draft_computed[fewer], computed)

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        """Tell the plan in flight behind this one, if there is one, what this one's drafts came to."""
        self._unsettled[plan.slots] = False
        for flight in self._flights if plan.has_drafts else ():
            settling = Settling.of(plan, result).spread(plan.slots, self.limits.max_running)
            flight.settled = flight.plan.settle(settling[flight.plan.slots])

    def abandon(self, reason: FinishReason) -> list[Progress]:
        """End every open request, whatever state a failed step left it in."""
        self._flights.clear()
        self._unsettled[:] = False
        self._cancelling = []
        self._leave_limbo()
        return self.take_ended() + [self._drop(entry, reason) for entry in list(self._entries.values())]

    def check(self) -> None:
        """Raise EngineError unless pages, slots and requests agree."""
        self.target_pages.check()
        if self.draft_pages is not None:
            self.draft_pages.check()
        idle = sorted([*self._free_slots, *self._limbo])
        if sorted([*idle, *self._running.tolist()]) != list(range(self.limits.max_running)):
            raise EngineError("a slot is lost or in two states")
        pools = [pool for pool in (self.target_pages, self.draft_pages) if pool is not None]
        if any(pool.count[idle].any() for pool in pools):
            raise EngineError("an idle slot holds pages")
        if len(self._waiting) + self.num_running != len(self._entries):
            raise EngineError("a request is neither waiting nor running")

    # ── made-up requests, while there are no real ones ────────────────────────────────────────────────────────────────

    def lend_slots(self, num_tokens: IntArray) -> tuple[PageWrites, PageWrites] | None:
        """Pages of both models for made-up requests of these sizes in the first slots, to be given back at once.

        None while there are requests, and where free pages are short: pages of the prefix cache are not taken.
        """
        pools = [pool for pool in (self.target_pages, self.draft_pages) if pool is not None]
        needed = int((-(-num_tokens // self.target_pages.page_size)).sum())
        if self.has_work or self._flights or any(pool.num_free < needed for pool in pools):
            return None
        slots = np.arange(num_tokens.size)
        for pool in pools:
            pool.reserve(slots, num_tokens)
        draft_writes = self.draft_pages.take_writes() if self.draft_pages is not None else NO_WRITES
        return self.target_pages.take_writes(), draft_writes

    def take_back_slots(self, num_slots: int) -> None:
        """The next plan tells the executor that these slots are free."""
        for slot in range(num_slots):
            self.target_pages.release(slot)
            if self.draft_pages is not None:
                self.draft_pages.release(slot)
        self._released.update(range(num_slots))

    # ── adding and ending ────────────────────────────────────────────────────────────────────────────────────────────

    def _check_size(self, request: Request) -> None:
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        total = num_prompt + max_tokens
        asked = f"{num_prompt} prompt tokens + max_tokens {max_tokens} = {total}"
        if num_prompt == 0:
            raise InvalidRequest("the prompt holds no token; give at least one")
        if total > self.limits.max_model_len:
            raise RequestTooLong(
                f"{asked}, but the model takes {self.limits.max_model_len}; shorten the prompt or max_tokens"
            )
        pool = self.target_pages
        if pool.pages_for(total) > pool.num_pages:
            raise RequestTooLong(
                f"{asked}, but the KV pool holds {pool.num_pages * pool.page_size} ({pool.num_pages} pages of "
                f"{pool.page_size}); shorten the request or enlarge the pool"
            )

    def _drop(self, entry: _Entry, reason: FinishReason) -> Progress:
        """End a request between steps, wherever it is."""
        stats = self._stats(entry)
        if entry.slot >= 0:
            self._vacate(entry)
        else:
            self._waiting.remove(entry)
        return self._close(entry, Finish(reason, stats))

    def _fail(self, slot: int, reason: str) -> None:
        """End a request whose step went wrong. Nothing it computed is offered to others."""
        entry = self._entry(slot)
        finish = Finish(FinishReason.FAILED, self._stats(entry), error=reason)
        self._vacate(entry, publish=False)
        self._ended.append(self._close(entry, finish))

    def _close(
        self, entry: _Entry, finish: Finish, new: list[int] | None = None, logprobs: list[TokenLogprobs] | None = None
    ) -> Progress:
        """Forget a request and say how it ended."""
        del self._entries[entry.request.id]
        if entry.checker is not None:
            finish = replace(finish, text=entry.checker.text)
        return Progress(entry.request.id, new or [], logprobs, finish)

    def _vacate(self, entry: _Entry, publish: bool = True) -> None:
        """Take a running request out of its slot and give back its pages."""
        slot = entry.slot
        if self._caching and publish:
            self._publish(slot, self.limits.max_model_len)
        self.target_pages.release(slot)
        if self.draft_pages is not None:
            self.draft_pages.release(slot)
        for stop_id in entry.request.stop_ids:
            self._stop_ids[stop_id] -= 1
            if not self._stop_ids[stop_id]:
                del self._stop_ids[stop_id]
        if entry.request.stop_ids:
            self._stop_array = np.array(list(self._stop_ids), dtype=np.int64)
        self._at[slot] = None
        self._running = self._running[self._running != slot]
        if any(flight.names[slot] for flight in self._flights):
            self._limbo.add(slot)
        else:
            self._free_slots.append(slot)
        self._admitted = [admission for admission in self._admitted if admission.slot != slot]
        self._released.add(slot)
        entry.slot = -1

    def _leave_limbo(self) -> None:
        """Slots that no plan in flight names any more are free."""
        for slot in list(self._limbo):
            if not any(flight.names[slot] for flight in self._flights):
                self._limbo.discard(slot)
                self._free_slots.append(slot)

    def _stats(self, entry: _Entry) -> Stats:
        slot = entry.slot
        if slot < 0:
            return entry.stats
        return Stats(
            drafted=int(self._drafted[slot]),
            verified=int(self._verified[slot]),
            accepted=int(self._accepted[slot]),
            steps=int(self._steps[slot]),
            cached=entry.stats.cached,
            lengths=_without_zeros(self._lengths[slot].tolist()),
        )

    # ── planning: running requests first ─────────────────────────────────────────────────────────────────────────────

    def _runnable(self) -> IntArray:
        """Running requests that can take another step: not those whose last token is surely on its way."""
        slots = self._running
        return slots[(self._num_tokens[slots] < self._end[slots]) | self._unsettled[slots]] if self._flights else slots

    def _reserve_decoding(self, ahead: bool) -> bool:
        """Give every running request a page for its next token; whether pages were short.

        Then the newest is preempted, unless this plans ahead.
        """
        short = False
        while self.num_running:
            slots = self._runnable()
            if self.target_pages.reserve(slots, self._num_tokens[slots]):
                break
            short = True
            if ahead:
                break
            self._preempt(int(slots[-1]))
        return short

    def _preempt(self, slot: int) -> None:
        """Send a request back to the queue, to compute its context again or find it in the prefix cache."""
        entry = self._entry(slot)
        entry.token_ids = self._tokens[slot, : self._num_tokens[slot]].copy()
        entry.stats, entry.judged, entry.num_found = self._stats(entry), int(self._judged[slot]), 0
        self._vacate(entry)
        place = next((i for i, other in enumerate(self._waiting) if other.number > entry.number), len(self._waiting))
        self._waiting.insert(place, entry)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Move waiting requests into slots: those whose prompts get rows of this step beside the running ones.

        `turns` says who is asked first. A waiting prompt stays in the queue while another one computes its next page in
        this step: it then finds that page in the prefix cache.
        """
        if not (self._waiting and self._free_slots):
            return
        slots = self._runnable()
        pending = self._num_tokens[slots] - self._num_computed[slots]
        reads = pending > 1
        room = self._prompt_room(int(np.count_nonzero(~reads)), 0)
        entries = [self._entry(slot) for slot in slots[reads].tolist()]
        entries += self._candidates()
        entries.sort(key=_number)
        left, context = self._rows_left(entries)
        computed = self._names_in_flight(slots[~reads])
        has_rows: set[int] = set()
        for i, is_oldest in turns(left):
            entry = entries[i]
            name = self._next_page(entry)
            if entry.slot < 0 and name in computed:
                continue
            rows = room.take(left[i], context[i], is_oldest, i in has_rows)
            if not rows:
                continue
            has_rows.add(i)
            left[i], context[i] = left[i] - rows, context[i] + rows
            if entry.slot < 0:
                is_head = entry is self._waiting[0]
                if not self._let_in(entry):
                    if is_head:
                        return
                    continue  # it may not overtake; the head is asked in its own turn
            if name is not None:
                computed.add(name)

    def _candidates(self) -> Iterator[_Entry]:
        """The oldest waiting requests, their pages looked for in the prefix cache. Costs a bounded time."""
        size, most = self.target_pages.page_size, MOST_HASHED
        for entry in islice(self._waiting, MOST_CANDIDATES):
            if self._caching:
                num_tokens = entry.token_ids.size
                new = num_tokens // size - len(entry.hashes)
                if new > most and most < MOST_HASHED:
                    return
                most -= new
                self._extend_hashes(entry, entry.token_ids, num_tokens)
                rest = entry.hashes[entry.num_found : (num_tokens - 1) // size]
                entry.num_found += self.target_pages.find(rest)[0]
            yield entry

    def _rows_left(self, entries: list[_Entry]) -> tuple[list[int], list[int]]:
        """Rows that the target has yet to compute of each context, and tokens it need not compute."""
        size = self.target_pages.page_size
        known = [self._num_tokens[e.slot] if e.slot >= 0 else e.token_ids.size for e in entries]
        computed = [int(self._num_computed[e.slot]) if e.slot >= 0 else e.num_found * size for e in entries]
        return [int(total) - done for total, done in zip(known, computed, strict=True)], computed

    def _next_page(self, entry: _Entry) -> bytes | None:
        """The name of the first full page of a prompt that is not in the prefix cache and could be."""
        if not self._caching:
            return None
        if entry.slot >= 0:
            column, end = int(self._num_published[entry.slot]), len(entry.hashes)
        else:
            column, end = entry.num_found, (entry.token_ids.size - 1) // self.target_pages.page_size
        return entry.hashes[column] if column < end else None

    def _names_in_flight(self, slots: IntArray) -> set[bytes | None]:
        """The next pages of prompts whose last rows are in flight: these pages are published by the next commit."""
        if not (self._caching and self._flights):
            return set()
        unpublished = slots[self._num_published[slots] < self._num_prompt[slots] // self.target_pages.page_size]
        return {self._next_page(self._entry(slot)) for slot in unpublished.tolist()} - {None}

    def _let_in(self, entry: _Entry) -> bool:
        """Give a waiting request a slot and pages; False where they are short.

        A request that overtakes the head of the queue leaves it a slot and all pages it could need.
        """
        head = self._waiting[0]
        overtakes = entry is not head
        if len(self._free_slots) <= overtakes:
            return False
        slot = self._free_slots[-1]
        num_kept = self.target_pages.pages_for(head.token_ids.size) if overtakes else 0
        num_computed = self._take_pages(entry, slot, num_kept)
        if num_computed is None:
            return False
        self._waiting.remove(entry)
        self._free_slots.pop()
        self._occupy(entry, slot, num_computed)
        return True

    def _take_pages(self, entry: _Entry, slot: int, num_kept: int) -> int | None:
        """Pages for the whole context, as many as possible from the prefix cache.

        Returns how many tokens the cached ones hold, or None where pages are short. `num_kept` pages must stay
        available. One page for each running request must stay available as well, or a next step would soon preempt.
        """
        pool, num_tokens = self.target_pages, entry.token_ids.size
        found: list[bytes] = []
        num_idle = 0
        if self._caching:
            matched, num_idle = pool.find(entry.hashes[: (num_tokens - 1) // pool.page_size])
            found = entry.hashes[:matched]
        missing = pool.pages_for(num_tokens) - len(found)
        if missing + self.num_running + num_kept > pool.num_available - num_idle:
            return None
        pool.match(slot, found)
        pool.reserve(np.array([slot]), np.array([num_tokens]))
        return len(found) * pool.page_size

    def _occupy(self, entry: _Entry, slot: int, num_computed: int) -> None:
        request, num_tokens = entry.request, entry.token_ids.size
        if self._caching:
            self.num_prefix_queries += num_tokens
            self.num_prefix_hits += num_computed
        if num_computed and not (entry.stats.steps or entry.stats.cached):
            entry.stats = replace(entry.stats, cached=num_computed)
        entry.slot = slot
        self._at[slot] = entry
        self._tokens[slot, :num_tokens] = entry.token_ids
        self._num_tokens[slot] = self._num_known[slot] = num_tokens
        self._num_prompt[slot] = len(request.prompt_token_ids)
        self._end[slot] = len(request.prompt_token_ids) + request.params.max_tokens
        self._num_computed[slot] = num_computed
        self._num_published[slot] = num_computed // self.target_pages.page_size
        self._draft_computed[slot] = self._draft_published[slot] = self._frontier[slot] = 0
        self._max_draft[slot] = (
            HARD_MAX_LENGTH if request.params.max_draft is None else min(request.params.max_draft, HARD_MAX_LENGTH)
        )
        self._drafted[slot], self._verified[slot] = entry.stats.drafted, entry.stats.verified
        self._accepted[slot], self._steps[slot] = entry.stats.accepted, entry.stats.steps
        self._judged[slot] = entry.judged
        self._lengths[slot] = 0
        self._lengths[slot, : len(entry.stats.lengths)] = entry.stats.lengths
        self._watched[slot] = entry.checker is not None or request.params.logprobs is not None
        for stop_id in request.stop_ids:
            self._stop_ids[stop_id] = self._stop_ids.get(stop_id, 0) + 1
        if request.stop_ids:
            self._stop_array = np.array(list(self._stop_ids), dtype=np.int64)
        self._numbers[slot] = entry.number
        place = int(np.searchsorted(self._numbers[self._running], entry.number))
        self._running = np.insert(self._running, place, slot)
        self._released.discard(slot)
        self._admitted.append(
            Admission(
                slot, entry.token_ids, len(request.prompt_token_ids), request.params, request.seed, request.stop_ids
            )
        )

    # ── planning: rows and lengths ───────────────────────────────────────────────────────────────────────────────────

    def _build_plan(self) -> StepPlan | None:
        slots = self._runnable()
        if slots.size == 0:
            return None
        num_tokens, start = self._num_tokens[slots], self._num_computed[slots]
        pending = num_tokens - start
        decoding = pending == 1
        lengths = np.zeros(slots.size, dtype=np.int64)
        draft_rows = np.zeros(slots.size, dtype=np.int64)
        stopping: Stopping | None = None
        lead = np.zeros(slots.size, dtype=np.int64)
        chunks: Chunks | None = None
        num_decoding = int(np.count_nonzero(decoding))
        catching_up = 0.0
        if self._speculates and num_decoding:
            num_prefill_rows = int(self._share_rows(start, pending, decoding, 0).sum()) - num_decoding
            drafting = self._plan_drafts(slots[decoding], num_prefill_rows)
            catching_up = drafting.catching_up
            lengths[decoding], lead[decoding] = drafting.lengths, drafting.lead
            draft_rows[decoding], chunks = drafting.rows, drafting.chunks
            if lengths.any() and not (chunks or self._frontier[slots].any()):
                stopping = self.policy.stopping()
        if stopping is not None:
            stopping = stopping.spread(decoding)
        frontier = self._frontier[slots]
        num_judged = int((frontier + (lengths if chunks is None else lead)).sum())
        num_rows = self._share_rows(start, pending, decoding, num_judged, catching_up)
        runs = num_rows > 0
        if not runs.all():
            slots, num_tokens, start, num_rows = slots[runs], num_tokens[runs], start[runs], num_rows[runs]
            lengths, draft_rows, frontier, lead = lengths[runs], draft_rows[runs], frontier[runs], lead[runs]
            stopping = stopping.of(runs) if stopping is not None else None
        plan = StepPlan(
            admitted=tuple(self._admitted),
            released=tuple(self._released),
            slots=slots,
            num_tokens=num_tokens,
            start=start,
            num_rows=num_rows,
            lengths=lengths,
            draft_start=self._draft_computed[slots],
            draft_rows=draft_rows,
            unsettled=self._unsettled[slots],
            target_pages=self.target_pages.take_writes(),
            draft_pages=self.draft_pages.take_writes() if self.draft_pages is not None else NO_WRITES,
            stopping=stopping,
            overlap=_overlap_plan(chunks, frontier, lead),
        )
        self._admitted, self._released = [], set()
        return plan

    def _share_rows(
        self,
        start: IntArray,
        pending: IntArray,
        decoding: NDArray[np.bool_],
        num_judged: int,
        catching_up: float = 0.0,
    ) -> IntArray:
        """Rows of each request: decoding ones their one, prompts what rows and seconds are left (see `turns`)."""
        if decoding.all():
            return pending
        reads = ~decoding
        room = self._prompt_room(int(np.count_nonzero(decoding)), num_judged, catching_up)
        rows: IntArray = decoding.astype(np.int64)
        left = pending[reads].tolist()
        shared = share(room, left, start[reads].tolist())
        if self.pace is not None and self.pace.row_sizes:
            shared = fill_size(shared, left, int(rows.sum()) + num_judged, self.pace.row_sizes)
        rows[reads] = shared
        return rows

    def _prompt_room(self, num_decoding: int, num_judged: int, catching_up: float = 0.0) -> Room:
        """What a step has for prompts, beside its decoding requests, their drafts and `catching_up` seconds."""
        rows = self.limits.max_batch_tokens - num_decoding - num_judged
        return Room(rows) if self.pace is None else self.pace.prompt_room(rows, num_decoding == 0, catching_up)

    def _plan_drafts(self, slots: IntArray, num_prefill_rows: int) -> _Drafting:
        """What the decoding requests draft."""
        if self._frontier[slots].any():
            self._fit_frontier(slots, num_prefill_rows)
        frontier = self._frontier[slots]
        view = self._view(slots, num_prefill_rows)
        lengths = self._ask_policy(view)
        chunks = self.overlap.chunks(view, lengths) if self.overlap is not None else None
        if chunks is not None:
            lead = np.where(frontier > 0, 0, chunks.lead)
            lengths = np.minimum(chunks.lengths + lead, view.limit)
            if chunks.leads:  # a void frontier is drafted anew in the same step
                lengths = np.clip(self._max_draft[slots] - frontier, 0, lengths)
        else:  # one step verifies the frontier and what is drafted now: together as much as was asked for
            lead = lengths = np.clip(self._max_draft[slots] - frontier, 0, np.maximum(lengths - frontier, 0))
        none = np.zeros_like(lengths)
        if not lengths.any():
            return _Drafting(none, none, none, 0.0, chunks if frontier.any() else None)
        # what is drafted beside the verification is verified in the next, when the frontier is gone
        others = slots.size + (int(frontier.sum()) if lead.any() else 0)
        lengths = self._fit_rows(lengths, others, num_prefill_rows)
        if lead.any():
            lengths = self._fit_target_pages(slots, np.minimum(lead, lengths), lengths)
        rows, catching_up = none, 0.0
        if self.draft_pages is not None:
            lengths, rows, catching_up = self._fit_draft(slots, lengths, num_prefill_rows > 0)
        return _Drafting(lengths, np.minimum(lead, lengths), rows, catching_up, chunks)

    def _fit_frontier(self, slots: IntArray, num_prefill_rows: int) -> None:
        """Pages and rows for the drafts there are; without them these are given up, which costs no token."""
        frontier = self._fit_rows(self._frontier[slots], slots.size, num_prefill_rows)
        if not self.target_pages.reserve(slots, self._num_tokens[slots] + frontier):
            frontier = np.zeros_like(frontier)
        fewer = slots[frontier < self._frontier[slots]]
        self._frontier[slots] = frontier
        void = self._num_tokens[fewer] + self._frontier[fewer] - 1
        self._draft_computed[fewer] = np.minimum(self._draft_computed[fewer], void)

    def _view(self, slots: IntArray, num_prefill_rows: int) -> BatchView:
        num_tokens, frontier = self._num_tokens[slots], self._frontier[slots]
        remaining = self._end[slots] - num_tokens
        limit: IntArray = np.minimum(np.maximum(remaining - 1 - frontier, 0), self._max_draft[slots])
        if self.limits.draft_max_len is not None:
            limit = np.clip(self.limits.draft_max_len + 1 - num_tokens - frontier, 0, limit)
        ends = num_tokens + frontier
        lag = ends - self._draft_computed[slots] if self.draft_pages is not None else np.zeros_like(slots)
        return BatchView(
            slots=slots,
            num_tokens=num_tokens,
            lag=lag,
            limit=limit,
            accepted=self._accepted[slots],
            tried=self._judged[slots],
            num_output=num_tokens - self._num_prompt[slots],
            remaining=remaining,
            num_prefill_rows=num_prefill_rows,
            cost=self.cost,
        )

    def _ask_policy(self, view: BatchView) -> IntArray:
        lengths = np.asarray(self.policy.lengths(view))
        if lengths.dtype.kind not in "iu" or lengths.shape != view.slots.shape or (lengths < 0).any():
            raise EngineError(
                f"policy {self.policy.name!r} gave {lengths!r}; expected {view.num_requests} integers of at least 0"
            )
        capped: IntArray = np.minimum(lengths, view.limit)
        return capped

    def _fit_rows(self, lengths: IntArray, num_others: int, num_prefill_rows: int) -> IntArray:
        """Cap lengths to the row budget. Speculation leaves prefills a quarter of it, so arrivals are never starved."""
        budget = self.limits.max_batch_tokens
        room = max(0, budget - num_others - min(num_prefill_rows, max(1, budget // 4)))
        cap = int(lengths.max())
        while lengths.sum() > room:
            cap -= 1
            lengths = np.minimum(lengths, cap)
        return lengths

    def _fit_target_pages(self, slots: IntArray, judged: IntArray, lengths: IntArray) -> IntArray:
        """Reserve room for the new drafts that are judged; the lengths there is room for.

        Where pages are short nobody speculates, for that is better than to preempt.
        """
        if self.target_pages.reserve(slots, self._num_tokens[slots] + self._frontier[slots] + judged):
            return lengths
        return np.zeros_like(lengths)

    def _fit_draft(self, slots: IntArray, lengths: IntArray, beside_prompts: bool) -> tuple[IntArray, IntArray, float]:
        """Draft pages and catch-up rows: the lengths, the draft's rows, and the seconds that catching up may take.

        A request that cannot have its pages, or cannot catch up yet, drafts nothing.
        """
        assert self.draft_pages is not None
        self._match_drafts(slots[lengths > 0])
        lag = self._num_tokens[slots] + self._frontier[slots] - self._draft_computed[slots]
        wanted = np.where(lengths > 0, lag, 0)
        rows = self._share_catch_up(wanted, self._draft_computed[slots], beside_prompts)
        is_late = rows is not wanted
        lengths = np.where(rows == lag, lengths, 0)
        # whose tokens are not settled computes all rows or none: which they are is only known later
        rows = np.where(self._unsettled[slots] & (rows < lag), 0, rows)
        needed = np.where(rows > 0, self._draft_computed[slots] + rows + np.maximum(lengths - 1, 0), 0)
        if not self.draft_pages.reserve(slots, needed):
            self._reclaim_drafts(slots[rows == 0])
            granted = self._grant_drafts(slots, rows, needed)
            lengths, rows = np.where(granted, lengths, 0), np.where(granted, rows, 0)
        catching_up = 0.0
        if is_late and self.pace is not None:
            work = catch_up_work(rows, self._draft_computed[slots], lengths)
            catching_up = self.pace.catch_up.seconds(*work)
        return lengths, rows, catching_up

    def _grant_drafts(self, slots: IntArray, rows: IntArray, needed: IntArray) -> NDArray[np.bool_]:
        """Draft pages for the oldest that want them; the newest give theirs up, so that somebody always gets done."""
        assert self.draft_pages is not None
        granted = np.zeros(slots.size, dtype=np.bool_)
        wanting = np.flatnonzero(rows).tolist()
        while wanting:
            oldest = wanting.pop(0)
            while not self.draft_pages.reserve(slots[oldest : oldest + 1], needed[oldest : oldest + 1]):
                if not wanting:
                    self._reclaim_drafts(slots[oldest : oldest + 1])
                    return granted
                newest = wanting.pop()
                self._reclaim_drafts(slots[newest : newest + 1])
            granted[oldest] = True
        return granted

    def _share_catch_up(self, rows: IntArray, start: IntArray, beside_prompts: bool) -> IntArray:
        """Cut the draft's rows to what a step has for them. The same array: all keep up, and have room.

        Requests that kept up come first: they wait for no long catch-up. The others share the rest as prompts do.
        """
        most = self.limits.max_batch_tokens
        if rows.sum() <= most and (self.pace is None or rows.max() <= KEPT_UP):
            return rows
        late = rows > KEPT_UP
        shared = np.where(late, 0, rows)
        order = np.argsort(shared, kind="stable")
        shared[order] = np.clip(most - (np.cumsum(shared[order]) - shared[order]), 0, shared[order])
        room = most - int(shared.sum())
        given = Room(room) if self.pace is None else self.pace.catch_up_room(room, beside_prompts)
        shared[late] = share(given, rows[late].tolist(), start[late].tolist())
        return shared

    def _match_drafts(self, slots: IntArray) -> None:
        """Requests the draft has never seen may find their context in its prefix cache."""
        if not self._caching or self.draft_pages is None:
            return
        for slot in slots[self._draft_computed[slots] == 0].tolist():
            last = (int(self._num_tokens[slot]) - 1) // self.draft_pages.page_size
            matched = self.draft_pages.match(slot, self._entry(slot).hashes[:last])
            self._draft_computed[slot] = matched * self.draft_pages.page_size
            self._draft_published[slot] = matched

    def _reclaim_drafts(self, slots: IntArray) -> None:
        """Take the draft's pages from requests that do not speculate now; they catch up if they ever do again."""
        assert self.draft_pages is not None
        for slot in slots[self.draft_pages.count[slots] > 0].tolist():
            if self._caching:
                self._publish(slot, self.limits.max_model_len)
            self.draft_pages.release(slot)
            self._draft_computed[slot] = self._draft_published[slot] = 0

    # ── committing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, slots: IntArray, num_tokens: IntArray, emitted: IntArray, token_ids: IntArray) -> None:
        cu_emitted = np.cumsum(emitted) - emitted
        columns = np.arange(token_ids.size) + np.repeat(num_tokens - cu_emitted, emitted)
        self._tokens[np.repeat(slots, emitted), columns] = token_ids
        self._num_known[slots] = num_tokens + emitted

    def _publish_prompts(self, slots: IntArray) -> None:
        """Offer newly computed prompt pages to the prefix caches. Output pages follow when the request leaves."""
        if not self._caching:
            return
        prompt = self._num_prompt[slots] // self.target_pages.page_size
        lacks = self._num_published[slots] < prompt
        if self.draft_pages is not None:
            lacks |= (self._draft_published[slots] < prompt) & (self._draft_computed[slots] > 0)
        for i in np.flatnonzero(lacks).tolist():
            if self._at[slots[i]] is not None:  # a failed one has left, and publishes nothing
                self._publish(int(slots[i]), int(prompt[i]))

    def _publish(self, slot: int, most: int) -> None:
        """Publish a slot's first pages, `most` at most. Rows beyond num_computed may hold refused drafts: never."""
        size, entry, known = self.target_pages.page_size, self._entry(slot), int(self._num_known[slot])
        self._extend_hashes(entry, self._tokens[slot], known)
        for pool, computed, published in (
            (self.target_pages, self._num_computed, self._num_published),
            (self.draft_pages, self._draft_computed, self._draft_published),
        ):
            full = min(int(computed[slot]) // size, known // size, most)
            if pool is not None and full > published[slot]:
                for column in range(int(published[slot]), full):
                    pool.publish(slot, column, entry.hashes[column])
                published[slot] = full

    def _extend_hashes(self, entry: _Entry, tokens: IntArray, num_tokens: int) -> None:
        size = self.target_pages.page_size
        for column in range(len(entry.hashes), num_tokens // size):
            previous = entry.hashes[-1] if entry.hashes else b""
            entry.hashes.append(page_hash(previous, tokens[column * size : (column + 1) * size]))

    def _collect_all(self, slots: IntArray, emitted: IntArray, result: StepResult) -> None:
        """Hand out tokens; look closely only at requests that may end here or asked for more than tokens.

        What is handed out is kept in `_ended` until the step is whole, so that no end is lost if it is not.
        """
        ends: NDArray[np.bool_] = (self._num_known[slots] >= self._end[slots]) | self._watched[slots]
        cu_emitted = np.concatenate(([0], np.cumsum(emitted)))
        if self._stop_array.size:
            hits = np.flatnonzero(np.isin(result.token_ids, self._stop_array))
            ends[np.searchsorted(cu_emitted, hits, side="right") - 1] = True
        tokens, bounds = result.token_ids.tolist(), cu_emitted.tolist()
        progress = self._ended
        rows = zip(slots.tolist(), bounds, bounds[1:], ends.tolist(), strict=False)
        for i, (slot, first, last, may_end) in enumerate(rows):
            entry = self._at[slot]
            if entry is None or first == last:
                continue
            if may_end:
                progress.append(self._examine(entry, tokens[first:last], result.logprobs.get(i)))
            else:
                progress.append(Progress(entry.request.id, tokens[first:last], None, None))

    def _collect_ends(self, slots: IntArray, emitted: IntArray, result: StepResult) -> None:
        """Report requests that begin or end in this step; add up the tokens of all others under the id NOBODY.

        For an executor whose tokens are all the same: which of them a request gets does not matter.
        """
        known = self._num_known[slots]
        begins = known - emitted == self._num_prompt[slots]
        reported = (emitted > 0) & (begins | (known >= self._end[slots]))
        count = int(emitted[reported].sum())
        self._collect_all(slots[reported], emitted[reported], replace(result, token_ids=result.token_ids[:count]))
        self._ended.append(Progress(NOBODY, [0] * (result.token_ids.size - count), None, None))

    def _examine(self, entry: _Entry, new: list[int], logprobs: list[TokenLogprobs] | None) -> Progress:
        """Cut a request's new tokens at its first stop, if any: the tokens behind it are as if never made."""
        request = entry.request
        num_output = int(self._num_known[entry.slot] - self._num_prompt[entry.slot]) - len(new)
        reason, stop_id = None, None
        for i, token in enumerate(new):
            if token in request.stop_ids and num_output + i >= request.params.min_tokens:
                reason, stop_id = FinishReason.STOP, token
            elif entry.checker is not None and entry.checker.push(token):
                reason = FinishReason.STOP
            if reason is not None:
                self._accepted[entry.slot] -= len(new) - (i + 1)
                new = new[: i + 1]
                break
        if reason is None and num_output + len(new) >= request.params.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = logprobs[: len(new)] if logprobs is not None else None
        if reason is None:
            return Progress(request.id, new, logprobs, None)
        finish = Finish(reason, self._stats(entry), stop_id)
        self._vacate(entry)
        return self._close(entry, finish, new, logprobs)

    def _give_back_lookahead(self) -> None:
        """Pages for refused drafts. Those of a step in flight are in use."""
        slots = self._running
        for flight in self._flights:
            slots = slots[~flight.names[slots]]
        if not slots.size:
            return
        self.target_pages.truncate(slots, self._num_tokens[slots])
        if self.draft_pages is not None:
            self.draft_pages.truncate(slots, self._draft_computed[slots])

    def _are(self, slots: Iterable[int] | IntArray) -> NDArray[np.bool_]:
        """By slot, whether it is one of these."""
        found = np.zeros(self.limits.max_running, dtype=np.bool_)
        found[slots if isinstance(slots, np.ndarray) else list(slots)] = True
        return found

    def _entry(self, slot: int) -> _Entry:
        entry = self._at[slot]
        assert entry is not None
        return entry


def _overlap_plan(chunks: Chunks | None, frontier: IntArray, lead: IntArray) -> OverlapPlan | None:
    """None where nothing is drafted beside the verification and no drafts of an earlier step wait."""
    if chunks is not None:
        return OverlapPlan(frontier, lead, leads=chunks.leads, draft_sms=chunks.draft_sms)
    return OverlapPlan(frontier, np.zeros_like(lead), beside=False) if frontier.any() else None


def _number(entry: _Entry) -> int:
    return entry.number


def _without_zeros(counts: list[int]) -> tuple[int, ...]:
    """Up to the last that is none."""
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _only(plan: StepPlan, result: StepResult, alive: NDArray[np.bool_]) -> tuple[StepPlan, StepResult]:
    """Without the rows of requests that have ended."""
    emitted = np.where(plan.samples, result.num_accepted + 1, 0)
    number = np.cumsum(alive) - 1  # a row's index among the living
    return (
        plan.of(alive),
        replace(
            result,
            num_drafted=result.num_drafted[alive],
            num_verified=result.num_verified[alive],
            num_accepted=result.num_accepted[alive],
            token_ids=result.token_ids[np.repeat(alive, emitted)],
            logprobs={int(number[i]): value for i, value in result.logprobs.items() if alive[i]},
            failures={int(number[i]): value for i, value in result.failures.items() if alive[i]},
            confidence=None,
            hits=None if result.hits is None else result.hits[alive],
        ),
    )
