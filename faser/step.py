"""One step: the plan that the scheduler makes and the result that an executor returns.

Knows the vocabulary (docs/architecture.md). Knows nothing of tensors, free pages or time. Every value is frozen and
complete when built. B is the number of requests of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from faser.arrays import NONE, BoolArray, FloatArray, IntArray
from faser.request import SamplingParams, TokenLogprobs
from faser.rules.early_exit import ExitReadings, ExitRule
from faser.rules.overlap import OverlapPlan
from faser.rules.stopping import Stopping
from faser.vision import Grid, Vision


@dataclass(frozen=True)
class Admission:
    """All that an executor must know of a request before its first step, and again after a preemption."""

    slot: int
    token_ids: IntArray  # the whole context: the prompt, and the output from before a preemption
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    vision: Vision | None = None


@dataclass(frozen=True)
class PageWrites:
    """Entries of a page table written since the last plan: table[slots, columns] = pages."""

    slots: IntArray
    columns: IntArray
    pages: IntArray


@dataclass(frozen=True)
class KeyStarts:
    """From this step on, the draft's keys of these slots between the sinks and `positions` do not exist. 0: all do."""

    slots: IntArray
    positions: IntArray


@dataclass(frozen=True)
class PageMoves:
    """Pages of the target whose content moves, before the page table is written and anything is computed.

    No page is both a source and a destination.
    """

    sources: IntArray
    destinations: IntArray


@dataclass(frozen=True)
class KvCopies:
    """Entries of the target's pages that are copied, before pages move and anything is computed: KV that is taken over.

    Entry e is token e % page_size of page e // page_size. All sources are read before a destination is written.
    """

    sources: IntArray
    destinations: IntArray


@dataclass(frozen=True)
class GridWrite:
    """A grid to encode, and where its tokens go: rows of the executor's buffer of encoded tokens."""

    grid: Grid
    buffer_rows: IntArray  # [tokens of the grid]


@dataclass(frozen=True)
class VisionPlan:
    """The grids that a step encodes before anything else, and the context rows that are encoded tokens.

    E context rows of the target enter as rows of the buffer, not as embeddings of their token ids.
    """

    writes: tuple[GridWrite, ...]
    slots: IntArray  # [E]
    positions: IntArray  # [E] index in the context
    buffer_rows: IntArray  # [E]

    @property
    def grids(self) -> list[Grid]:
        """Those that the step encodes."""
        return [write.grid for write in self.writes]


@dataclass(frozen=True)
class LookupDrafts:
    """Drafts that were found in the contexts of their requests, instead of being made by a draft. Arrays are [B].

    A step planned ahead does not know the last tokens of a context yet. So tokens are given by their position: those
    that followed the last known token where the same tokens had occurred before. The drafts are the ones that turn out
    to stand behind the context.
    """

    is_looked_up: BoolArray  # [B] whose drafts these are; the others have drafts of the draft, or none
    start: IntArray  # [B] position of the first of token_ids
    token_ids: IntArray  # [B, W]

    def of(self, some: BoolArray) -> LookupDrafts:
        return LookupDrafts(self.is_looked_up[some], self.start[some], self.token_ids[some])

    def spread(self, where: BoolArray) -> LookupDrafts:
        """The same for a larger batch, in which `where` marks these requests; for the others nothing is looked up."""
        spread = LookupDrafts(
            np.zeros(where.size, dtype=np.bool_),
            np.zeros(where.size, dtype=np.int64),
            np.zeros((where.size, self.token_ids.shape[1]), dtype=np.int64),
        )
        for mine, whole in zip(vars(self).values(), vars(spread).values(), strict=True):
            whole[where] = mine
        return spread


