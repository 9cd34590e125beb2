"""Put a small Llama inside a larger shape without changing its function, to measure real cost at real acceptance.

Knows how each dimension of a Llama can grow without changing the output, and how to write a Hugging Face folder. Knows
nothing of engines, requests or speed. Every matrix product of the result has the full size of the shape:

* hidden size: the residual stream lies in a random subspace. `frame` [d, D] has orthonormal rows: the embedding and
  every matrix that reads the stream become W @ frame, every matrix that writes it frame^T @ W. The mean of squares over
  D dimensions is d/D of that over d, so eps shrinks by d/D and the norms come out sqrt(D/d) too large; that factor
  and the norm weights are folded into the matrices that follow, which leaves the norm weights one. The head therefore
  differs from the embedding: the result is untied.
* heads: every query head of the large shape is a copy of a small one and every KV head a copy of the KV head of its
  queries. The output columns of a small head are shared out among its copies, so that they sum to the original.
* head dimension, doubled: rotary pair i moves to pair 2i, which turns as fast at the same theta; queries grow by
  sqrt(2) to undo the smaller attention scale. Values do not rotate: they, too, go to a random subspace of their head.
* MLP width: copies of neurons, their output columns shared out like those of heads.
* layers: extra layers, spread evenly between the real ones, are copies of their neighbours with outputs near zero.

Zeros run faster than real data on a GPU, so with dense=True (the default) no weight is zero. Shares are random and
positive. Outputs of extra layers are scaled by 2^-24, and queries and keys of the odd rotary pairs by 2^-12 each: both
vanish in the rounding of float32 (in float16 the former underflow to zero). With dense=False these weights are zero,
and one copy of each head and neuron has the whole share.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from faser.errors import ConfigError
from faser.models import weights
from faser.models.config import DTYPES, ModelConfig, Rope, config_dict
from faser.models.layers import rope_tables
from faser.models.transformer import Layer, Transformer
from faser.progress import Update
from tools.commands import run_command

_WORK = torch.float64  # dtype of all arithmetic; the result is rounded once
_FAINT = 2.0**-12  # scale of queries and keys of the unused rotary pairs
_SHARD_BYTES = 4 << 30
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja",
    "generation_config.json",
)  # fmt: skip


# ---- what to make ----


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a model; the names are those of ModelConfig."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> Shape:
    return Shape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
    )


SHAPES = {
    "llama-8b": _shape(4096, 32, 32, 8, 128, 14336),
    "llama-3b": _shape(3072, 28, 24, 8, 128, 8192),
    "llama-1b": _shape(2048, 16, 32, 8, 64, 8192),
    "qwen-32b": _shape(5120, 64, 64, 8, 128, 25600),
    "qwen-0.6b": _shape(1024, 28, 16, 8, 128, 3072),
}


def inflated_config(config: ModelConfig, shape: Shape, dtype: torch.dtype) -> ModelConfig:
    """The config of the inflated model; ConfigError if the model cannot take this shape."""
    _refuse_features(config)
    return replace(grown_config(config, shape, dtype), family="llama")


def grown_config(config: ModelConfig, shape: Shape, dtype: torch.dtype) -> ModelConfig:
    """The config with the dimensions of the shape, of any family; ConfigError if the layers cannot take them."""
    _refuse_dimensions(config, shape)
    _refuse_heads(config, shape)
    rope = _spread_rope(config.rope, shape.head_dim // config.head_dim)
    _refuse_rope(config.rope, config.head_dim, rope, shape.head_dim)
    return replace(
        config,
        rope=rope,
        norm_eps=config.norm_eps * config.hidden_size / shape.hidden_size,
        tie_embeddings=False,
        dtype=str(dtype).removeprefix("torch."),
        **asdict(shape),
    )


def _refuse_features(config: ModelConfig) -> None:
    for feature, present in {
        "qkv_bias (biases of queries, keys and values)": config.qkv_bias,
        "out_bias (a bias after attention)": config.out_bias,
        "qk_norm (norms of queries and keys)": config.qk_norm,
        "sliding windows": bool(config.windows),
    }.items():
        if present:
            raise ConfigError(f"the {config.family} model has {feature}; expected a plain Llama: choose one without")


def _refuse_dimensions(config: ModelConfig, shape: Shape) -> None:
    for name in (each.name for each in fields(Shape) if each.name != "head_dim"):
        small, large = getattr(config, name), getattr(shape, name)
        if large < small:
            raise ConfigError(f"{name}={large}: expected at least {small}, what the model has; choose a larger shape")
    if shape.head_dim not in (config.head_dim, 2 * config.head_dim):
        raise ConfigError(
            f"head_dim={shape.head_dim}: expected the model's {config.head_dim} or twice that; choose another shape"
        )


def _refuse_heads(config: ModelConfig, shape: Shape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"num_heads={shape.num_heads}: expected a multiple of num_kv_heads={shape.num_kv_heads}")
    group, large_group = config.num_heads // config.num_kv_heads, shape.num_heads // shape.num_kv_heads
    needed = config.num_kv_heads * math.ceil(group / large_group)
    if shape.num_kv_heads < needed:
        raise ConfigError(
            f"num_kv_heads={shape.num_kv_heads} with {large_group} query heads each: the model has "
            f"{config.num_kv_heads} with {group} each, which takes {needed}; choose a shape with more heads"
        )


def _spread_rope(rope: Rope, stride: int) -> Rope:
    """The rope of the larger head: its pair `stride` * i has the frequency of pair i."""
    return replace(rope, factors=tuple(factor for factor in rope.factors for _ in range(stride)))


def _refuse_rope(rope: Rope, head_dim: int, large_rope: Rope, large_head_dim: int) -> None:
    """Refuse ropes whose frequencies do not match: yarn rounds its ramp to whole dimensions of the head."""
    # sines at position 1, [pairs]
    sines, large_sines = rope_tables(rope, head_dim, 2)[1][1], rope_tables(large_rope, large_head_dim, 2)[1][1]
    if not torch.allclose(sines, large_sines[:: large_head_dim // head_dim], rtol=1e-5, atol=0):
        raise ConfigError(
            f"head_dim={large_head_dim}: the model's {rope.kind} rope gives it other frequencies than head_dim="
            f"{head_dim}; choose a shape with head_dim={head_dim}"
        )


# ---- the inflation ----


@torch.no_grad()
def inflate(
    model: Transformer,
    shape: Shape,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    dense: bool = True,
    progress: Update | None = None,
) -> Transformer:
    """A model of this shape with the function of `model`. dtype and device default to those of `model`.

    Random numbers are drawn on the CPU: a seed gives the same model everywhere, up to rounding. Needs memory for both
    models and for one layer in float64, or for the embedding if that is larger.
    """
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    config = inflated_config(model.config, shape, dtype)
    result = Transformer.empty(config, dtype, device, model.max_positions)
    if model.vocabulary is not None:
        result.vocabulary = model.vocabulary.to(device)
        result.head = result.head[: len(model.vocabulary)].clone()
    inflation = Inflation(model.config, shape, device, seed, dense)
    inflation.embed(model.embedding, result.embedding)
    for index, (source, real) in enumerate(_layer_sources(model.num_layers, shape.num_layers)):
        inflation.layer(model.layers[source], result.layers[index], real)
        if progress is not None:
            progress(index + 1, shape.num_layers)
    inflation.head(model.final_norm, model.head, result.final_norm, result.head)
    return result


def _layer_sources(small: int, large: int) -> list[tuple[int, bool]]:
    """For each large layer: the small layer it copies, and whether it is real (not an extra layer)."""
    places = {place_of(index, small, large): index for index in range(small)}
    sources, latest = [], 0
    for place in range(large):
        latest = places.get(place, latest)
        sources.append((latest, place in places))
    return sources


def place_of(index: int, small: int, large: int) -> int:
    """The large layer that has the function of the small layer `index`."""
    return (2 * index + 1) * large // (2 * small)


class Inflation:
    """One inflation: the subspace of the residual stream, which head and neuron copies which, and random numbers.

    `frame` [d, D] has orthonormal rows. It is drawn first: a seed gives all models of one width the same frame.
    """

    def __init__(self, config: ModelConfig, shape: Shape, device: torch.device, seed: int, dense: bool) -> None:
        self._config = config
        self._shape = shape
        self._device = device
        self._dense = dense
        self._generator = torch.Generator().manual_seed(seed)
        self._stride = shape.head_dim // config.head_dim
        self._norm_scale = math.sqrt(config.hidden_size / shape.hidden_size)
        self.frame = self.orthonormal(shape.hidden_size, config.hidden_size).t()
        # the small head, KV head or neuron that each large one copies
        self._kv_heads = torch.arange(shape.num_kv_heads, device=device) % config.num_kv_heads
        self._heads = torch.tensor(_head_sources(config, shape), device=device)
        self._neurons = torch.arange(shape.intermediate_size, device=device) % config.intermediate_size

    def embed(self, embedding: Tensor, into: Tensor) -> None:
        into.copy_(self.work(embedding) @ self.frame)

    def head(self, norm: Tensor, head: Tensor, into_norm: Tensor, into_head: Tensor) -> None:
        into_norm.fill_(1)
        into_head.copy_(self.folded(head, norm) @ self.frame)

    def layer(self, layer: Layer, into: Layer, real: bool) -> None:
        """Write a layer with the function of `layer`, or, if it is not real, one that changes nothing."""
        into.attention_norm.fill_(1)
        into.mlp_norm.fill_(1)
        strength = 1.0 if real else _FAINT**2 if self._dense else 0.0
        self.attention(self.folded(layer.qkv, layer.attention_norm) @ self.frame, layer, into, strength)
        self.mlp(layer, into, strength)

    def attention(self, qkv: Tensor, layer: Layer, into: Layer, strength: float = 1.0) -> None:
        """Write the attention of a layer. qkv [out, inputs]: that of `layer` as it reads the inputs of `into`."""
        config, shape = self._config, self._shape
        # query, key, value [heads, head_dim, inputs]
        parts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = qkv.view(-1, config.head_dim, qkv.shape[1]).split(parts)
        query_scale, key_scale = self._qk_scales(layer, into)
        query = self._spread_pairs(query[self._heads] * query_scale)
        key = self._spread_pairs(key[self._kv_heads] * key_scale)
        # turns [KV heads, large head_dim, head_dim]: the subspace of the values in each large head
        turns = self._value_turns()
        value = turns @ value[self._kv_heads]
        into.qkv.copy_(torch.cat([query, key, value]).flatten(0, 1))

        # out, by the head it reads [heads, head_dim, D]
        out = (self.work(layer.out).t() @ self.frame).view(-1, config.head_dim, shape.hidden_size)
        shares = strength * self._shares(self._heads, config.num_heads)
        turns = turns.repeat_interleave(shape.num_heads // shape.num_kv_heads, 0) * shares[:, None, None]
        into.out.copy_((turns @ out[self._heads]).flatten(0, 1).t())

    def _qk_scales(self, layer: Layer, into: Layer) -> tuple[float, float]:
        """Factors of queries and keys; writes their norms where there are any.

        The attention scale of the larger head is too small by sqrt(stride). Norms over the larger head come out
        sqrt(stride) too large, and queries and keys must follow eps; the norms' weights undo both.
        """
        stride = self._stride
        if layer.qk_norm is None or into.qk_norm is None:
            return math.sqrt(stride), 1.0
        weights = self.work(layer.qk_norm)[:, :, None]
        query, key = weights.split([self._config.num_heads, self._config.num_kv_heads])
        spread = torch.cat((query[self._heads], key[self._kv_heads] / math.sqrt(stride)))
        into.qk_norm.copy_(self._spread_pairs(spread, 1.0)[:, :, 0])
        scale = self._norm_scale * math.sqrt(stride)
        return scale, scale

    def mlp(self, layer: Layer, into: Layer, strength: float = 1.0) -> None:
        gate_up = self.folded(layer.gate_up, layer.mlp_norm) @ self.frame
        for part, destination in zip(gate_up.chunk(2), into.gate_up.chunk(2), strict=True):
            destination.copy_(part[self._neurons])
        shares = strength * self._shares(self._neurons, self._config.intermediate_size)
        down = self.work(layer.down).t() @ self.frame
        into.down.copy_((down[self._neurons] * shares[:, None]).t())

    def _spread_pairs(self, heads: Tensor, unused_scale: float | None = None) -> Tensor:
        """heads [num, head_dim, D] -> [num, large head_dim, D], rotary pair i at pair `stride` * i.

        The pairs between are copies of their neighbours; if no scale is given, so faint that they do not count.
        """
        if self._stride == 1:
            return heads
        # pair i of a head is dimensions i and i + head_dim / 2: [num, 2, pairs, D]
        pairs = heads.view(heads.shape[0], 2, -1, heads.shape[2])
        scale = (_FAINT if self._dense else 0.0) if unused_scale is None else unused_scale
        unused = pairs.roll(1, dims=2) * scale
        return torch.stack([pairs, unused], dim=3).flatten(1, 3)

    def _value_turns(self) -> Tensor:
        large, small = self._shape.head_dim, self._config.head_dim
        if self._dense:
            return self.orthonormal(self._shape.num_kv_heads, large, small)
        return torch.eye(large, small, dtype=_WORK, device=self._device).expand(self._shape.num_kv_heads, -1, -1)

    def _shares(self, sources: Tensor, num_sources: int) -> Tensor:
        """[copies]: the share of its source's output that each copy writes. Shares of one source sum to 1."""
        num_copies = sources.shape[0]
        if self._dense:
            shares = 0.5 + torch.rand(num_copies, generator=self._generator, dtype=_WORK).to(self._device)
        else:
            places = torch.arange(num_copies, device=self._device)
            first = torch.full((num_sources,), num_copies, device=self._device).scatter_reduce(
                0, sources, places, "amin"
            )
            shares = (places == first[sources]).to(_WORK)
        sums = torch.zeros(num_sources, dtype=_WORK, device=self._device).scatter_add(0, sources, shares)
        return shares / sums[sources]

    def folded(self, matrix: Tensor, norm: Tensor) -> Tensor:
        """A matrix [out, d] times the weights of the norm before it and the scale of the larger residual stream."""
        return self.work(matrix) * (self.work(norm) * self._norm_scale)

    def orthonormal(self, *shape: int) -> Tensor:
        """Uniformly random matrices [..., rows, columns] with orthonormal columns; signs do not depend on the QR."""
        turned, triangle = torch.linalg.qr(self._gaussian(*shape))
        return turned * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)

    def _gaussian(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=_WORK).to(self._device)

    def work(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, _WORK)


