"""Where profiles are kept between runs, and what each was measured on; and beside them what early exits learned.

A profile is found again by hardware, models, sizes and versions; any other is no use. What cannot be read or written
here is a warning, never an error: a profile can always be measured again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from faser.cost.profile import VERSION, Profile
from faser.engine.scheduler import Limits
from faser.errors import ConfigError
from faser.machine import atomic_write, faser_version, processor_name
from faser.models.transformer import Transformer
from faser.policy.early_exit import EarlyExit
from faser.threads import available_cpus

log = logging.getLogger("faser.engine.engine")


def describe(target: Transformer, draft: Transformer | str | None, limits: Limits, page_size: int) -> dict[str, Any]:
    """Everything that seconds depend on, in words."""
    return {
        "hardware": _hardware(target.device),
        "target": _shape(target),
        "draft": _shape(draft) if isinstance(draft, Transformer) else draft,
        "max_running": limits.max_running,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_model_len": limits.max_model_len,
        "page_size": page_size,
        "faser": faser_version(),
        "torch": str(torch.__version__),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {available_cpus()} CPUs"


def _shape(model: Transformer) -> str:
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
    return ", ".join(parts)


def path_of(about: Mapping[str, Any]) -> Path:
    """The file of a profile that was measured on this."""
    key = json.dumps({"version": VERSION, **about}, sort_keys=True)
    return _folder() / "profiles" / f"{blake2b(key.encode(), digest_size=8).hexdigest()}.json"


def _folder() -> Path:
    own, shared = os.environ.get("FASER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "faser"


def find(about: Mapping[str, Any]) -> Profile | None:
    """The profile that was kept for this, if there is one."""
    try:
        path = path_of(about)
        if not path.is_file():
            return None
        profile = Profile.load(path)
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        log.warning("a saved profile is of no use: %s", error)
        return None
    if profile.about != about:
        log.warning("%s was measured on something else (%s) and is not used", path, differences(profile, about))
        return None
    return profile


def keep(profile: Profile) -> Path | None:
    """Where it was kept; None where it could not be."""
    try:
        path = path_of(profile.about)
        profile.save(path)
    except (OSError, RuntimeError) as error:
        log.warning("the profile cannot be kept for the next start: %s", error)
        return None
    return path


# ── what trials of the early exit taught ─────────────────────────────────────────────────────────────────────────────


def _exits_path(about: Mapping[str, Any], models: Iterable[Transformer]) -> Path:
    """Beside the profile. Seconds depend on shapes alone, and this on the weights as well."""
    key = blake2b(digest_size=4)
    for model in models:
        for weight in (model.final_norm, model.layers[0].attention_norm, model.layers[-1].mlp_norm):
            key.update(weight.float().cpu().numpy().tobytes())
    profile = path_of(about)
    return profile.with_name(f"{profile.stem}-{key.hexdigest()}.exits.json")


def restore_exits(exits: EarlyExit, about: Mapping[str, Any], models: Iterable[Transformer]) -> None:
    """What was kept for these, if anything was."""
    try:
        path = _exits_path(about, models)
        if path.is_file():
            exits.restore(json.loads(path.read_text(encoding="utf-8")))
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        log.warning("what is known of the early exit is of no use: %s", error)


def keep_exits(exits: EarlyExit, about: Mapping[str, Any], models: Iterable[Transformer]) -> None:
    known = exits.to_dict()
    if not known["scores"]:
        return
    try:
        atomic_write(_exits_path(about, models), json.dumps(known) + "\n")
    except (OSError, RuntimeError) as error:
        log.warning("what was learned of the early exit cannot be kept: %s", error)


def differences(profile: Profile, about: Mapping[str, Any]) -> str:
    """What a profile was measured on, where it is something else."""
    other = {name: value for name, value in profile.about.items() if about.get(name) != value}
    return ", ".join(f"{name}: {value}" for name, value in other.items()) or "it does not say what"
