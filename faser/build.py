"""Builds an engine: models on a device, KV pages, scheduler, executor, profile.

Whatever can be refused is refused before the first weight is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from faser.config import NGRAM, EngineOptions, resolve_draft, split_draft
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.draft_check import DraftCheck
from faser.engine.engine import Engine
from faser.engine.pages import PagePool
from faser.engine.prompt_pace import StepPace
from faser.engine.residency import Residency
from faser.engine.scheduler import Scheduler
from faser.engine.vision import BLOCK_ROWS
from faser.errors import ConfigError, ModelError
from faser.limits import HARD_MAX_LENGTH, HeadLimits, Limits, VisionLimits
from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.draft import apply_patch
from faser.models.heads import BLOCK, DraftHead
from faser.models.heads.sample import SAMPLE
from faser.models.heads.shift import find_shift
from faser.models.quantised.placement import Mode, is_packed, pack_draft
from faser.models.source import DraftSource, FolderSource, GgufSource, HeadSource, PatchSource, open_draft, open_target
from faser.models.transformer import Transformer
from faser.policy import Policy
from faser.policy.early_exit import EarlyExit, can_pay
from faser.policy.overlap import Overlap, worthwhile
from faser.progress import Update, progress_bar
from faser.rules.early_exit import candidates_of, layers_at
from faser.runtime.device import Device, DeviceExecutor, DraftModel, Parts, make_device
from faser.runtime.draft_window import choose_window
from faser.runtime.kv_cache import (
    ROUNDED,
    KvFormat,
    bytes_per_page,
    feature_bytes_per_page,
    fitting_pages,
    require_room,
)
from faser.runtime.profiling import saved as saved_profiles
from faser.runtime.profiling.assumed import assumed_profile
from faser.runtime.profiling.batches import Subject
from faser.runtime.profiling.idle import IdleProfiler
from faser.runtime.profiling.profiler import measure, measure_quick
from faser.runtime.sampling import Sampler
from faser.runtime.weights_home import home_bytes, own_weights
from faser.text.grammar import shared_compiler
from faser.text.tokenizer import Tokenizer

log = logging.getLogger("faser.engine")


@dataclass(frozen=True)
class WithLookup:
    """A draft model or a head, and prompt lookup beside it."""

    draft: DraftModel


Draft = DraftModel | WithLookup | str | None  # a model or a head, that and prompt lookup, NGRAM, or no draft


@dataclass(frozen=True)
class LoadedPair:
    """Models in memory, and their tokenizer; None where the model comes without one."""

    target: Transformer
    draft: Draft
    tokenizer: Tokenizer | None

    @property
    def draft_model(self) -> DraftModel | None:
        return _model_of(self.draft)


def load_pair(model: str | Transformer | None, draft: Draft, options: EngineOptions) -> LoadedPair:
    """A target and its draft: found, checked, loaded. Models in memory are taken as they are.

    `resolve_draft` says what a draft that is not given means. No model is the default one.
    """
    draft = resolve_draft(model, draft)
    options.make_policy(has_draft=draft is not None)
    _given_profile(options)
    if isinstance(model, Transformer):
        if isinstance(draft, str) and draft != NGRAM:
            raise ConfigError(f"the target is in memory and the draft {draft!r} is not; load it first")
        # Models in memory come without tokenizers: only the number of tokens can be compared.
        in_memory = _model_of(draft)
        if in_memory is not None and in_memory.config.vocab_size != model.config.vocab_size:
            raise ModelError(
                f"the draft has {in_memory.config.vocab_size} tokens, the target {model.config.vocab_size}; "
                "expected the same tokenizer"
            )
        if options.dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
            raise ConfigError(f"dtype={options.dtype!r}: the model in memory is {model.dtype}; load it as you want it")
        return LoadedPair(model, draft, None)
    if draft is not None and not isinstance(draft, str):
        raise ConfigError(f"the draft is in memory and the target {model!r} is not; load it first")
    return _load_sources(model, draft, options)


def _load_sources(model: str | None, draft: str | None, options: EngineOptions) -> LoadedPair:
    source = open_target(model)
    draft_path, looks_up = split_draft(draft) if draft is not None else (None, False)
    draft_source = open_draft(draft_path, source) if draft_path is not None else None
    max_model_len = _max_model_len(options, source.config.max_positions)
    device = make_device(options.device)
    require_room(options.kv_memory, device.memory)
    configs = [source.config] + ([draft_source.config] if draft_source is not None else [])
    if options.kv_dtype == "fp8":
        device.require_rounded_kv()
    budget = options.kv_memory or device.default_kv_memory()
    if budget is not None and options.num_pages is None:
        models = [(c, _dtype(options, c, device)) for c in configs]
        if options.kv_dtype == "fp8":
            models[0] = (source.config, ROUNDED)
        feature_bytes = 0
        if isinstance(draft_source, HeadSource):
            feature_bytes = feature_bytes_per_page(
                draft_source.config, options.page_size, _dtype(options, source.config, device)
            )
        fitting_pages(budget, models, options.page_size, max_model_len, feature_bytes=feature_bytes)
    is_head = isinstance(draft_source, HeadSource)
    draft_config = draft_source.config if draft_source else None
    choose_window(options.draft_window, draft_config, is_head, max_model_len, device.name)
    tokenizer = source.tokenizer()
    target = _load("target", source, options, device)
    if draft_source is None:
        return LoadedPair(target, draft, tokenizer)
    loaded = _load_draft(draft_source, target, options, device)
    return LoadedPair(target, WithLookup(loaded) if looks_up else loaded, tokenizer)


def _load_draft(source: DraftSource, target: Transformer, options: EngineOptions, device: Device) -> DraftModel:
    if isinstance(source, PatchSource):
        patched = apply_patch(target, source.patch)
        return pack_draft(patched, target) if is_packed(target) else patched
    if isinstance(source, HeadSource):
        return _load_head(source, target)
    return _load("draft", source, options, device)


def _model_of(draft: Draft) -> DraftModel | None:
    """The model or head of a draft, if it has one."""
    if isinstance(draft, WithLookup):
        return draft.draft
    return draft if isinstance(draft, DraftModel) else None


def _load(role: str, source: FolderSource | GgufSource, options: EngineOptions, device: Device) -> Transformer:
    most = source.config.max_positions
    if not source.config.rope.sections:  # positions in time may run ahead of the context
        most = min(most, options.max_model_len or most)
    dtype = _dtype(options, source.config, device)
    with _loading(role, dtype) as update:
        return source.load(dtype, most, update, device.name, _quantised(source, options, device))


def _quantised(source: FolderSource | GgufSource, options: EngineOptions, device: Device) -> Mode:
    """A user who names a dtype of a GGUF file on a CPU wants products in it. A GPU takes its blocks when told to."""
    is_dequantised = isinstance(source, GgufSource) and (device.name != "cpu" or options.dtype != "auto")
    return "off" if options.quantised == "auto" and is_dequantised else options.quantised


def _load_head(source: HeadSource, target: Transformer) -> DraftHead:
    """A head has the target's dtype: it shares the target's embedding."""
    with _loading("draft", target.dtype) as update:
        return source.load(target, target.dtype, target.max_positions, update)


@contextmanager
def _loading(role: str, dtype: torch.dtype) -> Iterator[Update]:
    try:
        with progress_bar(f"loading the {role}", bytes_=True) as update:
            yield update
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of GPU memory while loading the {role} in {str(dtype).removeprefix('torch.')}: free the GPU, use a "
            f"smaller model, a --dtype of fewer bytes or --device cpu ({str(error).splitlines()[0]})"
        ) from error


def _dtype(options: EngineOptions, config: ModelConfig, device: Device) -> torch.dtype:
    return weights.resolve_dtype(options.dtype, config, device.name)


@dataclass(frozen=True)
class _Made:
    """An executor on a device, and what it was made from."""

    target: Transformer
    draft: DraftModel | str | None  # a model or a head, NGRAM, or no draft
    looks_up: bool  # prompt lookup drafts, too or alone
    policy: Policy
    device: Device
    limits: Limits
    executor: DeviceExecutor
    num_pages: int
    page_size: int
    target_kv: KvFormat

    @property
    def draft_model(self) -> DraftModel | None:
        return self.draft if isinstance(self.draft, DraftModel) else None

    @property
    def has_head(self) -> bool:
        return isinstance(self.draft, DraftHead)


def build_engine(
    target: Transformer,
    draft: Draft,
    options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    device: Device | None = None,
) -> Engine:
    """An engine over models in memory; they stay on their device.

    Without a tokenizer, requests with a grammar fail. Where the policy needs the cost of forwards and no profile is
    given or saved, `options.profiling` says what is measured first.
    """
    draft_check = DraftCheck(_known_misfit(target, draft, options, tokenizer))
    made = _make_executor(target, draft, options, tokenizer, device)
    memory = made.executor.draft_memory
    most_pages = made.num_pages + (memory.pages_gained if memory is not None else 0)
    profile = _profile_of(made, options)
    cost = ProfiledCost(profile, made.limits.draft_span) if profile is not None else None
    scheduler = Scheduler(
        made.limits,
        made.policy,
        _target_pool(made, options, most_pages),
        _draft_pool(made, options),
        speculates=draft is not None,
        looks_up=made.looks_up,
        prefix_caching=options.prefix_caching,
        cost=cost,
        overlap=_make_overlap(made, options, cost),
        pace=_make_pace(made.device, options),
    )
    residency = Residency(scheduler, memory, perf_counter) if memory is not None else None
    engine = partial(Engine, scheduler, made.executor, cost=cost, residency=residency, draft_check=draft_check)
    if cost is not None and cost.profile.kind == "quick":
        keep = saved_profiles.keep_in_background
        engine = partial(engine, on_idle=IdleProfiler(_subject(made), cost, scheduler, _about(made), keep))
    exits = _make_exits(made, options, cost)
    if exits is None:
        return engine()
    known = _about(made), [made.target, *([made.draft] if isinstance(made.draft, Transformer) else [])]
    saved_profiles.restore_exits(exits, *known)
    return engine(exits=exits, on_close=partial(saved_profiles.keep_exits, exits, *known))


def _known_misfit(target: Transformer, draft: Draft, options: EngineOptions, tokenizer: Tokenizer | None) -> str | None:
    """What is wrong with a head, as far as a text tells; before KV pages take the device's memory."""
    head = _model_of(draft)
    if not isinstance(head, DraftHead) or tokenizer is None or options.acceptance is not None:
        return None
    started = perf_counter()
    try:
        shift = find_shift(head, target, tokenizer.encode(SAMPLE))
    except torch.OutOfMemoryError:
        log.info("the head's layers are not checked: too little memory")
        return None
    log.info("checked the head's layers in %.1f s", perf_counter() - started)
    return None if shift is None else str(shift)


