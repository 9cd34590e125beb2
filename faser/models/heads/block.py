"""Block heads, DFlash and DSpark: a few layers that fill a block of masked positions in one pass.

Keys and values of the context come from the target's fused features (`context_kv`). The block's rows are the anchor,
which is the last token of the context, and masks behind it; they see the whole context and each other. In DFlash a mask
predicts its own token, in DSpark every row predicts the token behind it. The Markov head adds a bias to the logits of a
token by the token before it; the confidence head tells how likely the target accepts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.allocation import Allocator
from faser.models.heads.head import DraftHead
from faser.models.layers import rms_norm, rms_norm_heads_
from faser.models.quantised.matrix import plain
from faser.models.transformer import Attend, apply_head, run_layer


class BlockHead(DraftHead):
    """A block head in memory."""

    def _allocate(self, make: Allocator) -> None:
        config, hidden = self.head_config, self.config.hidden_size
        self.feature_norm = make.vector(hidden)
        self.mask_embedding: Tensor | None = None  # [hidden]; None: the mask token's row of the embedding
        self.markov_in: Tensor | None = None  # [vocab_size, rank]
        self.markov_out: Tensor | None = None  # [output rows, rank]
        if config.markov_rank:
            self.markov_in = make.vector(self.config.vocab_size, config.markov_rank)
            self.markov_out = make.matrix(config.num_output_rows, config.markov_rank)
        self.confidence_weight: Tensor | None = None  # [1, hidden], [1, hidden + rank] with the Markov head
        self.confidence_bias: Tensor | None = None  # [1]
        if config.confidence:
            rank = config.markov_rank if config.confidence_with_markov else 0
            self.confidence_weight = make.vector(1, hidden + rank)
            self.confidence_bias = make.vector(1)

    def _further(self) -> dict[str, Tensor]:
        further = {
            "feature_norm": self.feature_norm,
            "mask_embedding": self.mask_embedding,
            "markov_in": self.markov_in,
            "markov_out": self.markov_out,
            "confidence_weight": self.confidence_weight,
            "confidence_bias": self.confidence_bias,
        }
        return {name: tensor for name, tensor in further.items() if tensor is not None}

    def fuse(self, features: Tensor) -> Tensor:
        return rms_norm(F.linear(features, self.fc), self.feature_norm, self.config.norm_eps)

    def context_kv(self, layer: int, fused: Tensor) -> Tensor:
        """fused [rows, hidden] -> [rows, 2 * num_kv_heads, head_dim]: keys, normed but not rotated, then values."""
        weights, config = self.layers[layer], self.config
        first = config.num_heads * config.head_dim
        bias = None if weights.qkv_bias is None else weights.qkv_bias[first:]
        kv = F.linear(fused, plain(weights.qkv)[first:], bias).view(-1, 2 * config.num_kv_heads, config.head_dim)
        if weights.qk_norm is not None:
            rms_norm_heads_(kv[:, : config.num_kv_heads], weights.qk_norm[config.num_heads :], config.norm_eps)
        return kv

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded = super().embed(token_ids)
        if self.mask_embedding is None:
            return embedded
        is_mask = (token_ids == self.head_config.mask_token_id).unsqueeze(-1)
        return torch.where(is_mask, self.mask_embedding, embedded)

    def run_block(self, embedded: Tensor, attend: Attend) -> Tensor:
        """embedded [rows, hidden] of anchors and masks -> hidden [rows, hidden].

        qkv that attend gets are of the block's rows; keys and values of the context must be stored before.
        """
        hidden = embedded
        for index, layer in enumerate(self.layers):
            hidden = run_layer(index, layer, self.config, hidden, attend)
        return hidden

    def markov_bias(self, token_ids: Tensor) -> Tensor | None:
        """What is added to the logits of a token, by the token before it: token_ids [rows] -> [rows, output rows].

        In float32; None without a Markov head.
        """
        if self.markov_in is None or self.markov_out is None:
            return None
        return apply_head(F.embedding(token_ids, self.markov_in), self.markov_out).float()

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor | None:
        """The probability that each row's token is accepted: hidden [rows, hidden] -> [rows] in float32.

        token_ids [rows] are the tokens before those that the rows predict. None without a confidence head.
        """
        if self.confidence_weight is None or self.confidence_bias is None:
            return None
        inputs = self.normed(hidden)
        if self.head_config.confidence_with_markov and self.markov_in is not None:
            inputs = torch.cat((inputs, F.embedding(token_ids, self.markov_in)), dim=-1)
        scores = F.linear(inputs.float(), self.confidence_weight.float(), self.confidence_bias.float())
        return scores.squeeze(-1).sigmoid()
