"""The target's features on the device, for a draft head: fused, in pages under the target's page table.

Knows the residual streams that a head reads and how it fuses them. Knows nothing of plans or of drafting. Whatever
context the target has, the head can compute from these pages.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.runtime.cuda import linear
from faser.runtime.cuda.rows import DeviceRows
from faser.runtime.kv_cache import feature_bytes_per_page


class CudaFeatures:
    """Static buffers for the features of the latest forward, and the pages of all of them."""

    def __init__(self, head: DraftHead, max_rows: int, page_size: int) -> None:
        config, device = head.head_config, head.device
        assert config.feature_layers is not None, "a head in memory knows its target"
        self._head = head
        self._number = {layer: index for index, layer in enumerate(config.feature_layers)}
        self._page_size = page_size

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=head.dtype, device=device)

        self._joined = buffer(max_rows, config.feature_size)
        self._normed = buffer(max_rows, config.target_hidden_size) if config.fc_norm else None
        self._fused = buffer(max_rows, head.config.hidden_size)
        self._linear = linear.LinearWorkspace.allocate(device)
        self.pages = torch.zeros(0, dtype=head.dtype, device=device)  # [pages, page_size, hidden]

    @property
    def page_bytes(self) -> int:
        return feature_bytes_per_page(self._head.config, self._page_size, self._head.dtype)

    def allocate_pages(self, num_pages: int) -> None:
        self.pages = self.pages.new_zeros(num_pages, self._page_size, self._head.config.hidden_size)

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Remember the residual stream [R, target hidden] before a layer, if the head reads it."""
        number = self._number.get(layer)
        if number is None:
            return
        num_rows, head = hidden.shape[0], self._head
        if isinstance(head, Eagle3Head) and head.fc_norm is not None and self._normed is not None:
            normed = self._normed[:num_rows]
            linear.rms_norm(hidden, head.fc_norm[number], head.config.norm_eps, normed)
            hidden = normed
        self._joined[:num_rows].view(num_rows, len(self._number), -1)[:, number].copy_(hidden)

    def store(self, rows: DeviceRows, table: Tensor) -> None:
        """Fuse what was kept and write it to the pages of the rows."""
        num_rows = rows.slots.shape[0]
        _copy_rows(self._fuse(num_rows), self.pages, rows, table, 0, writes=True)

    def read(self, rows: DeviceRows, table: Tensor, out: Tensor, behind: int) -> None:
        """out [R, hidden]: the features of the tokens `behind` positions before the rows."""
        _copy_rows(out, self.pages, rows, table, behind, writes=False)

    def _fuse(self, num_rows: int) -> Tensor:
        """The same as the `fuse` of heads, in static buffers."""
        head, eps = self._head, self._head.config.norm_eps
        joined, fused = self._joined[:num_rows], self._fused[:num_rows]
        if isinstance(head, Eagle3Head) and head.input_norm is not None:
            linear.rms_norm(joined, head.input_norm, eps, joined)
        linear.linear(joined, head.fc, None, fused, self._linear)
        if isinstance(head, BlockHead):
            linear.rms_norm(fused, head.feature_norm, eps, fused)
        return fused


def _copy_rows(each: Tensor, pages: Tensor, rows: DeviceRows, table: Tensor, behind: int, *, writes: bool) -> None:
    """Rows [R, width] to their entries in pages [pages, page_size, width], or the other way round."""
    num_rows, width = each.shape
    assert each.is_contiguous()
    assert pages.is_contiguous()
    _copy_rows_kernel[(num_rows,)](
        each, pages, table, rows.slots, rows.positions, rows.num_rows, table.stride(0), behind, width,
        page_size=pages.shape[1], block=min(1024, triton.next_power_of_2(width)), writes=writes, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "slots", "positions", "table_stride", "behind"])
def _copy_rows_kernel(
    rows, pages, table, slots, positions, num_rows, table_stride, behind, width,
    page_size: tl.constexpr, block: tl.constexpr, writes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    position = tl.load(positions + row) - behind
    page = tl.load(table + tl.load(slots + row).to(tl.int64) * table_stride + position // page_size)
    entry = pages + (page.to(tl.int64) * page_size + position % page_size) * width
    own = rows + row.to(tl.int64) * width
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        if writes:
            tl.store(entry + column, tl.load(own + column, mask=inside), mask=inside)
        else:
            tl.store(own + column, tl.load(entry + column, mask=inside), mask=inside)
