"""One decoder for every supported family: embedding, layers, head, as functions of rows of tokens.

Knows the weights and the order of operations. Knows nothing of positions, pages, requests or sampling: the caller's
`attend` does all that mixes rows. Has no state between calls, so two forwards may run at once. The caller holds
torch.inference_mode().

Matrices have the shape [out, in]. On a CPU the matrices of the layers and an untied head are stored transposed:
F.linear is up to twice as fast at 4 to 64 rows, and as fast at one. The embedding is looked up by row and stays
row-major.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.errors import ConfigError
from faser.models.allocation import Allocator, fill_random
from faser.models.config import ModelConfig
from faser.models.layers import look_up, rms_norm, rms_norm_heads_, rope_tables, silu_mul
from faser.models.quantised.matrix import Weight, add_linear, format_of, linear, tensors_of
from faser.models.quantised.packed import PackedMatrix
from faser.models.vision.encoder import VisionEncoder

# (layer index, qkv [rows, num_heads + 2 * num_kv_heads, head_dim]) -> [rows, num_heads * head_dim]. The heads are
# queries, keys, values, normalised but not rotated. attend rotates them, stores keys and values, and attends; it may
# write into qkv.
Attend = Callable[[int, Tensor], Tensor]

# Rows at which a row-major head on a CPU is faster as (W @ x^T)^T, copy included. Measured on two cores: 49152 x 576
# gains 1.4x at 8 rows, 1.7x at 16, 1.4x at 48 and loses from 64; 151936 x 896 gains 1.2x at 16 and nothing at 8 or 48.
_SWAPPED_HEAD_ROWS = range(6, 49)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. Rows of qkv: queries, keys, values. Rows of gate_up: gate, then up."""

    attention_norm: Tensor  # [hidden]
    qkv: Weight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]; twice hidden in an EAGLE-3 head
    qkv_bias: Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]: a row per head applies both norms at once
    out: Weight  # [hidden, num_heads * head_dim]
    out_bias: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]

    def tensors(self) -> dict[str, Tensor]:
        """By field, without those that the model does not have; several of a quantised matrix."""
        weights = {name: weight for name, weight in vars(self).items() if weight is not None}
        return {
            name if part == "weight" else f"{name}.{part}": tensor
            for name, weight in weights.items()
            for part, tensor in tensors_of(weight).items()
        }


class Decoder(ABC):
    """Layers between an embedding and a head, in memory: a whole model, or a draft head."""

    config: ModelConfig
    embedding: Tensor  # [vocab_size, hidden]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [hidden]
    head: Weight  # [rows, hidden]
    vocabulary: Tensor | None  # [rows] token ids of the head's rows; None: all tokens
    max_positions: int
    cos: Tensor  # [max_positions, head_dim // 2] in float32, for `layers.rotate`
    sin: Tensor

    @abstractmethod
    def weights(self) -> Iterator[Tensor]:
        """Every weight once; a tied head is not repeated."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights without the position tables; a tied head counts once."""
        return sum(weight.numel() * weight.element_size() for weight in self.weights())

    def reach(self, num_positions: int) -> None:
        """Have tables for this many positions, even if the model was trained on fewer: its rows see windows."""
        if num_positions > self.max_positions:
            self.max_positions = num_positions
            self.cos, self.sin = rope_tables(self.config.rope, self.config.head_dim, num_positions, self.device)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, head_dim // 2] at positions [rows], or [rows, 3] in time, height and width.

        Positions are below max_positions.
        """
        return look_up(self.cos, self.sin, positions, self.config.rope)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows] -> hidden [rows, hidden_size]."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of the last layer -> [rows, rows of the head] in float32."""
        return apply_head(self.normed(hidden), self.head).float()

    def normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.final_norm, self.config.norm_eps)


