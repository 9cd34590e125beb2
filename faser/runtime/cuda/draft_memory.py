"""The draft's memory on a GPU: while the draft is away, it holds KV pages of the target.

Knows the layout of both models in virtual memory and moves chunks between them. When a move begins is the scheduler's
business (faser/engine/residency.py).

The draft's weights and KV pages stand in one range, made of one chunk for each layer of the target. To lend is to unmap
chunk i there and to map it behind the pages of layer i, so every layer gains the same number of pages:

    target    │ layer 0: base, chunk 0 │ layer 1: base, chunk 1 │ …       base: mapped from start to end
    draft     │ weights │ KV pages │                                     chunk 0, chunk 1, …

Addresses never change, so no graph is captured again. A copy of the weights stays in locked memory of the host. Pages
begin with whatever their memory held: the kernels read no entry that was not written for the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from faser.errors import ConfigError, MoveError
from faser.models.config import ModelConfig
from faser.runtime.cuda.memory import ADVICE
from faser.runtime.cuda.pinned import PinnedBlock
from faser.runtime.cuda.transfer import long_copy_begins, long_copy_ended
from faser.runtime.cuda.virtual_memory import AddressRange, MemoryChunk, MemoryDriver, VirtualMemory
from faser.runtime.kv_cache import bytes_per_page
from faser.runtime.weights_home import WeightsHome

CHUNKS_PER_PART = 40  # moved in one call: about 4 ms
LOAD_SPEED = 45e9  # bytes per second from the host, before anything is measured


@dataclass(frozen=True)
class Layout:
    """Bytes and pages of both models in virtual memory."""

    num_layers: int  # of the target
    page_bytes: int  # of one layer of the target
    base_pages: int  # of the target while the draft is resident
    draft_pages: int
    most_pages: int  # of the target while the draft is away
    base_bytes: int  # of one layer of the target while the draft is resident
    chunk_bytes: int  # of one layer of the target in the draft's memory
    weights_bytes: int  # of the draft
    draft_page_bytes: int  # of all layers of the draft

    @classmethod
    def of(
        cls,
        target: tuple[ModelConfig, torch.dtype],
        draft: tuple[ModelConfig, torch.dtype],
        page_size: int,
        weights_bytes: int,
        num_pages: int,
        most_pages: int,
        granularity: int,
        *,
        exact: bool,
        most_draft_pages: int = 2**40,
    ) -> Layout:
        """`num_pages` pages of the target, rounded down to whole granules of a layer unless `exact`.

        The draft has as many, at most `most_draft_pages`.
        """
        num_layers = target[0].num_layers
        page_bytes = bytes_per_page(target[0], page_size, target[1]) // num_layers
        draft_page_bytes = bytes_per_page(draft[0], page_size, draft[1])
        base_bytes = num_pages * page_bytes // granularity * granularity
        base_pages = base_bytes // page_bytes
        if exact or not base_pages:
            base_pages = num_pages
            base_bytes = _round_up(num_pages * page_bytes, granularity)
        draft_pages = min(base_pages, most_draft_pages)
        draft_bytes = weights_bytes + draft_pages * draft_page_bytes
        chunk_bytes = _round_up(-(-draft_bytes // num_layers), granularity)
        most = min((base_bytes + chunk_bytes) // page_bytes, most_pages)
        return cls(
            num_layers, page_bytes, base_pages, draft_pages, most, base_bytes, chunk_bytes, weights_bytes,
            draft_page_bytes,
        )  # fmt: skip

    @property
    def layer_bytes(self) -> int:
        """Addresses of one layer of the target."""
        return self.base_bytes + self.chunk_bytes

    @property
    def pages_gained(self) -> int:
        return self.most_pages - self.base_pages

    @property
    def kv_bytes(self) -> int:
        """Memory of both models' pages while the draft is resident, rounding included."""
        return self.num_layers * self.layer_bytes - self.weights_bytes


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class WeightsLoader:
    """Copies the weights from the host, on a stream of its own beside decoding."""

    def __init__(self, source: Tensor, weights: Tensor) -> None:
        self._source = source
        self._weights = weights
        self._events: tuple[Any, Any] | None = None
        make: Any = torch.cuda.Stream
        self._stream = make(weights.device) if weights.is_cuda else None
        self.seconds = source.numel() / LOAD_SPEED  # expected; of the last load, if there was one

    def begin(self) -> None:
        if self._stream is None:
            self._weights.copy_(self._source)
            return
        make: Any = torch.cuda.Event
        began, ended = make(enable_timing=True), make(enable_timing=True)
        long_copy_begins(self, self._weights.device)
        with torch.cuda.stream(self._stream):
            began.record()
            self._weights.copy_(self._source, non_blocking=True)
            ended.record()
        self._events = began, ended

    def is_done(self) -> bool:
        """Whether the load has ended. The work that is enqueued from now on sees the weights."""
        if self._events is None:
            return True
        began, ended = self._events
        if not ended.query():
            return False
        long_copy_ended(self)
        torch.cuda.current_stream().wait_event(ended)
        self.seconds = began.elapsed_time(ended) / 1e3
        self._events = None
        return True


