"""A block head on the device: one forward over what it has to read and the block, then tokens from left to right.

The rows of a request are the context tokens that the head has not read yet, whose keys and values come from the
target's features, and the block: the last context token (the anchor) and masks behind it. All rows run through the
layers together; what comes out of rows that are not of the block is not used.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.arrays import IntArray
from faser.limits import Limits
from faser.models.heads import BlockHead
from faser.runtime.cuda import linear
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.graphs import Shape, block_draft
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.model import HEAD_ROWS, CudaModel
from faser.runtime.cuda.rows import VARYING, DeviceRows, Requests
from faser.runtime.cuda.sampling import Slots, sample
from faser.runtime.cuda.tiling import Attending
from faser.step import StepPlan


class CudaBlock(CudaModel):
    """The head, its pages and its buffers. `target` has the features and the page table that they are found by."""

    sees_all = True  # a row sees all rows of its request

    def __init__(
        self, head: BlockHead, slots: Slots, limits: Limits, page_size: int, lanes: Lanes, target: CudaModel
    ) -> None:
        most = limits.max_batch_tokens + limits.max_running * (head.head_config.num_block_rows - 1)
        limits = replace(limits, max_batch_tokens=most)
        super().__init__(head, slots, limits, page_size, lanes, writes=True, window=limits.draft_window)
        assert target.features is not None
        self.block = head
        self._features = target.features
        self._target_table = target.table
        config, device, max_requests = head.head_config, head.device, limits.max_running
        self._fused = torch.zeros_like(self.hidden)  # the features of rows that are not of the block
        self._inputs = torch.zeros_like(self.hidden)
        self._in_block = torch.zeros(self.max_rows, 1, dtype=torch.bool, device=device)
        self.confidence = torch.zeros(config.num_drafts, max_requests, device=device)
        self._num_drafting = torch.zeros(1, dtype=torch.int32, device=device)
        self._scores = torch.zeros(max_requests, head.head.shape[0], dtype=torch.float32, device=device)
        self._before = torch.zeros(max_requests, dtype=torch.int32, device=device)  # the token before each draft
        self._ranked = torch.zeros(max_requests, config.markov_rank, dtype=head.dtype, device=device)

    def embed(self, shape: Shape, rows: DeviceRows) -> None:
        num_rows, config = shape.num_rows, self.block.head_config
        mark_block(self.requests_of(shape), rows, self._in_block[:num_rows], config.mask_token_id)
        self._features.read(rows, self._target_table, self._fused[:num_rows], 0)
        super().embed(shape, rows)
        if self.block.mask_embedding is not None:
            is_mask = (rows.token_ids == config.mask_token_id).unsqueeze(-1)
            hidden = self.hidden[:num_rows]
            hidden.copy_(torch.where(is_mask, self.block.mask_embedding, hidden))

    def run_layers(
        self, shape: Shape, rows: DeviceRows, attending: Sequence[Attending], layers: Iterable[int]
    ) -> Tensor:
        num_rows, eps = shape.num_rows, self.block.config.norm_eps
        hidden, normed, inputs = (each[:num_rows] for each in (self.hidden, self.normed, self._inputs))
        for index in layers:
            layer = self.block.layers[index]
            linear.rms_norm(hidden, layer.attention_norm, eps, normed)
            torch.where(self._in_block[:num_rows], normed, self._fused[:num_rows], out=inputs)
            qkv = self._qkv[:num_rows].flatten(1)
            linear.linear(inputs, layer.qkv, layer.qkv_bias, qkv, self._linear, num_sms=shape.num_sms)
            self.finish_layer(index, shape, rows, attending)
        return hidden

    def choose(self, shape: Shape, rows: DeviceRows, hidden: Tensor) -> None:
        """Tokens of all blocks, as many requests at a time as logits have room for."""
        size = self.block.head_config.num_block_rows
        wanted = torch.index_select(hidden, 0, rows.wanted, out=self._wanted[: shape.num_wanted])
        torch.div(rows.num_wanted, size, rounding_mode="floor", out=self._num_drafting)
        num_requests, at_once = shape.num_wanted // size, HEAD_ROWS // size
        for first in range(0, num_requests, at_once):
            last = min(first + at_once, num_requests)
            self._draft(shape, rows, wanted, first, last)

    def _draft(self, shape: Shape, rows: DeviceRows, wanted: Tensor, first: int, last: int) -> None:
        """The drafts of requests first to last - 1, left to right."""
        head, config, count = self.block, self.block.head_config, last - first
        size, some = config.num_block_rows, slice(first * config.num_block_rows, last * config.num_block_rows)
        logits = self.logits[: count * size]
        linear.norm_linear(
            wanted[some], head.final_norm, head.config.norm_eps, head.head, None, logits, self.normed[some],
            self._linear, num_sms=shape.num_sms, product="head",
        )  # fmt: skip
        by_row = logits.view(count, size, -1)
        slots, positions = (each[some].view(count, size) for each in (rows.wanted_slots, rows.wanted_positions))
        own_slots, choices = slots[:, 0].contiguous(), self.choices[:count]
        num_drafting = torch.clamp(self._num_drafting - first, 0, count)
        before = self._before[:count]
        before.copy_(_last_tokens(self.slots.history, own_slots, positions[:, 0]))
        for number in range(config.num_drafts):
            scores = self._scores[:count]
            scores.copy_(by_row[:, number if config.anchor_predicts else number + 1])
            if head.markov_in is not None and head.markov_out is not None:
                ranked = torch.index_select(head.markov_in, 0, before, out=self._ranked[:count])
                scores.add_(torch.mm(ranked, head.markov_out.t()))
            sample(
                scores, own_slots, positions[:, number].contiguous(), num_drafting, self.slots, choices,
                vocabulary=self._vocabulary, write=True, confidence=True,
            )  # fmt: skip
            known = choices.confidence
            if head.confidence_weight is not None:
                row = number if config.anchor_predicts else number + 1
                told = head.confidence(wanted[some].view(count, size, -1)[:, row], before)
                assert told is not None
                known = told
            self.confidence[number, first:last].copy_(known)
            before.copy_(choices.tokens)


def _last_tokens(history: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """The tokens before `positions` of some slots; any for padding."""
    return history[slots.clamp(min=0).long(), (positions - 1).clamp(min=0).long()]


def mark_block(requests: Requests, rows: DeviceRows, in_block: Tensor, mask_token_id: int) -> None:
    """Which rows are of a block, into in_block [R, 1]; masks get their token. A request that samples has a block."""
    in_block.zero_()
    _mark_kernel[(requests.slots.shape[0],)](
        requests.num_rows, requests.samples, requests.num_requests, rows.cu_rows, rows.token_ids, in_block,
        mask_token_id, rows.slots.shape[0], block=64, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*VARYING, "in_block", "mask_token_id"])
def _mark_kernel(
    num_context, samples, num_requests, cu_rows, token_ids, in_block, mask_token_id, max_rows, block: tl.constexpr
):
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    if tl.load(samples + request) == 0:
        return
    first = tl.load(cu_rows + request)
    anchor = first + tl.load(num_context + request) - 1
    end = tl.minimum(tl.load(cu_rows + request + 1), max_rows)
    for begin in range(anchor, end, block):
        row = begin + tl.arange(0, block)
        tl.store(in_block + row, 1, mask=row < end)
        tl.store(token_ids + row, mask_token_id, mask=(row < end) & (row > anchor))


class CudaBlockDrafter(CudaDrafter):
    """All drafts of a request in one launch."""

    def __init__(self, model: CudaBlock) -> None:
        self.models = (model,)
        self._model = model

    def graphs(self, num_requests: Sequence[int], length: int) -> list[tuple[CudaModel, Shape | None]]:
        size = self._model.block.head_config.num_block_rows
        # one and two tokens since the last draft, and as many as a step can bring
        rows = sorted({size, size + 1, size + length + 1})
        shapes = dict.fromkeys(block_draft(count, each, size) for each in rows for count in num_requests)
        return [(self._model, shape) for shape in shapes if shape is not None]

    def begin(self, plan: StepPlan) -> BlockLaunch:
        return BlockLaunch(self._model, plan)


class BlockLaunch:
    """The drafts of one step. The first `extend` launches them all; the others only tell of the next token."""

    is_whole = True

    def __init__(self, model: CudaBlock, plan: StepPlan) -> None:
        order = np.argsort(-plan.lengths, kind="stable")
        self._order = order[plan.draft_rows[order] > 0]  # [n] by index in the plan
        self._lengths = plan.lengths[self._order]
        self._depth = 0  # tokens told of
        self._model = model
        self._plan = plan

    @property
    def num_tokens(self) -> IntArray:
        return np.minimum(self._plan.lengths, self._depth)

    @property
    def requests(self) -> IntArray:
        return self._order[self._lengths >= self._depth]

    @property
    def num_unfinished(self) -> int:
        return int(np.count_nonzero(self._lengths > self._depth))

    @property
    def confidence(self) -> Tensor:
        return self._model.confidence[self._depth - 1]

    def extend(self, num_sms: int = 0) -> bool:
        if not self._order.size or (self._depth and not self.num_unfinished):
            return False
        if self._depth == 0:
            self._launch()
        self._depth += 1
        return True

    def _launch(self) -> None:
        plan, order, model = self._plan, self._order, self._model
        size = model.block.head_config.num_block_rows
        rows, start, none = plan.draft_rows[order], plan.draft_start[order], np.zeros_like(order)
        drafts = self._lengths > 0
        behind = np.where(drafts, size - 1, 0)
        model.set_requests(plan.slots[order], start, rows, behind, drafts, plan.unsettled[order], none, none)
        shape = block_draft(order.size, int((rows + behind).max()), size)
        model.launch_rows(shape, rows + behind, start, size * int(np.count_nonzero(drafts)))
