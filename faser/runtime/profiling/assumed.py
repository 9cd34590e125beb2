"""What forwards cost where nothing was measured: from the sizes of the models alone.

A forward reads all weights once and multiplies with each of them for every row; attention reads keys and values. The
speeds are rough. ProfiledCost corrects them within a few steps, so the shape of the curves matters more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from faser.cost.curve import NOTHING, Curve
from faser.cost.profile import Profile
from faser.models.heads import BlockHead
from faser.models.quantised import tensors_of
from faser.models.transformer import Decoder, Transformer, matrices_of
from faser.runtime.device import Speeds


def assumed_profile(
    target: Transformer,
    draft: Decoder | None,
    speeds: Speeds,
    max_rows: int,
    about: Mapping[str, Any],
    target_kv: torch.dtype,
) -> Profile:
    verify = _curve(target, target_kv, speeds, max_rows)
    drafts = next_drafts = NOTHING if draft is None else _curve(draft, draft.dtype, speeds, max_rows)
    if isinstance(draft, BlockHead):  # all tokens come from one forward
        drafts = _curve(draft, draft.dtype, speeds, max_rows, draft.head_config.num_block_rows)
        next_drafts = NOTHING
    return Profile(
        about=about,
        verify=verify,
        prompts=verify,
        first_draft=drafts,
        next_draft=next_drafts,
        catch_up=drafts,
        host=speeds.host_seconds,
        stop_seconds=None if draft is None else speeds.stop_seconds,
        kind="assumed",
    )


def _curve(model: Decoder, kv_dtype: torch.dtype, speeds: Speeds, max_rows: int, rows_each: int = 1) -> Curve:
    """By requests of `rows_each` rows."""
    config, matrices = model.config, matrices_of(model)
    num_bytes = sum(each.numel() * each.element_size() for weight in matrices for each in tensors_of(weight).values())
    base = model.num_layers * speeds.layer_seconds + num_bytes / speeds.bytes_per_second
    row = 2 * rows_each * sum(weight.shape[0] * weight.shape[1] for weight in matrices) / speeds.flops_per_second
    kv_bytes = 2 * model.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize
    token = kv_bytes / speeds.bytes_per_second
    rows = tuple(1 << i for i in range(max_rows.bit_length()))
    return Curve(rows, tuple(base + row * each for each in rows), (token,) * len(rows))
