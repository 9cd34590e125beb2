"""What the host sends arrives, and does not wait for a long copy that is under way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faser.runtime.cuda.draft_memory import WeightsLoader
from faser.runtime.cuda.pinned import PinnedBlock
from faser.runtime.cuda.transfer import Staging, read_by_kernel, send, send_by_kernel
from faser.runtime.cuda.virtual_memory import open_driver

ARRAYS = [
    np.arange(3000, dtype=np.int64).reshape(3, 1000),
    np.arange(7, dtype=np.int32),
    np.linspace(0, 1, 1025, dtype=np.float32),
    np.arange(13) % 3 == 0,
    np.zeros((2, 0), dtype=np.int64),
    np.array(2.5),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype} {array.shape}")
def test_a_kernel_sends_what_a_copy_sends(device, array):
    sent = send_by_kernel(torch.from_numpy(array), torch.device(device))
    assert sent.dtype == torch.from_numpy(array).dtype
    assert np.array_equal(sent.cpu().numpy(), array)
    assert np.array_equal(send(array, torch.device(device)).cpu().numpy(), array)


def test_no_word_behind_the_end_is_written(device):
    source = torch.arange(1500, dtype=torch.int32)
    target = torch.full((2048,), -1, dtype=torch.int32, device=device)
    read_by_kernel(source.pin_memory() if device == "cuda" else source, target[:1500])
    assert torch.equal(target[:1500].cpu(), source)
    assert (target[1500:] == -1).all()


@pytest.mark.gpu
def test_a_step_gets_its_inputs_while_weights_are_copied():
    """Small and large ones; by the copy engine they would come behind gigabytes."""
    weights = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    block = PinnedBlock(weights.numel(), open_driver(weights.device))
    loader = WeightsLoader(block.bytes, weights)
    buffer = torch.zeros(2 * 6000 + 1, dtype=torch.int32, device="cuda")
    staging, numbers = Staging(buffer, 2), np.arange(6000, dtype=np.int32)
    torch.cuda.synchronize()
    loader.begin()
    staging.write([numbers, numbers + 1], 5)
    sent = send(np.arange(100_000), weights.device)
    torch.cuda.current_stream().synchronize()
    assert not loader.is_done(), "the weights are still being copied"
    assert torch.equal(buffer.cpu(), torch.from_numpy(np.concatenate([numbers, numbers + 1, [5]]).astype(np.int32)))
    assert torch.equal(sent.cpu(), torch.arange(100_000))
    torch.cuda.synchronize()
    assert loader.is_done()
