"""Puts the parts together: models on a device, pages, scheduler, executor, engine.

Everything that can be refused is refused before the first weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from faser.config import NGRAM, EngineOptions
from faser.engine import Engine
from faser.errors import ConfigError, ModelError
from faser.grammar import shared_compiler
from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.source import DEFAULT_DRAFT, PatchSource, Source, open_draft, open_target
from faser.models.transformer import Transformer
from faser.pages import PagePool
from faser.policy import MAX_LENGTH
from faser.progress import progress_bar
from faser.runtime.device import Device, Parts, make_device
from faser.runtime.kv_cache import fitting_pages
from faser.runtime.sampling import Sampler
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
    """A target and its draft: found, checked, loaded. Models in memory are taken as they are.

    Naming no model means the default pair; then the draft may still be another.
    """
    if model is None and draft is None:
        draft = str(DEFAULT_DRAFT)
    options.make_policy(has_draft=draft is not None)
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
    return _load_sources(model, draft, options)


def _load_sources(model: str | None, draft: str | None, options: EngineOptions) -> LoadedPair:
    source = open_target(model)
    draft_source = open_draft(draft, source) if draft is not None and draft != NGRAM else None
    _max_model_len(options, source.config.max_positions)
    device = make_device(options.device)
    configs = [source.config] + ([draft_source.config] if draft_source is not None else [])
    budget = options.kv_memory or device.default_kv_memory()
    if budget is not None and options.num_pages is None:
        fitting_pages(budget, [(c, _dtype(options, c, device)) for c in configs], options.page_size)
    tokenizer = source.tokenizer()
    target = _load("target", source, options, device)
    if draft_source is None:
        return LoadedPair(target, draft, tokenizer)
    if isinstance(draft_source, PatchSource):
        return LoadedPair(target, draft_source.apply(target), tokenizer)
    return LoadedPair(target, _load("draft", draft_source, options, device), tokenizer)


def _load(role: str, source: Source, options: EngineOptions, device: Device) -> Transformer:
    most = min(source.config.max_positions, options.max_model_len or source.config.max_positions)
    dtype = _dtype(options, source.config, device)
    try:
        with progress_bar(f"loading the {role}", bytes_=True) as update:
            return source.load(dtype, most, update, device.name)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of GPU memory while loading the {role} in {str(dtype).removeprefix('torch.')}: free the GPU, use a "
            f"smaller model, a --dtype of fewer bytes or --device cpu ({str(error).splitlines()[0]})"
        ) from error


def _dtype(options: EngineOptions, config: ModelConfig, device: Device) -> torch.dtype:
    return weights.resolve_dtype(options.dtype, config, device.name)


def build_engine(
    target: Transformer,
    draft: Draft,
    options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    device: Device | None = None,
) -> Engine:
    """An engine over models already in memory, where they are.

    Without a tokenizer, requests with a grammar fail with that reason.
    """
    policy = options.make_policy(has_draft=draft is not None)
    device = device or make_device(options.device if options.device != "auto" else target.device.type)
    draft_model = draft if isinstance(draft, Transformer) else None
    limits = _limits(options, device, target, draft_model)
    # memory on first touch
    history = torch.from_numpy(np.zeros((limits.max_running, limits.max_model_len), dtype=np.int64))
    compiler = None
    if tokenizer is not None:
        compiler = shared_compiler(tokenizer, target.config.vocab_size, target.config.eos_token_ids)
    executor, num_pages = device.make_executor(
        Parts(
            target=target,
            draft=draft_model,
            uses_ngrams=draft == NGRAM,
            limits=limits,
            page_size=options.page_size,
            max_length=MAX_LENGTH if draft is not None else 0,
            usual_length=getattr(policy, "max_length", 0) if draft is not None else 0,
            history=history,
            sampler=Sampler(limits.max_running, target.config.vocab_size, history, compiler),
            num_pages=options.num_pages,
            kv_memory=options.kv_memory,
            acceptance=options.acceptance,
        )
    )

    def pool() -> PagePool:
        return PagePool(num_pages, options.page_size, limits.max_running, limits.max_model_len, options.prefix_caching)

    scheduler = Scheduler(
        limits,
        policy,
        pool(),
        pool() if draft_model is not None else None,
        speculates=draft is not None,
        prefix_caching=options.prefix_caching,
    )
    return Engine(scheduler, executor)


def _limits(options: EngineOptions, device: Device, target: Transformer, draft: Transformer | None) -> Limits:
    max_running = options.max_running or min(device.max_running, options.max_batch_tokens or device.max_running)
    return Limits(
        max_running,
        options.max_batch_tokens or max(device.max_batch_tokens, max_running),
        _max_model_len(options, target.max_positions),
        draft.max_positions if draft is not None else None,
    )


def _max_model_len(options: EngineOptions, known: int) -> int:
    """What the target knows, or less if the user says so. A draft that knows less does not draft beyond that."""
    asked = options.max_model_len
    if asked is not None and asked > known:
        raise ConfigError(f"max_model_len={asked}: the model knows {known} positions; give at most that")
    return asked or known


def _require_same_vocabulary(target: Transformer, draft: Transformer) -> None:
    """For models that come without folders: the only thing left to compare is the number of tokens."""
    if target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"the draft has {draft.config.vocab_size} tokens, the target {target.config.vocab_size}; "
            "expected the same tokenizer"
        )