def _target_pool(made: _Made, options: EngineOptions, most_pages: int) -> PagePool:
    limits = made.limits
    sizes = made.num_pages, made.page_size, limits.max_running, limits.max_model_len
    window = None if made.has_head else made.target.config.page_window  # a head reads features of whole contexts
    return PagePool(*sizes, options.prefix_caching, most_pages, window)


def _draft_pool(made: _Made, options: EngineOptions) -> PagePool | None:
    if made.draft_model is None:
        return None
    limits = made.limits
    num_pages = limits.draft_pages(made.num_pages, made.page_size)
    sizes = num_pages, made.page_size, limits.max_running, limits.max_model_len
    window = limits.draft_window or made.draft_model.config.page_window
    if limits.draft_span is not None:
        counts = made.num_pages, num_pages, limits.draft_span
        log.info("KV pages: %d of the target, %d of the draft, which sees %d tokens of a context", *counts)
    return PagePool(*sizes, options.prefix_caching, window=window)


def _make_pace(device: Device, options: EngineOptions) -> StepPace | None:
    """None where the duration of a step has no bound."""
    bound = device.pacing.max_step_ms if options.max_step_ms is None else options.max_step_ms
    return StepPace(bound / 1e3, device.pacing) if bound else None


def _make_overlap(made: _Made, options: EngineOptions, cost: ProfiledCost | None) -> Overlap | None:
    """None without a draft model, on a device that cannot overlap, and, for `auto`, where overlap never pays."""
    if options.overlap == "on" and not made.device.splits:
        raise ConfigError(f"overlap=on: {made.device.name} drafts and verifies one after the other; leave it out")
    if options.overlap == "on" and not isinstance(made.draft, Transformer):
        raise ConfigError("overlap=on: there is no draft model to overlap with verification; give one, or leave it out")
    if options.overlap == "on" and made.looks_up:
        raise ConfigError("overlap=on: prompt lookup cannot draft behind a frontier; leave +ngram or overlap out")
    is_possible = isinstance(made.draft, Transformer) and bool(made.device.splits) and not made.looks_up
    if options.overlap == "off" or not is_possible:
        _forget(made, "overlap")
        return None
    if options.overlap == "auto":
        if cost is None or not cost.overlap.splits:
            return None  # the profile has no figures for it
        splits = worthwhile(cost)
        if not splits:
            log.info("overlap is off: by the profile it does not pay for any batch size")
            _forget(made, "overlap")
            return None
        log.info("overlap may be used; SMs for drafting: %s", sorted(splits))
        if hasattr(made.executor, "prepare_overlap"):  # only an executor with graphs
            with progress_bar("capturing graphs for overlap") as update:
                made.executor.prepare_overlap(splits, update)
        return Overlap("auto", splits=splits)
    return Overlap("on")


