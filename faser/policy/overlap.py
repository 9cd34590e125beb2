"""Whether the draft model goes on drafting while the target verifies what it drafted before.

Knows the batch about to decode, the lengths its policy would draft and the cost of forwards; no tensors and no clocks.
See faser/rules/overlap.py for frontier, chunk, hit and miss. After a miss there are two ways to go on:

  ride   the next step brings the request one token while it drafts again. Nobody waits. With acceptance rate p, a chunk
         of c tokens is a hit with probability p^c behind a frontier and p behind none.
  lead   the next step first drafts the frontier again, for each request that has none, and everybody waits for that.
         Every step brings as many tokens as without overlap. Drafting takes time only in the steps after a miss. A step
         cannot begin before the host knows who missed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome
from faser.policy.estimates import step_seconds
from faser.rules.overlap import MAX_REQUESTS

MODES = ("auto", "on", "off")
# How much faster overlapping must be to begin, and to continue. Acceptance rates are estimates, a switch costs drafts,
# and on an H200 predictions for one request were up to 3 % too good.
MARGIN_TO_BEGIN, MARGIN_TO_CONTINUE = 0.04, 0.02
HIGHEST_RATE = 0.99  # an acceptance rate is never taken to be higher
RIDING_CHUNKS = range(2, ADAPTIVE_MAX_LENGTH + 1)  # of a chunk of one token nothing would be left to verify
LEADS = range(1, ADAPTIVE_MAX_LENGTH + 1)
LIKELY_RATES = (0.5, 0.7, 0.8, 0.9, 0.95)  # acceptance rates that are tried before any is known
STEPS_BETWEEN_DECISIONS = 4  # for the same batch: a decision takes the host a millisecond or two
BATCH_SIZES = (1, 2, MAX_REQUESTS)  # that `worthwhile` looks at
CONTEXT = 512  # tokens of each request, before any is known


@dataclass(frozen=True)
class Chunks:
    """What each request drafts in a step that overlaps. Arrays are [B]."""

    lengths: IntArray  # beside the verification
    lead: IntArray  # before it, for requests without a frontier
    draft_sms: int = 0  # SMs that drafting has to itself; 0: all are shared

    @property
    def leads(self) -> bool:
        return bool(self.lead.any())


@dataclass(frozen=True)
class Way:
    """One way to overlap, the same for every request, and the tokens per second it is expected to bring."""

    speed: float
    chunk: int
    lead: int
    draft_sms: int

    def chunks(self, num_requests: int) -> Chunks:
        chunk, lead = (np.full(num_requests, each) for each in (self.chunk, self.lead))
        return Chunks(chunk, lead, self.draft_sms)


class Overlap:
    """`on`: every step that drafts overlaps, with the policy's lengths. `auto`: where it brings more tokens per second.

    `splits` are the SMs for drafting that `auto` may choose from (None: all that were profiled). `leads` and
    `draft_sms` are for `on`.
    """

    def __init__(
        self, mode: str = "on", leads: bool = False, draft_sms: int = 0, splits: Collection[int] | None = None
    ) -> None:
        self._mode = mode
        self._splits = splits
        self._leads = leads
        self._draft_sms = draft_sms
        self._decided_for: tuple[int, ...] = ()  # the batch of the latest decision
        self._best: Way | None = None
        self._num_steps = 0  # since then
        self._acceptance = Acceptance(ADAPTIVE_MAX_LENGTH)  # of all requests, for what is not known of one

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        """What each request drafts beside the verification of its frontier. None: this step does not overlap."""
        if self._mode == "on":
            lead = lengths if self._leads else np.zeros_like(lengths)
            return Chunks(lengths + (lead > 0), lead, self._draft_sms)
        cost = view.cost
        # Large batches and prompts rarely gain, and there are no graphs of them on a part of the device.
        is_unsuitable = view.num_requests > MAX_REQUESTS or view.num_prefill_rows > 0
        if cost is None or not cost.overlap.splits or not lengths.any() or is_unsuitable:
            self._best, self._decided_for = None, ()
            return None
        batch = (view.num_requests, int(lengths.max()))
        self._num_steps += 1
        if batch != self._decided_for or self._num_steps >= STEPS_BETWEEN_DECISIONS:
            self._best = self._decide(view, lengths)
            self._decided_for, self._num_steps = batch, 0
        return self._best.chunks(lengths.size) if self._best is not None else None

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)

    def _decide(self, view: BatchView, lengths: IntArray) -> Way | None:
        rates = np.minimum(self._acceptance.request_rates(view), HIGHEST_RATE)
        # Without overlap, drafts may also be shorter than the policy's lengths, or as long as a lead.
        plain_lengths = [np.minimum(lengths, most) for most in range(1, int(lengths.max()) + 1)]
        plain_lengths += [np.full_like(lengths, most) for most in LEADS]
        plain = max(plain_speed(view, rates, each) for each in plain_lengths)
        best = self.best(view, rates)
        margin = MARGIN_TO_BEGIN if self._best is None else MARGIN_TO_CONTINUE
        return best if best.speed > plain * (1 + margin) else None

    def best(self, view: BatchView, rates: FloatArray) -> Way:
        """The fastest way for requests with these acceptance rates [B]."""
        assert view.cost is not None
        splits = view.cost.overlap.splits if self._splits is None else self._splits
        ways = [
            Way(ride_speed(view, rates, chunk, split), chunk, 0, split) for split in splits for chunk in RIDING_CHUNKS
        ]
        ways += [Way(lead_speed(view, rates, lead, split), lead + 1, lead, split) for split in splits for lead in LEADS]
        return max(ways, key=lambda way: way.speed)


def worthwhile(cost: ProfiledCost) -> set[int]:
    """The splits of the device on which `auto` would overlap for some batch size and acceptance rate."""
    chooser, found = Overlap("auto"), set()
    for size in BATCH_SIZES if cost.overlap.splits else ():
        view = BatchView.alike(size, CONTEXT, cost)
        for rate in LIKELY_RATES:
            rates = np.full(size, rate)
            plain = max(plain_speed(view, rates, np.full(size, length)) for length in LEADS)
            best = chooser.best(view, rates)
            if best.speed > plain * (1 + MARGIN_TO_BEGIN):
                found.add(best.draft_sms)
    return found


def ride_speed(view: BatchView, rates: FloatArray, chunk: int, draft_sms: int = 0) -> float:
    """Tokens per second if everybody drafts `chunk` tokens beside each verification, and rides after a miss."""
    full = rates / (1 - rates**chunk + rates)  # [B] the share of steps that have a frontier
    tokens = full * (1 - rates**chunk) / (1 - rates) + (1 - full)
    rows = view.num_requests + round(float(full.sum()) * (chunk - 1))
    return float(tokens.sum()) / _overlapped_seconds(view, rows, chunk, draft_sms)


def lead_speed(view: BatchView, rates: FloatArray, lead: int, draft_sms: int = 0) -> float:
    """Tokens per second if everybody drafts `lead` + 1 tokens beside each verification, and leads after a miss."""
    assert view.cost is not None
    tokens = (1 - rates ** (lead + 1)) / (1 - rates)
    anybody_missed = 1 - float(np.prod(rates ** (lead + 1)))
    rows = view.num_requests * (lead + 1)
    seconds = _overlapped_seconds(view, rows, lead + 1, draft_sms) + anybody_missed * _drafting_seconds(view, lead)
    return float(tokens.sum()) / (seconds + view.cost.overlap.await_seconds)


def plain_speed(view: BatchView, rates: FloatArray, lengths: IntArray) -> float:
    """Tokens per second if every step drafts these lengths and then verifies."""
    assert view.cost is not None
    tokens = ((1 - rates ** (lengths + 1)) / (1 - rates)).sum()
    return float(tokens / step_seconds(view.cost, lengths, view.num_tokens, prompt_rows=view.num_prefill_rows))


def _overlapped_seconds(view: BatchView, rows: int, chunk: int, draft_sms: int) -> float:
    """Of a step that verifies `rows` rows and drafts `chunk` tokens for everybody beside it."""
    assert view.cost is not None
    verify = float(view.cost.verify(rows, float(view.num_tokens.sum()), view.num_prefill_rows))
    draft = _drafting_seconds(view, chunk)
    return draft + verify - view.cost.overlap.hidden(draft, verify, view.num_requests, draft_sms) + view.cost.host


def _drafting_seconds(view: BatchView, length: int) -> float:
    """Of drafting `length` tokens for everybody."""
    assert view.cost is not None
    context = float(view.num_tokens.sum())
    first = float(view.cost.first_draft(view.num_requests, context))
    return first + (length - 1) * float(view.cost.next_draft(view.num_requests, context))
