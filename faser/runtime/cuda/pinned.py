"""Memory of the host that the device copies from at full speed, beside everything else.

torch's own pinned memory would be rounded up to a power of two, and is locked 4 KiB at a time: seconds for gigabytes.
Here the system is asked for pages of 2 MiB, all cores touch them, and then they are locked.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref

import torch

from faser.errors import ConfigError, MoveError
from faser.machine import free_memory_bytes
from faser.runtime.cuda.virtual_memory import MemoryDriver
from faser.runtime.kv_cache import GIB

log = logging.getLogger("faser.engine")

SPARE_BYTES = 2 * GIB  # that a pinned block leaves to everybody else
HUGE_PAGE = 2 * 2**20


def require_host_memory(num_bytes: int) -> None:
    """ConfigError if `num_bytes` cannot be locked."""
    free = free_memory_bytes()
    if num_bytes + SPARE_BYTES > free:
        raise ConfigError(
            f"its copy in host memory takes {num_bytes / GIB:.1f} GiB beside a reserve of {SPARE_BYTES / GIB:.0f} GiB, "
            f"and {free / GIB:.1f} GiB are free"
        )


class PinnedBlock:
    """`bytes` is uint8 [num_bytes] in locked memory, until `close` or until nobody refers to the block."""

    def __init__(self, num_bytes: int, driver: MemoryDriver) -> None:
        length = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        memory = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE
        self.bytes = whole[start : start + num_bytes]
        self.bytes.fill_(0)
        address = self.bytes.data_ptr()
        driver.pin(address, length)
        self._finalizer = weakref.finalize(self, _unpin, driver, address)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Unlock the memory. No copy must be under way."""
        self._finalizer()


def _unpin(driver: MemoryDriver, address: int) -> None:
    try:
        driver.unpin(address)
    except MoveError as error:
        log.warning("memory of the host stays locked: %s", error)