class CudaDraftMemory:
    """A `DraftMemory`. The weights of `home` move into memory of their own, which the target's pages can borrow."""

    def __init__(self, layout: Layout, home: WeightsHome, driver: MemoryDriver) -> None:
        self.layout = layout
        self.pages_gained = layout.pages_gained
        self._home = home
        self._memory = VirtualMemory(driver)
        self._chunks: list[MemoryChunk] = []
        self._is_loading = False
        self._is_closed = False
        with _explained(ConfigError, "no memory for a draft that can leave; use --offload off"):
            self._host = PinnedBlock(home.num_bytes, driver)
        home.save(self._host.bytes)
        home.leave()
        if home.device.type == "cuda":
            torch.cuda.empty_cache()  # the chunks need the weights' former memory
        try:
            with _explained(ConfigError, f"out of GPU memory; {ADVICE}"):
                self._make()
        except ConfigError:
            self.close()
            raise
        weights = self._draft_bytes[: home.num_bytes]
        home.enter(weights)
        self.loader = WeightsLoader(self._host.bytes, weights)
        self.loader.begin()
        driver.synchronize()
        self.loader.is_done()

    def _make(self) -> None:
        """Reserve both ranges, and map everything as it is while the draft is resident."""
        layout, memory, num_layers = self.layout, self._memory, self.layout.num_layers
        self._target: AddressRange = memory.reserve(num_layers * layout.layer_bytes)
        self._draft: AddressRange = memory.reserve(num_layers * layout.chunk_bytes)
        for index in range(num_layers):
            memory.map(memory.create(layout.base_bytes), self._target, index * layout.layer_bytes)
            self._chunks.append(memory.create(layout.chunk_bytes))
            memory.map(self._chunks[index], self._draft, self._resident_offset(index))
        self._target_bytes = memory.tensor(self._target).view(num_layers, layout.layer_bytes)
        self._draft_bytes = memory.tensor(self._draft)

    def target_pages(self, config: ModelConfig, page_size: int, dtype: torch.dtype) -> Tensor:
        """[num_layers, most_pages, page_size, 2 * num_kv_heads, head_dim]. Those from base_pages on come and go."""
        layout = self.layout
        used = self._target_bytes[:, : layout.most_pages * layout.page_bytes].view(dtype)
        return used.view(config.num_layers, layout.most_pages, page_size, 2 * config.num_kv_heads, config.head_dim)

    def draft_pages(self, config: ModelConfig, page_size: int, dtype: torch.dtype) -> Tensor:
        """[num_layers, draft_pages, page_size, 2 * num_kv_heads, head_dim]."""
        layout = self.layout
        used = self._draft_bytes[layout.weights_bytes :][: layout.draft_pages * layout.draft_page_bytes].view(dtype)
        return used.view(config.num_layers, layout.draft_pages, page_size, 2 * config.num_kv_heads, config.head_dim)

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def load_seconds(self) -> float:
        return self.loader.seconds

    def offload(self) -> bool:
        with _explained(MoveError):
            if self._is_loading:  # memory that is being written must stay
                self._is_loading = not self.loader.is_done()
                return False
            for index in islice(self._not_lent(), CHUNKS_PER_PART):
                self._move(index, self._target, self._lent_offset(index))
        return next(self._not_lent(), None) is None

    def load(self) -> bool:
        with _explained(MoveError):
            if not self._is_loading:
                for index in islice(self._not_resident(), CHUNKS_PER_PART):
                    self._move(index, self._draft, self._resident_offset(index))
                if next(self._not_resident(), None) is not None:
                    return False
                self.loader.begin()
            self._is_loading = False  # if the next line fails, the next call begins again
            self._is_loading = not self.loader.is_done()
        return not self._is_loading

    def _move(self, index: int, place: AddressRange, offset: int) -> None:
        self._memory.unmap(self._chunks[index])
        self._memory.map(self._chunks[index], place, offset)

    def _not_lent(self) -> Iterator[int]:
        """Chunks that are not behind their layer of the target."""
        first = self._target.address
        return (i for i, chunk in enumerate(self._chunks) if chunk.address != first + self._lent_offset(i))

    def _not_resident(self) -> Iterator[int]:
        """Chunks that are not in the draft's range."""
        first = self._draft.address
        return (i for i, chunk in enumerate(self._chunks) if chunk.address != first + self._resident_offset(i))

    def _lent_offset(self, index: int) -> int:
        return index * self.layout.layer_bytes + self.layout.base_bytes

    def _resident_offset(self, index: int) -> int:
        return index * self.layout.chunk_bytes

    def close(self) -> None:
        """Give all memory back. The weights go to memory of torch's, so that the model can serve another engine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._memory.close()
        block = torch.empty(self._home.num_bytes, dtype=torch.uint8, device=self._home.device)
        self._home.enter(block.copy_(self._host.bytes))
        self._host.close()


@contextmanager
def _explained(kind: type[ConfigError] | type[MoveError], what: str = "the device failed") -> Iterator[None]:
    """Turn failures of the driver, and torch's for any failure of the device, into an error of one kind."""
    try:
        yield
    except (MoveError, RuntimeError, OSError) as error:
        if type(error) is kind:
            raise
        raise kind(f"{what} ({(str(error) or type(error).__name__).splitlines()[0]})") from error
