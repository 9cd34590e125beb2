"""Draft heads in training: EAGLE-3 and block heads as plain torch modules over whole sequences.

Knows the parameters and the forward of each kind, for all chains of a sequence at once. A *chain* is what is drafted
behind one *anchor*, the last token of the context; draft k (from 0) of the anchor at position a is the token at
a + k + 1. Tokens of the text stand in for the drafts before it. This is no approximation for acceptance: a draft is
only judged if all before it equal the text.

Knows nothing of losses, schedules or files. faser/models/heads/ has the forwards that serve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faser.models.config import ModelConfig
from faser.models.heads import HeadConfig
from faser.models.heads.whole import KeysValues, attend
from faser.models.transformer import Transformer
from tools.distill import rotary

_STD = 0.02  # of weights that no weight of the target can begin


class HeadLayer(nn.Module):
    """One decoder layer of a head. The fields are those of faser's Layer, the norms of q and k one per head_dim."""

    def __init__(self, config: ModelConfig, num_in: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
        qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
        self.attention_norm = ones(hidden, device)
        self.qkv = normal(qkv_size, num_in, device)
        self.q_norm = ones(config.head_dim, device) if config.qk_norm else None
        self.k_norm = ones(config.head_dim, device) if config.qk_norm else None
        self.out = normal(hidden, query_size, device)
        self.mlp_norm = ones(hidden, device)
        self.gate_up = normal(2 * config.intermediate_size, hidden, device)
        self.down = normal(hidden, config.intermediate_size, device)

    @torch.no_grad()
    def begin_as(self, target: Transformer, index: int) -> None:
        """Take the weights of a target's layer. Its qkv becomes the last columns of ours."""
        source = target.layers[index]
        self.attention_norm.copy_(source.attention_norm)
        self.qkv[:, -source.qkv.shape[1] :].copy_(source.qkv)
        self.out.copy_(source.out)
        self.mlp_norm.copy_(source.mlp_norm)
        self.gate_up.copy_(source.gate_up)
        self.down.copy_(source.down)
        if self.q_norm is not None and self.k_norm is not None and source.qk_norm is not None:
            self.q_norm.copy_(source.qk_norm[0])
            self.k_norm.copy_(source.qk_norm[-1])

    def normed(self, x: Tensor) -> Tensor:
        return norm(x, self.attention_norm, self.config.norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        """[..., num_in] -> [..., heads, head_dim], normalised, not rotated."""
        config = self.config
        rows = config.num_heads * config.head_dim
        query = F.linear(x, self.qkv[:rows]).unflatten(-1, (config.num_heads, config.head_dim))
        return query if self.q_norm is None else norm(query, self.q_norm, config.norm_eps)

    def keys_values(self, x: Tensor) -> KeysValues:
        """[..., num_in] -> keys and values [..., KV heads, head_dim], the keys normalised, not rotated."""
        config = self.config
        rows = config.num_heads * config.head_dim
        both = F.linear(x, self.qkv[rows:]).unflatten(-1, (2, config.num_kv_heads, config.head_dim))
        key, value = both.unbind(-3)
        return key if self.k_norm is None else norm(key, self.k_norm, config.norm_eps), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream behind this layer. x [..., hidden], attended [..., heads * head_dim]"""
        x = x + F.linear(attended, self.out)
        gate, up = F.linear(norm(x, self.mlp_norm, self.config.norm_eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class HeadModule(nn.Module, ABC):
    """What both kinds share: the fused features, the layers, the final norm and the output matrix.

    Without a vocabulary the output matrix is the target's and stays as it is. Attributes are named as in faser's heads.
    """

    def __init__(
        self, head_config: HeadConfig, target: Transformer, num_drafts: int, vocabulary: Tensor | None, num_in: int
    ) -> None:
        super().__init__()
        config, device = head_config.layers, target.device
        self.head_config, self.config, self.num_drafts = head_config, config, num_drafts
        self.fc = normal(config.hidden_size, head_config.feature_size, device)
        self.layers = nn.ModuleList(HeadLayer(config, num_in, device) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(target.final_norm.float().clone())
        self.vocabulary = vocabulary
        self.head = target.head if vocabulary is None else nn.Parameter(target.head[vocabulary].float().contiguous())
        self.embedding, self.cos, self.sin = target.embedding, target.cos, target.sin

    @abstractmethod
    def begin_as(self, target: Transformer) -> None:
        """Take what weights of the target can serve as a beginning."""

    @abstractmethod
    def states(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """The last residual streams of all drafts. [sequences, chains, drafts, hidden]

        tokens [sequences, tokens]; features [sequences, tokens, num_in of fc]; anchors [sequences, chains] positions,
        each with `num_drafts` positions from it on.
        """

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Of drafts with their states [..., hidden] and the tokens `before` them [...]. [..., vocabulary]"""
        return F.linear(norm(states, self.final_norm, self.config.norm_eps), self.head)

    def confidence(self, states: Tensor, before: Tensor) -> Tensor | None:
        """[...]: the log-odds that a draft is accepted; None without a confidence head."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).float()

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., heads, head_dim] to its positions [...]."""
        return rotary(x, self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2))


class Eagle3Module(HeadModule):
    """One layer over a token's embedding and the fused features before it; drafts go on from its own state."""

    def __init__(
        self, head_config: HeadConfig, target: Transformer, num_drafts: int, vocabulary: Tensor | None
    ) -> None:
        super().__init__(head_config, target, num_drafts, vocabulary, 2 * head_config.layers.hidden_size)
        self.state_norm = ones(self.config.hidden_size, target.device)

    @torch.no_grad()
    def begin_as(self, target: Transformer) -> None:
        """The target's last layer; `fc` passes the last feature on. The embedding's columns stay random."""
        layer = self.layers[0]
        layer.begin_as(target, target.num_layers - 1)
        self.state_norm.copy_(layer.attention_norm)
        layer.attention_norm.fill_(1.0)
        self.fc.zero_()
        self.fc[:, -self.config.hidden_size :].fill_diagonal_(1.0)

    def states(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Step k of all chains at once: real keys before the anchor, and the chain's own from its first draft on.

        `anchors` must be all positions that can be one; see `all_anchors`.
        """
        num_chains = anchors.shape[1]
        layer, starts = self.layers[0], torch.arange(num_chains, device=tokens.device)
        visible = (starts <= starts[:, None])[None]
        state, states = F.linear(features[:, :num_chains], self.fc).float(), []
        for step in range(self.num_drafts):
            embedded = self.embed(tokens[:, 1 + step : 1 + step + num_chains])
            x = torch.cat((layer.normed(embedded), norm(state, self.state_norm, self.config.norm_eps)), dim=-1)
            key, value = layer.keys_values(x)
            key, query = self.turn(key, starts + step), self.turn(layer.queries(x), starts + step)
            if step == 0:
                context = key, value
                own = key[:, :, None][:, :, :0], value[:, :, None][:, :, :0]
            else:
                own = torch.cat((own[0], key[:, :, None]), dim=2), torch.cat((own[1], value[:, :, None]), dim=2)
            state = layer.finish(state, attend(query[:, :, None], context, own, visible)[:, :, 0])
            states.append(state)
        return torch.stack(states, dim=2)


class BlockModule(HeadModule):
    """A few layers over blocks: the anchor and masks behind it, which see the features before it as keys and values."""

    def __init__(self, head_config: HeadConfig, target: Transformer, vocabulary: Tensor | None) -> None:
        super().__init__(head_config, target, head_config.num_drafts, vocabulary, head_config.layers.hidden_size)
        hidden, rank, device = self.config.hidden_size, head_config.markov_rank, target.device
        self.feature_norm = ones(hidden, device)
        self.markov_in = self.markov_out = self.confidence_weight = self.confidence_bias = None
        if rank:
            self.markov_in = normal(self.config.vocab_size, rank, device)
            self.markov_out = nn.Parameter(torch.zeros(self.head.shape[0], rank, device=device))
        if head_config.confidence:
            num_in = hidden + (rank if head_config.confidence_with_markov else 0)
            self.confidence_weight = nn.Parameter(torch.zeros(1, num_in, device=device))
            self.confidence_bias = nn.Parameter(torch.zeros(1, device=device))

    @torch.no_grad()
    def begin_as(self, target: Transformer) -> None:
        """The target's last layers."""
        for index, layer in enumerate(self.layers):
            layer.begin_as(target, target.num_layers - len(self.layers) + index)

    def states(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        num_tokens, num_rows = tokens.shape[1], self.head_config.num_block_rows
        places = torch.arange(num_tokens, device=tokens.device)
        visible = places < anchors[..., None]
        positions = anchors[..., None] + torch.arange(num_rows, device=tokens.device)
        rows = torch.full_like(positions, self.head_config.mask_token_id)
        rows[..., 0] = tokens.gather(1, anchors)
        fused = norm(F.linear(features, self.fc).float(), self.feature_norm, self.config.norm_eps)
        x = self.embed(rows)
        for layer in self.layers:
            normed = layer.normed(x)
            (far_keys, far_values), (keys, values) = layer.keys_values(fused), layer.keys_values(normed)
            context = self.turn(far_keys, places), far_values
            own = self.turn(keys, positions), values
            x = layer.finish(x, attend(self.turn(layer.queries(normed), positions), context, own, visible))
        return x if self.head_config.anchor_predicts else x[:, :, 1:]

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        logits = super().logits(states, before)
        if self.markov_in is None or self.markov_out is None:
            return logits
        return logits + F.linear(F.embedding(before, self.markov_in), self.markov_out)

    def confidence(self, states: Tensor, before: Tensor) -> Tensor | None:
        if self.confidence_weight is None:
            return None
        known = norm(states, self.final_norm, self.config.norm_eps)
        if self.markov_in is not None and self.head_config.confidence_with_markov:
            known = torch.cat((known, F.embedding(before, self.markov_in)), dim=-1)
        return F.linear(known, self.confidence_weight, self.confidence_bias)[..., 0]


def all_anchors(num_sequences: int, num_tokens: int, num_drafts: int, device: torch.device) -> Tensor:
    """Every position with a token before it and `num_drafts` positions from it on. [sequences, chains]"""
    return torch.arange(1, num_tokens - num_drafts + 1, device=device).expand(num_sequences, -1)


def random_anchors(
    num_sequences: int, num_tokens: int, num_drafts: int, most: int, generator: torch.Generator
) -> Tensor:
    """Up to `most` of these positions, others for each sequence, in ascending order. [sequences, chains]"""
    num_places = num_tokens - num_drafts
    chosen = torch.rand(num_sequences, num_places, generator=generator, device=generator.device)
    return chosen.topk(min(most, num_places), dim=1).indices.sort(dim=1).values + 1


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, whatever autocast says."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def ones(size: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, device=device))


def normal(num_out: int, num_in: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_out, num_in, device=device) * _STD)