def _head_sources(config: ModelConfig, shape: Shape) -> list[int]:
    """The small query head that each large one copies.

    Large KV head j copies small KV head j % num_kv_heads. Query heads of its copies take the query heads of the
    original in turn, so that each of them has a copy.
    """
    group, large_group = config.num_heads // config.num_kv_heads, shape.num_heads // shape.num_kv_heads
    sources = []
    for head in range(shape.num_heads):
        large_kv_head, index = divmod(head, large_group)
        round_index, small_kv_head = divmod(large_kv_head, config.num_kv_heads)
        sources.append(small_kv_head * group + (round_index * large_group + index) % group)
    return sources


# ---- a Hugging Face folder ----


def write_folder(
    model: Transformer,
    folder: str | Path,
    tokenizer_files_from: str | Path | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Update | None = None,
) -> None:
    """Write a Llama checkpoint: config.json, safetensors and, copied from another folder, the tokenizer's files."""
    folder = Path(folder)
    _refuse_features(model.config)
    _refuse_unwritable(model)
    description = config_dict(model.config, str(model.dtype).removeprefix("torch."))
    _refuse_folders(folder, tokenizer_files_from)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", description)
    _write_weights(model, folder, shard_bytes, progress)
    if tokenizer_files_from is not None:
        for path in _tokenizer_files(Path(tokenizer_files_from)):
            shutil.copy(path, folder / path.name)


