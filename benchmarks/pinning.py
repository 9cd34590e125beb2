"""How fast is host memory locked, and how fast do weights come from it? torch's pinned memory against huge pages.

A draft that leaves the GPU keeps a copy of its weights in locked memory of the host. Locking it is part of the start;
the copy to the device is part of every return. torch rounds a pinned tensor up to a power of two.

A step's own inputs are copied at the same time, and must not wait for the weights. So the weights are copied in several
ways (`whole`; `pieces:N`, of N MiB, each enqueued by the host; `graph:N`, the same in one CUDA graph; `kernel:N`, read
by N programs of a kernel) while small copies run on another stream, by the copy engine and by a kernel. On an H200 a
copy of 32 kB uses the copy engine and waits for all the weights however they are cut; one of 24 kB does not on an idle
stream, and behind enqueued work one of 8 kB waits, too.

Steps beside a load are slower because decoding reads memory as fast as it can. `--reads` says by how much: a kernel
that reads 8 GiB again and again, alone, beside a load into memory, beside one of the same speed into 2 MiB that the
cache holds, and beside a copy to the host.

    python -m benchmarks.pinning [--gigabytes 2.5] [--ways torch,huge] [--copies 5] [--loads whole,pieces:8,graph:2]
        [--small-bytes 32768] [--reads]

Prints a line for each way and each load, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.runtime.cuda.pinned import PinnedBlock
from faser.runtime.cuda.virtual_memory import open_driver

READ_BYTES, READ_PROGRAMS, READ_BLOCK = 2**33, 528, 2048
NUM_READS = 16  # of 2 ms each: within the copy of 2.5 GB


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--ways", default="torch,huge")
    parser.add_argument("--copies", type=int, default=5)
    parser.add_argument("--loads", default="whole,pieces:32,pieces:8,pieces:2,graph:8,graph:2,kernel:4,kernel:16")
    parser.add_argument("--small-bytes", type=int, default=32768)
    parser.add_argument("--reads", action="store_true", help="how much slower memory is read beside copies")
    args = parser.parse_args()
    num_bytes = int(args.gigabytes * 1e9)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    driver = open_driver(on_device.device)
    figures = {}
    for way in filter(None, args.ways.split(",")):
        seconds, host, block = lock(way, num_bytes, driver)
        copies = [copy_seconds(host, on_device) for _ in range(args.copies)]
        figures[way] = {"lock_seconds": seconds, "gigabytes_per_second": num_bytes / statistics.median(copies) / 1e9}
        print(
            f"{way}: locked in {seconds:.2f} s, copied at {figures[way]['gigabytes_per_second']:.1f} GB/s", flush=True
        )
        if block is not None:
            block.close()
    block = PinnedBlock(num_bytes, driver)
    small = torch.zeros(args.small_bytes // 8, dtype=torch.int64).pin_memory()
    loads = {load: measure_load(load, block.bytes, on_device, small) for load in args.loads.split(",") if load}
    found = {"gpu": torch.cuda.get_device_name(), "gigabytes": args.gigabytes, "ways": figures, "loads": loads}
    if args.reads:
        found["reads"] = measure_reads(block.bytes, on_device)
    print(json.dumps(found))
    return 0


def lock(way: str, num_bytes: int, driver) -> tuple[float, torch.Tensor, PinnedBlock | None]:
    """Seconds, the memory, and what must be closed."""
    started = perf_counter()
    if way == "torch":
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return perf_counter() - started, host, None
    block = PinnedBlock(num_bytes, driver)
    return perf_counter() - started, block.bytes, block


def copy_seconds(host: torch.Tensor, on_device: torch.Tensor) -> float:
    make: Callable = torch.cuda.Event
    began, ended = make(enable_timing=True), make(enable_timing=True)
    began.record()
    on_device.copy_(host, non_blocking=True)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


@triton.jit
def copy_kernel(source, destination, num_words, block: tl.constexpr):
    """Programs take turns over blocks of 8-byte words."""
    step = tl.num_programs(0) * block
    for start in range(tl.program_id(0) * block, num_words, step):
        places = start.to(tl.int64) + tl.arange(0, block)
        inside = places < num_words
        tl.store(destination + places, tl.load(source + places, mask=inside), mask=inside)


def copy_by_kernel(host: Tensor, on_device: Tensor, num_programs: int) -> None:
    words = host.numel() // 8 * 8
    source, destination = host[:words].view(torch.int64), on_device[:words].view(torch.int64)
    copy_kernel[(num_programs,)](source, destination, words // 8, block=4096, num_warps=16)


def loader_of(load: str, host: Tensor, on_device: Tensor) -> Callable[[], Any]:
    """What enqueues the load on the current stream."""
    kind, _, number = load.partition(":")
    if kind == "kernel":
        return lambda: copy_by_kernel(host, on_device, int(number))
    size = int(number) * 2**20 if number else host.numel()

    def enqueue() -> None:
        for destination, source in zip(on_device.split(size), host.split(size), strict=True):
            destination.copy_(source, non_blocking=True)

    if kind != "graph":
        return enqueue
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph.replay


def measure_load(load: str, host: Tensor, on_device: Tensor, small: Tensor) -> dict[str, Any]:
    """Seconds of a load, of enqueueing it, and microseconds of small copies beside it."""
    enqueue, found = loader_of(load, host, on_device), {}
    for way in ("engine", "kernel"):
        for _ in range(2):  # the first warms up
            found |= measure_beside(enqueue, way, small)
    print(load, ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    return found


def measure_beside(enqueue: Callable[[], Any], way: str, host: Tensor) -> dict[str, float]:
    on_device, own, loading = host.cuda(), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    ended: Any = torch.cuda.Event()
    began = perf_counter()
    with torch.cuda.stream(loading):
        enqueue()
        ended.record()
    enqueued, seconds = perf_counter() - began, []
    with torch.cuda.stream(own):
        while not ended.query() or not seconds:
            started = perf_counter()
            if way == "engine":
                on_device.copy_(host, non_blocking=True)
            else:
                copy_kernel[(1,)](host, on_device, host.numel(), block=1024)
            own.synchronize()
            seconds.append(perf_counter() - started)
    return {
        "enqueue_ms": 1e3 * enqueued,
        "load_ms": 1e3 * (perf_counter() - began),
        f"{way}_median_us": 1e6 * statistics.median(seconds),
        f"{way}_worst_us": 1e6 * max(seconds),
        f"{way}_number": len(seconds),
    }


@triton.jit
def read_kernel(source, sums, num_words, block: tl.constexpr):
    total = tl.zeros([block], tl.int64)
    for start in range(tl.program_id(0) * block, num_words, tl.num_programs(0) * block):
        total += tl.load(source + start.to(tl.int64) + tl.arange(0, block))
    tl.store(sums + tl.program_id(0) * block + tl.arange(0, block), total)


def measure_reads(host: Tensor, on_device: Tensor) -> dict[str, Any]:
    """Milliseconds of reading READ_BYTES alone, and percent slower beside copies."""
    cached = on_device[: 2 * 2**20]

    def into_the_cache() -> None:
        for piece in host.split(cached.numel()):
            cached[: piece.numel()].copy_(piece, non_blocking=True)

    copies = {
        "into memory": lambda: on_device.copy_(host, non_blocking=True),
        "into the cache": into_the_cache,
        "to the host": lambda: host.copy_(on_device, non_blocking=True),
    }
    words = torch.ones(READ_BYTES // 8, dtype=torch.int64, device="cuda")
    sums = torch.empty(READ_PROGRAMS * READ_BLOCK, dtype=torch.int64, device="cuda")
    read = lambda: read_kernel[(READ_PROGRAMS,)](words, sums, words.numel(), block=READ_BLOCK, num_warps=8)  # noqa: E731
    alone = statistics.median(read_beside(read, lambda: None))
    found: dict[str, Any] = {"alone_ms": alone, "tb_per_s": READ_BYTES / alone / 1e9, "slower_percent": {}}
    for name, copy in copies.items():
        beside = statistics.median(read_beside(read, copy))
        found["slower_percent"][name] = 100 * (beside / alone - 1)
    print(f"reading {READ_BYTES / 1e9:.1f} GB: {found}", flush=True)
    return found


def read_beside(read: Callable[[], Any], copy: Callable[[], Any]) -> list[float]:
    """Milliseconds of each read while the copy runs; the second of two attempts."""
    copying, make = torch.cuda.Stream(), lambda: torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        marks = [make() for _ in range(NUM_READS + 1)]
        torch.cuda.synchronize()
        with torch.cuda.stream(copying):
            copy()
        for mark in marks:
            mark.record()
            if mark is not marks[-1]:
                read()
        torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]


if __name__ == "__main__":
    raise SystemExit(main())
