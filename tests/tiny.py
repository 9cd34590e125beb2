"""Tiny random models of every family, made in memory, and drafts that agree with them some of the time."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from faser.arrays import IntArray
from faser.models.config import ModelConfig, Rope
from faser.models.heads import BLOCK, EAGLE3, BlockHead, DraftHead, Eagle3Head, HeadConfig
from faser.models.transformer import Transformer
from faser.models.vision.config import VisionConfig
from faser.vision import Grid

VOCABULARY = 61

_BASE = ModelConfig(
    family="llama",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-5,
    max_positions=128,
    eos_token_ids=(2,),
)

CONFIGS = {
    "llama2": replace(_BASE, num_kv_heads=4),
    "llama3": replace(
        _BASE,
        tie_embeddings=True,
        rope=Rope(500_000.0, "llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "mistral": replace(_BASE, family="mistral", num_kv_heads=1),
    "qwen2": replace(_BASE, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(_BASE, family="qwen3", qk_norm=True, head_dim=16, num_layers=2),
}


def make_model(name: str = "llama3", seed: int = 0) -> Transformer:
    return Transformer.random(CONFIGS[name], seed, std=0.3)


VISION = VisionConfig(
    kind="qwen2_vl",
    depth=2,
    hidden_size=16,
    num_heads=2,
    mlp_size=24,
    output_size=32,
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    activation="quick_gelu",
    image_token_id=58,
    video_token_id=59,
)
WINDOWED_VISION = replace(
    VISION, kind="qwen2_5_vl", activation="silu", window_size=16, full_attention_layers=(1,), tokens_per_second=2.0
)
VISION_CONFIGS = {
    "qwen2_vl": replace(CONFIGS["qwen2"], rope=Rope(sections=(2, 1, 1)), vision=VISION),
    "qwen2_5_vl": replace(CONFIGS["qwen2"], rope=Rope(sections=(2, 1, 1)), vision=WINDOWED_VISION),
    "watch": replace(CONFIGS["llama3"], vision=replace(VISION, has_spatial_positions=False)),
}


def make_vision_model(name: str = "qwen2_vl", seed: int = 0) -> Transformer:
    """A model with eyes: `.vision` is its encoder."""
    return Transformer.random(VISION_CONFIGS[name], seed, std=0.3)


def make_grid(height: int = 4, width: int = 6, frames: int = 2, seed: int = 0, kept: IntArray | None = None) -> Grid:
    """A grid of random pixels for a model of `make_vision_model`; `height` and `width` in patches."""
    size, side = VISION.patch_size, VISION.merge_size
    num_groups = height * width // side**2
    pixels = np.random.default_rng(seed).integers(0, 256, (num_groups, side**2, 3, frames, size, size), dtype=np.uint8)
    patches = (pixels if kept is None else pixels[kept]).reshape(-1, *pixels.shape[2:])
    return Grid(patches, height, width, side, kept)


def make_draft(target: Transformer, noise: float = 0.03, seed: int = 1) -> Transformer:
    """The target with every weight shaken: agrees often, not always."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.weights():
        weight += noise * torch.randn(weight.shape, generator=generator)
    return draft


def make_head(
    target: Transformer, kind: str = "eagle3", seed: int = 2, std: float = 0.3, head_dim: int = 16
) -> DraftHead:
    """A random head of one of HEAD_KINDS."""
    config = target.config
    layers = replace(_BASE, num_layers=1, head_dim=head_dim, tie_embeddings=False, max_positions=config.max_positions)
    options = {"layers": layers, "target_hidden_size": config.hidden_size, "feature_layers": (0, config.num_layers - 1)}
    if kind.startswith("eagle3"):
        flags = ("norm_before_residual", "norm_output", "fc_norm") if "3.1" in kind else ("norm_before_fc",)
        more = dict.fromkeys(flags, True)
        return Eagle3Head.random(HeadConfig(kind=EAGLE3, draft_vocab_size=40, **options, **more), target, seed, std=std)
    options["layers"] = replace(layers, family="qwen3", num_layers=2, qk_norm=True)
    if kind == "dspark":
        options |= {"anchor_predicts": True, "markov_rank": 4, "confidence": True, "confidence_with_markov": True}
    return BlockHead.random(HeadConfig(kind=BLOCK, num_drafts=5, mask_token_id=1, **options), target, seed, std=std)


HEAD_KINDS = ("eagle3", "eagle3.1", "dflash", "dspark")
