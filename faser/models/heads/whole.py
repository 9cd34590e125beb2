"""A head over a whole text at once, without pages: what it drafts behind any token of it, all chains together.

A *chain* is what is drafted behind one *anchor*, the last token of the context; draft k (from 0) of the anchor at
position a is the token at a + k + 1. Tokens of the text stand in for the drafts before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from faser.models.heads.block import BlockHead
from faser.models.heads.eagle3 import Eagle3Head
from faser.models.heads.head import DraftHead
from faser.models.layers import rotate

KeysValues = tuple[Tensor, Tensor]


def chain_logits(head: DraftHead, states: Tensor, before: Tensor) -> Tensor:
    """Of one draft of each chain: states [chains, hidden], before [chains] the tokens before the drafts."""
    logits = head.logits(states)
    bias = head.markov_bias(before) if isinstance(head, BlockHead) else None
    return logits if bias is None else logits + bias


def chain_states(head: DraftHead, tokens: Tensor, features: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    """hidden of every draft, [chains, drafts, hidden].

    tokens: of the text and `num_drafts` more; features [tokens of the text but the last, feature_size]; anchors
    [chains] positions, each with a token before it.
    """
    fused = head.fuse(features)
    if isinstance(head, BlockHead):
        return _block_states(head, tokens, fused, anchors)[:, :num_drafts]
    assert isinstance(head, Eagle3Head)
    return _eagle3_states(head, tokens, fused, anchors, num_drafts)


def _eagle3_states(head: Eagle3Head, tokens: Tensor, fused: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    rows = torch.arange(len(fused), device=tokens.device)
    kept: list[KeysValues] = []

    def keep(layer: int, qkv: Tensor) -> Tensor:
        query, key, value = _turned(head, qkv[:, None], rows[:, None])
        kept.append((key[:, 0], value[:, 0]))
        context = key[None, :, 0], value[None, :, 0]
        return _attended(query, context, (key[:, :0], value[:, :0]), rows <= rows[:, None])

    hidden = head.extend(head.embed(tokens[1 : len(fused) + 1]), fused, keep)[anchors - 1]
    states, (context,) = [hidden], kept
    own = tuple(each[:0].unsqueeze(0).expand(len(anchors), -1, -1, -1) for each in context)
    for draft in range(1, num_drafts):

        def follow(layer: int, qkv: Tensor, places: Tensor = anchors - 1 + draft) -> Tensor:
            nonlocal own
            query, key, value = _turned(head, qkv[:, None], places[:, None])
            own = torch.cat((own[0], key), dim=1), torch.cat((own[1], value), dim=1)
            return _attended(query, (context[0][None], context[1][None]), own, rows < anchors[:, None])

        hidden = head.extend(head.embed(tokens[anchors + draft]), head.next_states(hidden), follow)
        states.append(hidden)
    return torch.stack(states, dim=1)


def _block_states(head: BlockHead, tokens: Tensor, fused: Tensor, anchors: Tensor) -> Tensor:
    config = head.head_config
    rows = torch.arange(len(fused), device=tokens.device)
    places = anchors[:, None] + torch.arange(config.num_block_rows, device=tokens.device)
    block = torch.full_like(places, config.mask_token_id)
    block[:, 0] = tokens[anchors]

    def attend_block(layer: int, qkv: Tensor) -> Tensor:
        context = head.context_kv(layer, fused)
        keys, values = context.chunk(2, dim=1)
        rotate(keys, head.cos[rows, None], head.sin[rows, None])
        query, key, value = _turned(head, torch.unflatten(qkv, 0, places.shape), places)
        return _attended(query, (keys[None], values[None]), (key, value), rows < anchors[:, None])

    hidden = torch.unflatten(head.run_block(head.embed(block.flatten()), attend_block), 0, places.shape)
    return hidden if config.anchor_predicts else hidden[:, 1:]


def _turned(head: DraftHead, qkv: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [chains, rows, heads + 2 * KV heads, head_dim] -> queries, keys, values, rotated to places [chains, rows]."""
    config, flat = head.config, qkv.flatten(0, 1)
    places = places.flatten().clamp_max(head.max_positions - 1)  # rows past the text's end are never accepted
    rotate(flat[:, : -config.num_kv_heads], head.cos[places, None], head.sin[places, None])
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    query, key, value = torch.split(flat.view_as(qkv), sizes, dim=2)
    return query, key, value


def _attended(query: Tensor, context: KeysValues, own: KeysValues, visible: Tensor) -> Tensor:
    """[rows of all chains, heads * head_dim]"""
    return attend(query[None], context, (own[0][None], own[1][None]), visible[None])[0].flatten(0, 1)


def attend(query: Tensor, context: KeysValues, own: KeysValues, visible: Tensor) -> Tensor:
    """Attention of each chain's rows to the visible context and to rows of the same chain.

    query [sequences, chains, rows, heads, head_dim]; context: keys and values [sequences, tokens, KV heads, head_dim];
    own: keys and values [sequences, chains, own rows, KV heads, head_dim]; visible [sequences or 1, chains, tokens].
    Returns [sequences, chains, rows, heads * head_dim]. No score of one chain with another is computed.
    """
    num_kv_heads, (_, num_chains, num_rows, _, head_dim) = context[0].shape[2], query.shape
    # q [sequences, KV heads, chains, group * rows, head_dim]
    q = torch.unflatten(query, 3, (num_kv_heads, -1)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
    far_keys, far_values = (each.permute(0, 2, 1, 3) for each in context)
    near_keys, near_values = (each.permute(0, 3, 1, 2, 4) for each in own)
    far = torch.unflatten(q.flatten(2, 3) @ far_keys.transpose(-1, -2), 2, (num_chains, -1))
    far = far.masked_fill(~visible[:, None, :, None], -math.inf)
    near = q @ near_keys.transpose(-1, -2)
    weights = (torch.cat((far, near), dim=-1).float() * head_dim**-0.5).softmax(dim=-1).to(far.dtype)
    far, near = weights.split([far.shape[-1], near.shape[-1]], dim=-1)
    mixed = (far.flatten(2, 3) @ far_values).unflatten(2, (num_chains, -1)) + near @ near_values
    return mixed.unflatten(3, (-1, num_rows)).permute(0, 2, 4, 1, 3, 5).flatten(3)
