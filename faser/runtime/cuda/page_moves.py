"""Pages whose content moves to other pages, in all layers at once, as one Triton kernel; entries that are copied.

Knows the memory of pages; knows nothing of who holds them.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.runtime.cuda.transfer import send
from faser.step import KvCopies, PageMoves

BLOCK = 2048  # numbers that one program copies


def move_pages(pages: Tensor, moves: PageMoves) -> None:
    """Copy pages in place. pages [num_layers, num_pages, page_size, 2 * num_kv_heads, head_dim], each layer contiguous.

    No page is both a source and a destination, so the order of the copies does not matter.
    """
    assert pages[0].is_contiguous()
    where = send(np.stack([moves.sources, moves.destinations]), pages.device)
    page_numbers = pages[0, 0].numel()
    _move_kernel[(moves.sources.size, pages.shape[0], -(-page_numbers // BLOCK))](
        pages, where[0], where[1], pages.stride(0), page_numbers, block=BLOCK, num_warps=4
    )


def copy_entries(pages: Tensor, copies: KvCopies) -> None:
    """Copy entries in place, layer by layer, by torch's own kernels: it is done once for a window of a video."""
    where = send(np.stack([copies.sources, copies.destinations]), pages.device)
    for layer in pages.view(torch.uint8):  # bytes: torch copies no 8-bit floats by index
        entries = layer.flatten(0, 1)
        entries.index_copy_(0, where[1], entries.index_select(0, where[0]))


@triton.jit(do_not_specialize=["destinations"])
def _move_kernel(pages, sources, destinations, layer_stride, page_numbers, block: tl.constexpr):
    """One program for a block of one page of one layer."""
    move, layer = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * block + tl.arange(0, block)
    source = tl.load(sources + move).to(tl.int64)
    destination = tl.load(destinations + move).to(tl.int64)
    first = pages + layer.to(tl.int64) * layer_stride
    content = tl.load(first + source * page_numbers + at, mask=at < page_numbers)
    tl.store(first + destination * page_numbers + at, content, mask=at < page_numbers)
