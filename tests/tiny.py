"""Tiny random models of every family, made in memory, and drafts that agree with them some of the time."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from faser.models.config import ModelConfig, Rope
from faser.models.transformer import Transformer

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


def make_draft(target: Transformer, noise: float = 0.03, seed: int = 1) -> Transformer:
    """The target with every weight shaken: agrees often, not always."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.weights():
        weight += noise * torch.randn(weight.shape, generator=generator)
    return draft
