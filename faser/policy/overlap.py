"""Whether the draft goes on while the target verifies what it drafted before.

Knows the batch about to decode, what its policy would draft and what forwards cost; no tensors and no clocks. In a step
that overlaps a request drafts its next chunk as if its frontier (the chunk before) were accepted. A chunk of c tokens
holds if all of the frontier and its first token are right; the c - 1 others are the next frontier. Where it does not
hold there are two ways to go on:

  ride   the next step brings the request one token while it drafts anew, and nobody waits. A full step brings at most c
         tokens, and a chunk holds with a chance of p^c behind a frontier and p behind none.
  lead   the next step first drafts the frontier anew, for whoever has none, and everybody waits for that. Every step
         brings what it would without overlap; drafting takes time in the steps behind a miss alone. A step cannot
         begin before the host knows who missed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome
from faser.policy.estimates import ragged_seconds, reaches
from faser.step import MOST_DRAFT_ROWS, StepPlan, StepResult

MODES = ("auto", "on", "off")
# By which overlapping must be better to begin with it, and to go on. Rates are estimates, a switch costs drafts, and on
# an H200 predictions for one request were up to 3 % too good.
MARGIN, STAYING = 0.04, 0.02
SURE = 0.99  # no rate is taken to be higher
RIDING = range(2, ADAPTIVE_MAX_LENGTH + 1)  # chunks; of one token nothing would be left to verify
LEADING = range(1, ADAPTIVE_MAX_LENGTH + 1)  # frontiers
GUESSING = (0, 1, 2, 4)
# How many of the misses so many guesses turn into hits, before that is known: the default pair's (`docs/lab.md`), and
# the steps this counts as.
ADOPTED = {1: 0.23, 2: 0.29, 4: 0.39}
PRIOR = 30
LIKELY = (0.5, 0.7, 0.8, 0.9, 0.95)  # rates at which overlapping is looked at before anything is known
PATIENCE = 4  # steps before the same batch is looked at again: a millisecond or two of the host, while a step runs
FEW = (1, 2, 4)  # requests, likewise; for more it is not considered
CONTEXT = 512  # and tokens of each


@dataclass(frozen=True)
class Chunks:
    """What each request drafts in a step that overlaps: arrays [B]."""

    lengths: IntArray  # beside the verification
    lead: IntArray  # before it, where there is no frontier to verify
    outcomes: int = 0  # guesses for every token that may turn out to be the last (`StepPlan`)
    draft_sms: int = 0  # that drafting has to itself

    @property
    def leads(self) -> bool:
        return bool(self.lead.any())

    @property
    def waits(self) -> bool:
        """Where branches begin must be known; and who needs a lead."""
        return self.outcomes > 0 or self.leads


@dataclass(frozen=True)
class Way:
    """One way to overlap: chunks and leads of so many tokens, guesses, and the tokens per second that brings."""

    speed: float
    chunk: int
    lead: int
    outcomes: int
    draft_sms: int

    def chunks(self, num_requests: int) -> Chunks:
        chunk, lead = (np.full(num_requests, each) for each in (self.chunk, self.lead))
        return Chunks(chunk, lead, self.outcomes, self.draft_sms)


class Overlap:
    """`on`: every step that drafts, by the policy's lengths. `auto`: where it gives more tokens per second."""

    def __init__(
        self,
        mode: str = "on",
        leads: bool = False,
        outcomes: int = 0,
        draft_sms: int = 0,
        guessing: Sequence[int] = GUESSING,
        splits: Collection[int] | None = None,
    ) -> None:
        """`auto` chooses from `guessing` and `splits` (None: all there are); the others are for `on`, to measure."""
        self._mode = mode
        self._guessing = guessing
        self._splits = splits
        self._leads = leads
        self._outcomes = outcomes
        self._draft_sms = draft_sms
        self._looked_at: tuple[int, ...] = ()  # what the latest decision was for
        self._best: Way | None = None
        self._num_steps = 0  # since then
        self._acceptance = Acceptance(ADAPTIVE_MAX_LENGTH)  # of all requests, for what is not known of one
        self._adopted = {guesses: np.array([rate * PRIOR, PRIOR]) for guesses, rate in ADOPTED.items()}  # of misses

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        """What each request drafts beside the verification of its frontier. None: the step has none of that."""
        if self._mode == "on":
            lead = lengths if self._leads else np.zeros_like(lengths)
            return Chunks(lengths + (lead > 0), lead, self._outcomes, self._draft_sms)
        cost = view.cost
        is_seldom = view.num_requests > FEW[-1] or view.num_prefill_rows > 0  # worth it, and parts have no such graphs
        if cost is None or not cost.splits or not lengths.any() or is_seldom:
            self._best, self._looked_at = None, ()
            return None
        batch = (view.num_requests, int(lengths.max()))
        self._num_steps += 1
        if batch != self._looked_at or self._num_steps >= PATIENCE:
            self._best = self._decide(view, lengths)
            self._looked_at, self._num_steps = batch, 0
        return self._best.chunks(lengths.size) if self._best is not None else None

    def _decide(self, view: BatchView, lengths: IntArray) -> Way | None:
        rates = np.minimum(self._acceptance.request_rates(view), SURE)
        # drafts may stop before their lengths, and what overlaps may be longer than they are
        others = [np.minimum(lengths, most) for most in range(1, int(lengths.max()) + 1)]
        others += [np.full_like(lengths, most) for most in LEADING]
        apart = max(plain_speed(view, rates, each) for each in others)
        best = self.best(view, rates)
        return best if best.speed > apart * (1 + (MARGIN if self._best is None else STAYING)) else None

    def best(self, view: BatchView, rates: FloatArray) -> Way:
        """The fastest for requests whose drafts are right at these rates."""
        assert view.cost is not None
        splits = view.cost.splits if self._splits is None else self._splits
        ways = [Way(ride_speed(view, rates, chunk, split), chunk, 0, 0, split) for split in splits for chunk in RIDING]
        ways += [
            Way(lead_speed(view, rates, lead, split, guesses, self.adoption(guesses)), lead + 1, lead, guesses, split)
            for split in splits
            for lead in LEADING
            for guesses in self._guessing
            if (guesses * (lead + 1) + 1) * view.num_requests <= MOST_DRAFT_ROWS
        ]
        return max(ways, key=lambda way: way.speed)

    def adoption(self, guesses: int) -> float:
        """How many of the misses so many guesses turn into hits."""
        if not guesses:
            return 0.0
        hits, misses = self._adopted[guesses]
        return float(hits / misses)

    def learn(self, plan: StepPlan, result: StepResult, outcome: Outcome) -> None:
        """Take in how many drafts were right, and how often there was a branch where there was no hit."""
        self._acceptance.learn(outcome)
        if result.hits is None or result.adopted is None or plan.outcomes not in self._adopted:
            return
        could = plan.samples & (plan.chunks_of(result.num_drafted) > 1)
        missed = could & (~result.hits | result.adopted)
        self._adopted[plan.outcomes] += (np.count_nonzero(result.adopted & could), np.count_nonzero(missed))


