"""CUDA's virtual memory: addresses that stay, and physical memory that moves between them.

Knows addresses, chunks of physical memory and the driver's calls. Knows nothing of models, pages or streams. A range is
a reservation of addresses; a chunk is physical memory that is mapped at one place of a range, or nowhere. Mapping is
the host's work: it is in no stream, and the device must be done with a chunk before the chunk is unmapped. A graph
captured over a range stays valid whatever chunks are mapped there.

On an H200 mapping a chunk takes about 39 µs and unmapping it 24 µs, whatever its size up to 32 MiB, and about 60 and
30 µs at 256 MiB.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from faser.errors import ConfigError, MoveError

log = logging.getLogger("faser.engine")


class MemoryDriver(Protocol):
    """The calls of a driver. Each raises MoveError if it fails, and has then changed nothing."""

    granularity: int  # bytes; every size and every offset is a multiple of it

    def reserve(self, num_bytes: int) -> int:
        """The first address of a range without memory."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give a range back that has no memory."""

    def create(self, num_bytes: int) -> Any:
        """A handle of physical memory that is mapped nowhere."""

    def release(self, handle: Any) -> None:
        """Give physical memory back that is mapped nowhere."""

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Put all of a handle's memory at an address of a range, readable and writable."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo a `map`."""

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """uint8 [num_bytes] at an address where memory is mapped. It keeps `owner` alive."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Lock memory of the host, so that copies to the device run beside everything else."""

    def unpin(self, address: int) -> None:
        """Undo a `pin`."""


@dataclass(frozen=True)
class AddressRange:
    """Reserved addresses."""

    address: int
    num_bytes: int


class MemoryChunk:
    """Physical memory. `address` is where it is mapped; None: nowhere."""

    def __init__(self, handle: Any, num_bytes: int) -> None:
        self.handle = handle
        self.num_bytes = num_bytes
        self.address: int | None = None


class VirtualMemory:
    """Ranges and chunks, until `close` or until nobody refers to it or to a tensor of it."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._ranges: list[AddressRange] = []
        self._chunks: list[MemoryChunk] = []
        self._finalizer = weakref.finalize(self, _release, driver, self._ranges, self._chunks)
        self._finalizer.atexit = False  # the driver may be gone, and the process gives everything back

    @property
    def num_bytes(self) -> int:
        """Of physical memory."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    def reserve(self, num_bytes: int) -> AddressRange:
        self._ranges.append(AddressRange(self._driver.reserve(num_bytes), num_bytes))
        return self._ranges[-1]

    def create(self, num_bytes: int) -> MemoryChunk:
        self._chunks.append(MemoryChunk(self._driver.create(num_bytes), num_bytes))
        return self._chunks[-1]

    def map(self, chunk: MemoryChunk, place: AddressRange, offset: int) -> None:
        assert chunk.address is None, "the chunk is mapped elsewhere"
        assert 0 <= offset <= place.num_bytes - chunk.num_bytes, "the chunk does not fit there"
        address = place.address + offset
        self._driver.map(address, chunk.num_bytes, chunk.handle)
        chunk.address = address

    def unmap(self, chunk: MemoryChunk) -> None:
        if chunk.address is not None:
            self._driver.unmap(chunk.address, chunk.num_bytes)
            chunk.address = None

    def tensor(self, place: AddressRange) -> Tensor:
        """uint8 over a whole range, whose first chunk must be mapped. Where no chunk is, it must not be touched."""
        return self._driver.tensor(place.address, place.num_bytes, self)

    def close(self) -> None:
        """Give everything back. Tensors of it must not be used any more."""
        self._finalizer()


def _release(driver: MemoryDriver, ranges: list[AddressRange], chunks: list[MemoryChunk]) -> None:
    """Give back what can be given back: on a broken device every call fails."""
    try:
        driver.synchronize()
        for chunk in chunks:
            if chunk.address is not None:
                driver.unmap(chunk.address, chunk.num_bytes)
            driver.release(chunk.handle)
        for each in ranges:
            driver.free(each.address, each.num_bytes)
    except (MoveError, RuntimeError) as error:
        log.warning("memory of the GPU is not given back: %s", error)
    chunks.clear()
    ranges.clear()


def open_driver(device: torch.device) -> MemoryDriver:
    """The driver of a device. ConfigError: why there is none."""
    if device.type != "cuda":
        raise ConfigError("there is no GPU")
    try:
        return CudaMemoryDriver(device)
    except ImportError as error:
        raise ConfigError("the package cuda-bindings is missing (`pip install cuda-bindings`)") from error
    except MoveError as error:
        raise ConfigError(f"the driver has no virtual memory for this GPU ({error})") from error


class CudaMemoryDriver:
    """The driver's calls for one GPU."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self._calls = driver
        self._device = torch.device("cuda", index)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not _done(driver.cuDeviceGetAttribute(attribute, _done(driver.cuDeviceGet(index)))):
            raise MoveError("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0")
        kind = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = kind, index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = kind, index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(_done(driver.cuMemGetAllocationGranularity(self._kind, least)))

    def reserve(self, num_bytes: int) -> int:
        return int(_done(self._calls.cuMemAddressReserve(num_bytes, 0, 0, 0)))

    def free(self, address: int, num_bytes: int) -> None:
        _done(self._calls.cuMemAddressFree(address, num_bytes))

    def create(self, num_bytes: int) -> Any:
        return _done(self._calls.cuMemCreate(num_bytes, self._kind, 0))

    def release(self, handle: Any) -> None:
        _done(self._calls.cuMemRelease(handle))

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        _done(self._calls.cuMemMap(address, num_bytes, 0, handle, 0))
        try:
            _done(self._calls.cuMemSetAccess(address, num_bytes, [self._access], 1))
        except MoveError:
            self._calls.cuMemUnmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        _done(self._calls.cuMemUnmap(address, num_bytes))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        return torch.as_tensor(_DeviceBytes(address, num_bytes, owner), device=self._device)

    def pin(self, address: int, num_bytes: int) -> None:
        _done(self._calls.cuMemHostRegister(address, num_bytes, 0))

    def unpin(self, address: int) -> None:
        _done(self._calls.cuMemHostUnregister(address))


class _DeviceBytes:
    """Memory for torch, by the protocol that CUDA libraries share. The tensor refers to this object."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _done(answer: tuple[Any, ...]) -> Any:
    """The value that a call of the driver returned beside its status."""
    status, *values = answer
    if status.value:
        raise MoveError(status.name)
    return values[0] if values else None
