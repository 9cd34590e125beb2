"""CUDA graphs: the shapes of forwards that they are captured for, and how work is captured.

Knows numbers of rows and requests; no models. A step between two sizes runs as the graph of the larger one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# Rows of a forward. No 448: for an 8B on an H200 cuBLAS takes 14.8 ms at 448 rows and 11.2 ms at 512.
ROW_BUCKETS = (
    1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512,
)  # fmt: skip
ROWS_PER_REQUEST = (1, 2, 4, 8, 16)
# Rows of a step with prompts, or of a draft that catches up. With more rows a GPU is slower than the host, which then
# launches kernel by kernel: 13 ms for the 32 layers of an 8B.
MIXED_BUCKETS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, *range(512, 2049, 128))


@dataclass(frozen=True)
class Shape:
    """What the kernels of a forward are sized for."""

    num_requests: int
    num_rows: int
    rows_per_request: int  # the most of any request
    num_wanted: int  # rows whose next token is sampled
    drafts_on: bool = False  # one row for each request that is still drafting, instead of the rows of the plan
    is_mixed: bool = False  # requests differ much in rows: the host cuts them into tiles, and sampling is another graph
    num_sms: int = 0  # SMs of the part of the device that it keeps to; 0: the whole device

    @property
    def wants_all(self) -> bool:
        return self.num_wanted == self.num_rows


def verification(num_rows: int, rows_per_request: int, sizes: Sequence[int] = ROW_BUCKETS) -> Shape | None:
    """The graph for requests whose rows are all sampled from; None if no graph is large enough."""
    rows, each = least(sizes, num_rows), least(ROWS_PER_REQUEST, rows_per_request)
    return Shape(rows, rows, each, rows) if rows is not None and each is not None else None


def first_draft(num_requests: int, rows_per_request: int) -> Shape | None:
    """The graph for the first token of drafts that kept up: one or two rows a request, the last one sampled from."""
    requests = least(ROW_BUCKETS, num_requests)
    if requests is None or rows_per_request > 2:
        return None
    return Shape(requests, 2 * requests, 2, requests)


def head_draft(num_requests: int, rows_per_request: int) -> Shape | None:
    """The graph for the first token of a draft head: a row for each token since its last draft."""
    requests, each = least(ROW_BUCKETS, num_requests), least(ROWS_PER_REQUEST[1:], rows_per_request)
    if requests is None or each is None or requests * each > ROW_BUCKETS[-1]:
        return None
    return Shape(requests, requests * each, each, requests)


def block_draft(num_requests: int, rows_per_request: int, block_rows: int) -> Shape | None:
    """The graph for blocks of `block_rows` rows, behind the rows that the head has to read."""
    requests, each = least(ROW_BUCKETS, num_requests), least(ROWS_PER_REQUEST, rows_per_request)
    if requests is None or each is None or requests * each > ROW_BUCKETS[-1]:
        return None
    return Shape(requests, requests * each, each, requests * block_rows)


def next_draft(num_requests: int) -> Shape:
    """The graph for a further token of drafts."""
    rows = least(ROW_BUCKETS, num_requests)
    assert rows is not None, "a batch has no more requests than graphs have rows"
    return Shape(rows, rows, 1, rows, drafts_on=True)


def on_part(shape: Shape | None, num_sms: int) -> Shape | None:
    """The same forward on a part of the device."""
    return None if shape is None else replace(shape, num_sms=num_sms)


def least(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest size that holds `wanted`."""
    return next((size for size in sizes if size >= wanted), None)


def capture(run: Callable[[], None], device: torch.device, stream: Any, pool: Any = None) -> Callable[[], None]:
    """The replay of a graph of what `run` enqueues, captured on `stream`. Without a GPU, `run` itself.

    Graphs with the same `pool` share their memory: they never run at once, and leave nothing in it for others.
    """
    if device.type != "cuda":
        return run
    run()  # kernels must be compiled outside the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()  # garbage may hold graphs, and no graph must be freed while another is captured
    try:
        with torch.cuda.graph(graph, stream=stream, pool=pool):
            run()
    finally:
        if was_enabled:
            gc.enable()
    return graph.replay
