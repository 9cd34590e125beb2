"""How the GPU's memory is divided, and the advice in errors when it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from faser.errors import ConfigError, EngineError
from faser.runtime.device import Parts
from faser.runtime.kv_cache import GIB, divided_pages, require_room, useful_pages

ADVICE = "lower --kv-memory, --max-batch-tokens or --max-running"
RESERVED_BYTES = 3 * 2**29  # for graphs, compiled kernels and the allocations of one eager forward


@contextmanager
def explained_shortage(error: type[ConfigError] | type[EngineError]) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says which flag to lower."""
    try:
        yield
    except torch.OutOfMemoryError as shortage:
        raise error(f"out of GPU memory; {ADVICE} ({str(shortage).splitlines()[0]})") from shortage


def fitting_pages(parts: Parts, page_bytes: int, free: int, total: int, draft_page_bytes: int = 0) -> int:
    """KV pages of the target. `page_bytes` are those of one page of it, with features where there are."""
    room = free - RESERVED_BYTES
    least = useful_pages(parts.page_size, parts.limits.max_model_len)
    if parts.kv_memory is not None:
        require_room(parts.kv_memory, room)
    elif room < least * (page_bytes + draft_page_bytes):
        raise ConfigError(
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free beside the models, too little for KV pages; "
            "lower --max-batch-tokens or --max-running, or use smaller models"
        )
    budget = room if parts.kv_memory is None else parts.kv_memory
    most_draft_pages = parts.limits.most_draft_pages(parts.page_size)
    pages = divided_pages(budget, page_bytes, draft_page_bytes, most_draft_pages, parts.page_size, least)
    return min(pages, parts.most_pages)


@dataclass(frozen=True)
class Division:
    """Bytes of the whole GPU."""

    total: int
    others: int  # other processes, the driver, tensors that are not the engine's
    weights: int
    buffers: int  # memory that forwards compute in
    pages: int  # KV
    graphs: int  # captured graphs and the code of the kernels
    num_tokens: int  # that the target's pages hold

    @property
    def left(self) -> int:
        return self.total - self.others - self.weights - self.buffers - self.pages - self.graphs

    def __str__(self) -> str:
        def gib(size: int) -> str:
            return f"{size / GIB:.1f}"

        return (
            f"GPU memory, {gib(self.total)} GiB: weights {gib(self.weights)}, KV pages {gib(self.pages)} "
            f"({self.num_tokens:,} tokens), buffers {gib(self.buffers)}, graphs {gib(self.graphs)}, "
            f"others {gib(self.others)}, left {gib(self.left)}"
        )


class MemoryLedger:
    """Measures what each stage of a start takes of the GPU's memory."""

    def __init__(self, weights: int) -> None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        self._known = Division(total, total - free - weights, weights, 0, 0, 0, 0)

    def buffers_are_made(self) -> None:
        torch.cuda.empty_cache()
        self._known = replace(self._known, buffers=self._known.left - torch.cuda.mem_get_info()[0])

    def graphs_are_made(self, pages: int, num_tokens: int) -> Division:
        known = replace(self._known, pages=pages, num_tokens=num_tokens)
        return replace(known, graphs=known.left - torch.cuda.mem_get_info()[0])
