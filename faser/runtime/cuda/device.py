"""The CUDA device: how its memory is divided, and the executor over it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from faser.engine import prompt_pace
from faser.errors import ConfigError
from faser.limits import Limits
from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.models.transformer import Transformer
from faser.progress import progress_bar
from faser.runtime.cuda.block import CudaBlock, CudaBlockDrafter
from faser.runtime.cuda.draft_memory import CudaDraftMemory, Layout
from faser.runtime.cuda.drafter import CudaDrafter, CudaModelDrafter
from faser.runtime.cuda.eagle3 import CudaEagle3, CudaEagle3Drafter
from faser.runtime.cuda.executor import CudaExecutor
from faser.runtime.cuda.features import CudaFeatures
from faser.runtime.cuda.graphs import MIXED_BUCKETS, ROW_BUCKETS
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.lookup import CudaLookupDrafter
from faser.runtime.cuda.memory import MemoryLedger, explained_shortage, fitting_pages
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.pinned import require_host_memory
from faser.runtime.cuda.sampling import Slots
from faser.runtime.cuda.virtual_memory import MemoryDriver, open_driver
from faser.runtime.cuda.vision import CudaEyes, RowAngles
from faser.runtime.device import Parts, Profiling, Speeds
from faser.runtime.weights_home import WeightsHome, home_bytes, own_weights

log = logging.getLogger("faser.engine")


class CudaDevice:
    """One GPU, the current one."""

    name = "cuda"
    max_running = 256
    max_batch_tokens = 4096
    pacing = replace(prompt_pace.GPU, row_sizes=MIXED_BUCKETS)
    open_driver = staticmethod(open_driver)  # tests have one without a GPU
    runs_ahead = True  # a step is planned while the one before it runs
    exit_depths = (0.0, 0.5)  # each further depth would need as many graphs again
    profiling = Profiling(18.0, ROW_BUCKETS, MIXED_BUCKETS, most_rows=1024, most_context=2**18, most_prompt_rows=4096)
    speeds = Speeds(3e12, 4e14, layer_seconds=1e-5, host_seconds=1e-4, stop_seconds=None)

    @property
    def splits(self) -> tuple[int, ...]:
        return (0, *Lanes(torch.device("cuda")).splits) if torch.cuda.is_available() else (0,)

    @property
    def memory(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def require_rounded_kv(self) -> None:
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            raise ConfigError(
                f"kv_dtype='fp8': {torch.cuda.get_device_name()} has no 8-bit floats (compute capability below 8.9); "
                "leave it out"
            )

    def default_kv_memory(self) -> None:
        return None

    @explained_shortage(ConfigError)
    def make_executor(self, parts: Parts) -> tuple[CudaExecutor, int]:
        limits, device = parts.limits, parts.target.device
        if limits.max_running > ROW_BUCKETS[-1]:
            raise ConfigError(f"max_running={limits.max_running}: a GPU batch has at most {ROW_BUCKETS[-1]} requests")
        ledger = MemoryLedger(sum(each.num_bytes for each in parts.models)) if device.type == "cuda" else None
        longest = limits.max_model_len + 2 * parts.max_length + 1
        slots = Slots.allocate(limits.max_running, longest, device)
        lanes = Lanes(device)
        target = CudaModel(parts.target, slots, limits, parts.page_size, lanes, kv=parts.target_kv)
        _open_eyes(parts, target, slots)
        models = [target]
        drafter: CudaDrafter | None = None
        if isinstance(parts.draft, Transformer):
            window = limits.draft_window
            models.append(CudaModel(parts.draft, slots, limits, parts.page_size, lanes, writes=True, window=window))
            drafter = CudaModelDrafter(models[1])
        elif parts.head is not None:
            target.features = CudaFeatures(parts.head, target.max_rows, parts.page_size)
            drafter = _make_head_drafter(parts.head, slots, limits, parts.page_size, lanes, target)
            models += drafter.models
        if parts.looks_up:
            drafter = CudaLookupDrafter(drafter, slots)
        executor = CudaExecutor(parts, target, drafter, slots, lanes, runs_ahead=self.runs_ahead)
        if ledger is not None:
            ledger.buffers_are_made()
        features = target.features
        page_bytes = sum(each.page_bytes for each in (target, features) if each is not None)
        draft_page_bytes = sum(model.page_bytes for model in models[1:])
        driver = self._lending_driver(parts)
        num_pages = parts.num_pages
        if num_pages is None:
            assert ledger is not None, "off a GPU the number of pages is given"
            free, total = torch.cuda.mem_get_info()
            rounding = 0 if driver is None else parts.target.num_layers * driver.granularity
            num_pages = fitting_pages(parts, page_bytes, free - rounding, total, draft_page_bytes)
        num_draft_pages = limits.draft_pages(num_pages, parts.page_size)
        kv_bytes = num_pages * page_bytes + num_draft_pages * draft_page_bytes
        memory = _make_draft_memory(parts, models, num_pages, driver) if driver is not None else None
        if memory is not None:
            executor.draft_memory = memory
            num_pages, kv_bytes = memory.layout.base_pages, memory.layout.kv_bytes
        else:
            for each in (target, features):
                if each is not None:
                    each.allocate_pages(num_pages)
            for own in models[1:]:
                own.allocate_pages(num_draft_pages)
        with progress_bar("compiling kernels and capturing graphs") as update:
            executor.prepare(parts.usual_length, update)
        if ledger is not None:
            log.info("%s", ledger.graphs_are_made(kv_bytes, num_pages * parts.page_size))
        return executor, num_pages

    def _lending_driver(self, parts: Parts) -> MemoryDriver | None:
        """The driver by which the draft's memory can be lent to the target's pages; None: it cannot, or need not."""
        if not isinstance(parts.draft, Transformer) or parts.offload == "off":
            return None
        weights = own_weights(parts.draft, parts.target)
        with _unless_required(parts):
            if not weights:
                raise ConfigError("it has no weights of its own")
            require_host_memory(home_bytes(weights))
            return self.open_driver(parts.target.device)
        return None


def _open_eyes(parts: Parts, target: CudaModel, slots: Slots) -> None:
    """Give a target that sees its buffers."""
    encoder, limits, config = parts.target.vision, parts.limits.vision, parts.target.config
    if encoder is not None and limits is not None:
        target.eyes = CudaEyes(encoder, limits.buffer_rows, config.hidden_size, slots.history)
    if limits is not None:
        target.angles = RowAngles(parts.target, target.max_rows, slots.history)


def _make_head_drafter(
    head: DraftHead, slots: Slots, limits: Limits, page_size: int, lanes: Lanes, target: CudaModel
) -> CudaDrafter:
    if isinstance(head, Eagle3Head):
        return CudaEagle3Drafter(CudaEagle3(head, slots, limits, page_size, lanes, target))
    assert isinstance(head, BlockHead)
    return CudaBlockDrafter(CudaBlock(head, slots, limits, page_size, lanes, target))


@contextmanager
def _unless_required(parts: Parts) -> Iterator[None]:
    """Where the draft cannot leave, `on` is refused; else the log says why."""
    try:
        yield
    except ConfigError as error:
        if parts.offload == "on":
            raise ConfigError(f"offload=on: the draft cannot leave the device: {error}") from error
        log.info("the draft stays on the device: %s", error)


def _make_draft_memory(
    parts: Parts, models: Sequence[CudaModel], num_pages: int, driver: MemoryDriver
) -> CudaDraftMemory | None:
    """Memory of the draft that the target's pages can borrow; both models' pages are in it. None: nothing is gained."""
    target, draft = models
    home = WeightsHome(own_weights(draft.model, target.model))
    layout = Layout.of(
        (target.model.config, target.kv.dtype), (draft.model.config, draft.kv.dtype), parts.page_size,
        home.num_bytes, num_pages, parts.most_pages, driver.granularity, exact=parts.num_pages is not None,
        most_draft_pages=parts.limits.most_draft_pages(parts.page_size),
    )  # fmt: skip
    if num_pages >= parts.most_pages or layout.pages_gained <= 0:
        log.info("the draft stays on the device: all requests that can run together fit into the KV pages")
        return None
    with _unless_required(parts):
        memory = CudaDraftMemory(layout, home, driver)
        target.pages = memory.target_pages(target.model.config, parts.page_size, target.kv.dtype)
        draft.pages = memory.draft_pages(draft.model.config, parts.page_size, draft.kv.dtype)
        gained = layout.pages_gained, 100 * layout.pages_gained / layout.base_pages
        log.info("the draft can leave the device: then there are %d more KV pages (+%.0f %%)", *gained)
        return memory
    return None
