"""One step: the plan that the scheduler makes and the result that an executor returns.

Knows the vocabulary (docs/architecture.md). Knows nothing of tensors, free pages or time. Every value is frozen and
complete when built. B is the number of requests of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.request import SamplingParams, TokenLogprobs
from faser.rules.early_exit import ExitReadings, ExitRule
from faser.rules.overlap import OverlapPlan
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


@dataclass(frozen=True)
class StepPlan:
    """One step, complete: who runs, which rows, how many tokens each drafts. All arrays are [B] and in one order.

    The draft first computes draft_rows context tokens from draft_start on (1 or 2 in steady state, more to catch up),
    then drafts `lengths` tokens. The target computes the rows of positions start … start + num_rows - 1. Where that
    reaches the end of the context (`samples`), it also computes the drafts behind it and judges them.

    A plan made while the step before it runs counts on all drafts of that step being accepted. Requests that drafted
    there are `unsettled`. `settle` corrects their numbers when the result is known; a device that runs ahead corrects
    them itself.

    Each optional mechanism is one field.
    """

    admitted: tuple[Admission, ...]
    released: tuple[int, ...]  # slots that ended since the last plan and are not admitted anew in this one
    slots: IntArray
    num_tokens: IntArray
    start: IntArray
    num_rows: IntArray
    lengths: IntArray
    draft_start: IntArray
    draft_rows: IntArray
    unsettled: BoolArray
    target_pages: PageWrites
    draft_pages: PageWrites
    stopping: Stopping | None = None  # drafts may end before `lengths`, by this rule
    exits: ExitRule | None = None  # drafts may be dropped during the verification, by this rule
    overlap: OverlapPlan | None = None  # drafts of an earlier step, and drafting beside the verification

    @cached_property
    def samples(self) -> BoolArray:
        """Which requests emit tokens: those whose rows reach the end of their context."""
        reached: BoolArray = self.start + self.num_rows == self.num_tokens
        return reached

    @property
    def only_decodes(self) -> bool:
        """Whether nobody has a prompt to compute."""
        return bool(self.samples.all()) and not (self.num_rows > 1).any()

    @cached_property
    def judged(self) -> IntArray:
        """[B] the drafts that the target verifies."""
        return self.judged_of(self.lengths)

    def judged_of(self, num_drafted: IntArray) -> IntArray:
        """[B] the drafts that the target verifies, given the actual draft counts."""
        return num_drafted if self.overlap is None else self.overlap.judged_of(num_drafted)

    @cached_property
    def frontier(self) -> IntArray:
        """[B] drafts of an earlier step that wait behind the context; zero without overlap."""
        return np.zeros_like(self.lengths) if self.overlap is None else self.overlap.frontier

    @property
    def drafts_beside(self) -> bool:
        """Whether drafting goes on while the target verifies."""
        return self.overlap is not None and self.overlap.beside

    @property
    def waits(self) -> bool:
        """Whether the step cannot begin before the step before it is settled."""
        return self.overlap is not None and self.overlap.leads

    @property
    def has_drafts(self) -> bool:
        """Whether there is anything to verify or to draft."""
        return bool(self.lengths.any() or (self.overlap is not None and self.overlap.frontier.any()))

    def settle(self, settling: Settling) -> StepPlan:
        """The plan with its true numbers, now that the result of the step before is known."""
        unsettled = self.unsettled
        num_tokens = self.num_tokens - np.where(unsettled, settling.refused, 0)
        lengths, overlap, redone = self.lengths, self.overlap, unsettled & (self.draft_rows > 0)
        if overlap is not None:
            overlap, lengths = overlap.settle(unsettled & settling.missed, lengths, self.draft_rows > 0)
        end = num_tokens if overlap is None else num_tokens + overlap.frontier
        # The draft's KV is valid up to the end of the tokens that are left.
        valid = np.minimum(self.draft_start, end - 1 - settling.short)
        draft_start = np.where(unsettled, valid, self.draft_start)
        return replace(
            self,
            num_tokens=num_tokens,
            start=self.start - (self.num_tokens - num_tokens),
            lengths=lengths,
            draft_start=draft_start,
            draft_rows=np.where(redone, end - draft_start, self.draft_rows),
            unsettled=np.zeros_like(unsettled),
            overlap=overlap,
        )

    def of(self, some: BoolArray) -> StepPlan:
        """The plan of these requests alone, without its rules for stopping and exiting."""
        names = ("slots", "num_tokens", "start", "num_rows", "lengths", "draft_start", "draft_rows", "unsettled")
        own = {name: getattr(self, name)[some] for name in names}
        overlap = None if self.overlap is None else self.overlap.of(some)
        return replace(self, **own, overlap=overlap, stopping=None, exits=None)


@dataclass(frozen=True)
class Settling:
    """What a step's result changes in a plan that was made before it was known. Arrays are [B]."""

    refused: IntArray  # drafts that the step was to verify and did not accept
    short: BoolArray  # fewer were drafted than planned and all accepted: the draft has not computed the last token
    missed: BoolArray  # what was drafted beside the verification is void

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult) -> Settling:
        refused = plan.judged - result.num_accepted
        if plan.drafts_beside:
            none = np.zeros(plan.slots.size, dtype=np.bool_)
            return cls(refused, none, none if result.hits is None else ~result.hits)
        all_accepted = result.num_accepted == plan.judged_of(result.num_drafted)
        return cls(refused, (result.num_drafted < plan.lengths) & all_accepted, np.zeros_like(all_accepted))

    def spread(self, slots: IntArray, num_slots: int) -> Settling:
        """By slot; nothing changes for slots that were not part of the step."""
        none = np.zeros(num_slots, dtype=np.bool_)
        found = Settling(none.astype(np.int64), none, none.copy())
        found.refused[slots], found.short[slots], found.missed[slots] = self.refused, self.short, self.missed
        return found

    def __getitem__(self, some: IntArray | BoolArray) -> Settling:
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
    hits: BoolArray | None = None  # [B] who has a next frontier, where the plan overlaps
