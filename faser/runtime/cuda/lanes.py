"""Parts of the device: streams whose kernels keep to some of its SMs.

Knows the driver's green contexts and nothing of models or graphs. A device is split in two, once for each number of SMs
of the smaller part, and stays split until `close`. A graph keeps to the SMs of the stream it was captured on, on any
stream it is launched on. So graphs are captured on these streams and never launched on them.

Our own products know the number of SMs of their part (faser/runtime/cuda/linear.py). cuBLAS does not: on an H200 it is
slower with it (`docs/lab.md`).
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from faser.errors import EngineError

log = logging.getLogger("faser.engine")

SMALLER_PARTS = (32, 64)  # SMs of the smaller part: on Hopper a multiple of 8


class Lanes:
    """One stream for each part of the device. Parts are named by their number of SMs, which differ."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, Any] = {}
        self._contexts: list[Any] = []
        self.num_sms = 0  # of the whole device
        if device.type == "cuda":
            self.num_sms = int(torch.cuda.get_device_properties(device).multi_processor_count)

    @property
    def splits(self) -> tuple[int, ...]:
        """SMs of the smaller part of each possible split; empty if the driver has no green contexts."""
        return _usable_splits(self._device.index or 0, self.num_sms) if self._device.type == "cuda" else ()

    def stream(self, num_sms: int) -> Any:
        """The stream of a part: the smaller part of one of `splits`, or the larger."""
        if self._device.type != "cuda":
            return None
        if num_sms not in self._streams:
            smaller = min(num_sms, self.num_sms - num_sms)
            for part in _split(self._device, smaller):
                self._contexts.append(part)
                self._streams[part.num_sms] = torch.cuda.ExternalStream(int(part.stream), device=self._device)  # type: ignore[no-untyped-call]
        return self._streams[num_sms]

    def close(self) -> None:
        """Undo all splits. Graphs that were captured on parts must be gone."""
        self._streams.clear()
        while self._contexts:
            self._contexts.pop().destroy()


class _Part:
    """A green context and a stream of it."""

    def __init__(self, device: Any, resource: Any) -> None:
        driver = _driver()
        self.num_sms = int(resource.sm.smCount)
        description = _done(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        self._context = _done(driver.cuGreenCtxCreate(description, device, flags.value))
        is_apart = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = _done(driver.cuGreenCtxStreamCreate(self._context, is_apart.value, 0))

    def destroy(self) -> None:
        driver = _driver()
        _done(driver.cuStreamDestroy(self.stream))
        _done(driver.cuGreenCtxDestroy(self._context))


def _split(device: torch.device, num_sms: int) -> tuple[_Part, _Part]:
    """A part of num_sms SMs, and the rest."""
    driver = _driver()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    whole = _done(driver.cuDeviceGet(device.index or 0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = _done(driver.cuDeviceGetDevResource(whole, kind))
    groups, _, rest = _done(driver.cuDevSmResourceSplitByCount(1, resource, 0, num_sms))
    if groups[0].sm.smCount != num_sms or rest.sm.smCount != resource.sm.smCount - num_sms:
        raise EngineError(f"the device cannot be split at {num_sms} of its {resource.sm.smCount} SMs")
    return _Part(whole, groups[0]), _Part(whole, rest)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _usable_splits(index: int, num_sms: int) -> tuple[int, ...]:
    """Tried once: an old driver, or one that shares the GPU with other processes, may refuse."""
    sizes = tuple(each for each in SMALLER_PARTS if 2 * each < num_sms)
    try:
        for each in sizes:
            for part in _split(torch.device("cuda", index), each):
                part.destroy()
    except (ImportError, AttributeError, RuntimeError, EngineError) as error:
        log.info("the GPU is not split: %s", error)
        return ()
    return sizes


def _done(answer: tuple[Any, ...]) -> Any:
    """The values that a call of the driver returned beside its status."""
    status, *values = answer
    if status.value:
        raise EngineError(f"the driver refused to split the GPU: {status.name}")
    return values[0] if len(values) == 1 else values
