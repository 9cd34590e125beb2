"""The CUDA device: how its memory is divided, and the executor over it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from faser.engine import prompt_pace
from faser.errors import ConfigError
from faser.models.transformer import Transformer
from faser.progress import progress_bar
from faser.runtime.cuda.executor import CudaExecutor
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.memory import Ledger, explained_shortage, fitting_pages
from faser.runtime.cuda.model import MIXED_BUCKETS, ROW_BUCKETS, CudaModel
from faser.runtime.cuda.sampling import Slots
from faser.runtime.device import Parts, Profiling, Speeds
from faser.runtime.ngram import NgramDrafter

log = logging.getLogger("faser.engine.engine")


class CudaDevice:
    """One GPU, the current one."""

    name = "cuda"
    max_running = 256
    max_batch_tokens = 4096
    pacing = replace(prompt_pace.GPU, row_sizes=MIXED_BUCKETS)
    runs_ahead = True  # a step is planned while the one before it runs
    exit_depths = (0.0, 0.5)  # of every further one there would be as many graphs again
    profiling = Profiling(18.0, ROW_BUCKETS, MIXED_BUCKETS, most_rows=1024, most_context=2**18, most_prompt_rows=4096)
    speeds = Speeds(3e12, 4e14, layer_seconds=1e-5, host_seconds=1e-4, stop_seconds=None)

    @property
    def splits(self) -> tuple[int, ...]:
        return (0, *Lanes(torch.device("cuda")).splits) if torch.cuda.is_available() else (0,)

    @property
    def memory(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def default_kv_memory(self) -> None:
        return None

    def make_executor(self, parts: Parts) -> tuple[CudaExecutor, int]:
        with explained_shortage(ConfigError):
            return self._make_executor(parts)

    def _make_executor(self, parts: Parts) -> tuple[CudaExecutor, int]:
        limits, device = parts.limits, parts.target.device
        if limits.max_running > ROW_BUCKETS[-1]:
            raise ConfigError(f"max_running={limits.max_running}: a GPU batch has at most {ROW_BUCKETS[-1]} requests")
        ledger = Ledger(sum(model.num_bytes for model in parts.models)) if device.type == "cuda" else None
        longest = limits.max_model_len + 2 * parts.max_length + 1
        slots = Slots.allocate(limits.max_running, longest, device)
        lanes = Lanes(device)

        def on_device(model: Transformer, writes: bool) -> CudaModel:
            return CudaModel(
                model,
                slots,
                max_requests=limits.max_running,
                max_rows=limits.max_batch_tokens,
                max_context=limits.max_model_len,
                page_size=parts.page_size,
                lanes=lanes,
                writes=writes,
            )

        target = on_device(parts.target, False)
        draft = on_device(parts.draft, True) if parts.draft is not None else None
        acceptance = None
        if parts.acceptance is not None:
            acceptance = torch.full((max(1, parts.max_length),), parts.acceptance, device=device)
        executor = CudaExecutor(
            target,
            draft,
            slots,
            parts.sampler,
            parts.history.numpy(),
            ngrams=NgramDrafter(parts.history.numpy()) if parts.uses_ngrams else None,
            max_length=parts.max_length,
            acceptance=acceptance,
            runs_ahead=self.runs_ahead,
            lanes=lanes,
        )
        if ledger is not None:
            ledger.buffers_are_made()
        models = [target] + ([draft] if draft is not None else [])
        page_bytes = sum(model.page_bytes for model in models)
        num_pages = parts.num_pages
        if num_pages is None:
            assert ledger is not None, "off a GPU the number of pages is given"
            num_pages = fitting_pages(parts, page_bytes, ledger.free, ledger.total)
        target.allocate_pages(num_pages)
        if draft is not None:
            draft.allocate_pages(num_pages)
        with progress_bar("compiling kernels and capturing graphs") as update:
            executor.prepare(parts.usual_length, update, parts.exit_layers)
        if ledger is not None:
            log.info("%s", ledger.graphs_are_made(num_pages * page_bytes, num_pages * parts.page_size))
        return executor, num_pages
