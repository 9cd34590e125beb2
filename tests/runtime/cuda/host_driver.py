"""Virtual memory of the host behind the calls of CUDA's: real addresses and real mappings, with a strict account.

A handle is a file in memory, mapping it is mmap at a fixed address, and a reserved address without memory faults. What
CUDA calls undefined or an error is an AssertionError here. New memory is full of NaNs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter

import torch

from faser.errors import MoveError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FIXED, _NO_RESERVE, _PROT_NONE = 0x10, 0x4000, 0
_FAILED = ctypes.c_void_p(-1).value


class HostDriver:
    """A `MemoryDriver`. `fail(name, after)` lets a later call fail."""

    def __init__(self, granularity: int = 4096) -> None:
        self.granularity = granularity
        self.ranges: dict[int, int] = {}  # bytes by address
        self.handles: dict[int, int] = {}  # bytes by file
        self.mappings: dict[int, tuple[int, int]] = {}  # bytes and file by address
        self.pinned: dict[int, int] = {}
        self.calls: Counter[str] = Counter()
        self._failing: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.handles.values())

    @property
    def is_empty(self) -> bool:
        return not (self.ranges or self.handles or self.mappings or self.pinned)

    def fail(self, name: str, after: int = 0) -> None:
        """The call of this name fails once, after `after` calls that succeed."""
        self._failing[name] = after

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if name in self._failing:
            if not self._failing[name]:
                del self._failing[name]
                raise MoveError(f"CUDA_ERROR_OF_{name.upper()}")
            self._failing[name] -= 1

    def reserve(self, num_bytes: int) -> int:
        self._count("reserve")
        assert num_bytes > 0
        assert num_bytes % self.granularity == 0
        address = _map(None, num_bytes, None)
        self.ranges[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        assert self.ranges.pop(address) == num_bytes
        assert not any(address <= each < address + num_bytes for each in self.mappings), "memory is mapped there"
        assert _libc.munmap(address, num_bytes) == 0

    def create(self, num_bytes: int) -> int:
        self._count("create")
        assert num_bytes > 0
        assert num_bytes % self.granularity == 0
        file = os.memfd_create("chunk")
        os.write(file, b"\xff" * num_bytes)
        self.handles[file] = num_bytes
        return file

    def release(self, handle: int) -> None:
        assert all(handle != file for _, file in self.mappings.values()), "the memory is mapped"
        del self.handles[handle]
        os.close(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._count("map")
        assert self.handles[handle] == num_bytes, "a part of a handle's memory"
        assert address % self.granularity == 0
        assert any(first <= address and address + num_bytes <= first + size for first, size in self.ranges.items())
        assert all(
            address + num_bytes <= other or other + size <= address for other, (size, _) in self.mappings.items()
        ), "something is mapped there"
        assert all(handle != file for _, file in self.mappings.values()), "the memory is mapped elsewhere"
        assert _map(address, num_bytes, handle) == address
        self.mappings[address] = num_bytes, handle

    def unmap(self, address: int, num_bytes: int) -> None:
        self._count("unmap")
        assert self.mappings.pop(address)[0] == num_bytes, "a part of a mapping"
        assert _map(address, num_bytes, None) == address

    def synchronize(self) -> None:
        pass

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        assert address in self.mappings, "no memory there yet"
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def pin(self, address: int, num_bytes: int) -> None:
        self._count("pin")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def _map(address: int | None, num_bytes: int, file: int | None) -> int:
    """Memory of a file at an address, or addresses without memory."""
    fixed = 0 if address is None else _FIXED
    if file is None:
        how = _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | fixed, -1
    else:
        how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file
    found = _libc.mmap(address, num_bytes, *how, 0)
    assert found != _FAILED, os.strerror(ctypes.get_errno())
    return found
