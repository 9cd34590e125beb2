"""Rows that need more than a temperature: filters and log-probabilities on the device, grammars on the host.

Knows what each request asks for. The forward samples every row with its temperature alone. Here the logits of some
rows are computed again, outside the graphs, and their tokens replaced before the verdict. Drafts know nothing of this,
which costs agreement and never a token. Drafts that break a grammar are dropped before the verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from faser.arrays import BoolArray, IntArray
from faser.request import TokenLogprobs
from faser.runtime.cuda.filters import Filters, logprobs, unpack_logprobs
from faser.runtime.cuda.graphs import Shape
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.sampling import Choices, Slots, sample
from faser.runtime.cuda.transfer import send
from faser.runtime.sampling import Sampler
from faser.step import Admission, StepPlan

FILTERED_LOGITS = 1 << 22  # logits filtered at a time: sorting them takes some 250 MB


class Resampler:
    """`history` int64 [max_slots, max_len] is the host's copy of the tokens, which grammars read."""

    def __init__(self, target: CudaModel, slots: Slots, sampler: Sampler, history: IntArray) -> None:
        vocab_size, device = target.model.head.shape[0], target.model.device
        self._target = target
        self._slots = slots
        self._sampler = sampler
        self._history = history
        self._filters = Filters(len(history), vocab_size, device)
        self.is_on_host = np.zeros(len(history), dtype=np.bool_)  # by slot: a grammar samples its rows on the host
        self.is_special = self._filters.is_special  # by slot: the host must know its positions
        most_rows = min(target.choices.tokens.shape[0], max(1, FILTERED_LOGITS // vocab_size))
        self._filtered = Choices.allocate(most_rows, vocab_size, device)

    def admit(self, admitted: Sequence[Admission]) -> None:
        for new in admitted:
            self._history[new.slot, : new.token_ids.size] = new.token_ids
            self._sampler.admit(new.slot, new.params, new.seed, new.num_prompt, sorted(new.stop_ids))
            self._filters.admit(new.slot, new.params, new.num_prompt, sorted(new.stop_ids))
            self.is_on_host[new.slot] = new.params.grammar is not None

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._sampler.release(slot)

    def prune(self, plan: StepPlan, num_drafted: IntArray) -> IntArray:
        """[B] the drafts that no grammar forbids. The host reads the drafts of requests that have a grammar."""
        on_host = np.flatnonzero(self.is_on_host[plan.slots] & (num_drafted > 0)).tolist()
        if not on_host:
            return num_drafted
        for i in on_host:
            slot, first = int(plan.slots[i]), int(plan.num_tokens[i])
            drafted = slice(first, first + int(num_drafted[i]))
            self._history[slot, drafted] = self._slots.history[slot, drafted].cpu().numpy()
        return self._sampler.num_valid(plan.slots, plan.num_tokens, num_drafted)

    def resample(self, plan: StepPlan, num_judged: IntArray, shape: Shape) -> Answers:
        """Replace tokens that the target's latest forward chose; num_judged [B] rows of each request are judged."""
        on_host = self.is_on_host[plan.slots]
        special = self.is_special[plan.slots] & ~on_host
        answers = Answers()
        if (on_host & (num_judged > 0)).any():
            self._sample_on_host(_JudgedRows.of(plan, num_judged, on_host), shape, answers)
        if (special & (num_judged > 0)).any():
            self._sample_filtered(_JudgedRows.of(plan, num_judged, special), shape, answers)
        return answers

    def _sample_on_host(self, rows: _JudgedRows, shape: Shape, answers: Answers) -> None:
        where = self._wanted_rows(rows)
        logits = self._target.logits_of(shape, where).cpu()
        tokens = self._sampler.sample(logits, rows.slots, rows.positions)
        self._target.choices.tokens[where] = torch.from_numpy(tokens.astype(np.int32)).to(where.device)
        for row, why in self._sampler.failed_rows.items():
            answers.failed.append((int(rows.owners[row]), int(rows.offsets[row]), why))
        found = self._sampler.logprobs(logits, rows.slots, tokens)
        for owner, answer in zip(rows.owners.tolist(), found, strict=False):
            if answer is not None:
                answers.logprobs.setdefault(owner, []).append(answer)

    def _wanted_rows(self, rows: _JudgedRows) -> torch.Tensor:
        """[S] indices among the wanted rows. The device may have fewer rows before them than the host's plan says."""
        owners, offsets = send(np.stack([rows.owners, rows.offsets]), self._slots.history.device)
        return self._target.rows.cu_wanted[owners] + offsets

    def _sample_filtered(self, rows: _JudgedRows, shape: Shape, answers: Answers) -> None:
        """Rows to filter are sorted to the front and rows with log-probabilities to the back: each are adjacent."""
        changed = self._filters.changes(rows.slots, rows.positions)
        counts = self._filters.num_logprobs[rows.slots]
        order = np.argsort(np.where(changed, counts >= 0, 2), kind="stable")
        order = order[(changed | (counts >= 0))[order]]
        num_best, size = int(counts.max()), self._filtered.tokens.shape[0]
        for first in range(0, order.size, size):
            some = order[first : first + size]
            where = self._wanted_rows(rows[some])
            logits = self._target.logits_of(shape, where)
            num_changed, asking = int(changed[some].sum()), some[counts[some] >= 0]
            if num_changed:
                self._choose_filtered(rows[some[:num_changed]], logits[:num_changed], where[:num_changed])
            if asking.size:
                chosen = self._target.choices.tokens[where[-asking.size :]]
                packed = logprobs(logits[-asking.size :], chosen, num_best).to("cpu", non_blocking=True)
                answers.pending.append((rows[asking], counts[asking], packed))

    def _choose_filtered(self, rows: _JudgedRows, logits: torch.Tensor, where: torch.Tensor) -> None:
        """Only tokens change. Whether a row is broken was decided by the forward, by the unfiltered logits."""
        logits = self._filters.apply(logits, rows.slots, rows.positions, self._slots.history)
        # [2, S]
        row = send(np.stack([rows.slots, rows.positions]).astype(np.int32), logits.device)
        count = torch.full((1,), rows.slots.size, dtype=torch.int32, device=logits.device)
        sample(logits, row[0], row[1], count, self._slots, self._filtered)
        self._target.choices.tokens[where] = self._filtered.tokens[: rows.slots.size]


@dataclass(frozen=True)
class _JudgedRows:
    """Some of the rows judged in a step. Arrays are [S]."""

    owners: IntArray  # index in the plan
    offsets: IntArray  # row within its owner
    places: IntArray  # row among all judged rows, by the host's plan
    slots: IntArray
    positions: IntArray

    @classmethod
    def of(cls, plan: StepPlan, num_judged: IntArray, wanted: BoolArray) -> _JudgedRows:
        """The rows of the wanted requests; num_judged [B] rows of each request are judged."""
        owners = np.repeat(np.arange(num_judged.size), num_judged)
        places = np.flatnonzero(wanted[owners])
        owners = owners[places]
        offsets = places - (np.cumsum(num_judged) - num_judged)[owners]
        return cls(owners, offsets, places, plan.slots[owners], plan.num_tokens[owners] + offsets)

    def __getitem__(self, some: IntArray) -> _JudgedRows:
        return _JudgedRows(*(getattr(self, each.name)[some] for each in fields(self)))


@dataclass
class Answers:
    """What a step returns beside tokens, by index in the plan."""

    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of rows sampled on the host
    failed: list[tuple[int, int, str]] = field(default_factory=list)  # index in the plan, row within it, reason
    # Log-probabilities that have arrived on the host when the step is finished: the rows, how many of the most likely
    # tokens each row asks for [S], and what `logprobs` packed.
    pending: list[tuple[_JudgedRows, IntArray, torch.Tensor]] = field(default_factory=list)

    def all_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By index in the plan, in the order of the rows, of a finished step."""
        found = dict(self.logprobs)
        answers: list[tuple[int, int, TokenLogprobs]] = []  # place, owner
        for rows, counts, packed in self.pending:
            unpacked = unpack_logprobs(packed.numpy(), counts)
            answers += zip(rows.places.tolist(), rows.owners.tolist(), unpacked, strict=True)
        for _, owner, answer in sorted(answers, key=lambda item: item[0]):
            found.setdefault(owner, []).append(answer)
        return found
