"""Requests between their arrival and their end; the state of those that run, in arrays indexed by slot.

Arrays, because a step over 256 requests must be planned and committed in under a millisecond. For a running request,
with n = num_tokens:

    0 ────────── num_computed ── n ───── n + length        target: rows num_computed … n - 1, then the drafted tokens
    0 ─── draft_computed ─────── n ───── n + length        draft: rows draft_computed … n - 1 (the lag), then drafting

num_computed is at most n - 1: the last token's row is computed in the step that samples its successor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.limits import HARD_MAX_LENGTH
from faser.request import Finish, FinishReason, Request, Stats
from faser.step import Admission, StepPlan, StepResult


class OutputChecker(Protocol):
    """Looks for stop strings in a request's output (faser/text/tokenizer.py)."""

    @property
    def text(self) -> str:
        """The output before the stop string, or all of it."""

    def push(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""


@dataclass(eq=False)
class OpenRequest:
    """A request that waits or runs. While it runs, its slot's arrays hold its tokens and counts."""

    request: Request
    checker: OutputChecker | None
    number: int  # counts arrivals: an older request has a smaller number
    token_ids: IntArray  # the context, while the request waits
    page_names: list[bytes] = field(default_factory=list)  # of the full pages of the context
    num_found: int = 0  # pages found in the prefix cache when last looked for, while the request waits
    stats: Stats = field(default_factory=Stats)  # from before a preemption
    tried: int = 0  # drafts tried before a preemption: accepted + the first rejected of each step
    lookup_tried: int = 0  # of these, drafts that were looked up
    slot: int = -1  # -1: it waits

    @property
    def runs(self) -> bool:
        return self.slot >= 0

    @property
    def is_private(self) -> bool:
        """Whether its pages may be offered to nobody, nor taken from the prefix cache."""
        return self.request.reuse is not None

    def finish(
        self, reason: FinishReason, stats: Stats, stop_id: int | None = None, error: str | None = None
    ) -> Finish:
        return Finish(reason, stats, stop_id, error, self.checker.text if self.checker is not None else None)


class SlotTable:
    """Which request has which slot, and its position: tokens, and rows computed by both models."""

    def __init__(self, max_running: int, max_model_len: int) -> None:
        def per_slot() -> IntArray:
            return np.zeros(max_running, dtype=np.int64)

        self.running: IntArray = np.zeros(0, dtype=np.int64)  # slots in use, oldest request first
        self.tokens: IntArray = np.zeros((max_running, max_model_len), dtype=np.int64)
        self.num_tokens = per_slot()
        self.num_known = per_slot()  # tokens in `tokens`; fewer than num_tokens while a step is in flight
        self.num_prompt = per_slot()
        self.end = per_slot()  # num_tokens at which the request has all its tokens
        self.num_computed = per_slot()
        self.draft_computed = per_slot()
        self.draft_first = per_slot()  # keys of the draft between its sinks and here do not exist (windows.py)
        self.max_draft = per_slot()
        self.counts = SpeculationCounts(max_running)
        self.requests: list[OpenRequest | None] = [None] * max_running  # by slot
        self._numbers = per_slot()  # OpenRequest.number
        self.max_running = max_running
        self.free = list(range(max_running))[::-1]  # a stack: `occupy` takes the last
        self.released: set[int] = set()  # slots that were left since the last plan: it tells the executor
        self._admitted: list[Admission] = []

    def mask(self, slots: IntArray | list[int]) -> BoolArray:
        """By slot, whether it is one of `slots`."""
        found = np.zeros(self.max_running, dtype=np.bool_)
        found[slots] = True
        return found

    def __getitem__(self, slot: int) -> OpenRequest:
        request = self.requests[slot]
        assert request is not None
        return request

    def occupy(self, new: OpenRequest, num_computed: int) -> None:
        """Give the next free slot to a request whose first `num_computed` tokens came from the prefix cache."""
        slot, request, num_tokens = self.free.pop(), new.request, new.token_ids.size
        num_prompt, params = len(request.prompt_token_ids), request.params
        new.slot = slot
        self.requests[slot] = new
        self.tokens[slot, :num_tokens] = new.token_ids
        self.num_tokens[slot] = self.num_known[slot] = num_tokens
        self.num_prompt[slot] = num_prompt
        self.end[slot] = num_prompt + params.max_tokens
        self.num_computed[slot] = num_computed
        self.draft_computed[slot] = self.draft_first[slot] = 0
        self.max_draft[slot] = HARD_MAX_LENGTH if params.max_draft is None else min(params.max_draft, HARD_MAX_LENGTH)
        self.counts.restore(slot, new.stats, new.tried, new.lookup_tried)
        self._numbers[slot] = new.number
        place = int(np.searchsorted(self._numbers[self.running], new.number))
        self.running = np.insert(self.running, place, slot)
        self.released.discard(slot)
        self._admitted.append(
            Admission(slot, new.token_ids, num_prompt, params, request.seed, request.stop_ids, request.vision)
        )

    def vacate(self, slot: int) -> None:
        """Take a request out of its slot. It joins `free` once no plan in flight has the slot."""
        self[slot].slot = -1
        self.requests[slot] = None
        self.running = self.running[self.running != slot]
        self._admitted = [admission for admission in self._admitted if admission.slot != slot]
        self.released.add(slot)

    def take_changes(self) -> tuple[tuple[Admission, ...], tuple[int, ...]]:
        """Admissions and released slots since the last call."""
        changes = tuple(self._admitted), tuple(self.released)
        self._admitted, self.released = [], set()
        return changes

    def is_consistent(self, held: set[int]) -> bool:
        """Whether every slot is either running, free or held (by a plan in flight)."""
        return sorted([*self.free, *held, *self.running.tolist()]) == list(range(self.max_running))

    def append(self, plan: StepPlan, emitted: IntArray, token_ids: IntArray) -> None:
        """Store the tokens that a step emitted: `emitted` [B] for each of its requests."""
        cu_emitted = np.cumsum(emitted) - emitted
        columns = np.arange(token_ids.size) + np.repeat(plan.num_tokens - cu_emitted, emitted)
        self.tokens[np.repeat(plan.slots, emitted), columns] = token_ids
        self.num_known[plan.slots] = plan.num_tokens + emitted

    def move(self, plan: StepPlan, emitted: IntArray) -> None:
        """Set the target's position after a step."""
        num_tokens = plan.num_tokens + emitted
        self.num_tokens[plan.slots] = num_tokens
        self.num_computed[plan.slots] = np.where(plan.samples, num_tokens - 1, plan.start + plan.num_rows)

    def stats(self, request: OpenRequest) -> Stats:
        return self.counts.stats(request.slot, request.stats) if request.runs else request.stats


class SpeculationCounts:
    """What speculation did for each running request, over all its steps."""

    def __init__(self, max_running: int) -> None:
        self.drafted, self.verified, self.accepted, self.steps, self.tried = np.zeros((5, max_running), dtype=np.int64)
        # of these, what was looked up
        self.looked_up, self.lookup_accepted, self.lookup_tried = np.zeros((3, max_running), dtype=np.int64)
        self._lengths: IntArray = np.zeros((max_running, HARD_MAX_LENGTH + 1), dtype=np.int64)  # steps, by draft length

    def accepted_of_draft(self, slots: IntArray) -> IntArray:
        """[B] without drafts that were looked up."""
        return self.accepted[slots] - self.lookup_accepted[slots]

    def tried_of_draft(self, slots: IntArray) -> IntArray:
        """[B] without drafts that were looked up."""
        return self.tried[slots] - self.lookup_tried[slots]

    def restore(self, slot: int, stats: Stats, tried: int, lookup_tried: int) -> None:
        self.drafted[slot], self.verified[slot] = stats.drafted, stats.verified
        self.accepted[slot], self.steps[slot] = stats.accepted, stats.steps
        self.looked_up[slot], self.lookup_accepted[slot] = stats.looked_up, stats.lookup_accepted
        self.tried[slot], self.lookup_tried[slot] = tried, lookup_tried
        self._lengths[slot] = 0
        self._lengths[slot, : len(stats.lengths)] = stats.lengths

    def add(self, plan: StepPlan, result: StepResult) -> None:
        slots, samples = plan.slots, plan.samples
        if plan.has_drafts:
            self.drafted[slots] += result.num_drafted
            self.verified[slots] += result.num_verified
            self.accepted[slots] += result.num_accepted
            tried = np.minimum(result.num_accepted + 1, result.num_verified)
            self.tried[slots] += tried
            if plan.lookup is not None:
                is_looked_up = plan.lookup.is_looked_up
                self.looked_up[slots] += plan.looked_up
                self.lookup_accepted[slots] += np.where(is_looked_up, result.num_accepted, 0)
                self.lookup_tried[slots] += np.where(is_looked_up, tried, 0)
        self.steps[slots] += samples
        self._lengths[slots, np.minimum(result.num_drafted, HARD_MAX_LENGTH)] += samples

    def stats(self, slot: int, before: Stats) -> Stats:
        """`before`: what was known of the request when it got the slot."""
        return replace(
            before,
            drafted=int(self.drafted[slot]),
            verified=int(self.verified[slot]),
            accepted=int(self.accepted[slot]),
            looked_up=int(self.looked_up[slot]),
            lookup_accepted=int(self.lookup_accepted[slot]),
            steps=int(self.steps[slot]),
            lengths=tuple(np.trim_zeros(self._lengths[slot], "b").tolist()),
        )
