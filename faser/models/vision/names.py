"""The names of an encoder's tensors in a checkpoint, and the layouts that checkpoints of whole models have.

Knows names and shapes. Knows nothing of files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from faser.models.vision.encoder import VisionBlock, VisionEncoder

_NEW_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


def canonical_name(name: str) -> str:
    """The name of a tensor in the older layout, which FASER writes and speaks: visual.*, model.*, lm_head.*."""
    for new, old in _NEW_PREFIXES.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def vision_tensors(encoder: VisionEncoder) -> dict[str, Tensor]:
    """Every tensor of the encoder by name, as a view of the checkpoint's own shape."""
    config, merger = encoder.config, encoder.merger
    size = config.patch_size
    convolution = (config.in_channels, config.temporal_patch_size, size, size)
    tensors = {
        "visual.patch_embed.proj.weight": encoder.patch_embedding.view(-1, *convolution),
        "visual.merger.ln_q.weight": merger.norm,
        "visual.merger.ln_q.bias": merger.norm_bias,
        "visual.merger.mlp.0.weight": merger.inner,
        "visual.merger.mlp.0.bias": merger.inner_bias,
        "visual.merger.mlp.2.weight": merger.out,
        "visual.merger.mlp.2.bias": merger.out_bias,
    }
    for index, block in enumerate(encoder.blocks):
        mlp = _gated_mlp(block) if config.has_rms_norm else _plain_mlp(block)
        for name, tensor in {**_attention(block), **mlp}.items():
            tensors[f"visual.blocks.{index}.{name}"] = tensor
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _attention(block: VisionBlock) -> dict[str, Tensor | None]:
    return {
        "norm1.weight": block.attention_norm,
        "norm1.bias": block.attention_norm_bias,
        "attn.qkv.weight": block.qkv,
        "attn.qkv.bias": block.qkv_bias,
        "attn.proj.weight": block.out,
        "attn.proj.bias": block.out_bias,
        "norm2.weight": block.mlp_norm,
        "norm2.bias": block.mlp_norm_bias,
    }


def _plain_mlp(block: VisionBlock) -> dict[str, Tensor]:
    return {
        "mlp.fc1.weight": block.mlp_in,
        "mlp.fc1.bias": block.mlp_in_bias,
        "mlp.fc2.weight": block.mlp_out,
        "mlp.fc2.bias": block.mlp_out_bias,
    }


def _gated_mlp(block: VisionBlock) -> dict[str, Tensor]:
    (gate, up), (gate_bias, up_bias) = torch.chunk(block.mlp_in, 2), torch.chunk(block.mlp_in_bias, 2)
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.gate_proj.bias": gate_bias,
        "mlp.up_proj.weight": up,
        "mlp.up_proj.bias": up_bias,
        "mlp.down_proj.weight": block.mlp_out,
        "mlp.down_proj.bias": block.mlp_out_bias,
    }
