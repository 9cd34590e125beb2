"""Attention on the CPU: ragged, over pages, with plain torch calls.

Requests are put into groups. A group's pages are gathered into one padded block, and torch's fused attention is called
once per group and layer. Indices, masks and rotation depend on the rows alone and are prepared once per forward. The
query heads that share a key head are folded into the query's rows, which keeps the fused kernel on its fast path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from faser.arrays import IntArray
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from faser.runtime.cpu.rows import Rows
from faser.runtime.kv_cache import KVCache

SHORT_ROWS = 16  # a request with more rows is a group of its own
SPARE_PAGES = 64  # pages of padding that a group may always have; beyond it, at most half of its pages may be padding
GROUP_BYTES = 3 * 2**20  # keys and values of a group: more would leave the CPU's cache before they are used


@dataclass(frozen=True)
class _Group:
    """Requests that attend in one call: G requests padded to L rows and S keys."""

    rows: torch.Tensor | slice  # [G * L] indices of the query rows; padding repeats a request's last row
    real: torch.Tensor | None  # [R'] indices into `rows` that are not padding; None: no padding
    real_rows: torch.Tensor | slice  # [R'] the query rows at these indices
    pages: torch.Tensor  # [G * S / page_size]
    void: torch.Tensor  # [V] indices into the G * S gathered entries that are padding or not yet written
    num_requests: int
    mask: torch.Tensor  # [G, 1, L, S], or [G, 1, heads per key head * L, S] where folded
    folded: bool


class CpuAttention:
    """Attention over the rows of one forward."""

    def __init__(self, model: Transformer, cache: KVCache, table: IntArray, rows: Rows) -> None:
        config = model.config
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._cache = cache
        positions = torch.from_numpy(rows.positions)
        # [R, 1, head_dim // 2]
        self._cos, self._sin = model.cos[positions].unsqueeze(1), model.sin[positions].unsqueeze(1)
        size = cache.page_size
        pages = table[rows.owners, rows.positions // size]
        self._written = torch.from_numpy(pages * size + rows.positions % size)  # [R]
        heads_per_kv = config.num_heads // config.num_kv_heads
        page_bytes = size * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        members_of = _partition(rows, size, max(1, GROUP_BYTES // page_bytes))
        self._groups = [_make_group(rows, table, size, members, heads_per_kv, model.dtype) for members in members_of]

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        rotate(qkv[:, : num_heads + num_kv_heads], self._cos, self._sin)
        self._cache.layer_rows(layer).index_copy_(0, self._written, qkv[:, num_heads:])
        pages = self._cache.layer(layer)
        if len(self._groups) == 1 and self._groups[0].real is None:
            return self._attend(self._groups[0], qkv[:, :num_heads], pages)
        out = qkv.new_empty(qkv.shape[0], num_heads * qkv.shape[2])
        for group in self._groups:
            attended = self._attend(group, qkv[:, :num_heads], pages)
            out[group.real_rows] = attended if group.real is None else attended[group.real]
        return out

    def _attend(self, group: _Group, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] → [G * L, heads * head_dim]"""
        num_kv, head_dim = self._num_kv_heads, query.shape[2]
        fold = self._num_heads // num_kv
        # [G, S, 2 * kv heads, head_dim]. Void entries are zeroed: they may hold another request's overflow, and a
        # weight of zero times infinity is NaN.
        kv = pages.index_select(0, group.pages).flatten(0, 1).index_fill_(0, group.void, 0)
        kv = kv.view(group.num_requests, -1, 2 * num_kv, head_dim)
        key, value = kv[:, :, :num_kv].transpose(1, 2), kv[:, :, num_kv:].transpose(1, 2)
        # [G, kv heads, heads per key head, L, head_dim]
        query = query[group.rows].view(group.num_requests, -1, num_kv, fold, head_dim).permute(0, 2, 3, 1, 4)
        num_rows = query.shape[3]
        if group.folded:
            query = query.reshape(group.num_requests, num_kv, fold * num_rows, head_dim)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, scale=self._scale)
            out = out.view(group.num_requests, num_kv, fold, num_rows, head_dim)
        else:  # one request: kv heads take the place of the batch
            key, value = (x[0].unsqueeze(1).expand(-1, fold, -1, -1) for x in (key, value))
            out = F.scaled_dot_product_attention(query[0], key, value, attn_mask=group.mask, scale=self._scale)[None]
        return out.permute(0, 3, 1, 2, 4).reshape(-1, self._num_heads * head_dim)


def _partition(rows: Rows, page_size: int, most_pages: int) -> list[IntArray]:
    """Groups, by index: short requests of similar context, at most `most_pages` pages; each long request alone."""
    long = rows.counts > SHORT_ROWS
    groups = [np.array([i]) for i in np.flatnonzero(long).tolist()]
    short = np.flatnonzero(~long)
    num_pages = -(-(rows.start + rows.counts) // page_size)
    short = short[np.argsort(-num_pages[short], kind="stable")]
    while short.size:
        padding = num_pages[short[0]] - num_pages[short]
        fits = (padding.cumsum() <= SPARE_PAGES) | (2 * padding <= num_pages[short[0]])
        fits &= np.arange(1, short.size + 1) * num_pages[short[0]] <= most_pages
        fits[0] = True
        size = short.size if fits.all() else int(np.argmin(fits))
        groups.append(np.sort(short[:size]))
        short = short[size:]
    return groups


def _make_group(
    rows: Rows, table: IntArray, page_size: int, members: IntArray, heads_per_kv: int, dtype: torch.dtype
) -> _Group:
    counts, start = rows.counts[members], rows.start[members]
    first = rows.cu_rows[members]
    num_rows = int(counts.max())
    num_pages = -(-int((start + counts).max()) // page_size)
    offsets = np.minimum(np.arange(num_rows), counts[:, None] - 1)  # [G, L]
    real = np.arange(num_rows) < counts[:, None]  # [G, L]
    taken = (first[:, None] + offsets).reshape(-1)
    # A row may see keys up to its own position. [G, L, S]
    keys = np.arange(num_pages * page_size)
    visible = keys <= (start[:, None] + offsets)[:, :, None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -math.inf)
    folded = num_rows <= SHORT_ROWS
    if folded:
        mask = mask[:, None].expand(-1, heads_per_kv, -1, -1).reshape(members.size, 1, heads_per_kv * num_rows, -1)
    else:
        mask = mask[:, None]
    contiguous = bool(real.all()) and int(taken[-1] - taken[0]) + 1 == taken.size
    picked: torch.Tensor | slice = slice(int(taken[0]), int(taken[-1]) + 1) if contiguous else torch.from_numpy(taken)
    return _Group(
        rows=picked,
        real=None if real.all() else torch.from_numpy(np.flatnonzero(real)),
        real_rows=picked if real.all() else torch.from_numpy(taken[real.reshape(-1)]),
        pages=torch.from_numpy(table[rows.slots[members], :num_pages].reshape(-1)),  # padding is masked
        void=torch.from_numpy(np.flatnonzero(keys >= (start + counts)[:, None])),
        num_requests=int(members.size),
        mask=mask,
        folded=folded,
    )
