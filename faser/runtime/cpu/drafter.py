"""What drafts on the CPU: a draft model, or a draft head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from faser.arrays import FloatArray, IntArray
from faser.models.heads import BlockHead, Eagle3Head
from faser.models.transformer import Decoder
from faser.rules.stopping import WatchedPlan
from faser.runtime.cpu.runner import HeadRunner, ModelRunner, Rows, Runner
from faser.runtime.drafter import Drafts
from faser.runtime.sampling import Sampler
from faser.step import StepPlan


class SamplingDrafter:
    """Samples with the target's noise, so that it agrees as often as it can."""

    def __init__(self, model: Decoder, sampler: Sampler, history: torch.Tensor, target_vocab_size: int) -> None:
        self._vocabulary = model.vocabulary
        self._num_embedded = model.config.vocab_size
        self._sampler = sampler
        self._history: IntArray = history.numpy()
        self._vocab_size = target_vocab_size
        self._confidence: FloatArray | None = None  # [B, depth] of the drafts of the current step

    def _begin(self, plan: StepPlan) -> None:
        self._confidence = None
        if plan.stopping is not None or plan.exits is not None:
            self._confidence = np.full((plan.lengths.size, int(plan.lengths.max()) + 1), np.nan)

    def _tokens(self, slots: IntArray, positions: IntArray) -> torch.Tensor:
        """Token ids of the history that can be embedded.

        A target's vocabulary may be padded beyond the draft's; padding has no text, so any stand-in will do.
        """
        return torch.from_numpy(np.minimum(self._history[slots, positions], self._num_embedded - 1))

    def _sample(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        requests: IntArray,
        done: int,
        confidence: torch.Tensor | None = None,
    ) -> list[int]:
        """Draft token number `done` of `requests` (by index in the plan) into the history.

        `confidence` is known beforehand where the draft has a head for it. Returns the indices of requests without a
        token to draft: a short vocabulary may hold no token that a request's grammar allows.
        """
        logits = self._spread(logits)
        tokens = self._sampler.sample(logits, slots, positions)
        self._history[slots, positions] = tokens
        if self._confidence is not None and requests.size:
            known = self._sampler.confidence(logits, slots, tokens) if confidence is None else confidence.numpy()
            self._confidence[requests, done] = known
        return list(self._sampler.failed_rows)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits by the target's token ids, as noise, bias and penalties are. Tokens that the draft lacks get -inf."""
        if self._vocabulary is None:
            return logits[:, : self._vocab_size]
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._vocabulary, logits)


class ChainDrafter(SamplingDrafter, ABC):
    """Drafts token by token.

    Drafting is ragged: a request leaves the batch at its own length. The first forward also computes the context rows
    that the draft lags behind, also of requests that catch up and do not draft yet.
    """

    first_row = 0  # the first context token that has a row

    def __init__(
        self, runner: Runner, model: Decoder, sampler: Sampler, history: torch.Tensor, vocab_size: int
    ) -> None:
        super().__init__(model, sampler, history, vocab_size)
        self._runner = runner

    @abstractmethod
    def _first(self, rows: Rows) -> torch.Tensor:
        """The hidden states [R, hidden] of context rows. They are of all requests that run in this step."""

    @abstractmethod
    def _next(self, rows: Rows, active: IntArray) -> torch.Tensor:
        """The hidden states of the rows of the latest drafts; `active`: which requests of the first rows go on."""

    @abstractmethod
    def _logits(self, hidden: torch.Tensor, wanted: IntArray) -> torch.Tensor: ...

    def draft(self, plan: StepPlan) -> Drafts:
        self._runner.follow(plan)
        start = np.maximum(plan.draft_start, self.first_row)
        counts = np.where(plan.draft_rows > 0, np.maximum(plan.draft_start + plan.draft_rows - start, 0), 0)
        runs = np.flatnonzero(counts)
        if runs.size == 0:
            return Drafts(np.zeros_like(plan.lengths))
        self._begin(plan)
        rows = Rows.of(plan.slots[runs], start[runs], counts[runs])
        lengths, slots, positions = plan.lengths[runs], rows.slots, (plan.num_tokens + plan.frontier)[runs]
        active = np.flatnonzero(lengths)
        logits = self._logits(self._first(rows), rows.last[active])
        if active.size:
            stuck = self._sample(logits, slots[active], positions[active], runs[active], 0)
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
            logits = self._logits(self._next(rows, active), rows.last)
            stuck = self._sample(logits, rows.slots, rows.positions + 1, runs[active], done)
            lengths[active[stuck]] = done
        num_drafted = np.zeros_like(plan.lengths)
        num_drafted[runs] = lengths
        return Drafts(num_drafted, self._confidence, self._runner.take_seconds())