@dataclass(frozen=True)
class StepPlan:
    """One step, complete: who runs, which rows, how many tokens each request drafts. Arrays are [B], in one order.

    The draft computes the context rows draft_start … draft_start + draft_rows - 1 (1 or 2 rows in steady state, more to
    catch up) and then drafts `lengths` tokens. The target computes the context rows start … start + num_rows - 1. Where
    these reach the end of the context (`samples`), it also computes the rows of the drafts and judges the drafts.

    A plan made while the step before it runs counts on all drafts of that step. Requests with drafts in that step are
    `unsettled`. `settle` corrects their numbers when the result is known; a device that runs ahead corrects them
    itself.
    """

    admitted: tuple[Admission, ...]
    released: tuple[int, ...]  # slots that were left since the last plan and are not admitted again in this one
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
    moves: PageMoves | None = None  # the target's pool shrinks (faser/engine/residency.py)
    vision: VisionPlan | None = None  # pictures to encode, and rows that are encoded tokens
    copies: KvCopies | None = None  # KV that requests take over from the contexts of their sessions
    lookup: LookupDrafts | None = None  # drafts that need no draft model: `lengths` counts them too
    draft_first: KeyStarts | None = None  # a draft that sees a window has begun again (faser/engine/windows.py)

    @cached_property
    def samples(self) -> BoolArray:
        """Which requests emit tokens: those whose rows reach the end of their context."""
        reached: BoolArray = self.start + self.num_rows == self.num_tokens
        return reached

    @property
    def only_decodes(self) -> bool:
        """Whether no request has a prompt to compute."""
        return bool(self.samples.all()) and not (self.num_rows > 1).any()

    @cached_property
    def by_draft(self) -> StepPlan:
        """The plan without drafts that were looked up: what the draft has to do."""
        if self.lookup is None:
            return self
        return replace(self, lengths=np.where(self.lookup.is_looked_up, 0, self.lengths), lookup=None)

    @property
    def looked_up(self) -> IntArray:
        """[B] drafts that were looked up."""
        return self.lengths - self.by_draft.lengths

    def found_tokens(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of a settled plan, the drafts that were looked up: their slots, positions and token ids, flat."""
        assert self.lookup is not None
        counts = self.looked_up
        owners = np.repeat(np.arange(counts.size), counts)
        positions = np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts) + self.num_tokens[owners]
        token_ids = self.lookup.token_ids[owners, positions - self.lookup.start[owners]]
        return self.slots[owners], positions, token_ids

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
    def with_drafts(self) -> BoolArray:
        """[B] who has drafts, new or of an earlier step."""
        return (self.lengths if self.overlap is None else self.lengths + self.overlap.frontier) > 0

    @cached_property
    def has_drafts(self) -> bool:
        """Whether there is anything to verify or to draft."""
        return bool(self.with_drafts.any())

    def emitted(self, result: StepResult) -> IntArray:
        """[B] tokens that each request gained: the accepted ones and the bonus."""
        return np.where(self.samples, result.num_accepted + 1, 0)

    def best_result(self) -> StepResult:
        """The counts of a result in which every draft is accepted."""
        hits = None if self.overlap is None else self.overlap.chunk_of(self.lengths) > 0
        return StepResult(self.lengths, self.judged, self.judged, NONE, hits=hits)

    def as_drafted(self, result: StepResult) -> StepPlan:
        """The plan with the lengths that were drafted, where drafts could stop early; else the plan itself."""
        return self if self.stopping is None else replace(self, lengths=result.num_drafted)

    def verdicts(self, result: StepResult) -> tuple[IntArray, IntArray]:
        """[B] drafts that the target gave a verdict on, and how many of them were right.

        The token behind a frontier is also a verdict: on the first draft made beside the verification.
        """
        judged, accepted = self.judged_of(result.num_drafted), result.num_accepted
        if self.overlap is None or result.hits is None:
            return judged, accepted
        return judged + (self.overlap.chunk_of(result.num_drafted) > 0), accepted + result.hits

    def settle(self, settling: Settling) -> StepPlan:
        """The plan with its true numbers, now that the result of the step before is known."""
        unsettled = self.unsettled
        num_tokens = self.num_tokens - np.where(unsettled, settling.refused, 0)
        lengths, overlap, runs_draft = self.lengths, self.overlap, unsettled & (self.draft_rows > 0)
        if overlap is not None:
            overlap, lengths = overlap.settle(unsettled & settling.missed, lengths, self.draft_rows > 0)
        end = num_tokens if overlap is None else num_tokens + overlap.frontier
        # The draft's KV is valid up to the last token but one.
        valid = np.minimum(self.draft_start, end - 1 - settling.short)
        draft_start = np.where(unsettled, valid, self.draft_start)
        return replace(
            self,
            num_tokens=num_tokens,
            start=self.start - (self.num_tokens - num_tokens),
            lengths=lengths,
            draft_start=draft_start,
            draft_rows=np.where(runs_draft, end - draft_start, self.draft_rows),
            unsettled=np.zeros_like(unsettled),
            overlap=overlap,
        )

    def of(self, some: BoolArray) -> StepPlan:
        """The plan of some of the requests, without its rules for stopping and exiting."""
        names = ("slots", "num_tokens", "start", "num_rows", "lengths", "draft_start", "draft_rows", "unsettled")
        own = {name: getattr(self, name)[some] for name in names}
        overlap = None if self.overlap is None else self.overlap.of(some)
        lookup = None if self.lookup is None else self.lookup.of(some)
        return replace(self, **own, overlap=overlap, stopping=None, exits=None, lookup=lookup)


@dataclass(frozen=True)
class Settling:
    """What the result of a step changes in the plan made ahead of it. Arrays are [B]."""

    refused: IntArray  # drafts that were counted on and not accepted
    short: BoolArray  # fewer were drafted than planned and all accepted: the draft has not computed the last token
    missed: BoolArray  # the drafts made beside the verification are void

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult) -> Settling:
        refused = plan.judged - result.num_accepted
        if plan.drafts_beside:
            none = np.zeros(plan.slots.size, dtype=np.bool_)
            return cls(refused, none, none if result.hits is None else ~result.hits)
        all_accepted = result.num_accepted == plan.judged_of(result.num_drafted)
        return cls(refused, (result.num_drafted < plan.lengths) & all_accepted, np.zeros_like(all_accepted))

    def spread(self, slots: IntArray, num_slots: int) -> Settling:
        """The same by slot; nothing changes for slots without a row in the step."""
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
    hidden: float = 0.0  # in which both ran
    encode: float = 0.0  # of the vision encoder, before both

    @property
    def total(self) -> float:
        """Of target and draft."""
        return self.draft + self.verify - self.hidden


@dataclass(frozen=True)
class StepResult:
    """The result of a plan, in the plan's order. Arrays are [B]."""

    num_drafted: IntArray
    num_verified: IntArray
    num_accepted: IntArray
    token_ids: IntArray  # flat: the accepted tokens and the bonus of each request that samples
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in the plan
    failures: Mapping[int, str] = field(default_factory=dict)  # by index in the plan: why a request cannot go on
    seconds: StepSeconds = StepSeconds()
    confidence: FloatArray | None = None  # [B, depth] probability of each drafted token, if the plan has `stopping`
    exits: ExitReadings | None = None  # if the plan has `exits`
    hits: BoolArray | None = None  # [B] who has a next frontier, if drafting ran beside the verification