class Transformer(Decoder):
    """A whole model."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        final_norm: Tensor,
        head: Weight,  # the embedding itself where tied and not quantised
        max_positions: int | None = None,
        vocabulary: Tensor | None = None,
        vision: VisionEncoder | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.vocabulary = vocabulary
        self.vision = vision
        self.kv_scales: tuple[tuple[float, float], ...] = ()  # of 8-bit keys and values, by layer; empty: all are 1
        self.max_positions = most = config.max_positions
        if max_positions is not None:
            if not 1 <= max_positions <= most:
                raise ConfigError(f"max_positions={max_positions}: expected 1 to {most}, the positions of the model")
            self.max_positions = max_positions
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, self.max_positions, embedding.device)

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        without_matrices: bool = False,
    ) -> Transformer:
        """A model whose weights are allocated but not written; `without_matrices`: those take no memory."""
        make = Allocator(dtype, torch.device(device), without_matrices)
        embedding = make.vector(config.vocab_size, config.hidden_size)
        layers = tuple(empty_layer(config, make) for _ in range(config.num_layers))
        head = embedding if config.tie_embeddings else make.matrix(config.vocab_size, config.hidden_size)
        norm = make.vector(config.hidden_size)
        vision = None if config.vision is None else VisionEncoder(config.vision, dtype, device)
        return cls(config, embedding, layers, norm, head, max_positions, vision=vision)

    @classmethod
    def shared(cls, owner: Transformer, config: ModelConfig, short_vocabulary: Tensor | None = None) -> Transformer:
        """A model with its own layers, not yet written, and the embedding and head of `owner`.

        With a short vocabulary the head is a copy of the rows of its tokens.
        """
        make = Allocator(owner.dtype, owner.device)
        layers = tuple(empty_layer(config, make) for _ in range(config.num_layers))
        head: Weight = owner.head
        if short_vocabulary is not None:
            short_vocabulary = short_vocabulary.to(owner.device)
            head = make.matrix(len(short_vocabulary), config.hidden_size)
            head.copy_(owner.head_rows(short_vocabulary))
        norm = make.vector(config.hidden_size)
        return cls(config, owner.embedding, layers, norm, head, owner.max_positions, short_vocabulary)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype = torch.float32,
        std: float = 0.02,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> Transformer:
        """A model with random weights, for tests and benchmarks. Norms are near 1, biases not 0: mistakes show."""
        model = cls.empty(config, dtype, device, max_positions)
        layer_norms = (t for layer in model.layers for name, t in layer.tensors().items() if name.endswith("norm"))
        vision_norms = () if model.vision is None else model.vision.norms()
        fill_random(model.weights(), (*layer_norms, model.final_norm, *vision_norms), seed, std)
        return model

    @property
    def formats(self) -> tuple[str, ...]:
        """How its matrices are stored: a dtype, or formats of quantised weights."""
        return tuple(dict.fromkeys(map(format_of, matrices_of(self))))

    def weights(self) -> Iterator[Tensor]:
        """Every weight once, those of the eyes too; a tied head is not repeated."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.tensors().values()
        yield self.final_norm
        if self.head is not self.embedding:
            yield from tensors_of(self.head).values()
        if self.vision is not None:
            yield from self.vision.weights()

    def run_layers(self, hidden: Tensor, attend: Attend, first: int = 0, last: int | None = None) -> Tensor:
        """Run layers first to last - 1 on hidden [rows, hidden_size], which is not changed.

        Running the layers in several calls gives the same bits.
        """
        for index in range(first, self.num_layers if last is None else last):
            hidden = run_layer(index, self.layers[index], self.config, hidden, attend)
        return hidden

    def shortlist_logits(self, hidden: Tensor, candidates: int, token_ids: Tensor) -> Tensor:
        """[rows, candidates + 1]: the logits of tokens 0 … candidates - 1, then that of each row's own token."""
        normed = self.normed(hidden)
        own = (normed.float() * self.head_rows(token_ids).float()).sum(-1, keepdim=True)
        first = self.head[:candidates] if isinstance(self.head, Tensor) else self.head.select(slice(candidates))
        return torch.cat((apply_head(normed, first).float(), own), dim=1)

    @property
    def has_head_rows(self) -> bool:
        is_cpu = self.device.type == "cpu"
        can_select = isinstance(self.head, Tensor) or (is_cpu and not isinstance(self.head, PackedMatrix))
        return self.config.tie_embeddings or can_select

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows [len(token_ids), hidden] of the head, dequantised. Packed rows cannot be had (`has_head_rows`)."""
        if self.config.tie_embeddings:
            return self.embedding[token_ids]
        return self.head[token_ids] if isinstance(self.head, Tensor) else self.head.select(token_ids).dequantise()


def matrices_of(model: Decoder) -> list[Weight]:
    return [*(m for each in model.layers for m in (each.qkv, each.out, each.gate_up, each.down)), model.head]


def run_layer(index: int, layer: Layer, config: ModelConfig, hidden: Tensor, attend: Attend) -> Tensor:
    """One layer on hidden [rows, hidden_size], which is not changed. `index` is what attend is told."""
    return run_normed(index, layer, config, hidden, rms_norm(hidden, layer.attention_norm, config.norm_eps), attend)


def run_normed(
    index: int, layer: Layer, config: ModelConfig, residual: Tensor, normed: Tensor, attend: Attend
) -> Tensor:
    """One layer whose attention reads `normed` [rows, columns of layer.qkv] and adds to `residual` [rows, hidden]."""
    qkv = linear(normed, layer.qkv, layer.qkv_bias).view(
        -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
    )
    if layer.qk_norm is not None:
        rms_norm_heads_(qkv[:, : -config.num_kv_heads], layer.qk_norm, config.norm_eps)
    hidden = add_linear(residual, attend(index, qkv), layer.out)
    if layer.out_bias is not None:
        hidden.add_(layer.out_bias)
    gate_up = linear(rms_norm(hidden, layer.mlp_norm, config.norm_eps), layer.gate_up)
    return add_linear(hidden, silu_mul(gate_up), layer.down)


def empty_layer(config: ModelConfig, make: Allocator, num_inputs: int | None = None) -> Layer:
    """A layer whose weights are not written. `num_inputs`: columns of qkv where they are not hidden_size."""
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    return Layer(
        attention_norm=make.vector(hidden),
        qkv=make.matrix(qkv_size, num_inputs or hidden),
        qkv_bias=make.vector(qkv_size) if config.qkv_bias else None,
        qk_norm=make.vector(config.num_heads + config.num_kv_heads, config.head_dim) if config.qk_norm else None,
        out=make.matrix(hidden, query_size),
        out_bias=make.vector(hidden) if config.out_bias else None,
        mlp_norm=make.vector(hidden),
        gate_up=make.matrix(2 * config.intermediate_size, hidden),
        down=make.matrix(hidden, config.intermediate_size),
    )


def apply_head(x: Tensor, weight: Weight) -> Tensor:
    """x @ weight^T, contiguous; for a row-major weight on a CPU, by the product that is faster at these rows."""
    if not isinstance(weight, Tensor):
        return weight.product(x)
    if x.shape[0] in _SWAPPED_HEAD_ROWS and not x.is_cuda and weight.is_contiguous():
        return (weight @ x.t()).t().contiguous()
    return F.linear(x, weight)