def _refuse_folders(folder: Path, tokenizer_files_from: str | Path | None) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new or an empty folder; remove it or choose another")
    if tokenizer_files_from is not None and not Path(tokenizer_files_from).is_dir():
        raise ConfigError(f"tokenizer_files_from={str(tokenizer_files_from)!r}: expected a model folder")


def _refuse_unwritable(model: Transformer) -> None:
    if model.vocabulary is not None:
        raise ConfigError("the model's head covers a short vocabulary; expected all of it: keep the model in memory")


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


def _write_weights(model: Transformer, folder: Path, shard_bytes: int, progress: Update | None) -> None:
    named = {name: destination.tensor for name, destination in weights.destinations_of(model).items()}
    shards = _shards(named, shard_bytes)
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    if len(shards) == 1:
        names = [weights.SINGLE_FILE]
    for index, (name, shard) in enumerate(zip(names, shards, strict=True)):
        tensors = {key: weight.cpu().contiguous() for key, weight in shard.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        if progress is not None:
            progress(index + 1, len(shards))
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index_file = {"metadata": {"total_size": model.num_bytes}, "weight_map": places}
        _write_json(folder / weights.INDEX_FILE, index_file)


def _shards(named: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """The weights in order, split into files of at most `shard_bytes`, or of one tensor that is larger."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, weight in named.items():
        if filled and filled + weight.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = weight
        filled += weight.nbytes
    return shards


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# ---- the command ----


def load_source(path: str | Path) -> Transformer:
    """The model to inflate, on the CPU in float32, from a Hugging Face folder."""
    folder = weights.resolve(path)
    return weights.load(folder, ModelConfig.from_folder(folder), torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({}, (_run, _parser), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inflate",
        description="Put a small Llama inside a larger shape without changing its function.",
        epilog="example: python -m tools.inflate models/SmolLM2-135M-Instruct llama-8b models/smollm2-as-8b",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of the small model, in the Hugging Face layout")
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the inflated model")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the written weights (bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="of the random subspaces and shares (0)")
    parser.add_argument("--device", help="where to compute (cuda where there is one, else cpu)")
    parser.add_argument("--plain", action="store_true", help="leave zeros where the larger shape adds nothing")
    return parser


def _run(options: argparse.Namespace) -> None:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer_files_from = options.model if Path(options.model).is_dir() else None
    _refuse_folders(options.out, tokenizer_files_from)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:7.1f} s  {text}", flush=True)

    say(f"reading {options.model}")
    source = load_source(options.model)
    say(f"inflating {_size(source)} to {options.shape} in {options.dtype} on {device}")
    model = inflate(
        source,
        SHAPES[options.shape],
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
        device=device,
        dense=not options.plain,
        progress=lambda done, total: say(f"layer {done} of {total}") if done % 8 == 0 or done == total else None,
    )
    say(f"writing {_size(model)}, {model.num_bytes / 1e9:.1f} GB, to {options.out}")
    write_folder(model, options.out, tokenizer_files_from, progress=lambda done, total: say(f"file {done} of {total}"))
    say("done")


def _size(model: Transformer) -> str:
    return f"{sum(weight.numel() for weight in model.weights()) / 1e6:,.0f} M parameters"


if __name__ == "__main__":
    sys.exit(main())
