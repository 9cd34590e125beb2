"""Virtual memory: chunks move between addresses, errors change nothing, and everything is given back."""

from __future__ import annotations

import gc

import pytest
import torch

from faser.errors import ConfigError, MoveError
from faser.runtime.cuda.virtual_memory import VirtualMemory, _done, open_driver
from tests.runtime.cuda.host_driver import HostDriver

SIZE = 8192


@pytest.fixture
def driver():
    return HostDriver()


@pytest.fixture
def memory(driver):
    return VirtualMemory(driver)


def test_the_content_of_a_chunk_goes_where_the_chunk_goes(memory):
    first, second = memory.reserve(2 * SIZE), memory.reserve(2 * SIZE)
    chunks = [memory.create(SIZE) for _ in range(3)]
    memory.map(chunks[0], first, 0)
    memory.map(chunks[1], second, 0)
    memory.map(chunks[2], second, SIZE)
    here, there = memory.tensor(first), memory.tensor(second)
    there[SIZE:] = torch.arange(SIZE) % 251
    expected = there[SIZE:].clone()
    memory.unmap(chunks[2])
    memory.map(chunks[2], first, SIZE)
    assert torch.equal(here[SIZE:], expected)
    assert memory.num_bytes == 3 * SIZE


@pytest.mark.parametrize("offset", [-4096, SIZE + 4096])
def test_a_chunk_must_fit_into_the_range(memory, offset):
    place, chunk = memory.reserve(2 * SIZE), memory.create(SIZE)
    with pytest.raises(AssertionError, match="does not fit"):
        memory.map(chunk, place, offset)


def test_a_chunk_is_at_one_place(memory):
    place, chunk = memory.reserve(2 * SIZE), memory.create(SIZE)
    memory.map(chunk, place, 0)
    with pytest.raises(AssertionError, match="elsewhere"):
        memory.map(chunk, place, SIZE)


def test_unmapping_twice_is_nothing(memory, driver):
    place, chunk = memory.reserve(SIZE), memory.create(SIZE)
    memory.map(chunk, place, 0)
    memory.unmap(chunk)
    memory.unmap(chunk)
    assert driver.calls["unmap"] == 1


@pytest.mark.parametrize("call", ["map", "unmap"])
def test_a_call_that_fails_changes_nothing(memory, driver, call):
    place, chunk = memory.reserve(SIZE), memory.create(SIZE)
    if call == "unmap":
        memory.map(chunk, place, 0)
    before = chunk.address
    driver.fail(call)
    with pytest.raises(MoveError, match=f"CUDA_ERROR_OF_{call.upper()}"):
        memory.map(chunk, place, 0) if call == "map" else memory.unmap(chunk)
    assert chunk.address == before
    memory.unmap(chunk)
    memory.map(chunk, place, 0)


def test_close_gives_everything_back_mapped_or_not(memory, driver):
    place, mapped, _ = memory.reserve(SIZE), memory.create(SIZE), memory.create(SIZE)
    memory.map(mapped, place, 0)
    memory.close()
    memory.close()
    assert driver.is_empty


def test_memory_lives_as_long_as_a_tensor_of_it(driver):
    memory = VirtualMemory(driver)
    place, chunk = memory.reserve(SIZE), memory.create(SIZE)
    memory.map(chunk, place, 0)
    tensor = memory.tensor(place)[:3]
    del memory, chunk, place
    gc.collect()
    tensor.fill_(7)
    del tensor
    gc.collect()
    assert driver.is_empty


def test_memory_that_cannot_be_given_back_is_logged(memory, driver, caplog):
    place, chunk = memory.reserve(SIZE), memory.create(SIZE)
    memory.map(chunk, place, 0)
    driver.fail("unmap")
    memory.close()
    assert "not given back: CUDA_ERROR_OF_UNMAP" in caplog.text


def test_without_a_gpu_there_is_no_driver():
    with pytest.raises(ConfigError, match="no GPU"):
        open_driver(torch.device("cpu"))


class _Status:
    value, name = 2, "CUDA_ERROR_OUT_OF_MEMORY"


