"""The CPU device: its sizes, and the executor that runs inline on it."""

from __future__ import annotations

import logging
import os
from functools import partial

import torch

from faser.engine import prompt_pace
from faser.errors import ConfigError
from faser.limits import KeyWindow
from faser.models.config import ModelConfig
from faser.models.heads import BlockHead, Eagle3Head
from faser.models.quantised.placement import packed_matrices
from faser.models.transformer import Transformer
from faser.rules.early_exit import DEPTHS
from faser.runtime.cpu.draft_memory import CpuDraftMemory, HostBlock
from faser.runtime.cpu.drafter import BlockDrafter, Eagle3Drafter, ModelDrafter
from faser.runtime.cpu.executor import TorchExecutor
from faser.runtime.cpu.positions import RotaryPositions
from faser.runtime.cpu.rounded import BlockRunner, RoundedAttention, WideAttention
from faser.runtime.cpu.runner import FeaturePages, HeadRunner, ModelRunner
from faser.runtime.cpu.verifier import Verifier
from faser.runtime.cpu.vision import CpuEyes
from faser.runtime.device import Parts, Profiling, Speeds
from faser.runtime.drafter import Drafter
from faser.runtime.kv_cache import (
    GIB,
    KvFormat,
    bytes_per_page,
    feature_bytes_per_page,
    fitting_pages,
    pages_over,
    require_room,
)
from faser.runtime.lookup import LookupDrafter
from faser.runtime.weights_home import home_bytes, own_weights
from faser.threads import ThreadTuner, available_cpus, user_chose_threads

log = logging.getLogger("faser.engine")


