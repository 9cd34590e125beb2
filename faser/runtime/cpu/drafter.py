"""Where drafts come from. A drafter writes its tokens into the history behind each request's context.

A wrong draft costs time and never a token: the verifier emits what the target says. A draft that samples is under the
request's grammar, as the target is; one that looks up is not, and the executor drops what does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from faser.arrays import NONE, FloatArray, IntArray
from faser.rules.stopping import WatchedPlan
from faser.runtime.cpu.rows import Rows
from faser.runtime.cpu.runner import ModelRunner
from faser.runtime.ngram import lookup
from faser.runtime.sampling import Sampler
from faser.step import StepPlan


@dataclass(frozen=True)
class Drafts:
    """What was drafted: how many tokens [B], and, where the plan has a rule that asks, their confidence [B, depth]."""

    num_tokens: IntArray
    confidence: FloatArray | None = None


class Drafter(Protocol):
    def draft(self, plan: StepPlan) -> Drafts:
        """Write up to plan.lengths tokens per request to history[slot, num_tokens + frontier:]."""
        ...

    def adopt(self, plan: StepPlan, num_accepted: IntArray) -> NDArray[np.bool_]:
        """Put a branch behind the last token of each request that has one there, for a plan with `outcomes`: who. [B]

        The tokens that were emitted are in the history.
        """
        ...

    def take_seconds(self) -> float:
        """Time spent in the draft's forwards since the last call."""
        ...


@dataclass(frozen=True)
class _Branch:
    """What comes behind a token that the target may say, as far as it was drafted."""

    position: int
    tokens: list[int]  # that one, and the drafts
    kv: torch.Tensor  # of all but the last
    rivals: dict[int, list[int]]  # of the drafts