class ModelDrafter(ChainDrafter):
    """A draft model."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor, target_vocab_size: int) -> None:
        super().__init__(runner, runner.model, sampler, history, target_vocab_size)
        self._model_runner = runner

    def _first(self, rows: Rows) -> torch.Tensor:
        return self._model_runner.run(rows, self._model_runner.model.embed(self._tokens(rows.owners, rows.positions)))

    def _next(self, rows: Rows, active: IntArray) -> torch.Tensor:
        return self._first(rows)

    def _logits(self, hidden: torch.Tensor, wanted: IntArray) -> torch.Tensor:
        return self._model_runner.logits(hidden, wanted)


class Eagle3Drafter(ChainDrafter):
    """An EAGLE-3 head. The row of a token stands at the token's own position, so its page depends on no later token.

    Rotary positions count from one then; only their differences matter. The first token has no row.
    """

    first_row = 1

    def __init__(
        self, runner: HeadRunner, head: Eagle3Head, sampler: Sampler, history: torch.Tensor, target_vocab_size: int
    ) -> None:
        super().__init__(runner, head, sampler, history, target_vocab_size)
        self._head_runner = runner
        self._head = head
        self._states = torch.zeros(0)  # [requests that run, hidden] behind the latest row of each

    def _first(self, rows: Rows) -> torch.Tensor:
        hidden = self._extend(rows, self._head_runner.features(rows.owners, rows.positions - 1))
        self._states = self._head.next_states(hidden[torch.from_numpy(rows.last)])
        return hidden

    def _next(self, rows: Rows, active: IntArray) -> torch.Tensor:
        index = torch.from_numpy(active)
        hidden = self._extend(rows, self._states[index])
        self._states[index] = self._head.next_states(hidden)
        return hidden

    def _extend(self, rows: Rows, states: torch.Tensor) -> torch.Tensor:
        with self._runner.timed():
            embedded = self._head.embed(self._tokens(rows.owners, rows.positions))
            return self._head.extend(embedded, states, self._head_runner.attention(rows, self.first_row))

    def _logits(self, hidden: torch.Tensor, wanted: IntArray) -> torch.Tensor:
        with self._runner.timed():
            return self._head.logits(hidden[torch.from_numpy(wanted)])


class BlockDrafter(SamplingDrafter):
    """A block head: all drafts of a request in one forward, then sampled left to right."""

    def __init__(
        self, runner: HeadRunner, head: BlockHead, sampler: Sampler, history: torch.Tensor, target_vocab_size: int
    ) -> None:
        super().__init__(head, sampler, history, target_vocab_size)
        self._runner = runner
        self._head = head

    def draft(self, plan: StepPlan) -> Drafts:
        self._runner.follow(plan)
        self._begin(plan)
        with self._runner.timed():
            self._read_context(plan)
        active = np.flatnonzero(plan.lengths)
        lengths = plan.lengths.copy()
        if active.size:
            with self._runner.timed():
                hidden = self._run_block(plan.slots[active], plan.num_tokens[active])
            self._sample_block(plan, active, hidden, lengths)
        return Drafts(lengths, self._confidence, self._runner.take_seconds())

    def _read_context(self, plan: StepPlan) -> None:
        """Keys and values of the context, from features. The last token has none yet: it is the anchor."""
        end = np.minimum(plan.draft_start + plan.draft_rows, plan.num_tokens - 1)
        rows = Rows.of(
            plan.slots, plan.draft_start, np.where(plan.draft_rows > 0, np.maximum(end - plan.draft_start, 0), 0)
        )
        if rows.num_rows:
            fused = self._runner.features(rows.owners, rows.positions)
            for layer in range(self._head.num_layers):
                self._runner.write_kv(rows, layer, self._head.context_kv(layer, fused))

    def _run_block(self, slots: IntArray, num_tokens: IntArray) -> torch.Tensor:
        """[B, block rows, hidden]"""
        config = self._head.head_config
        size = np.full(slots.size, config.num_block_rows)
        rows = Rows.of(slots, num_tokens - 1, size)
        token_ids = torch.full((slots.size, config.num_block_rows), config.mask_token_id)
        token_ids[:, 0] = self._tokens(slots, num_tokens - 1)
        embedded = self._head.embed(token_ids.view(-1))
        hidden = self._head.run_block(embedded, self._runner.attention(rows, sees_all=True))
        return hidden.view(slots.size, config.num_block_rows, -1)

    def _sample_block(self, plan: StepPlan, active: IntArray, hidden: torch.Tensor, lengths: IntArray) -> None:
        """Draft the tokens of `active` requests; lengths [B] of those that end early are lowered."""
        head, first = self._head, 0 if self._head.head_config.anchor_predicts else 1
        most = int(lengths.max())
        with self._runner.timed():
            logits = head.logits(hidden[:, first : first + most].flatten(0, 1)).view(active.size, most, -1)
        for done in range(most):
            going = np.flatnonzero(lengths[active] > done)
            if going.size == 0:
                break
            index, requests = torch.from_numpy(going), active[going]
            slots, positions = plan.slots[requests], plan.num_tokens[requests] + done
            before = self._tokens(slots, positions - 1)
            with self._runner.timed():
                bias = head.markov_bias(before)
                known = head.confidence(hidden[index, first + done], before) if self._confidence is not None else None
            scores = logits[index, done]
            stuck = self._sample(scores if bias is None else scores + bias, slots, positions, requests, done, known)
            lengths[requests[stuck]] = done
        if plan.stopping is not None and self._confidence is not None:
            lengths[:] = plan.stopping.cut(self._confidence, lengths)
