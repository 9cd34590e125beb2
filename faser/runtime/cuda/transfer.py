"""Copies from the host to the device that neither waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray, device: torch.device) -> Tensor:
    """A copy to the device, enqueued on the current stream. The host does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Staging:
    """Page-locked memory that a device buffer is filled from: `num_columns` arrays of one size, then one number.

    The host does not wait for copies, so two memories take turns. A memory is written again two steps later, and the
    step it was first written for has been collected by then. A step that begins on an idle device may write twice.
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
