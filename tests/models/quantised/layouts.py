"""A small Llama written in every quantised layout, by code of its own: from the descriptions of the formats.

The codes, zero points and scales are random, so that every bit of a layout has a meaning. `expected` are the weights
that they stand for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, MLP, VOCAB, LAYERS = 64, 128, 96, 2
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of eight that stands in each nibble


@dataclass
class Stored:
    """One matrix: its tensors by suffix, and the weights [N, K]."""

    tensors: dict[str, Tensor]
    weight: Tensor


def words(codes: Tensor, order: list[int]) -> Tensor:
    """codes [rows, 8 * words] -> int32 [rows, words]; order[i] is the column in nibble i."""
    eights = codes.view(codes.shape[0], -1, 8).long()
    packed = sum(eights[..., column] << (4 * nibble) for nibble, column in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def integers(n: int, k: int, random: torch.Generator, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes [N, K], zeros and scales [N, K / group], weights [N, K]."""
    codes = torch.randint(0, 16, (n, k), generator=random)
    zeros = torch.randint(1, 16, (n, k // group), generator=random)
    scales = (torch.rand(n, k // group, generator=random) * 0.01 + 0.005).half()
    wide_zeros, wide_scales = (each.repeat_interleave(group, 1) for each in (zeros, scales.float()))
    return codes, zeros, scales, (codes - wide_zeros) * wide_scales


def awq(n: int, k: int, random: torch.Generator) -> Stored:
    codes, zeros, scales, weight = integers(n, k, random)
    tensors = {"qweight": words(codes.t(), AWQ_ORDER), "qzeros": words(zeros.t(), AWQ_ORDER), "scales": scales.t()}
    return Stored(tensors, weight)


def gptq(
    n: int, k: int, random: torch.Generator, less: int = 1, act_order: bool = False, symmetric: bool = False
) -> Stored:
    codes, zeros, scales, weight = integers(n, k, random)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
        weight = (codes - 8) * scales.float().repeat_interleave(GROUP, 1)
    groups = torch.arange(k) // GROUP
    if act_order:
        groups = groups[torch.randperm(k, generator=random)]
        weight = (codes - zeros[:, groups]) * scales[:, groups].float()
    tensors = {
        "qweight": words(codes, list(range(8))).t(),
        "qzeros": words((zeros - less).t(), list(range(8))),
        "scales": scales.t(),
        "g_idx": groups.int(),
    }
    return Stored(tensors, weight)


def compressed_int4(n: int, k: int, random: torch.Generator, symmetric: bool = False) -> Stored:
    codes, zeros, scales, weight = integers(n, k, random)
    tensors = {
        "weight_packed": words(codes, list(range(8))),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if symmetric:
        return Stored(tensors, (codes - 8) * scales.float().repeat_interleave(GROUP, 1))
    return Stored({**tensors, "weight_zero_point": words(zeros.t(), list(range(8))).t()}, weight)


def fp8(n: int, k: int, random: torch.Generator, scale: str, static: bool = False) -> Stored:
    values = (torch.randn(n, k, generator=random) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    if scale == "block":
        scales = torch.rand(-(-n // 128), -(-k // 128), generator=random) * 1e-3 + 1e-4
        wide = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    elif scale == "channel":
        scales = wide = torch.rand(n, 1, generator=random) * 1e-3 + 1e-4
    else:
        scales = wide = torch.tensor(7e-4)
    tensors = {"weight": values, "weight_scale_inv" if scale == "block" else "weight_scale": scales}
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return Stored(tensors, values.float() * wide)


def compressed_group(weights: dict[str, Any], inputs: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"], **extra,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }  # fmt: skip


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}

# name: (quantization_config, how a matrix is stored)
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda n, k, random: fp8(n, k, random, "block"),
    ),
    "fp8 matrices": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda n, k, random: fp8(n, k, random, "tensor"),
    ),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda n, k, random: fp8(n, k, random, "tensor", static=True),
    ),
    "compressed fp8": (
        compressed_group(FLOATS, TOKENS, format="float-quantized"),
        lambda n, k, random: fp8(n, k, random, "channel"),
    ),
    "compressed fp8 static": (
        compressed_group(
            {**FLOATS, "strategy": "tensor"}, {**TOKENS, "strategy": "tensor", "dynamic": False},
            format="float-quantized",
        ),
        lambda n, k, random: fp8(n, k, random, "tensor", static=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (GPTQ, gptq),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda n, k, random: gptq(n, k, random, less=0),
    ),
    "gptq act-order": (
        {**GPTQ, "desc_act": True},
        lambda n, k, random: gptq(n, k, random, act_order=True),
    ),
    "gptq symmetric": (
        {**GPTQ, "sym": True},
        lambda n, k, random: gptq(n, k, random, symmetric=True),
    ),
    "gptq v2 symmetric act-order": (
        {**GPTQ, "sym": True, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda n, k, random: gptq(n, k, random, less=0, act_order=True, symmetric=True),
    ),
    "compressed int4": (
        compressed_group(INT4, None, format="pack-quantized"),
        lambda n, k, random: compressed_int4(n, k, random, symmetric=True),
    ),
    "compressed int4 zeros": (
        compressed_group({**INT4, "symmetric": False}, None, format="pack-quantized"),
        compressed_int4,
    ),
}  # fmt: skip


def write_layout(
    folder: Path,
    name: str,
    plain: tuple[str, ...] = (),
    quantisation: dict[str, Any] | None = None,
    more: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Write a model; the weights of its matrices by module. Modules in `plain` are not quantised; `more` tensors."""
    described, store = LAYOUTS[name]
    random = torch.Generator().manual_seed(7)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=random) * 0.1,
    }
    weights = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = torch.rand(HIDDEN, generator=random) + 0.5
        tensors[f"{prefix}post_attention_layernorm.weight"] = torch.rand(HIDDEN, generator=random) + 0.5
        for part, (n, k) in SHAPES.items():
            stored = store(n, k, random)
            module = prefix + part
            weights[module] = stored.weight
            if module in plain:
                tensors[f"{module}.weight"] = stored.weight
            else:
                tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.tensors.items()}
    tensors |= more or {}
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**CONFIG, "quantization_config": {**described, **(quantisation or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    return weights