class CpuDevice:
    """Every call runs inline: there are no lanes and no graphs."""

    name = "cpu"
    max_running = 64
    max_batch_tokens = 1024
    pacing = prompt_pace.CPU
    exit_depths = DEPTHS
    splits = (0,)
    # From some dozen rows on, seconds are linear in rows: few sizes are measured, and larger ones extrapolated.
    profiling = Profiling(6.0, (), (), most_rows=64, most_context=4096, most_prompt_rows=128, has_lanes=False)
    speeds = Speeds(10e9, 40e9, layer_seconds=2e-4, host_seconds=1e-3, stop_seconds=2e-4)

    @property
    def memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def require_rounded_kv(self) -> None:
        """Every CPU can store them."""

    def default_kv_memory(self) -> int:
        """A quarter of the machine's memory, at most 4 GiB. Only pages in use take physical memory."""
        return min(4 * 2**30, self.memory // 4)

    def make_executor(self, parts: Parts) -> tuple[TorchExecutor, int]:
        if parts.acceptance is not None:
            raise ConfigError("synthetic acceptance is for measuring a GPU; the CPU device has none")
        num_pages = parts.num_pages or self._num_pages(parts)
        gained = _pages_gained(parts, num_pages) if parts.offload == "on" else 0  # auto: see draft_memory.py
        shapes = parts.kv_shapes
        target_pages = _page_block(*shapes[0], num_pages + gained, parts.page_size)
        features = None if parts.head is None else FeaturePages(parts.head, num_pages, parts.page_size)
        target = _runner(parts.target, target_pages, parts, parts.target_kv, features)
        if parts.limits.vision is not None:
            target.rotary = RotaryPositions(
                parts.limits.max_running, parts.limits.max_model_len, parts.target.max_positions
            )
        drafter: Drafter | None = None
        memory: CpuDraftMemory | None = None
        if parts.draft is not None:
            num_draft_pages = parts.limits.draft_pages(num_pages, parts.page_size)
            draft_pages = _page_block(*shapes[1], num_draft_pages, parts.page_size)
            drafter = _make_drafter(parts, draft_pages, target)
            if gained:
                assert isinstance(parts.draft, Transformer)
                memory = CpuDraftMemory(parts.target, parts.draft, target_pages, draft_pages, num_pages, gained)
        if parts.looks_up:
            drafter = LookupDrafter(drafter, parts.history.numpy())
        eyes = _make_eyes(parts)
        verifier = Verifier(target, parts.sampler, parts.history, eyes)
        executor = TorchExecutor(verifier, drafter, parts.sampler, parts.history, _make_tuner(), memory, eyes)
        return executor, num_pages

    def _num_pages(self, parts: Parts) -> int:
        require_room(parts.kv_memory, self.memory - sum(model.num_bytes for model in parts.models))
        budget = parts.kv_memory or self.default_kv_memory()
        head, feature_bytes = parts.head, 0
        if head is not None:
            feature_bytes = feature_bytes_per_page(head.config, parts.page_size, head.dtype)
        sizes = parts.page_size, parts.limits.max_model_len, parts.most_pages
        most_draft = parts.limits.most_draft_pages(parts.page_size)
        return fitting_pages(budget, parts.kv_shapes, *sizes, feature_bytes, most_draft)


def _make_eyes(parts: Parts) -> CpuEyes | None:
    encoder, limits = parts.target.vision, parts.limits.vision
    if encoder is None or limits is None:
        return None
    return CpuEyes(encoder, limits.buffer_rows, parts.target.config.hidden_size)


def _make_drafter(parts: Parts, draft_pages: HostBlock, target: ModelRunner) -> Drafter:
    """Of a draft model or a head."""
    rest = parts.sampler, parts.history, parts.target.config.vocab_size
    draft = parts.draft
    if isinstance(draft, Transformer):
        return ModelDrafter(
            _runner(draft, draft_pages, parts, KvFormat.of(draft), window=parts.limits.draft_window), *rest
        )
    assert draft is not None
    pages = pages_over(draft_pages.bytes, draft.config, parts.page_size, draft.dtype)
    limits = parts.limits
    runner = HeadRunner(draft, pages, limits.max_running, limits.max_model_len, target, limits.draft_window)
    if isinstance(draft, Eagle3Head):
        return Eagle3Drafter(runner, draft, *rest)
    assert isinstance(draft, BlockHead)
    return BlockDrafter(runner, draft, *rest)


def _page_block(config: ModelConfig, dtype: torch.dtype, num_pages: int, page_size: int) -> HostBlock:
    num_bytes = num_pages * bytes_per_page(config, page_size, dtype)
    try:
        return HostBlock(num_bytes)
    except OSError as error:
        raise ConfigError(f"no memory for a KV cache of {num_bytes / GIB:.2f} GiB; lower kv_memory") from error


def _runner(
    model: Transformer,
    block: HostBlock,
    parts: Parts,
    kv: KvFormat,
    features: FeaturePages | None = None,
    window: KeyWindow | None = None,
) -> ModelRunner:
    pages = pages_over(block.bytes, model.config, parts.page_size, kv.dtype)
    sizes = parts.limits.max_running, parts.limits.max_model_len
    if kv.is_rounded:
        return BlockRunner(model, pages, *sizes, features, window, partial(RoundedAttention, kv=kv))
    packed = packed_matrices(model) if model is parts.target else "none"  # what a draft makes of last bits is a guess
    if packed == "none":
        return ModelRunner(model, pages, *sizes, features, window)
    return (ModelRunner if packed == "all" else BlockRunner)(model, pages, *sizes, features, window, WideAttention)


def _pages_gained(parts: Parts, num_pages: int) -> int:
    """Target pages that the draft's weights and pages would hold, no more than all slots can use."""
    if not isinstance(parts.draft, Transformer):
        return 0
    page, draft_page = (bytes_per_page(config, parts.page_size, dtype) for config, dtype in parts.kv_shapes)
    num_draft_pages = parts.limits.draft_pages(num_pages, parts.page_size)
    freed = home_bytes(own_weights(parts.draft, parts.target)) + num_draft_pages * draft_page
    gained = max(0, min(freed // page, parts.most_pages - num_pages))
    if not gained:
        log.info("the draft stays in memory: all requests that can run together fit into the KV pages")
    return gained


def _make_tuner() -> ThreadTuner | None:
    """None where the user chose the number of threads."""
    if user_chose_threads():
        return None
    most = min(torch.get_num_threads(), available_cpus())
    torch.set_num_threads(most)
    return ThreadTuner(most, torch.set_num_threads)
