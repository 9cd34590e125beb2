"""Does attention cost more than reading the keys and values? Microseconds per layer on a GPU, beside the memory floor.

A decode or verification step must read every key and value of its contexts once: that many bytes over the measured copy
bandwidth is the floor. A prefill is bound by arithmetic instead, so it is given in TFLOP/s (four operations per query,
key and dimension, half of them masked). Both kernels run, as in a forward: rotate and write, then attend. Launches
are captured in a CUDA graph that walks over layers of different memory, because in a model the weights in between
would have pushed a layer's keys out of the cache.

    python benchmarks/cuda_attention.py [--quick]

Prints a table, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from faser.runtime.cuda import attention
from faser.runtime.cuda.attention import AttentionConfig, Memory, Tiles

PAGE_SIZE = 16
BANDWIDTH = 4.3e12  # bytes per second of a large copy on an H200, reads + writes
CACHE_BYTES = 256 * 2**20  # all layers together are larger, so that none is in the L2
MAX_CONTEXT = 8192  # the longest context that a captured launch supports
MAX_LAYERS, MIN_LAYERS = 256, 3
ARENA_BYTES = 24 * 2**30


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """num_requests requests of num_rows rows each; the last row of each sees `context` keys."""

    shape: Shape
    num_requests: int
    num_rows: int
    context: int

    @property
    def layer_bytes(self) -> int:
        return self.num_requests * self.context * 2 * self.shape.num_kv_heads * self.shape.head_dim * 2

    @property
    def floor_us(self) -> float:
        return self.layer_bytes / BANDWIDTH * 1e6

    @property
    def flops(self) -> float:
        """Of the keys that the rows attend to."""
        seen = self.num_rows * (self.context - (self.num_rows - 1) / 2)
        return 4.0 * self.num_requests * seen * self.shape.num_heads * self.shape.head_dim

    def config(self) -> AttentionConfig:
        shape = self.shape
        return attention.choose(
            self.num_requests, self.num_rows, MAX_CONTEXT,
            shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.bfloat16,
        )  # fmt: skip


LARGE = Shape("8B", 32, 8, 128)
SMALL = Shape("1B", 32, 8, 64)
STEPS = [
    (batch, rows, context) for rows in (1, 5) for context in (256, 1024, 4096) for batch in (1, 4, 16, 64, 128, 256)
]
CASES = [Case(shape, *step) for shape in (LARGE, SMALL) for step in STEPS]
PREFILLS = [Case(shape, 16, 2048, 2048) for shape in (LARGE, SMALL)]


class Layers:
    """The inputs of one case, with enough layers of pages to exceed the L2 cache."""

    def __init__(self, case: Case, arena: torch.Tensor, config: AttentionConfig) -> None:
        shape, requests, rows = case.shape, case.num_requests, case.num_requests * case.num_rows
        self.config = config
        columns = -(-case.context // PAGE_SIZE)
        self.num_layers = max(MIN_LAYERS, min(MAX_LAYERS, -(-CACHE_BYTES // case.layer_bytes)))
        page_shape = (self.num_layers, requests * columns, PAGE_SIZE, 2 * shape.num_kv_heads, shape.head_dim)
        self.pages = arena[: int(np.prod(page_shape))].view(page_shape)
        table = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns)
        self.table = torch.from_numpy(np.pad(table, ((0, 0), (0, -columns % 16))).astype(np.int32)).cuda()
        width = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = torch.randn(rows, width, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty(rows, shape.num_heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
        start = case.context - case.num_rows
        self.positions = _int32(np.tile(np.arange(start, case.context), requests))
        self.slots = _int32(np.repeat(np.arange(requests), case.num_rows))
        self.num_rows = _int32([rows])
        angles = torch.rand(case.context, shape.head_dim // 2, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()
        counts, starts = np.full(requests, case.num_rows), np.full(requests, start)
        request, offset = attention.build_tiles(counts, config.rows_per_tile, starts)
        self.tiles = Tiles(
            *map(_int32, (counts.cumsum() - counts, counts, starts, np.arange(requests), request, offset)),
            _int32([request.size]),
        )
        self.workspace = Memory("cuda").workspace(
            config, rows, request.size, shape.num_heads, shape.num_kv_heads, shape.head_dim
        )

    def rotate_and_write(self, layer: int) -> None:
        attention.rotate_and_write(
            self.qkv, self.positions, self.slots, self.num_rows, self.table, self.cos, self.sin, self.pages[layer],
            overlap=True,
        )  # fmt: skip

    def attend(self, layer: int, overlap: bool = False) -> None:
        attention.attend(
            self.qkv, self.pages[layer], self.table, self.tiles, self.out, self.workspace, self.config, overlap=overlap
        )

    def both(self, layer: int) -> None:
        self.rotate_and_write(layer)
        self.attend(layer, overlap=True)


def _int32(values: np.ndarray | list[int]) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


def make_arena() -> torch.Tensor:
    """Random bf16, filled in pieces; the pages of every case are views of it."""
    arena = torch.empty(ARENA_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    for piece in arena.split(2**28):
        piece.normal_()
    return arena


def microseconds(launch: Callable[[int], None], num_layers: int, repeats: int = 7) -> float:
    """The median time of a launch for one layer, from a graph over all layers."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            launch(layer)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_layers)
    return statistics.median(times)


def measure(case: Case, arena: torch.Tensor, config: AttentionConfig | None = None) -> dict[str, object]:
    layers = Layers(case, arena, config or case.config())
    attend_us = microseconds(layers.attend, layers.num_layers)
    both_us = microseconds(layers.both, layers.num_layers)
    return {
        "model": case.shape.name,
        "requests": case.num_requests,
        "rows": case.num_rows,
        "context": case.context,
        "attend_us": round(attend_us, 2),
        "both_us": round(both_us, 2),
        "floor_us": round(case.floor_us, 2),
        "floor_share": round(case.floor_us / attend_us, 3),
        "tflops": round(case.flops / attend_us / 1e6, 1),
        "config": asdict(layers.config),
    }


def print_result(result: dict[str, object]) -> None:
    config = result["config"]
    assert isinstance(config, dict)
    cells = [f"{result[key]:>9}" for key in list(result)[:-1]]
    print(*cells, "  " + " ".join(str(value) for value in config.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the cases")
    quick = parser.parse_args().quick
    arena = make_arena()
    cases = (CASES[::3] if quick else CASES) + PREFILLS
    titles = ["model", "requests", "rows", "context", "attend us", "both us", "floor us", "of floor", "TFLOP/s"]
    print(*(f"{title:>9}" for title in titles), "  rows/tile block_m block_n splits usual min_split warps stages")
    results = []
    for case in cases:
        results.append(measure(case, arena))
        print_result(results[-1])
    print(json.dumps({"device": torch.cuda.get_device_name(), "bandwidth": BANDWIDTH, "results": results}))


if __name__ == "__main__":
    main()
