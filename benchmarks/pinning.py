"""How fast is host memory locked, and how fast do weights come from it? torch's pinned memory against huge pages.

A draft that leaves the GPU keeps a copy of its weights in locked memory of the host. Locking it is part of the start;
the copy to the device is part of every return. torch rounds a pinned tensor up to a power of two.

    python -m benchmarks.pinning [--gigabytes 2.5] [--ways torch,huge] [--copies 5]

Prints a line for each way, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from faser.runtime.cuda.pinned import PinnedBlock
from faser.runtime.cuda.virtual_memory import open_driver


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--ways", default="torch,huge")
    parser.add_argument("--copies", type=int, default=5)
    args = parser.parse_args()
    num_bytes = int(args.gigabytes * 1e9)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    driver = open_driver(on_device.device)
    figures = {}
    for way in args.ways.split(","):
        seconds, host, block = lock(way, num_bytes, driver)
        copies = [copy_seconds(host, on_device) for _ in range(args.copies)]
        figures[way] = {"lock_seconds": seconds, "gigabytes_per_second": num_bytes / statistics.median(copies) / 1e9}
        print(
            f"{way}: locked in {seconds:.2f} s, copied at {figures[way]['gigabytes_per_second']:.1f} GB/s", flush=True
        )
        if block is not None:
            block.close()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "gigabytes": args.gigabytes, "ways": figures}))
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


if __name__ == "__main__":
    raise SystemExit(main())
