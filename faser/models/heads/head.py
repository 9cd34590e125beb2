"""What EAGLE-3 and block heads have in common: weights of a few layers, the fusing matrix, embedding and output.

A head reads the target's features, so it exists only with its target, on the target's device. It shares the target's
embedding and output matrix unless its checkpoint has its own. As in `Transformer`: rows in, rows out, no state between
calls, the caller's `attend` does all that mixes rows, and the caller holds torch.inference_mode().
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.errors import ModelError
from faser.models.allocation import Allocator, fill_random
from faser.models.heads.config import HeadConfig
from faser.models.layers import look_up, rms_norm, rope_tables
from faser.models.quantised.matrix import Weight, plain, tensors_of
from faser.models.transformer import Transformer, apply_head, empty_layer


class DraftHead(ABC):
    """A head in memory. `hidden` is always the residual stream behind the last layer, before the final norm."""

    inputs_per_layer = 1  # widths of hidden_size that the attention of a layer reads

    def __init__(
        self,
        head_config: HeadConfig,
        target: Transformer,
        dtype: torch.dtype,
        max_positions: int | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        """Allocate the weights; they are not written yet. More positions than the head has are cut to those."""
        self.head_config = head_config = head_config.resolve(target.config)
        self.config = config = head_config.layers
        self.owns_embedding = own_embedding
        self.owns_head = own_head or head_config.is_short
        if not (head_config.can_share or (self.owns_embedding and self.owns_head)):
            raise ModelError(
                f"the head is {config.hidden_size} wide and the target {target.config.hidden_size}; "
                "expected a head with its own embed_tokens and lm_head"
            )
        make = Allocator(dtype, target.device)
        vocab_size, num_rows, hidden = config.vocab_size, head_config.num_output_rows, config.hidden_size
        # [vocab_size, hidden], [output rows, hidden]
        self.embedding = make.vector(vocab_size, hidden) if self.owns_embedding else target.embedding.to(dtype)
        self.head: Weight = make.matrix(num_rows, hidden) if self.owns_head else _shared(target.head, dtype)
        # [output rows] token ids; None: all tokens
        self.vocabulary = torch.arange(num_rows, device=target.device) if head_config.is_short else None
        num_inputs = hidden * self.inputs_per_layer
        self.layers = tuple(empty_layer(config, make, num_inputs) for _ in range(config.num_layers))
        self.fc = make.matrix(hidden, head_config.feature_size)
        self.final_norm = make.vector(hidden)
        self.max_positions = min(max_positions or config.max_positions, config.max_positions)
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, self.max_positions, target.device)
        self._allocate(make)

    @abstractmethod
    def _allocate(self, make: Allocator) -> None:
        """Allocate the weights that only this kind has."""

    @abstractmethod
    def _further(self) -> dict[str, Tensor]:
        """The weights that only this kind has, by attribute. The names of norms end with norm."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """features [rows, num_features * target_hidden] -> [rows, hidden]."""

    @classmethod
    def random(
        cls,
        head_config: HeadConfig,
        target: Transformer,
        seed: int,
        dtype: torch.dtype = torch.float32,
        std: float = 0.02,
        max_positions: int | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> Self:
        """A head with random weights, and a random short vocabulary where it has one."""
        head = cls(head_config, target, dtype, max_positions, own_embedding, own_head)
        head._randomise(seed, std)
        return head

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, shared ones too, without the position tables."""
        return sum(weight.numel() * weight.element_size() for weight in self.weights())

    def weights(self) -> Iterator[Tensor]:
        """Every weight once, those shared with the target too."""
        yield from self.own_weights()
        if not self.owns_embedding:
            yield self.embedding
        if not self.owns_head and self.head is not self.embedding:
            yield from tensors_of(self.head).values()

    def own_weights(self) -> Iterator[Tensor]:
        """Every weight that is not the target's."""
        if self.owns_embedding:
            yield self.embedding
        for layer in self.layers:
            yield from layer.tensors().values()
        yield self.fc
        yield from self._further().values()
        yield self.final_norm
        if self.owns_head:
            yield plain(self.head)

    def reach(self, num_positions: int) -> None:
        """As `Transformer.reach`."""
        if num_positions > self.max_positions:
            self.max_positions = num_positions
            self.cos, self.sin = rope_tables(self.config.rope, self.config.head_dim, num_positions, self.device)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Transformer.rotation`."""
        return look_up(self.cos, self.sin, positions, self.config.rope)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows] -> [rows, hidden]."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, output rows] in float32."""
        return apply_head(self._normed(hidden), self.head).float()

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.final_norm, self.config.norm_eps)

    def _randomise(self, seed: int, std: float) -> None:
        norms = [tensor for name, tensor in self._further().items() if name.endswith("norm")]
        norms += [t for layer in self.layers for name, t in layer.tensors().items() if name.endswith("norm")]
        fill_random(self.own_weights(), (*norms, self.final_norm), seed, std)
        for qk_norm in (layer.qk_norm for layer in self.layers if layer.qk_norm is not None):
            for rows in torch.split(qk_norm, [self.config.num_heads, self.config.num_kv_heads]):
                rows.copy_(rows[0].clone())  # a checkpoint has one norm for all heads
        if self.vocabulary is not None:
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(self.config.vocab_size, generator=generator)[: len(self.vocabulary)]
            self.vocabulary.copy_(chosen.sort().values)


def _shared(weight: Weight, dtype: torch.dtype) -> Weight:
    """A quantised head serves any dtype."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight
