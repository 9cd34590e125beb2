"""From the host to the device without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray, device: torch.device) -> Tensor:
    """To the device, behind what is enqueued there and without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Staging:
    """Page-locked memory that a device buffer is filled from: `num_columns` arrays of one size, then one number.

    Copies are not waited for, so there are two of these to take turns: one is written again when the step after the
    one it was for is submitted, and by then that one has been collected. A step may write twice if it began on an idle
    device, as those that wait for the one before do.
    """

    def __init__(self, target: Tensor, num_columns: int) -> None:
        self._target = target
        self._num_columns = num_columns
        memories = [torch.zeros(target.shape, dtype=target.dtype) for _ in range(2)]
        self._memories = [memory.pin_memory() if target.is_cuda else memory for memory in memories]

    def write(self, columns: Sequence[NDArray], number: int) -> None:
        self._memories.reverse()
        array = self._memories[0].numpy()
        for row, column in zip(array[:-1].reshape(self._num_columns, -1), columns, strict=True):
            row[: column.size] = column
        array[-1] = number
        self._target.copy_(self._memories[0], non_blocking=True)
