"""Profiles saved between runs, and beside them what early exit has learned.

A profile is found by hardware, models, sizes and versions. A file that cannot be read or written is a warning, never an
error: a profile can be measured again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from faser.cost.profile import VERSION, Profile
from faser.errors import ConfigError
from faser.limits import Limits
from faser.machine import atomic_write, faser_version, processor_name
from faser.models.heads import DraftHead
from faser.models.transformer import Decoder, Transformer
from faser.policy.early_exit import EarlyExit
from faser.runtime.kv_cache import KvFormat
from faser.threads import available_cpus

log = logging.getLogger("faser.engine")

WRITER = "profile writer"  # the name of threads that keep profiles


def describe(
    target: Transformer,
    draft: Decoder | str | None,
    limits: Limits,
    page_size: int,
    target_kv: KvFormat,
) -> dict[str, Any]:
    """Everything that the seconds of a profile depend on."""
    is_gpu = target.device.type == "cuda"
    hardware = torch.cuda.get_device_name(target.device) if is_gpu else f"{processor_name()}, {available_cpus()} CPUs"
    window = {} if limits.draft_window is None else {"draft_window": limits.draft_window.size}
    return {
        "hardware": hardware,
        "target": _shape(target) + (f", keys and values in {target_kv}" if target_kv.is_rounded else ""),
        "draft": draft if draft is None or isinstance(draft, str) else _shape(draft),
        "max_running": limits.max_running,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_model_len": limits.max_model_len,
        "page_size": page_size,
        "faser": faser_version(),
        "torch": str(torch.__version__),
        **window,
    }


def _shape(model: Decoder) -> str:
    config = model.config
    extras = [name for name in ("qkv_bias", "out_bias", "qk_norm") if getattr(config, name)]
    parts = [
        f"{config.num_layers} layers of {config.hidden_size}",
        f"{config.num_heads} heads of {config.head_dim} on {config.num_kv_heads}",
        f"MLP of {config.intermediate_size}",
        f"{model.head.shape[0]} tokens",
        *extras,
        str(model.dtype).removeprefix("torch."),
    ]
    if isinstance(model, Transformer) and model.formats != (parts[-1],):
        parts.append(f"weights: {', '.join(model.formats)}")
    if isinstance(model, Transformer) and model.vision is not None:
        eyes = model.vision.config
        parts.append(f"{eyes.kind} eyes of {eyes.depth} layers of {eyes.hidden_size}, MLP of {eyes.mlp_size}")
    if isinstance(model, DraftHead):
        head = model.head_config
        parts.append(f"{head.kind} head of {head.num_features} features")
        if head.num_drafts:
            parts.append(f"blocks of {head.num_drafts}, Markov rank {head.markov_rank}")
    return ", ".join(parts)


def path_of(about: Mapping[str, Any]) -> Path:
    """The file of the profile measured on `about`."""
    key = json.dumps({"version": VERSION, **about}, sort_keys=True)
    return _folder() / "profiles" / f"{blake2b(key.encode(), digest_size=8).hexdigest()}.json"


def _folder() -> Path:
    own, shared = os.environ.get("FASER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "faser"


def find(about: Mapping[str, Any]) -> Profile | None:
    """The saved profile measured on `about`, if there is one."""
    try:
        path = path_of(about)
        if not path.is_file():
            return None
        profile = Profile.load(path)
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        log.warning("a saved profile cannot be used: %s", error)
        return None
    if profile.about != about:
        log.warning("%s was measured on something else (%s) and is not used", path, differences(profile, about))
        return None
    return profile


def keep(profile: Profile) -> Path | None:
    """Save a profile. Its path; None if it cannot be written."""
    try:
        path = path_of(profile.about)
        profile.save(path)
    except (OSError, RuntimeError) as error:
        log.warning("the profile cannot be kept for the next start: %s", error)
        return None
    return path


def keep_in_background(profile: Profile) -> Thread:
    """Save a profile while the engine goes on: a slow disk delays no request."""
    thread = Thread(target=keep, args=(profile,), name=WRITER, daemon=True)
    thread.start()
    return thread


# ── what early exit learned from trials ───────────────────────────────────────────────────────────────────────────────


def _exits_path(about: Mapping[str, Any], models: Iterable[Transformer]) -> Path:
    """Beside the profile. Seconds depend on shapes only; fitted exit points depend on the weights too."""
    key = blake2b(digest_size=4)
    for model in models:
        for weight in (model.final_norm, model.layers[0].attention_norm, model.layers[-1].mlp_norm):
            key.update(weight.float().cpu().numpy().tobytes())
    profile = path_of(about)
    return profile.with_name(f"{profile.stem}-{key.hexdigest()}.exits.json")


def restore_exits(exits: EarlyExit, about: Mapping[str, Any], models: Iterable[Transformer]) -> None:
    """Restore what was saved for these models, if anything was."""
    try:
        path = _exits_path(about, models)
        if path.is_file():
            exits.restore(json.loads(path.read_text(encoding="utf-8")))
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        log.warning("the saved calibration of early exit cannot be used: %s", error)


def keep_exits(exits: EarlyExit, about: Mapping[str, Any], models: Iterable[Transformer]) -> None:
    known = exits.to_dict()
    if not known["scores"]:
        return
    try:
        atomic_write(_exits_path(about, models), json.dumps(known) + "\n")
    except (OSError, RuntimeError) as error:
        log.warning("the calibration of early exit cannot be kept: %s", error)


def differences(profile: Profile, about: Mapping[str, Any]) -> str:
    """What the profile was measured on, as far as it differs from `about`."""
    other = {name: value for name, value in profile.about.items() if about.get(name) != value}
    return ", ".join(f"{name}: {value}" for name, value in other.items()) or "it does not say what"
