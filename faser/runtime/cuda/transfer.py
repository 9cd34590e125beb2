"""Copies from the host to the device that neither waits for.

Ordinarily the device's copy engine carries them out. It takes one copy after the other, so behind a long one (the
weights of a draft that comes back: 45 ms on an H200) a step would wait for its inputs. While a long copy is under way,
kernels read the host's memory instead.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

BLOCK_WORDS = 1024  # of 4 bytes, that a program copies
_long_copies: WeakSet[Any] = WeakSet()  # who copies
_in_flight: deque[tuple[Any, Tensor]] = deque()  # events, and the memory that kernels before them read


def long_copy_begins(owner: object, device: torch.device) -> None:
    """The copy engine is about to be busy for long."""
    send_by_kernel(torch.zeros(1), device)  # the kernel's code, if it is not on the device, would wait behind the copy
    _long_copies.add(owner)


def long_copy_ended(owner: object) -> None:
    _long_copies.discard(owner)


def send(array: NDArray, device: torch.device) -> Tensor:
    """A copy to the device, enqueued on the current stream. The host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    if not _long_copies:
        return tensor.pin_memory().to(device, non_blocking=True)
    return send_by_kernel(tensor, device)


def send_by_kernel(tensor: Tensor, device: torch.device) -> Tensor:
    num_words = -(-tensor.nbytes // 4)
    words = torch.empty(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    words.view(torch.uint8)[: tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    sent = torch.empty(num_words, dtype=torch.int32, device=device)
    read_by_kernel(words, sent)
    return sent.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def read_by_kernel(source: Tensor, target: Tensor) -> None:
    """Copy int32 words from page-locked memory, which is kept until they have been read."""
    if not source.numel():
        return
    copy_words[(-(-source.numel() // BLOCK_WORDS),)](source, target, source.numel(), block=BLOCK_WORDS)
    if target.is_cuda:
        make: Any = torch.cuda.Event
        event = make()
        event.record()
        _in_flight.append((event, source))
        while _in_flight and _in_flight[0][0].query():
            _in_flight.popleft()


@triton.jit(do_not_specialize=["num_words"])
def copy_words(source, target, num_words, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_words
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


class Staging:
    """Page-locked memory that an int32 device buffer is filled from: `num_columns` arrays of one size, then one number.

    The host does not wait for copies, so two memories take turns. A memory is written again two steps later, and the
    step it was first written for has been collected by then. A step that begins on an idle device may write twice.
    """

    def __init__(self, target: Tensor, num_columns: int) -> None:
        assert target.dtype is torch.int32
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
        if self._target.is_cuda and _long_copies:
            read_by_kernel(self._memories[0], self._target)
        else:
            self._target.copy_(self._memories[0], non_blocking=True)
