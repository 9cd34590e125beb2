"""Moving pages: their content is found at the destination, in every layer, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faser.runtime.cuda.page_moves import BLOCK, copy_entries, move_pages
from faser.step import KvCopies, PageMoves

SHAPES = {
    "a page smaller than a block": (3, 12, 4, 4, 16),
    "a page of many blocks": (2, 12, 16, 4, 80),
    "a page and a bit": (2, 12, 1, 1, BLOCK + 24),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_spread", [False, True], ids=["contiguous", "layers apart"])
def test_pages_are_found_at_their_destination_in_every_layer(place, shape, is_spread):
    device, dtype = place
    num_layers, num_pages, *page = SHAPES[shape]
    spare = 3 if is_spread else 0  # pages that addresses are reserved for
    whole = torch.randn(num_layers, num_pages + spare, *page).to(device, dtype)
    pages = whole[:, :num_pages]
    expected = whole.clone()
    moves = PageMoves(np.array([11, 3, 7]), np.array([0, 5, 10]))
    expected[:, [0, 5, 10]] = expected[:, [11, 3, 7]]
    move_pages(pages, moves)
    assert torch.equal(whole, expected)


def test_pages_and_entries_of_eight_bits_are_copied_byte_by_byte(device):
    whole = torch.randint(0, 256, (3, 12, 4, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = whole.to(device)
    pages, expected = whole.view(torch.float8_e4m3fn)[:, :10], whole.clone()
    expected[:, [0, 5]] = expected[:, [9, 3]]
    move_pages(pages, PageMoves(np.array([9, 3]), np.array([0, 5])))
    assert torch.equal(whole, expected)
    entries = expected[:, :10].flatten(1, 2)
    entries[:, [2, 7]] = entries[:, [7, 30]].clone()
    expected[:, :10] = entries.view(3, 10, 4, 4, 16)
    copy_entries(pages, KvCopies(np.array([7, 30]), np.array([2, 7])))
    assert torch.equal(whole, expected)


@pytest.mark.gpu
def test_layers_far_apart_are_reached():
    """A layer of more than 2³¹ numbers."""
    whole = torch.zeros(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    pages = whole.view(2, -1, 16, 4, 64)
    last = pages.shape[1] - 1
    pages[1, last] = 7.0
    move_pages(pages, PageMoves(np.array([last]), np.array([1])))
    assert (pages[1, 1] == 7.0).all()
    assert not pages[0, 1].any()
