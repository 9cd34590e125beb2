"""Models that round on the CPU, such that the output still does not depend on speculation.

Rounding makes much of little: where a number lies near the middle of two coarser ones, its last bit decides which of
them it becomes. Keys and values are rounded to 8-bit floats if asked for; rows are rounded to bfloat16 before products
with packed weights (faser/models/quantised/packed.py). Products in float32 and attention give a row other last bits in
another batch. So here they do not: rows go through the layers ROWS at a time, padded, because a product of one shape
treats all of its rows alike, and attention is computed in float64, whose last bits are lost when its results are
rounded to the dtype of the model. Where all products are with packed weights, which treat rows alike at any number of
rows, wide attention is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from faser.arrays import IntArray
from faser.models.transformer import Decoder, Transformer
from faser.runtime.cpu.runner import CpuAttention, Group, ModelRunner, Rows
from faser.runtime.kv_cache import KvFormat, round_kv

ROWS = 4  # of a product: more are faster for prompts, fewer for the row of a request that does not draft


class WideAttention(CpuAttention):
    """Attention in float64. Rows behind the real ones are padding."""

    dtype = torch.float64

    def __init__(self, model: Decoder, pages: torch.Tensor, table: IntArray, rows: Rows, **seen: Any) -> None:
        super().__init__(model, pages, table, rows, **seen)
        self._num_rows = rows.num_rows

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        attended = super().__call__(layer, qkv[: self._num_rows])
        num_padding = qkv.shape[0] - self._num_rows
        return F.pad(attended, (0, 0, 0, num_padding)) if num_padding else attended

    def _attend(self, group: Group, query: torch.Tensor, layer: int) -> torch.Tensor:
        return super()._attend(group, query.to(self.dtype), layer).to(query.dtype)

    def _read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        return super()._read(layer, pages).to(self.dtype)


class RoundedAttention(WideAttention):
    """The same over pages of 8-bit floats."""

    def __init__(
        self, model: Transformer, pages: torch.Tensor, table: IntArray, rows: Rows, *, kv: KvFormat, **seen: Any
    ) -> None:
        super().__init__(model, pages, table, rows, **seen)
        self._kv = kv

    def _write(self, layer: int, kv: torch.Tensor) -> None:
        parts = zip(kv.chunk(2, dim=1), self._kv.scales_of(layer), strict=True)
        rounded = torch.cat([round_kv(part, scale) for part, scale in parts], dim=1)
        entries = self._pages[layer].flatten(0, 1).view(torch.uint8)  # torch copies no 8-bit floats by index
        entries.index_copy_(0, self._written, rounded.view(torch.uint8))

    def _read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        kv = super()._read(layer, pages)
        for part, scale in zip(kv.chunk(2, dim=2), self._kv.scales_of(layer), strict=True):
            part.mul_(scale)
        return kv


class BlockRunner(ModelRunner):
    """Computes ROWS rows at a time."""

    def _run(self, rows: Rows, hidden: torch.Tensor, first: int, last: int | None) -> torch.Tensor:
        """In blocks of rows. Each sees what the blocks before it have stored."""
        out = torch.empty_like(hidden)
        for start, block in _blocks(rows):
            some = slice(start, start + block.num_rows)
            padded = F.pad(hidden[some], (0, 0, 0, ROWS - block.num_rows))
            out[some] = super()._run(block, padded, first, last)[: block.num_rows]
        return out


def _blocks(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """ROWS rows at a time: the index of the first, and the rows."""
    for start in range(0, rows.num_rows, ROWS):
        # [B] of each request: its rows before this block, and before the end of it
        before, until = (np.clip(each - rows.cu_rows[:-1], 0, rows.counts) for each in (start, start + ROWS))
        yield start, Rows.of(rows.slots, rows.start + before, until - before)