def test_an_error_carries_cudas_name():
    with pytest.raises(MoveError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        _done((_Status,))


class Calls:
    """The driver's calls without a GPU: recorded, and answered as CUDA answers. `failing` names calls that fail."""

    def __init__(self, monkeypatch) -> None:
        self.driver = pytest.importorskip("cuda.bindings.driver")
        self.failing: set[str] = set()
        self.made: list[tuple] = []
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        values = {
            "cuDeviceGet": 1, "cuDeviceGetAttribute": 1, "cuMemGetAllocationGranularity": 2**21,
            "cuMemAddressReserve": 2**40, "cuMemCreate": "handle", "cuMemMap": None, "cuMemSetAccess": None,
            "cuMemUnmap": None, "cuMemRelease": None, "cuMemAddressFree": None, "cuMemHostRegister": None,
            "cuMemHostUnregister": None,
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.setattr(self.driver, name, self._call(name, value))

    def _call(self, name, value):
        def call(*given):
            self.made.append((name, *given))
            if name in self.failing:
                return (self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, *([] if value is None else [None]))
            return (self.driver.CUresult.CUDA_SUCCESS, *([] if value is None else [value]))

        return call


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def test_a_mapping_that_cannot_be_made_accessible_is_undone(calls):
    driver = open_driver(torch.device("cuda"))
    assert driver.granularity == 2**21
    address, handle = driver.reserve(2**22), driver.create(2**21)
    calls.failing.add("cuMemSetAccess")
    calls.made.clear()
    with pytest.raises(MoveError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        driver.map(address, 2**21, handle)
    assert [name for name, *_ in calls.made] == ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"]
    assert calls.made[0][1:] == (address, 2**21, 0, handle, 0)


def test_memory_is_made_on_the_current_gpu_and_readable_there(calls):
    driver = open_driver(torch.device("cuda"))
    driver.create(2**21)
    kind = calls.made[-1][2]
    assert (kind.location.id, kind.location.type) == (1, calls.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    assert kind.type == calls.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    driver.map(2**40, 2**21, "handle")
    (access,) = calls.made[-1][3]
    assert access.location.id == 1
    assert access.flags == calls.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def test_a_gpu_without_virtual_memory_has_no_driver(calls, monkeypatch):
    calls.failing.add("cuDeviceGetAttribute")
    with pytest.raises(ConfigError, match=r"no virtual memory for this GPU \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        open_driver(torch.device("cuda"))
    monkeypatch.setattr(calls.driver, "cuDeviceGetAttribute", lambda *_: (calls.driver.CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(ConfigError, match="SUPPORTED is 0"):
        open_driver(torch.device("cuda"))


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def on_gpu():
    memory = VirtualMemory(open_driver(torch.device("cuda")))
    yield memory
    memory.close()


@pytest.mark.gpu
def test_a_graph_replays_after_its_range_got_other_memory(on_gpu):
    size = on_gpu._driver.granularity
    place, spare = on_gpu.reserve(size), on_gpu.reserve(size)
    first, second = on_gpu.create(size), on_gpu.create(size)
    on_gpu.map(first, place, 0)
    on_gpu.map(second, spare, 0)
    numbers = on_gpu.tensor(place).view(torch.float32)
    other = on_gpu.tensor(spare).view(torch.float32)
    out = torch.zeros_like(numbers, device="cuda")
    numbers.fill_(1.0)
    other.fill_(2.0)
    torch.add(numbers, 1.0, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(numbers, 1.0, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 2.0).all()
    on_gpu.unmap(first)
    on_gpu.unmap(second)
    on_gpu.map(second, place, 0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3.0).all(), "the graph reads the memory that is mapped now"
    assert numbers.data_ptr() == place.address


def take_and_give_back(num_bytes: int) -> None:
    memory = VirtualMemory(open_driver(torch.device("cuda")))
    place = memory.reserve(2 * num_bytes)
    memory.map(memory.create(num_bytes), place, 0)
    memory.tensor(place)[:num_bytes].zero_()
    memory.close()


@pytest.mark.gpu
def test_the_gpus_memory_is_the_same_before_and_after():
    """Once in twenty attempts: other tests may use the GPU meanwhile."""
    take_and_give_back(1 << 27)  # loads the kernels
    torch.cuda.empty_cache()

    def is_the_same() -> bool:
        before = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            take_and_give_back(1 << 27)
        return torch.cuda.mem_get_info()[0] == before

    assert any(is_the_same() for _ in range(20))


@pytest.mark.gpu
def test_more_memory_than_the_gpu_has_is_refused_by_name(on_gpu):
    with pytest.raises(MoveError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        on_gpu.create(1 << 42)
