"""The draft loop as CUDA graphs: one launch per drafted token."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from faser.vllm.drafting.lag import STEADY_LAG
from faser.vllm.drafting.loop import DraftLoop

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)

MAX_SPLIT_REQUESTS = 32  # up to here attention may split a context: few requests leave SMs idle
NUM_SPLITS = 16


def max_splits(num_requests: int, max_rows: int) -> int:
    """Parts that attention may split a context into; 0: it decides by itself, which a captured graph cannot do.

    Partial results take memory for every part and row, in every graph. Catch-ups have many rows and are not captured.
    """
    if max_rows > STEADY_LAG:
        return 0
    return NUM_SPLITS if num_requests <= MAX_SPLIT_REQUESTS else 1


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """Numbers of requests that graphs are captured for; larger batches run eagerly."""
    largest = min(max_requests, BUCKETS[-1])
    return (*(size for size in BUCKETS if size < largest), largest)


class LoopGraphs:
    """Captured first passes by width and size, and further tokens by size. All share one memory pool."""

    def __init__(self, loop: DraftLoop, sizes: Sequence[int]) -> None:
        self.loop = loop
        self.sizes: Sequence[int] = tuple(sorted(sizes))
        self._pool = torch.cuda.graph_pool_handle()
        self._first: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._next: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self, context: AbstractContextManager[Any]) -> float:
        """Capture on the stream that `context` gives; returns seconds.

        The largest size comes first: smaller ones fit into its memory.
        """
        began = time.perf_counter()
        with context as given:
            stream: torch.cuda.Stream = given.stream
            for size in reversed(self.sizes):
                for width in range(1, STEADY_LAG + 1):
                    self._first[width, size] = self._capture(partial(self.loop.run_first, width, size), stream)
                self._next[size] = self._capture(partial(self.loop.run_next, size), stream)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def _capture(self, run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        run()  # compiles kernels, and fills caches that a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            run()
        return graph

    def size_for(self, num_requests: int) -> int:
        """The smallest captured size that is large enough; 0: none is."""
        index = bisect.bisect_left(self.sizes, num_requests)
        return self.sizes[index] if index < len(self.sizes) else 0

    def first(self, width: int, num_requests: int) -> int:
        size = self.size_for(num_requests)
        if size:
            self._first[width, size].replay()
        return size

    def next(self, size: int) -> None:
        self._next[size].replay()


def capture_graphs(loop: DraftLoop, context: AbstractContextManager[Any]) -> str:
    """Give the loop graphs, captured inside vLLM's `graph_capture`; returns what was done, in one line."""
    graphs = LoopGraphs(loop, graph_sizes(loop.max_requests))
    seconds = graphs.capture(context)
    loop.replay = graphs
    return f"draft graphs of {len(graphs.sizes)} sizes up to {graphs.sizes[-1]} requests captured in {seconds:.1f} s"
