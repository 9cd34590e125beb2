"""What decoding requests draft in a step: the policy's lengths, cut to rows, pages and what the draft has to catch up.

Knows the policy, the draft's position in each context and both page pools. Knows nothing of the queue or of plans in
flight. `overlap`, where it is set, plans steps in which drafting goes on beside the verification (overlap.py).
`lookup`, where it is set, finds drafts in the contexts of the requests (lookup.py). `windows`, where it is set, says
what a draft that sees a window of each context has to compute (windows.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.pages import PagePool
from faser.engine.prefixes import Prefixes
from faser.engine.prompt_pace import KEPT_UP, Room, StepPace, catch_up_work, share
from faser.engine.slots import SlotTable
from faser.errors import EngineError
from faser.limits import HeadLimits, Limits
from faser.policy import BatchView, Policy
from faser.policy.base import Guesses, Outcome
from faser.rules.overlap import OverlapPlan
from faser.rules.stopping import Stopping
from faser.step import LookupDrafts, Settling, StepPlan, StepResult

if TYPE_CHECKING:
    from faser.engine.lookup import PromptLookup
    from faser.engine.overlap import OverlapState
    from faser.engine.windows import DraftWindows


@dataclass(frozen=True)
class Drafting:
    """What requests draft in a step. Arrays are [B]."""

    lengths: IntArray
    rows: IntArray  # context rows that the draft computes before it drafts
    catch_up_seconds: float = 0.0  # expected of the long catch-ups among these rows
    stopping: Stopping | None = None
    overlap: OverlapPlan | None = None
    lookup: LookupDrafts | None = None  # `lengths` counts these drafts too

    @classmethod
    def none(cls, num_requests: int) -> Drafting:
        zeros = np.zeros(num_requests, dtype=np.int64)
        return cls(zeros, zeros)

    @property
    def num_judged(self) -> int:
        """Draft rows that the target computes in this step."""
        return int((self.lengths if self.overlap is None else self.overlap.judged_of(self.lengths)).sum())

    def spread(self, where: BoolArray) -> Drafting:
        """The same for a larger batch, in which `where` marks these requests; the others draft nothing."""
        if where.all():
            return self
        lengths, rows = np.zeros((2, where.size), dtype=np.int64)
        lengths[where], rows[where] = self.lengths, self.rows
        return replace(
            self,
            lengths=lengths,
            rows=rows,
            stopping=None if self.stopping is None else self.stopping.spread(where),
            overlap=None if self.overlap is None else self.overlap.spread(where),
            lookup=None if self.lookup is None else self.lookup.spread(where),
        )


class DraftPlanner:
    """Asks the policy and fits its lengths. `draft_pages` is None where drafts need no KV (n-gram)."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        slots: SlotTable,
        target_pages: PagePool,
        draft_pages: PagePool | None,
        prefixes: Prefixes,
    ) -> None:
        self.policy = policy
        self.cost: ProfiledCost | None = None  # what the policy may go by
        self.pace: StepPace | None = None
        self.overlap: OverlapState | None = None
        self.lookup: PromptLookup | None = None
        self.windows: DraftWindows | None = None
        self.is_away = False  # the draft is not on the device: nobody drafts (residency.py)
        self._limits = limits
        self._slots = slots
        self._target_pages = target_pages
        self._draft_pages = draft_pages
        self._prefixes = prefixes

    def plan(self, slots: IntArray, num_prefill_rows: int, unsettled: BoolArray) -> Drafting:
        """What decoding requests draft. `unsettled` [B]: a step in flight may still take back their last tokens."""
        if self.overlap is not None:
            return self.overlap.plan(slots, num_prefill_rows, unsettled)
        begin = self._slots.num_tokens[slots]
        guesses = self._ask_guesses(self.view(slots, begin, num_prefill_rows))
        lengths = guesses.lengths
        if not lengths.any():
            return Drafting.none(slots.size)
        lengths = self.fit_rows(lengths, slots.size, num_prefill_rows)
        lengths = self.fit_target_pages(slots, begin, lengths, lengths)
        looked_up = np.where(guesses.is_looked_up, lengths, 0)
        drafting = self.with_stopping(
            self.fit_draft(slots, begin, lengths - looked_up, num_prefill_rows > 0, unsettled)
        )
        if self.lookup is None or not looked_up.any():
            return drafting
        return replace(drafting, lengths=drafting.lengths + looked_up, lookup=self.lookup.take(slots, looked_up))

    def teach_policy(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Tell the policy what a committed step brought and how long it took."""
        policy, overlap, samples = self.policy, self.overlap, plan.samples
        if not samples.any() or not (policy.learns or overlap is not None):
            return
        judged, accepted = plan.verdicts(result)
        outcome = Outcome(
            slots=plan.slots[samples],
            lengths=judged[samples],
            accepted=accepted[samples],
            lag=plan.draft_rows[samples],
            num_prefill_rows=int(plan.num_rows.sum()) - int(samples.sum()),
            seconds=seconds,
            confidence=None if result.confidence is None else result.confidence[samples],
            is_looked_up=None if plan.lookup is None or not self._has_draft else plan.lookup.is_looked_up[samples],
            num_tokens=plan.num_tokens[samples],
        )
        policy.learn(outcome)
        if overlap is not None:
            overlap.learn(outcome)

    # ── the parts of a plan; `begin` [B] is the position of the first new draft ──────────────────────────────────────

    def view(self, slots: IntArray, begin: IntArray, num_prefill_rows: int) -> BatchView:
        state, num_tokens = self._slots, self._slots.num_tokens[slots]
        limit = self._room(slots, begin)
        if self._limits.draft_max_len is not None:
            limit = np.clip(self._limits.draft_max_len + 1 - begin, 0, limit)
        if self._limits.head is not None:
            limit = self._head_limit(self._limits.head, begin, limit)
        return BatchView(
            slots=slots,
            num_tokens=num_tokens,
            lag=self._lag(slots, begin),
            limit=limit,
            accepted=state.counts.accepted_of_draft(slots) if self._has_draft else state.counts.accepted[slots],
            tried=state.counts.tried_of_draft(slots) if self._has_draft else state.counts.tried[slots],
            num_output=num_tokens - state.num_prompt[slots],
            remaining=state.end[slots] - num_tokens,
            num_prefill_rows=num_prefill_rows,
            cost=self.cost,
        )

    def _lag(self, slots: IntArray, begin: IntArray) -> IntArray:
        """[B] context rows that the draft computes before it drafts at `begin`; zero without a draft."""
        if not self._has_draft:
            return np.zeros_like(slots)
        return begin - self._slots.draft_computed[slots] if self.windows is None else self.windows.lag(slots, begin)

    def _room(self, slots: IntArray, begin: IntArray) -> IntArray:
        """[B] tokens that requests may draft, whatever drafts them."""
        room: IntArray = np.minimum(np.maximum(self._slots.end[slots] - begin - 1, 0), self._slots.max_draft[slots])
        return room

    def _head_limit(self, head: HeadLimits, begin: IntArray, limit: IntArray) -> IntArray:
        """Nothing without features, and nothing where a block would reach beyond the longest context."""
        longest = min(self._limits.max_model_len, self._limits.draft_max_len or self._limits.max_model_len)
        can_draft = (begin >= head.LEAST_CONTEXT) & (begin - 1 + head.block_rows <= longest)
        return np.where(can_draft, np.minimum(limit, head.max_length), 0)

    def ask_policy(self, view: BatchView) -> IntArray:
        """Lengths of the draft."""
        if self.is_away:
            return np.zeros_like(view.slots)
        return np.minimum(self._checked(self.policy.lengths(view), view), view.limit)

    def _ask_guesses(self, view: BatchView) -> Guesses:
        """Lengths of the draft and of prompt lookup."""
        if self.lookup is None or not self.policy.max_length:
            return Guesses(self.ask_policy(view), np.zeros(view.num_requests, dtype=np.bool_))
        room = np.minimum(self._room(view.slots, view.num_tokens), self.policy.max_length)
        is_alone = self.is_away or not self._has_draft
        lookup = self.lookup.look(view.slots, room, is_alone)
        view = replace(view, lookup=lookup)
        if is_alone:  # prompt lookup is the draft, and is never behind
            view = replace(view, limit=lookup.limit, lag=np.zeros_like(view.lag))
        guesses = self.policy.guesses(view)
        lengths = self._checked(guesses.lengths, view)
        is_looked_up = guesses.is_looked_up | is_alone
        return Guesses(np.minimum(lengths, np.where(is_looked_up, lookup.limit, view.limit)), is_looked_up)

    def _checked(self, given: IntArray, view: BatchView) -> IntArray:
        """Lengths, if a policy may give them."""
        lengths = np.asarray(given)
        if lengths.dtype.kind not in "iu" or lengths.shape != view.slots.shape or (lengths < 0).any():
            raise EngineError(
                f"policy {self.policy.name!r} gave {lengths!r}; expected {view.num_requests} integers of at least 0"
            )
        return lengths

    def fit_rows(self, lengths: IntArray, num_others: int, num_prefill_rows: int) -> IntArray:
        """Cap lengths to the rows of a step, less `num_others`. Prompts keep a quarter: drafts do not starve them."""
        budget = self._limits.max_batch_tokens
        room = max(0, budget - num_others - min(num_prefill_rows, max(1, budget // 4)))
        cap = int(lengths.max())
        while lengths.sum() > room:
            cap -= 1
            lengths = np.minimum(lengths, cap)
        return lengths

    def fit_target_pages(self, slots: IntArray, begin: IntArray, num_judged: IntArray, lengths: IntArray) -> IntArray:
        """Reserve pages for `num_judged` [B] drafts to verify. If short, nobody drafts: better than to preempt."""
        return lengths if self._target_pages.reserve(slots, begin + num_judged) else np.zeros_like(lengths)

    def fit_draft(
        self, slots: IntArray, begin: IntArray, lengths: IntArray, beside_prompts: bool, unsettled: BoolArray
    ) -> Drafting:
        """Reserve draft pages and rows to catch up. Requests without pages, or not caught up then, draft nothing."""
        if self._draft_pages is None:
            return Drafting(lengths, np.zeros_like(lengths))
        computed = self._slots.draft_computed
        wanting = slots[lengths > 0]
        for slot in wanting[computed[wanting] == 0].tolist():
            self._prefixes.match_draft(slot)
        if self.windows is not None:
            self.windows.begin_again(wanting, begin[lengths > 0])
        lag = begin - computed[slots]
        wanted = np.where(lengths > 0, lag if self.windows is None else self.windows.rows(slots, begin, lag), 0)
        rows = self._share_catch_up(wanted, computed[slots], beside_prompts)
        is_late = rows is not wanted
        lengths = np.where(rows == lag, lengths, 0)
        # An unsettled request computes all its rows or none: which rows those are is known only later.
        rows = np.where(unsettled & (rows < lag), 0, rows)
        needed = np.where(rows > 0, computed[slots] + rows + self._rows_behind(lengths), 0)
        if not self._draft_pages.reserve(slots, needed):
            self._reclaim(slots[rows == 0])
            granted = self._grant(slots, rows, needed)
            lengths, rows = np.where(granted, lengths, 0), np.where(granted, rows, 0)
        seconds = 0.0
        if is_late and self.pace is not None:
            seconds = self.pace.catch_up.seconds(*catch_up_work(rows, computed[slots], lengths))
        return Drafting(lengths, rows, seconds)

    def with_stopping(self, drafting: Drafting) -> Drafting:
        """With the policy's rule for ending drafts early, if it has one."""
        return replace(drafting, stopping=self.policy.stopping()) if drafting.lengths.any() else drafting

    # ── the draft's position ─────────────────────────────────────────────────────────────────────────────────────────

    def vacate(self, slot: int) -> None:
        if self.lookup is not None:
            self.lookup.forget(slot)

    def admit(self, slot: int) -> None:
        if self.overlap is not None:
            self.overlap.clear(slot)

    def move(self, plan: StepPlan, result: StepResult) -> None:
        """Set the draft's position after a step; the target's is set. KV from the first rejected token on is void."""
        computed = plan.draft_start + plan.draft_rows
        if self._limits.head is None:  # the draft computed all its tokens but the last
            computed = computed + np.maximum(result.num_drafted - plan.looked_up - 1, 0)
        elif self._limits.head.block_rows:  # the last context token was a row of the block
            computed = np.minimum(computed, plan.num_tokens - 1)
        valid = np.minimum(computed, self._slots.num_tokens[plan.slots] - 1)
        self._slots.draft_computed[plan.slots] = 0 if self.is_away else np.where(plan.samples, valid, computed)
        if self.overlap is not None:
            self.overlap.move(plan, result)

    def take_back(self, plan: StepPlan, settling: Settling) -> None:
        """Correct the draft's position after a step that was counted on. It is lower already if pages were taken."""
        if self.overlap is not None:
            self.overlap.take_back(plan, settling)
            return
        moved = settling.refused > 0
        self.void(plan.slots[moved], settling.short[moved])

    def void(self, slots: IntArray, short: BoolArray | int = 0, num_drafts: IntArray | int = 0) -> None:
        """The draft's KV is valid up to the last token but one, `num_drafts` drafts included, less `short` tokens."""
        computed = self._slots.num_tokens[slots] + num_drafts - 1 - short
        self._slots.draft_computed[slots] = np.minimum(self._slots.draft_computed[slots], computed)

    @property
    def _has_draft(self) -> bool:
        """Whether drafts come from a model or a head, and not from prompt lookup alone."""
        return self._draft_pages is not None

    # ── pages and rows of the draft ──────────────────────────────────────────────────────────────────────────────────

    def _rows_behind(self, lengths: IntArray) -> IntArray:
        """[B] rows of the draft behind the context, in steps that draft `lengths` tokens."""
        head = self._limits.head
        if head is None or not head.block_rows:
            return np.maximum(lengths - 1, 0)
        return np.where(lengths > 0, head.block_rows - 1, 0)

    def _grant(self, slots: IntArray, rows: IntArray, needed: IntArray) -> BoolArray:
        """Reserve draft pages for the oldest requests with rows. The newest give theirs up: the oldest catches up."""
        assert self._draft_pages is not None
        granted = np.zeros(slots.size, dtype=np.bool_)
        wanting = np.flatnonzero(rows).tolist()
        while wanting:
            oldest = wanting.pop(0)
            while not self._draft_pages.reserve(slots[oldest : oldest + 1], needed[oldest : oldest + 1]):
                if not wanting:
                    self._reclaim(slots[oldest : oldest + 1])
                    return granted
                newest = wanting.pop()
                self._reclaim(slots[newest : newest + 1])
            granted[oldest] = True
        return granted

    def _reclaim(self, slots: IntArray) -> None:
        """Take the draft's pages from requests that do not draft now; they catch up if they ever draft again."""
        assert self._draft_pages is not None
        for slot in slots[self._draft_pages.count[slots] > 0].tolist():
            self._prefixes.release_draft(slot)

    def _share_catch_up(self, rows: IntArray, start: IntArray, beside_prompts: bool) -> IntArray:
        """Cut the draft's rows to the room of a step, requests that kept up first. The same array if none is late."""
        most = self._limits.max_batch_tokens
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