def _make_exits(made: _Made, options: EngineOptions, cost: ProfiledCost | None) -> EarlyExit | None:
    """None without drafts and, for `auto`, without a profile that has the cost of an exit or if none can pay."""
    mode = options.early_exit
    has_price = cost is not None and cost.profile.exit_check is not None
    _forget(made, "exits")
    if made.has_head:
        if mode == "on":
            raise ConfigError("early_exit=on: a draft head needs the features of whole verifications; leave it out")
        return None
    if not made.target.has_head_rows:
        if mode == "on":
            raise ConfigError("early_exit=on: the model's head is quantised and packed; give --quantised off too")
        return None
    if made.draft is None or mode == "off" or (mode == "auto" and not has_price):
        return None
    depths = made.device.exit_depths
    if hasattr(made.executor, "prepare_exits"):  # it has graphs
        depths = _prepare_exits(made, mode, cost)
        if not depths:
            log.info("no draft leaves a verification early: it would not pay for any batch")
            return None
    return EarlyExit(mode, made.target.num_layers, cost, depths=depths)


def _prepare_exits(made: _Made, mode: str, cost: ProfiledCost | None) -> tuple[float, ...]:
    """The depths at which an exit can pay (`on`: all of them). Their graphs are captured."""
    num_layers, depths = made.target.num_layers, made.device.exit_depths
    if mode == "auto":
        assert cost is not None
        # a policy that does not go by cost drafts its length whatever that costs
        length = None if made.policy.needs_cost else made.policy.max_length or None
        most = made.limits.max_running
        depths = tuple(d for d in depths if can_pay(cost, int(d * num_layers), num_layers, most, length))
    layers = [layer for layer in layers_at(depths, num_layers) if layer]
    if layers:
        executor: Any = made.executor
        with progress_bar("capturing graphs for early exit") as update:
            executor.prepare_exits(layers, update)
    return depths