def worthwhile(cost: ProfiledCost) -> set[int]:
    """The splits of the device on which `auto` would overlap for a few requests, whose drafts are likely enough."""
    chooser, found = Overlap("auto"), set()
    for size in FEW if cost.splits else ():
        view = BatchView.alike(size, CONTEXT, cost)
        for rate in LIKELY:
            rates = np.full(size, rate)
            lengths = (np.full(size, length) for length in LEADING)
            apart = max(plain_speed(view, rates, each) for each in lengths)
            best = chooser.best(view, rates)
            if best.speed > apart * (1 + MARGIN):
                found.add(best.draft_sms)
    return found


def ride_speed(view: BatchView, rates: FloatArray, chunk: int, draft_sms: int = 0) -> float:
    """Tokens per second of steps in which everybody drafts so many beside the verification, and misses ride."""
    full = rates / (1 - rates**chunk + rates)  # [B] the share of steps that have a frontier
    tokens = full * (1 - rates**chunk) / (1 - rates) + (1 - full)
    rows = view.num_requests + round(float(full.sum()) * (chunk - 1))
    return float(tokens.sum()) / _overlapped(view, rows, chunk, draft_sms)


def lead_speed(
    view: BatchView, rates: FloatArray, lead: int, draft_sms: int = 0, guesses: int = 0, adoption: float = 0.0
) -> float:
    """Likewise where whoever missed drafts so many first.

    With guesses for each of the tokens that may be the last, of which one is right in a share of the misses.
    """
    assert view.cost is not None
    tokens = (1 - rates ** (lead + 1)) / (1 - rates)
    missed = (1 - rates ** (lead + 1)) * (1 - adoption)  # [B] the chance to
    anybody = 1 - float(np.prod(1 - missed))
    rows = view.num_requests * (lead + 1)
    seconds = _overlapped(view, rows, lead + 1, draft_sms, view.num_requests + guesses * rows)
    return float(tokens.sum()) / (seconds + anybody * _drafting(view, lead) + view.cost.await_seconds)


def _overlapped(view: BatchView, rows: int, chunk: int, draft_sms: int, draft_rows: int = 0) -> float:
    """Seconds of a step that verifies so many rows and drafts so many tokens beside, for so many rows at a time."""
    assert view.cost is not None
    cost: ProfiledCost = view.cost
    verify = float(cost.verify(rows, float(view.num_tokens.sum()), view.num_prefill_rows))
    draft = _drafting(view, chunk, draft_rows)
    return draft + verify - cost.hidden(draft, verify, view.num_requests, draft_sms, draft_rows) + cost.host


def _drafting(view: BatchView, length: int, draft_rows: int = 0) -> float:
    """Seconds of so many drafted tokens for everybody, of which all but the first have so many rows."""
    assert view.cost is not None
    context, rows = float(view.num_tokens.sum()), draft_rows or view.num_requests
    first = float(view.cost.first_draft(view.num_requests, context))
    # a branch reads its parent's context
    return first + (length - 1) * float(view.cost.next_draft(rows, context * rows / view.num_requests))


def plain_speed(view: BatchView, rates: FloatArray, lengths: IntArray) -> float:
    """Likewise of steps that draft and then verify."""
    assert view.cost is not None
    tokens = ((1 - rates ** (lengths + 1)) / (1 - rates)).sum()
    reached = reaches(lengths, int(lengths.max()))
    drafting, read = reached.sum(axis=1), reached @ view.num_tokens
    context = float(view.num_tokens.sum())
    seconds = ragged_seconds(view.cost, view.num_requests, context, drafting, read, view.num_prefill_rows)
    return float(tokens / seconds)
