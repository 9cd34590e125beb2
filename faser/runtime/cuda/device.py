"""The CUDA device: how its memory is divided, and the executor over it."""

from __future__ import annotations

import logging

import torch

from faser.errors import ConfigError
from faser.models.transformer import Transformer
from faser.progress import progress_bar
from faser.runtime.cuda.executor import CudaExecutor
from faser.runtime.cuda.model import ROW_BUCKETS, CudaModel
from faser.runtime.cuda.sampling import Slots
from faser.runtime.device import Parts
from faser.runtime.drafter import NgramDrafter

log = logging.getLogger("faser.engine")

RESERVED_BYTES = 3 * 2**29  # for graphs, compiled kernels and what one eager forward allocates


class CudaDevice:
    """One GPU, the current one."""

    name = "cuda"
    max_running = 256
    max_batch_tokens = 4096
    # Whether a step is planned while the one before it runs. Proven on the oracle and in Triton's interpreter, and off
    # until it has been run, and measured, on a GPU.
    runs_ahead = False

    def default_kv_memory(self) -> None:
        return None

    def make_executor(self, parts: Parts) -> tuple[CudaExecutor, int]:
        try:
            return self._make_executor(parts)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"out of GPU memory ({str(error).splitlines()[0]}); lower --kv-memory, --max-batch-tokens or "
                "--max-running"
            ) from error

    def _make_executor(self, parts: Parts) -> tuple[CudaExecutor, int]:
        limits, device = parts.limits, parts.target.device
        if limits.max_running > ROW_BUCKETS[-1]:
            raise ConfigError(f"max_running={limits.max_running}: a GPU batch has at most {ROW_BUCKETS[-1]} requests")
        slots = Slots.allocate(limits.max_running, limits.max_model_len + parts.max_length + 1, device)

        def on_device(model: Transformer, writes: bool) -> CudaModel:
            return CudaModel(
                model,
                slots,
                max_requests=limits.max_running,
                max_rows=limits.max_batch_tokens,
                max_context=limits.max_model_len,
                page_size=parts.page_size,
                writes=writes,
            )

        models = [on_device(parts.target, False)] + ([on_device(parts.draft, True)] if parts.draft is not None else [])
        num_pages = self._num_pages(parts, sum(model.page_bytes for model in models))
        for model in models:
            model.allocate_pages(num_pages)
        acceptance = None
        if parts.acceptance is not None:
            acceptance = torch.full((max(1, parts.max_length),), parts.acceptance, device=device)
        executor = CudaExecutor(
            models[0],
            models[1] if parts.draft is not None else None,
            slots,
            parts.sampler,
            parts.history.numpy(),
            ngrams=NgramDrafter(parts.history) if parts.uses_ngrams else None,
            max_length=parts.max_length,
            acceptance=acceptance,
            runs_ahead=self.runs_ahead,
        )
        with progress_bar("capturing graphs") as update:
            executor.prepare(parts.usual_length, update)
        return executor, num_pages

    def _num_pages(self, parts: Parts, page_bytes: int) -> int:
        if parts.num_pages is not None:
            return parts.num_pages
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        budget = parts.kv_memory if parts.kv_memory is not None else free - RESERVED_BYTES
        if budget < page_bytes:
            raise ConfigError(
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free beside the models, too little for KV pages; "
                "lower --max-batch-tokens or --max-running, or use smaller models"
            )
        num_pages = min(budget // page_bytes, parts.most_pages)
        log.info(
            "GPU memory: %.1f GiB; models and buffers %.1f, KV pages %.1f, left %.1f",
            total / 2**30,
            (total - free) / 2**30,
            num_pages * page_bytes / 2**30,
            (free - num_pages * page_bytes) / 2**30,
        )
        return num_pages
