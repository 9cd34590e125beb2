"""A trained head as the head that serves."""

from __future__ import annotations

import torch
from torch import Tensor

from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.models.transformer import Layer, Transformer
from tools.heads.modules import BlockModule, Eagle3Module, HeadLayer, HeadModule


@torch.no_grad()
def serving_head(module: HeadModule, target: Transformer, dtype: torch.dtype) -> DraftHead:
    """The same function in faser's form, with weights of this dtype."""
    if isinstance(module, BlockModule):
        head = _block_head(module, target, dtype)
    else:
        assert isinstance(module, Eagle3Module)
        head = _eagle3_head(module, target, dtype)
    head.fc.copy_(module.fc)
    head.final_norm.copy_(module.final_norm)
    for into, layer in zip(head.layers, module.layers, strict=True):
        assert isinstance(layer, HeadLayer)
        _copy_layer(layer, into)
    if module.vocabulary is not None:
        assert head.vocabulary is not None
        head.vocabulary.copy_(module.vocabulary)
        head.head.copy_(module.head)
    return head


def _eagle3_head(module: Eagle3Module, target: Transformer, dtype: torch.dtype) -> DraftHead:
    head = Eagle3Head(module.head_config, target, dtype)
    head.state_norm.copy_(module.state_norm)
    return head


def _block_head(module: BlockModule, target: Transformer, dtype: torch.dtype) -> DraftHead:
    head = BlockHead(module.head_config, target, dtype)
    head.feature_norm.copy_(module.feature_norm)
    for into, weight in (
        (head.markov_in, module.markov_in),
        (head.markov_out, module.markov_out),
        (head.confidence_weight, module.confidence_weight),
        (head.confidence_bias, module.confidence_bias),
    ):
        if into is not None:
            into.copy_(weight)
    return head


def _copy_layer(layer: HeadLayer, into: Layer) -> None:
    into.attention_norm.copy_(layer.attention_norm)
    into.qkv.copy_(layer.qkv)
    if into.qk_norm is not None:
        into.qk_norm.copy_(_norms_by_head(layer))
    into.out.copy_(layer.out)
    into.mlp_norm.copy_(layer.mlp_norm)
    into.gate_up.copy_(layer.gate_up)
    into.down.copy_(layer.down)


def _norms_by_head(layer: HeadLayer) -> Tensor:
    """[heads + KV heads, head_dim]"""
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    return torch.cat(
        (layer.q_norm.expand(layer.config.num_heads, -1), layer.k_norm.expand(layer.config.num_kv_heads, -1))
    )
