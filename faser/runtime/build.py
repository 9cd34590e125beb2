"""Puts the parts together: models on a device, pages, scheduler, executor, engine.

Everything that can be refused is refused before the first weight is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from faser.config import NGRAM, EngineOptions
from faser.engine import Engine
from faser.errors import ConfigError, ModelError
from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.pages import PagePool
from faser.progress import progress_bar
from faser.runtime.device import Device, make_device
from faser.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from faser.runtime.executor import TorchExecutor
from faser.runtime.kv_cache import bytes_per_page
from faser.runtime.runner import ModelRunner
from faser.runtime.sampling import Sampler
from faser.runtime.verifier import Verifier
from faser.scheduler import Limits, Scheduler
from faser.text import Tokenizer

Draft = Transformer | str | None  # a model, NGRAM, or none


@dataclass(frozen=True)
class LoadedPair:
    """Models in memory, and the tokenizer they share (None where there is no file of it)."""

    target: Transformer
    draft: Draft
    tokenizer: Tokenizer | None


def load_pair(model: str | Transformer | None, draft: Draft, options: EngineOptions) -> LoadedPair:
    """A target and its draft by folder or hub name: found, checked, loaded. Models in memory are taken as they are."""
    options.make_policy(has_draft=draft is not None)
    if model is None:
        raise ConfigError('no model given: name a Hugging Face folder or a hub name, e.g. LLM("org/name")')
    if isinstance(model, Transformer):
        if isinstance(draft, str) and draft != NGRAM:
            raise ConfigError(f"the target is in memory and the draft {draft!r} is not; load it first")
        if isinstance(draft, Transformer):
            _require_same_vocabulary(model, draft)
        if options.dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
            raise ConfigError(f"dtype={options.dtype!r}: the model in memory is {model.dtype}; load it as you want it")
        return LoadedPair(model, draft, None)
    if isinstance(draft, Transformer):
        raise ConfigError(f"the draft is in memory and the target {model!r} is not; load it first")
    return _load_folders(model, draft, options)


def _load_folders(model: str, draft: str | None, options: EngineOptions) -> LoadedPair:
    folder = weights.resolve(model)
    config = ModelConfig.from_folder(folder)
    draft_folder = weights.resolve(draft) if draft is not None and draft != NGRAM else None
    draft_config = ModelConfig.from_folder(draft_folder) if draft_folder is not None else None
    if draft_folder is not None and draft_config is not None:
        weights.check_pair(folder, draft_folder, config, draft_config)
    _max_model_len(options, config.max_positions)
    device = make_device(options.device)
    _num_pages(options, device, [(c, _dtype(options, c, device)) for c in (config, draft_config) if c is not None])
    tokenizer = Tokenizer.from_folder(folder) if (folder / weights.TOKENIZER_FILE).is_file() else None
    target = _load("target", folder, config, options)
    if draft_folder is None or draft_config is None:
        return LoadedPair(target, draft, tokenizer)
    return LoadedPair(target, _load("draft", draft_folder, draft_config, options), tokenizer)


def _load(role: str, folder: Path, config: ModelConfig, options: EngineOptions) -> Transformer:
    dtype = _dtype(options, config, make_device(options.device))
    most = min(config.max_positions, options.max_model_len or config.max_positions)
    with progress_bar(f"loading the {role}", bytes_=True) as update:
        return weights.load(folder, config, dtype, progress=update, max_positions=most)


def _dtype(options: EngineOptions, config: ModelConfig, device: Device) -> torch.dtype:
    return weights.resolve_dtype(options.dtype, config, device.name)


def build_engine(target: Transformer, draft: Draft, options: EngineOptions) -> Engine:
    """An engine over models already in memory."""
    policy = options.make_policy(has_draft=draft is not None)
    device = make_device(options.device)
    draft_model = draft if isinstance(draft, Transformer) else None
    models = [model for model in (target, draft_model) if model is not None]
    max_model_len = _max_model_len(options, target.max_positions)
    draft_max_len = draft_model.max_positions if draft_model is not None else None
    limits = Limits(options.max_running, options.max_batch_tokens, max_model_len, draft_max_len)
    num_pages = _num_pages(options, device, [(model.config, model.dtype) for model in models])

    def pool() -> PagePool:
        return PagePool(num_pages, options.page_size, limits.max_running, max_model_len, options.prefix_caching)

    def runner(model: Transformer) -> ModelRunner:
        cache = device.kv_cache(model.config, num_pages, options.page_size, model.dtype)
        return ModelRunner(model, cache, device, limits.max_running, max_model_len)

    history = torch.from_numpy(np.zeros((limits.max_running, max_model_len), dtype=np.int64))  # memory on first touch
    sampler = Sampler(limits.max_running, target.config.vocab_size, history)
    drafter: Drafter | None = None
    if draft_model is not None:
        drafter = ModelDrafter(runner(draft_model), sampler, history, target.config.vocab_size)
    elif draft == NGRAM:
        drafter = NgramDrafter(history)
    executor = TorchExecutor(Verifier(runner(target), sampler, history), drafter, sampler, history)
    scheduler = Scheduler(
        limits,
        policy,
        pool(),
        pool() if draft_model is not None else None,
        speculates=drafter is not None,
        prefix_caching=options.prefix_caching,
    )
    return Engine(scheduler, executor)


def _max_model_len(options: EngineOptions, known: int) -> int:
    """What the target knows, or less if the user says so. A draft that knows less does not draft beyond that."""
    asked = options.max_model_len
    if asked is not None and asked > known:
        raise ConfigError(f"max_model_len={asked}: the model knows {known} positions; give at most that")
    return asked or known


def _num_pages(options: EngineOptions, device: Device, models: Sequence[tuple[ModelConfig, torch.dtype]]) -> int:
    """Pages of each pool: what the memory holds, and no more than could ever be used."""
    if options.num_pages is not None:
        return options.num_pages
    budget = options.kv_memory or device.default_kv_memory()
    page = sum(bytes_per_page(config, options.page_size, dtype) for config, dtype in models)
    if budget < page:
        raise ConfigError(
            f"kv_memory of {budget / 2**30:.6f} GiB: one page of {options.page_size} tokens takes "
            f"{page / 2**30:.6f} GiB; give more"
        )
    most_tokens = options.max_model_len or models[0][0].max_positions
    return min(budget // page, options.max_running * -(-most_tokens // options.page_size))


def _require_same_vocabulary(target: Transformer, draft: Transformer) -> None:
    """For models that come without folders: the only thing left to compare is the number of tokens."""
    if target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"the draft has {draft.config.vocab_size} tokens, the target {target.config.vocab_size}; "
            "expected the same tokenizer"
        )
