"""CUDA graphs: work that is captured once and replayed with one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capture(run: Callable[[], None], device: torch.device, stream: Any) -> Callable[[], None]:
    """The replay of a graph of what `run` enqueues, captured on `stream`. Without a GPU, `run` itself."""
    if device.type != "cuda":
        return run
    run()  # kernels must be compiled outside the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), _without_collecting():
        run()
    return graph.replay


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Garbage may hold graphs, and no graph must be freed while another is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
