"""The draft's memory on the CPU: the same moves as on a GPU, with plain memory.

The copy of the weights stays in the host's memory, so what a move gains here is address space, not memory: `auto`
leaves it off. It is there so that everything about residency runs without a GPU.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from faser.models.transformer import Transformer
from faser.runtime.weights_home import home_bytes, move_in, own_weights


class HostBlock:
    """Memory whose pages the system gives when they are first written, and takes back when they are released."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:num_bytes]

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Zero bytes start … stop - 1, and give their memory back."""
        stop = self.bytes.numel() if stop is None else stop
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.bytes[start:stop] = 0
            return
        self.bytes[start:first] = 0
        self.bytes[last:stop] = 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


class CpuDraftMemory:
    """A `DraftMemory`. `target_pages` and `draft_pages` are the memory of both models' pages."""

    def __init__(
        self,
        target: Transformer,
        draft: Transformer,
        target_pages: HostBlock,
        draft_pages: HostBlock,
        base_pages: int,
        pages_gained: int,
    ) -> None:
        weights = own_weights(draft, target)
        self._weights = HostBlock(home_bytes(weights))
        move_in(weights, self._weights.bytes)
        self._copy: Tensor = self._weights.bytes.clone()
        self._target_pages = target_pages
        self._draft_pages = draft_pages
        self._layer_bytes = target_pages.bytes.numel() // target.num_layers
        self._base_bytes = self._layer_bytes // (base_pages + pages_gained) * base_pages
        self.pages_gained = pages_gained
        self.load_seconds = self._copy.numel() / 5e9

    def offload(self) -> bool:
        self._weights.release()
        self._draft_pages.release()
        return True

    def load(self) -> bool:
        for start in range(0, self._target_pages.bytes.numel(), self._layer_bytes):
            self._target_pages.release(start + self._base_bytes, start + self._layer_bytes)
        self._weights.bytes.copy_(self._copy)
        return True