def _forget(made: _Made, mechanism: str) -> None:
    """Give up the graphs that were captured to measure a mechanism."""
    forget = getattr(made.executor, f"forget_{mechanism}", None)
    if forget is not None:
        forget()


def measure_profile(pair: LoadedPair, options: EngineOptions, budget: float | None = None) -> tuple[Profile, float]:
    """Measure what the forwards of a pair cost on this machine; the profile, and the seconds of measuring.

    `budget`: seconds to spend; None: the device's default.
    """
    made = _make_executor(pair.target, pair.draft, options)
    try:
        return _measure(made, budget)
    finally:
        made.executor.close()


def _make_executor(
    target: Transformer,
    draft: Draft,
    options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    device: Device | None = None,
) -> _Made:
    policy = options.make_policy(has_draft=draft is not None)
    device = device or make_device(options.device if options.device != "auto" else target.device.type)
    draft_model, looks_up = _model_of(draft), draft == NGRAM or isinstance(draft, WithLookup)
    if options.offload == "on" and not isinstance(draft_model, Transformer):
        raise ConfigError("offload=on: there is no draft model that could leave the device; give one, or leave it out")
    kv = target_kv(options, target)
    if kv.is_rounded:
        device.require_rounded_kv()
    elif target.kv_scales:
        log.info("the model brings scales for 8-bit keys and values; --kv-dtype fp8 uses them")
    limits = _limits(options, device, target, draft_model)
    # [max_running, max_model_len]; numpy's zeros take memory only where they are first written
    history = torch.from_numpy(np.zeros((limits.max_running, limits.max_model_len), dtype=np.int64))
    compiler = None
    if tokenizer is not None:
        compiler = shared_compiler(tokenizer, target.config.vocab_size, target.config.eos_token_ids)
    executor, num_pages = device.make_executor(
        Parts(
            target=target,
            draft=draft_model,
            looks_up=looks_up,
            limits=limits,
            page_size=options.page_size,
            max_length=HARD_MAX_LENGTH if draft is not None else 0,
            usual_length=_usual_length(policy, draft),
            history=history,
            sampler=Sampler(limits.max_running, target.config.vocab_size, history, compiler),
            num_pages=options.num_pages,
            kv_memory=options.kv_memory,
            target_kv=kv,
            offload=options.offload,
            acceptance=options.acceptance,
        )
    )
    drafts = draft_model if isinstance(draft, WithLookup) else draft
    return _Made(target, drafts, looks_up, policy, device, limits, executor, num_pages, options.page_size, kv)


