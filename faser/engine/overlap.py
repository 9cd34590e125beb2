"""Overlap in the scheduler: steps in which drafting goes on beside the verification (words: faser/rules/overlap.py).

Owns the frontier of every slot. With f = frontier, n = num_tokens:

    0 ── num_computed ── n ── n + f                        target: verifies the frontier
    0 ── draft_computed ───── n + f ─── n + f + length     draft: continues behind it
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.engine.drafting import Drafting, DraftPlanner
from faser.engine.pages import PagePool
from faser.engine.slots import SlotTable
from faser.policy.base import Outcome
from faser.policy.overlap import Chunks, Overlap
from faser.rules.overlap import OverlapPlan
from faser.step import Settling, StepPlan, StepResult


class OverlapState:
    """`chooser` decides whether a step overlaps; None: no step does, and what frontiers there are is verified."""

    def __init__(self, chooser: Overlap | None, drafts: DraftPlanner, slots: SlotTable, target_pages: PagePool) -> None:
        self.chooser = chooser
        self._drafts = drafts
        self._slots = slots
        self._target_pages = target_pages
        self._frontier: IntArray = np.zeros(slots.max_running, dtype=np.int64)

    def plan(self, slots: IntArray, num_prefill_rows: int, unsettled: BoolArray) -> Drafting:
        """As `DraftPlanner.plan`, behind the frontiers."""
        drafts = self._drafts
        frontier = self._fit_frontier(slots, num_prefill_rows)
        begin = self._slots.num_tokens[slots] + frontier
        view = drafts.view(slots, begin, num_prefill_rows)
        lengths = drafts.ask_policy(view)
        chooser = None if drafts.is_away else self.chooser
        chunks = chooser.chunks(view, lengths) if chooser is not None else None
        room = np.maximum(self._slots.max_draft[slots] - frontier, 0)
        if chunks is None:  # this step verifies the frontier and the new drafts: together as many as were asked for
            lead = lengths = np.minimum(np.maximum(lengths - frontier, 0), room)
        else:
            lead = np.where(frontier > 0, 0, chunks.lead)
            lengths = np.minimum(chunks.lengths + lead, view.limit)
            if chunks.leads:  # a void frontier is drafted again in the same step
                lengths = np.minimum(lengths, room)
        if not lengths.any():
            nothing = Drafting.none(slots.size)
            return replace(nothing, overlap=_overlap_plan(chunks, frontier, lengths)) if frontier.any() else nothing
        # Drafts made beside the verification are verified in the next step, when this frontier is gone.
        num_others = slots.size + (int(frontier.sum()) if lead.any() else 0)
        lengths = drafts.fit_rows(lengths, num_others, num_prefill_rows)
        if lead.any():
            lengths = drafts.fit_target_pages(slots, begin, np.minimum(lead, lengths), lengths)
        drafting = drafts.fit_draft(slots, begin, lengths, num_prefill_rows > 0, unsettled)
        if chunks is None and not frontier.any():
            return drafts.with_stopping(drafting)
        return replace(drafting, overlap=_overlap_plan(chunks, frontier, np.minimum(lead, drafting.lengths)))

    def learn(self, outcome: Outcome) -> None:
        if self.chooser is not None:
            self.chooser.learn(outcome)

    def clear(self, slot: int) -> None:
        self._frontier[slot] = 0

    def move(self, plan: StepPlan, result: StepResult) -> None:
        """After a hit the rest of the chunk is the next frontier, and the draft has computed all of it but the last."""
        slots = plan.slots
        if plan.overlap is None or result.hits is None or self._drafts.is_away:
            self._frontier[slots] = 0
            return
        self._frontier[slots] = np.where(result.hits, plan.overlap.chunk_of(result.num_drafted) - 1, 0)
        hits = slots[result.hits]
        self._slots.draft_computed[hits] = self._slots.num_tokens[hits] + self._frontier[hits] - 1

    def take_back(self, plan: StepPlan, settling: Settling) -> None:
        self._frontier[plan.slots[settling.missed if plan.drafts_beside else settling.refused > 0]] = 0
        moved = (settling.refused > 0) | settling.missed
        slots = plan.slots[moved]
        self._drafts.void(slots, settling.short[moved], self._frontier[slots])

    def _fit_frontier(self, slots: IntArray, num_prefill_rows: int) -> IntArray:
        """The frontiers [B] that have target pages and rows. The others are given up, which costs no token."""
        wanted = self._frontier[slots]
        if not wanted.any():
            return wanted
        frontier = self._drafts.fit_rows(wanted, slots.size, num_prefill_rows)
        if not self._target_pages.reserve(slots, self._slots.num_tokens[slots] + frontier):
            frontier = np.zeros_like(frontier)
        self._frontier[slots] = frontier
        fewer = slots[frontier < wanted]
        self._drafts.void(fewer, num_drafts=self._frontier[fewer])
        return frontier


def _overlap_plan(chunks: Chunks | None, frontier: IntArray, lead: IntArray) -> OverlapPlan:
    if chunks is None:
        return OverlapPlan(frontier, np.zeros_like(lead), beside=False)
    return OverlapPlan(frontier, lead, leads=chunks.leads, draft_sms=chunks.draft_sms)
