"""Plain helpers for the model tests: a dense `attend`, small random checkpoints, small configs.

Knows transformers, the oracle. Everything here favours being obviously right over being fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from faser.limits import KeyWindow
from faser.models.config import ModelConfig
from faser.models.layers import rotate
from faser.models.transformer import Attend, Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def dense_attend(
    model: Transformer,
    positions: Tensor | None = None,
    windows: Sequence[KeyWindow | None] = (),
    first: Tensor | None = None,
) -> Attend:
    """Causal attention of all rows over all rows, as one sequence.

    `windows` by layer; queries meet the sinks as if they stood right behind the sinks and the window. Row r does not
    see the keys between the sinks and first[r].
    """
    config = model.config

    def attend(layer_index: int, qkv: Tensor) -> Tensor:
        rows = qkv.shape[0]
        where = torch.arange(rows) if positions is None else positions
        qkv = qkv.clone()
        window = windows[layer_index] if windows else None
        sinks = 0 if window is None else window.sinks
        nearer = qkv[:, : config.num_heads].clone()
        cos, sin = model.rotation(where if window is None else where.clamp(max=window.span - 1))
        rotate(nearer, cos[:, None], sin[:, None])
        cos, sin = model.rotation(where)
        rotate(qkv[:, : -config.num_kv_heads], cos[:, None], sin[:, None])
        # query [heads, rows, head_dim]; key, value [kv heads, rows, head_dim]
        parts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = (part.transpose(0, 1).float() for part in torch.split(qkv, parts, dim=1))
        group = config.num_heads // config.num_kv_heads
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = query @ key.transpose(1, 2) / config.head_dim**0.5
        scores[..., :sinks] = nearer.transpose(0, 1) @ key[:, :sinks].transpose(1, 2) / config.head_dim**0.5
        if window is not None:
            row, column = torch.arange(rows)[:, None], torch.arange(rows)
            begin = torch.zeros(rows, 1) if first is None else first[:, None]
            scores.masked_fill_((column >= sinks) & ((column <= row - window.size) | (column < begin)), float("-inf"))
        scores.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ value).transpose(0, 1).reshape(rows, -1).to(qkv.dtype)

    return attend


@torch.inference_mode()
def forward(
    model: Transformer,
    token_ids: Tensor,
    windows: Sequence[KeyWindow | None] = (),
    first: Tensor | None = None,
) -> Tensor:
    """Logits [rows, vocab_size] of one sequence."""
    attend = dense_attend(model, None, windows, first)
    return model.logits(model.run_layers(model.embed(token_ids), attend))


def random_hf(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model in which no norm is one and no bias zero: these defaults would hide mistakes."""
    torch.manual_seed(seed)
    has_eyes = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if has_eyes else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0, 0.2) if "norm" in name or "ln_q" in name else weight.normal_(0.0, 0.15)
    return model.eval()


def save_hf(folder: Path, config: transformers.PreTrainedConfig, **options: Any) -> transformers.PreTrainedModel:
    """Save a random model in `folder` and return it."""
    model = random_hf(config)
    model.save_pretrained(folder, **options)
    return model


def small_config(**changes: Any) -> ModelConfig:
    """A small Llama without transformers."""
    values: dict[str, Any] = {
        "family": "llama", "vocab_size": 96, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 12, "intermediate_size": 80, "norm_eps": 1e-5, "max_positions": 128,
    }  # fmt: skip
    return ModelConfig(**(values | changes))