def target_kv(options: EngineOptions, target: Transformer) -> KvFormat:
    """How the target's keys and values are stored."""
    return KvFormat.rounded(target) if options.kv_dtype == "fp8" else KvFormat.of(target)


def _usual_length(policy: Policy, draft: Draft) -> int:
    return policy.max_length if draft is not None else 0


# ── profiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _profile_of(made: _Made, options: EngineOptions) -> Profile | None:
    """The given profile; else, where the policy needs one, the one saved by an earlier start, or a new one."""
    given = _given_profile(options)
    if given is None and not made.policy.needs_cost:
        return None
    about = _about(made)
    if given is not None:
        if given.about != about:
            others = saved_profiles.differences(given, about)
            log.warning("the profile %s was measured under other conditions: %s", options.profile, others)
        return given
    kept = saved_profiles.find(about)
    if kept is not None and not (options.profiling == "full" and kept.kind == "idle"):
        log.info("using the profile saved by an earlier start: %s", kept.accuracy)
        return kept
    if options.profiling == "none":
        return _assumed(made)
    if options.profiling == "quick":
        started = perf_counter()
        with progress_bar("profiling"):
            profile = measure_quick(_subject(made), about)
        log.info("quick profile in %.1f s; the rest is measured when there are no requests", perf_counter() - started)
        return profile
    profile, seconds = _measure(made)
    log.info("profiled in %.1f s: %s", seconds, profile.accuracy)
    reason = profile.why_not_kept()
    if reason is None:
        saved_profiles.keep(profile)
    else:
        log.warning("the profile is used but not kept: %s; the machine may be busy", reason)
    return profile


