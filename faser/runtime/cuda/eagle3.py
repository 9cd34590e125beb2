"""An EAGLE-3 head on the device: its forward over static buffers, and what it drafts.

The row of a token stands at the token's own position, so its page depends on no later token; the first token of a
context has no row. Rotary positions count from one then, and only their differences matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from faser.limits import Limits
from faser.models.heads import Eagle3Head
from faser.runtime.cuda import linear
from faser.runtime.cuda.drafter import CudaModelDrafter, ModelDraft
from faser.runtime.cuda.features import CudaFeatures
from faser.runtime.cuda.graphs import ROWS_PER_REQUEST, Shape, head_draft
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.rows import DeviceRows
from faser.runtime.cuda.sampling import Slots
from faser.runtime.cuda.tiling import Attending
from faser.step import StepPlan

FIRST_ROW = 1


class CudaEagle3(CudaModel):
    """The head, its pages and its buffers. `target` has the features and the page table that they are found by."""

    first_key = FIRST_ROW

    def __init__(
        self, head: Eagle3Head, slots: Slots, limits: Limits, page_size: int, lanes: Lanes, target: CudaModel
    ) -> None:
        super().__init__(head, slots, limits, page_size, lanes, writes=True, window=limits.draft_window)
        assert target.features is not None
        self._head = head
        self._features: CudaFeatures = target.features
        self._target_table = target.table
        hidden = head.config.hidden_size

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=head.dtype, device=head.device)

        self._next_states = buffer(self.max_rows, hidden)  # of requests, in the order of the latest wanted rows
        self.carried = (self._next_states,)
        self._inputs = buffer(self.max_rows, 2 * hidden)  # embedding and state of each row, normed
        self._embedded = buffer(self.max_rows, hidden)

    def embed(self, shape: Shape, rows: DeviceRows) -> None:
        """Residual stream and inputs of the layer."""
        head, eps, num_rows = self._head, self._head.config.norm_eps, shape.num_rows
        embedded, normed, hidden = self._embedded[:num_rows], self.normed[:num_rows], self.hidden[:num_rows]
        torch.index_select(head.embedding, 0, rows.token_ids, out=embedded)
        if shape.drafts_on:
            hidden.copy_(self._next_states[:num_rows])
        else:
            self._features.read(rows, self._target_table, hidden, FIRST_ROW)
        linear.rms_norm(embedded, head.layers[0].attention_norm, eps, embedded)
        linear.rms_norm(hidden, head.state_norm, eps, normed)
        inputs = self._inputs[:num_rows].view(num_rows, 2, -1)
        inputs[:, 0].copy_(embedded)
        inputs[:, 1].copy_(normed)
        if head.head_config.norm_before_residual:
            hidden.copy_(normed)

    def run_layers(
        self, shape: Shape, rows: DeviceRows, attending: Sequence[Attending], layers: Iterable[int]
    ) -> Tensor:
        (layer,) = self._head.layers
        inputs, qkv = self._inputs[: shape.num_rows], self._qkv[: shape.num_rows].flatten(1)
        linear.linear(inputs, layer.qkv, layer.qkv_bias, qkv, self._linear, num_sms=shape.num_sms)
        self.finish_layer(0, shape, rows, attending)
        return self.hidden[: shape.num_rows]

    def choose(self, shape: Shape, rows: DeviceRows, hidden: Tensor) -> None:
        super().choose(shape, rows, hidden)
        states = hidden if shape.wants_all else self._wanted[: shape.num_wanted]
        kept = self._next_states[: shape.num_wanted]
        if self._head.head_config.norm_output:
            linear.rms_norm(states, self._head.final_norm, self._head.config.norm_eps, kept)
        else:
            kept.copy_(states)


class CudaEagle3Drafter(CudaModelDrafter):
    """The first launch of a step computes the rows that the target has verified since: one more than it accepted."""

    def graphs(self, num_requests: Sequence[int], length: int) -> list[tuple[CudaModel, Shape | None]]:
        (model,) = self.models
        each = [rows for rows in ROWS_PER_REQUEST[1:] if rows < 2 * (length + 1)]
        shapes = [head_draft(size, rows) for rows in each for size in num_requests]
        found: list[tuple[CudaModel, Shape | None]] = [(model, shape) for shape in shapes if shape is not None]
        further = super().graphs(num_requests, length)
        return found + further[len(num_requests) :]

    def begin(self, plan: StepPlan) -> ModelDraft:
        return ModelDraft(self.models[0], plan, self.ragged, head_draft, FIRST_ROW)
