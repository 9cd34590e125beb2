"""Drafts tokens for a batch: catch up, one first pass over the last one or two tokens of every context, further tokens.

All inputs of the first pass and of further tokens stand in tensors that stay in place, so that both can be captured as
CUDA graphs (graphs.py); without graphs the same functions run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from faser.arrays import IntArray
from faser.vllm.drafting.lag import STEADY_LAG
from faser.vllm.drafting.rows import ForwardRows, LagPiece, Paging, host_rows, plan_catch_up

Sample = Callable[[Tensor, int], Tensor]  # (hidden states [B, H], place in the draft) -> tokens [B]


class DraftForward(Protocol):
    """The draft model, as an adapter offers it."""

    def forward(self, rows: ForwardRows) -> Tensor:
        """[N, H] hidden states."""

    def top_tokens(self, hidden_states: Tensor) -> Tensor:
        """[B] the most likely token after each."""


class LoopReplay(Protocol):
    """Runs what was captured."""

    @property
    def sizes(self) -> Sequence[int]:
        """Numbers of requests, ascending."""

    def first(self, width: int, num_requests: int) -> int:
        """The first pass of the smallest size that is large enough; returns that size, or 0: there is none."""

    def next(self, size: int) -> None:
        """One further token of each."""


class DraftLoop:
    """Draft tokens of up to `max_requests` requests. The batch's inputs are set by `load`."""

    def __init__(
        self, model: DraftForward, paging: Paging, *, max_requests: int, max_rows: int, max_depth: int
    ) -> None:
        """`max_rows`: of a forward that catches up."""
        self.model, self.paging = model, paging
        self.max_requests, self.max_rows, self.max_depth = max_requests, max_rows, max_depth
        self.device = paging.history.device
        zeros = torch.zeros(max_requests, dtype=torch.int64, device=self.device)
        self.lengths = zeros.clone()  # [B] context tokens, the newest included; 0: padding
        self.history_rows = zeros.clone()  # [B] rows of the history
        self.ends = zeros.clone()  # [B] context tokens and drafts that the draft has been given
        self.tokens = zeros.clone()  # [B] newest drafts
        self.drafts = torch.zeros(max_depth, max_requests, dtype=torch.int64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the newest drafts
        self._index = torch.arange(max_requests + 1, dtype=torch.int64, device=self.device)
        self._starts = {width: (self._index * width).to(torch.int32) for width in range(1, STEADY_LAG + 1)}
        self._starts_cpu = {width: starts.cpu() for width, starts in self._starts.items()}
        self.replay: LoopReplay | None = None

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, lengths: Tensor, history_rows: Tensor) -> None:
        """[B] context tokens, the newest included, and the rows of the history that hold them."""
        number = lengths.shape[0]
        self.lengths[:number].copy_(lengths)
        self.lengths[number:].zero_()
        self.history_rows[:number].copy_(history_rows)

    def draft(self, lags: IntArray, depth: int, sample: Sample | None = None) -> Tensor:
        """[B, depth] tokens after the contexts loaded last. `sample`: instead of the most likely tokens; not captured.

        `lags`: [B] tokens that the draft lacks of each context, at most.
        """
        number = lags.size
        width = 1 if lags.max(initial=1) <= 1 else STEADY_LAG
        for pieces in plan_catch_up(lags, width, self.max_rows):
            self.catch_up(pieces)
        if sample is None:
            captured = self.first(width, number)
            for _ in range(depth - 1):
                self.next(captured, number)
        else:
            self.run_first(width, number, sample)
            for place in range(1, depth):
                self.run_next(number, sample, place)
        # a copy in every case: vLLM still reads these drafts while the next ones are made
        return self.drafts[:depth, :number].t().clone(memory_format=torch.contiguous_format)

    def first(self, width: int, number: int) -> int:
        """The first pass for `number` requests; returns the size of the graph that ran, or 0: it ran eagerly."""
        captured = 0 if self.replay is None else self.replay.first(width, number)
        if not captured:
            self.run_first(width, number)
        return captured

    def next(self, captured: int, number: int) -> None:
        """A further token of each; `captured` is what `first` returned."""
        if self.replay is not None and captured:
            self.replay.next(captured)
        else:
            self.run_next(number)

    def pretend(self, number: int, context: int) -> None:
        """Load made-up contexts, for measurements: KV entries are written to whatever the block table names."""
        self.load(self.lengths.new_full((number,), context), self.history_rows.new_zeros(number))

    def catch_up(self, pieces: Sequence[LagPiece]) -> None:
        """Compute rows of requests that fell behind; nothing is sampled from them."""
        owners, backs = (self._to_device(each) for each in host_rows(pieces))
        who = self._to_device(np.array([piece.owner for piece in pieces]))
        ends = self._to_device(np.array([piece.end for piece in pieces]))
        starts = np.cumsum([0, *(piece.rows for piece in pieces)], dtype=np.int32)
        positions = self.lengths[owners] - backs
        self._forward(
            owners=owners,
            positions=positions,
            input_ids=self.paging.token_at(self.history_rows[owners], positions),
            starts=torch.from_numpy(starts).to(self.device, non_blocking=True),
            starts_cpu=torch.from_numpy(starts),
            seq_lens=(self.lengths[who] - ends).clamp(min=0),
            block_table=self.paging.block_table[who],
            max_rows=max(piece.rows for piece in pieces),
        )

    # ── what is captured: no value is read by the host ───────────────────────────────────────────────────────────────

    def run_first(self, width: int, size: int, sample: Sample | None = None) -> None:
        """The last `width` tokens of `size` contexts; the first drafts."""
        lengths = self.lengths[:size]
        owners = self._index[:size].repeat_interleave(width, output_size=size * width)
        positions = (lengths[:, None] - width + self._index[:width]).flatten()
        hidden = self._forward(
            owners=owners,
            positions=positions,
            input_ids=self.paging.token_at(self.history_rows[owners], positions),
            starts=self._starts[width][: size + 1],
            starts_cpu=self._starts_cpu[width][: size + 1],
            seq_lens=lengths,
            block_table=self.paging.block_table[:size],
            max_rows=width,
        )
        self.ends[:size].copy_(lengths)
        self.place.zero_()
        self._keep(hidden[width - 1 :: width], size, sample, 0)

    def run_next(self, size: int, sample: Sample | None = None, place: int = 0) -> None:
        """The newest drafts; a further draft of each. `place` is told to `sample` alone."""
        ends = self.ends[:size]
        positions = ends.clone()
        ends.add_(1)
        hidden = self._forward(
            owners=self._index[:size],
            positions=positions,
            input_ids=self.tokens[:size],
            starts=self._starts[1][: size + 1],
            starts_cpu=self._starts_cpu[1][: size + 1],
            seq_lens=torch.where(self.lengths[:size] > 0, ends, 0),
            block_table=self.paging.block_table[:size],
            max_rows=1,
        )
        # clamped: measurements replay this alone, more often than a draft is long
        self.place.add_(1).clamp_(max=self.max_depth - 1)
        self._keep(hidden, size, sample, place)

    def _keep(self, hidden: Tensor, size: int, sample: Sample | None, place: int) -> None:
        tokens = self.model.top_tokens(hidden) if sample is None else sample(hidden, place)
        self.tokens[:size].copy_(tokens)
        self.drafts[:, :size].index_copy_(0, self.place, self.tokens[None, :size])

    def _forward(
        self,
        *,
        owners: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        starts: Tensor,
        starts_cpu: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        max_rows: int,
    ) -> Tensor:
        limit = self.paging.limit
        rows = ForwardRows(
            input_ids=input_ids.to(torch.int32),
            positions=positions.clamp(0, limit - 1),
            slots=self.paging.slot_of(owners, positions, self.lengths[owners] > 0),
            starts=starts,
            starts_cpu=starts_cpu,
            seq_lens=seq_lens.clamp(max=limit).to(torch.int32),
            block_table=block_table,
            max_rows=max_rows,
        )
        return self.model.forward(rows)

    def _to_device(self, values: IntArray) -> Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