def _given_profile(options: EngineOptions) -> Profile | None:
    return None if options.profile is None else Profile.load(Path(options.profile).expanduser())


def _about(made: _Made) -> dict[str, object]:
    return saved_profiles.describe(made.target, made.draft, made.limits, made.page_size, made.target_kv)


def _assumed(made: _Made) -> Profile:
    limits = made.limits
    return assumed_profile(
        made.target, made.draft_model, made.device.speeds, limits.max_batch_tokens, _about(made), made.target_kv.dtype
    )


def _measure(made: _Made, budget: float | None = None) -> tuple[Profile, float]:
    started = perf_counter()
    with progress_bar("profiling") as update:
        profile = measure(_subject(made), _about(made), budget, update)
    return profile, perf_counter() - started


def _subject(made: _Made) -> Subject:
    models = made.target, made.draft_model or made.target
    dtypes = made.target_kv.dtype, models[1].dtype
    target_bytes, draft_bytes = (
        bytes_per_page(model.config, made.page_size, dtype) for model, dtype in zip(models, dtypes, strict=True)
    )
    own = own_weights(made.draft, made.target) if isinstance(made.draft, Transformer) else []
    return Subject(
        executor=made.executor,
        limits=made.limits,
        num_pages=made.num_pages,
        num_draft_pages=made.limits.draft_pages(made.num_pages, made.page_size),
        page_size=made.page_size,
        speculates=made.draft is not None,
        has_draft_model=made.draft_model is not None,
        usual_length=_usual_length(made.policy, made.draft),
        vocab_size=made.target.config.vocab_size,
        how=made.device.profiling,
        exit_layer=0 if made.has_head else made.target.num_layers // 2,
        exit_candidates=candidates_of(made.target.config.vocab_size),
        splits=made.device.splits if made.device.profiling.has_lanes and not made.has_head else (),
        draft_memory=made.executor.draft_memory,
        leaving_bytes=home_bytes(own),
        page_bytes=(target_bytes, draft_bytes),
        assumed=_assumed(made),
    )


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _limits(options: EngineOptions, device: Device, target: Transformer, draft: DraftModel | None) -> Limits:
    max_running = options.max_running or min(device.max_running, options.max_batch_tokens or device.max_running)
    max_model_len = _max_model_len(options, target.max_positions)
    is_head = isinstance(draft, DraftHead)
    draft_config = draft.config if draft is not None else None
    window = choose_window(options.draft_window, draft_config, is_head, max_model_len, device.name)
    if window is not None and draft is not None:
        draft.reach(max_model_len)
    return Limits(
        max_running,
        options.max_batch_tokens or max(device.max_batch_tokens, max_running),
        max_model_len,
        draft.max_positions if draft is not None and window is None else None,
        _head_limits(draft) if isinstance(draft, DraftHead) else None,
        _vision_limits(options, target) if target.vision is not None else None,
        window,
    )


def _vision_limits(options: EngineOptions, target: Transformer) -> VisionLimits:
    """The buffer holds no fewer tokens than its smallest part."""
    row_bytes = target.config.hidden_size * target.dtype.itemsize
    return VisionLimits(max(BLOCK_ROWS, options.vision_memory // row_bytes), target.max_positions)


def _head_limits(head: DraftHead) -> HeadLimits:
    config = head.head_config
    return HeadLimits(config.num_block_rows, config.num_drafts) if config.kind == BLOCK else HeadLimits()


def _max_model_len(options: EngineOptions, known: int) -> int:
    """The target's context length, or less if the user says so. A draft with a shorter one stops drafting there."""
    asked = options.max_model_len
    if asked is not None and asked > known:
        raise ConfigError(f"max_model_len={asked}: the model has {known} positions; give at most that")
    return asked or known
