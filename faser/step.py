"""One step: the plan that the scheduler makes and the result that an executor returns.

Knows the vocabulary (docs/architecture.md). Knows nothing of tensors, free pages or time. Every value is frozen and
complete when built. B is the number of requests of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from faser.arrays import NONE, FloatArray, IntArray
from faser.request import SamplingParams, TokenLogprobs
from faser.rules.early_exit import ExitReadings, ExitRule
from faser.rules.stopping import Stopping


@dataclass(frozen=True)
class Admission:
    """All an executor must know of a request before its first step (again after a preemption)."""

    slot: int
    token_ids: IntArray  # the whole context: the prompt, and what was generated before a preemption
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class PageWrites:
    """Entries of a page table written since the last plan: table[slots, columns] = pages."""

    slots: IntArray
    columns: IntArray
    pages: IntArray


# Rows of a draft with branches: a model of 1B takes about as long for so many as for one, and on a part of the device,
# where more rows are slow, a 0.6B does.
MOST_DRAFT_ROWS = 64


@dataclass(frozen=True)
class StepPlan:
    """One step, complete: who runs, which rows, how many tokens each drafts. All arrays are [B] and in one order.

    The target computes the rows of positions start … start + num_rows - 1, and, where that reaches the end of the
    context (`samples`), the drafted tokens behind them. The draft first computes draft_rows context tokens from
    draft_start on (1 or 2 in steady state, more to catch up), then drafts `lengths` tokens.

    A request may have drafts of an earlier step behind its context, its `frontier`; new ones come behind them. A plan
    that `overlaps` verifies the frontier alone, while the draft goes on as if all of it were accepted. The last row of
    it says what the first new draft should have been: if it is, and the frontier was accepted, the others are the next
    frontier (a hit); else they are void. A request without a frontier may have a `lead`: the first of its new drafts,
    which the verification waits for and judges instead.

    With `outcomes` the draft goes on for other cases, too: of every token that may turn out to be the last one, the
    draft's next best guesses, so many of them. Behind each it drafts as many tokens as the next frontier has. Where the
    verification ends with one of these, that branch is adopted: it becomes the next frontier, and that is a hit. There
    are as many as leave the draft MOST_DRAFT_ROWS; where that is too few, every token has fewer guesses.

    A plan made while the step before it runs does not know how many drafts that will accept. Requests that drafted are
    `unsettled`: their numbers hold if all drafts are accepted, and `settle` says what they are if some are not. Most
    plans run all the same, and settle themselves on the device; one that `waits` is run when it is settled.
    """

    admitted: tuple[Admission, ...]
    released: tuple[int, ...]  # slots that ended since the last plan and are not admitted anew in this one
    slots: IntArray
    num_tokens: IntArray
    start: IntArray
    num_rows: IntArray
    lengths: IntArray
    frontier: IntArray
    draft_start: IntArray
    draft_rows: IntArray
    unsettled: NDArray[np.bool_]
    target_pages: PageWrites
    draft_pages: PageWrites
    stopping: Stopping | None = None  # drafts may end before `lengths`, by this rule
    exits: ExitRule | None = None  # drafts may be dropped in the midst of the verification, by this one
    overlaps: bool = False
    lead: IntArray = field(default_factory=lambda: NONE)  # [B], or [0] where nobody has one
    outcomes: int = 0
    leads: bool = False  # a frontier that turns out to be void is drafted anew, as a lead
    waits: bool = False  # it does not begin before it is settled
    draft_sms: int = 0  # of the device that the drafting has to itself where it overlaps; 0: all is shared

    def settle(self, settling: Settling) -> StepPlan:
        """The plan as it stands when it is known what came of the step before."""
        unsettled = self.unsettled
        num_tokens = self.num_tokens - np.where(unsettled, settling.refused, 0)
        missed = unsettled & settling.missed
        frontier = np.where(missed, 0, self.frontier)
        lead, lengths = self.lead, self.lengths
        if self.leads and missed.any():
            anew = np.where(missed & (self.draft_rows > 0), self.frontier, 0)
            lead, lengths = lead + anew if lead.size else anew, lengths + anew
        # what the draft computed holds as far as its tokens do: to the end of a frontier that is left
        valid = np.minimum(self.draft_start, num_tokens + frontier - 1 - settling.short)
        draft_start = np.where(unsettled, valid, self.draft_start)
        redone = unsettled & (self.draft_rows > 0)  # the draft always catches up with these
        return replace(
            self,
            num_tokens=num_tokens,
            start=self.start - (self.num_tokens - num_tokens),
            lengths=lengths,
            lead=lead,
            frontier=frontier,
            draft_start=draft_start,
            draft_rows=np.where(redone, num_tokens + frontier - draft_start, self.draft_rows),
            unsettled=np.zeros_like(unsettled),
        )

    def of(self, some: NDArray[np.bool_]) -> StepPlan:
        """The plan of these requests alone; rules to stop or to exit by are not theirs."""
        names = (
            "slots", "num_tokens", "start", "num_rows", "lengths", "frontier", "draft_start", "draft_rows", "unsettled",
        )  # fmt: skip
        own = {name: getattr(self, name)[some] for name in names}
        return replace(self, **own, lead=self.lead[some] if self.lead.size else NONE, stopping=None, exits=None)

    @cached_property
    def judged(self) -> IntArray:
        """[B] the drafts that the target verifies."""
        return self.judged_of(self.lengths)

    def judged_of(self, num_drafted: IntArray) -> IntArray:
        """Likewise where so many were drafted."""
        if not self.overlaps:
            return self.frontier + num_drafted
        return self.frontier + np.minimum(self.lead, num_drafted) if self.lead.size else self.frontier

    def chunks_of(self, num_drafted: IntArray) -> IntArray:
        """[B] of so many new drafts those that are not verified in this step."""
        return self.frontier + num_drafted - self.judged_of(num_drafted)

    @cached_property
    def branch_points(self) -> IntArray:
        """[B] the tokens that may turn out to be the last, where anything would be drafted behind another one."""
        goes_on = (self.chunks_of(self.lengths) > 1) & (self.draft_rows > 0) & self.samples
        return np.where(goes_on, self.judged + 1, 0)

    def guesses(self, points: int) -> int:
        """For each of so many tokens that may be the last, as far as there is room."""
        return max(0, min(self.outcomes, (MOST_DRAFT_ROWS - self.slots.size) // points)) if points else 0

    @cached_property
    def num_branches(self) -> IntArray:
        """[B]"""
        return self.branch_points * self.guesses(int(self.branch_points.sum())) if self.outcomes else 0 * self.lengths

    @property
    def only_decodes(self) -> bool:
        """Whether nobody has a prompt to compute."""
        return bool(self.samples.all()) and not (self.num_rows > 1).any()

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """Which requests emit tokens: those whose rows reach the end of their context."""
        reached: NDArray[np.bool_] = self.start + self.num_rows == self.num_tokens
        return reached


@dataclass(frozen=True)
class Settling:
    """What came of a step that another was planned behind, of the requests that were counted on. Arrays are [B]."""

    refused: IntArray  # of the drafts it was to verify, those it did not accept
    short: NDArray[np.bool_]  # it drafted fewer than planned, and accepted all: the draft has not computed the last
    missed: NDArray[np.bool_]  # what it drafted behind those is void

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult) -> Settling:
        return cls(
            plan.judged - result.num_accepted,
            (result.num_drafted < plan.lengths)
            & (result.num_accepted == plan.frontier + result.num_drafted)
            & (not plan.overlaps),
            np.zeros(plan.slots.size, dtype=np.bool_) if result.hits is None else ~result.hits,
        )

    def spread(self, slots: IntArray, num_slots: int) -> Settling:
        """By slot, of the requests in these slots; nothing came of the others."""
        none = np.zeros(num_slots, dtype=np.bool_)
        found = Settling(none.astype(np.int64), none, none.copy())
        found.refused[slots], found.short[slots], found.missed[slots] = self.refused, self.short, self.missed
        return found

    def __getitem__(self, some: IntArray | NDArray[np.bool_]) -> Settling:
        return Settling(self.refused[some], self.short[some], self.missed[some])


@dataclass(frozen=True)
class StepSeconds:
    """Where the executor's time went."""

    draft: float = 0.0
    verify: float = 0.0
    hidden: float = 0.0  # of both, in which both ran

    @property
    def total(self) -> float:
        return self.draft + self.verify - self.hidden


@dataclass(frozen=True)
class StepResult:
    """What came of a plan, in the plan's order. Arrays are [B] but for token_ids.

    token_ids is flat: for each request that samples, its accepted tokens and the bonus.
    """

    num_drafted: IntArray
    num_verified: IntArray
    num_accepted: IntArray
    token_ids: IntArray
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in the plan
    failures: Mapping[int, str] = field(
        default_factory=dict
    )  # by index in the plan: a request that cannot go on, and why
    seconds: StepSeconds = StepSeconds()
    confidence: FloatArray | None = None  # [B, depth] the draft's own, of what it drafted, where it was looked at
    exits: ExitReadings | None = None  # where the plan has a rule to exit by
    hits: NDArray[np.bool_] | None = None  # [B] who has a next frontier, where the plan overlaps
    adopted: NDArray[np.bool_] | None = None  # [B] and of these, whose is a branch, where the plan has outcomes