class ModelDrafter:
    """A small model that samples with the target's noise, so that it agrees as often as it can.

    Drafting is ragged: a request leaves the batch at its own length. The first forward also computes the context the
    draft lags behind by, for requests that will not draft yet as well.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor, target_vocab_size: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history: IntArray = history.numpy()
        self._vocab_size = target_vocab_size
        self._confidence: FloatArray | None = None  # of the drafts at hand, [B, depth]
        self._num_rivals = 0  # to remember of each draft: what it would have been otherwise
        self._rivals: dict[int, dict[int, list[int]]] = {}  # by slot and position, the best first
        self._branches: dict[int, list[_Branch]] = {}  # of the plan at hand, by index in it

    def draft(self, plan: StepPlan) -> Drafts:
        self._num_rivals, self._branches = plan.outcomes, {}
        for new in plan.admitted:
            self._rivals.pop(new.slot, None)
        self._runner.apply(plan.draft_pages)
        drafts = self._draft(plan)
        if plan.outcomes:
            judged, sizes = plan.judged_of(drafts.num_tokens), plan.chunks_of(drafts.num_tokens) - 1
            for i in np.flatnonzero(sizes > 0).tolist():
                self._branches[i] = self._grow(int(plan.slots[i]), int(plan.num_tokens[i]), int(judged[i]), sizes[i])
        return drafts

    def _grow(self, slot: int, num_tokens: int, num_judged: int, size: int) -> list[_Branch]:
        """Branches of `size` drafts, from every token that may be the last. All is left as it was."""
        rivals = self._rivals.get(slot, {})
        for position in [position for position in rivals if position < num_tokens]:
            del rivals[position]
        branches = []
        for first in range(num_tokens, num_tokens + num_judged + 1):
            kept, tokens = self._runner.keep(slot, first, size), self._history[slot, first : first + size + 1].copy()
            usual = {position: rivals[position] for position in rivals if position > first}
            for token in list(rivals.get(first, ())):
                self._history[slot, first] = token
                if all(self._extend_one(slot, position) for position in range(first, first + size)):
                    grown = self._history[slot, first : first + size + 1].tolist()
                    others = {position: rivals[position] for position in range(first + 1, first + size + 1)}
                    branches.append(_Branch(first, grown, self._runner.keep(slot, first, size), others))
            self._history[slot, first : first + size + 1] = tokens
            self._runner.restore(slot, first, kept)
            for position in [position for position in rivals if position > first]:
                del rivals[position]
            rivals.update(usual)
        return branches

    def _extend_one(self, slot: int, position: int) -> bool:
        """Draft what comes behind a token; False where nothing may."""
        rows = Rows.of(np.array([slot]), np.array([position]), np.ones(1, dtype=np.int64))
        return not self._extend(rows, rows.last, rows.slots, rows.positions + 1, NONE, 0)

    def adopt(self, plan: StepPlan, num_accepted: IntArray) -> NDArray[np.bool_]:
        adopted = np.zeros(plan.slots.size, dtype=np.bool_)
        for i, branches in self._branches.items():
            slot, last = int(plan.slots[i]), int(plan.num_tokens[i] + num_accepted[i])
            said = int(self._history[slot, last])
            for branch in branches:
                if branch.position == last and branch.tokens[0] == said:
                    self._history[slot, last : last + len(branch.tokens)] = branch.tokens
                    self._runner.restore(slot, last, branch.kv)
                    self._rivals[slot].update(branch.rivals)
                    adopted[i] = True
        return adopted

    def _draft(self, plan: StepPlan) -> Drafts:
        runs = np.flatnonzero(plan.draft_rows)
        if runs.size == 0:
            return Drafts(np.zeros_like(plan.lengths))
        self._confidence = None
        if plan.stopping is not None or plan.exits is not None:
            self._confidence = np.full((plan.lengths.size, int(plan.lengths.max()) + 1), np.nan)
        rows = Rows.of(plan.slots[runs], plan.draft_start[runs], plan.draft_rows[runs])
        lengths, slots, positions = plan.lengths[runs], rows.slots, (plan.num_tokens + plan.frontier)[runs]
        active = np.flatnonzero(lengths)
        stuck = self._extend(rows, rows.last[active], slots[active], positions[active], runs[active], 0)
        lengths[active[stuck]] = 0
        watch = None if plan.stopping is None else WatchedPlan(plan.stopping, plan.lengths)
        for done in range(1, int(lengths.max())):
            active = np.flatnonzero(lengths > done)
            if active.size == 0:
                break
            if watch is not None and not watch.goes_on(self._confidence, done):
                lengths = np.minimum(lengths, done)
                break
            rows = Rows.of(slots[active], positions[active] + done - 1, np.ones(active.size, dtype=np.int64))
            stuck = self._extend(rows, rows.last, rows.slots, rows.positions + 1, runs[active], done)
            lengths[active[stuck]] = done
        num_drafted = np.zeros_like(plan.lengths)
        num_drafted[runs] = lengths
        return Drafts(num_drafted, self._confidence)

    def _extend(
        self, rows: Rows, wanted: IntArray, slots: IntArray, positions: IntArray, requests: IntArray, done: int
    ) -> list[int]:
        """Compute rows; draft token number `done` of requests, by index in the plan, from the wanted ones.

        Returns those that have none to draft: a short vocabulary may hold no token that a request's grammar allows; the
        target will say what comes there.
        """
        # A target's vocabulary may be padded beyond the draft's; such a token has no text, so any stand-in will do.
        token_ids = np.minimum(self._history[rows.owners, rows.positions], self._runner.model.config.vocab_size - 1)
        logits = self._runner.forward(rows, torch.from_numpy(token_ids), wanted)
        if wanted.size == 0:
            return []
        logits = self._spread(logits)
        tokens = self._sampler.sample(logits, slots, positions)
        self._history[slots, positions] = tokens
        if self._confidence is not None and requests.size:
            self._confidence[requests, done] = self._sampler.confidence(logits, slots, tokens)
        stuck = list(self._sampler.failed_rows)
        if self._num_rivals:
            self._remember_rivals(logits, slots, positions, tokens)
        return stuck

    def _remember_rivals(self, logits: torch.Tensor, slots: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """The same draw without the tokens that came first in it."""
        logits = logits.clone()
        places = [(self._rivals.setdefault(slot, {}), at) for slot, at in zip(slots, positions.tolist(), strict=True)]
        for rivals, position in places:
            rivals[position] = []
        for _ in range(self._num_rivals):
            logits[torch.arange(tokens.size), torch.from_numpy(tokens)] = -torch.inf
            tokens = self._sampler.sample(logits, slots, positions)
            for row, (rivals, position) in enumerate(places):
                if row not in self._sampler.failed_rows and logits[row, tokens[row]] > -torch.inf:
                    rivals[position].append(int(tokens[row]))

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits by token id: noise, bias and penalties are. A short vocabulary proposes nothing outside itself."""
        if self._runner.model.vocabulary is None:
            return logits[:, : self._vocab_size]
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._runner.model.vocabulary, logits)

    def take_seconds(self) -> float:
        return self._runner.take_seconds()


class NgramDrafter:
    """Prompt lookup: what followed the last time these tokens were seen. Needs no model, and may find nothing."""

    def __init__(self, history: torch.Tensor) -> None:
        self._history: IntArray = history.numpy()

    def draft(self, plan: StepPlan) -> Drafts:
        num_drafted = np.zeros_like(plan.lengths)
        for i in np.flatnonzero(plan.lengths).tolist():
            slot, num_tokens = int(plan.slots[i]), int(plan.num_tokens[i])
            found = lookup(self._history[slot, :num_tokens], int(plan.lengths[i]))
            self._history[slot, num_tokens : num_tokens + found.size] = found
            num_drafted[i] = found.size
        return Drafts(num_drafted)

    def adopt(self, plan: StepPlan, num_accepted: IntArray) -> NDArray[np.bool_]:
        return np.zeros(plan.slots.size, dtype=np.bool_)

    def take_seconds(self) -> float:
        return 0.0
