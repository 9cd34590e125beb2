"""Put a draft head inside the larger shape of its inflated target without changing what it drafts.

    python -m tools.inflate       MODEL llama-8b LARGE
    python -m tools.heads.inflate MODEL HEAD llama-8b LARGE_HEAD

Seeds must be the same. tools/inflate.py says how layers grow; a head has more to it:

* Feature layers become the large layers with the functions of the small ones; extra layers change nothing between.
* `fc` reads features in the target's frame, W @ frame per feature. EAGLE-3 writes them in the frame too, because its
  residual stream begins with them; norms before `fc` fold into it.
* A block head's keys and values are read by one matrix, through two norms: the layer's for the block's rows, the
  features' for the context. The norms' weights cannot both fold into it, so the fused features get a frame of their
  own, orthogonal to the target's. The matrix is the sum of what reads either. The shape must be at least twice as wide.
* The output matrix folds the head's final norm, not the target's: an inflated head has its own.
* The Markov head stays as it is.

What puts a normed state back into the residual stream (norm_before_residual, norm_output) cannot fold and is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from faser.errors import ConfigError, ModelError
from faser.models.config import DTYPES
from faser.models.heads import BlockHead, DraftHead, Eagle3Head, HeadConfig
from faser.models.heads.config import read_head_config
from faser.models.heads.load import load_head, write_head
from faser.models.transformer import Transformer
from tools.commands import run_command
from tools.distill import load_model, pick_device
from tools.inflate import SHAPES, Inflation, Shape, grown_config, inflated_config, place_of


@torch.no_grad()
def inflate_head(
    head: DraftHead, target: Transformer, large: Transformer, seed: int = 0, dense: bool = True
) -> DraftHead:
    """The head of `target` as a head of `large`, which is `target` inflated with the same seed."""
    config = _inflated_head_config(head, target, large)
    result = type(head)(config, large, large.dtype, head.max_positions, head.owns_embedding, own_head=True)
    growth = _HeadGrowth(head, large, seed, dense)
    _require_same_frame(growth.frame, target, large)
    growth.write(result)
    return result


def _inflated_head_config(head: DraftHead, target: Transformer, large: Transformer) -> HeadConfig:
    config, features = head.head_config, head.head_config.feature_layers
    assert features is not None  # resolved
    for name in ("norm_before_residual", "norm_output"):
        if asdict(config)[name]:
            raise ConfigError(f"the head has {name}, which a larger residual stream cannot have; choose one without")
    if config.layers.qkv_bias or config.layers.out_bias:
        raise ConfigError("the head has attention_bias (biases); choose one without")
    if config.target_hidden_size != config.layers.hidden_size:
        raise ConfigError(
            f"the head is {config.layers.hidden_size} wide, its target {config.target_hidden_size}; expected the same"
        )
    shape = replace(_shape_of(large), num_layers=head.num_layers)
    return replace(
        config,
        layers=grown_config(config.layers, shape, large.dtype),
        target_hidden_size=large.config.hidden_size,
        feature_layers=tuple(place_of(layer, target.config.num_layers, large.config.num_layers) for layer in features),
    )


def _shape_of(large: Transformer) -> Shape:
    config = large.config
    return Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
    )


def _require_same_frame(frame: Tensor, target: Transformer, large: Transformer) -> None:
    """Refuse a large target that another seed or another model made."""
    some = slice(0, 64)
    expected = target.embedding[some].to(frame.device, frame.dtype) @ frame
    difference = (large.embedding[some].to(frame.dtype) - expected).norm() / expected.norm()
    if difference > 0.02:  # bfloat16 rounds by 0.002
        raise ConfigError("the large target is not this target inflated with this seed; give the seed that made it")


class _HeadGrowth:
    """The growth of one head: its layers' inflation and, for blocks, the frame of the fused features."""

    def __init__(self, head: DraftHead, large: Transformer, seed: int, dense: bool) -> None:
        self._head = head
        self._inflation = Inflation(head.config, _shape_of(large), large.device, seed, dense)
        self.frame = self._inflation.frame

    def write(self, into: DraftHead) -> None:
        head, grow = self._head, self._inflation
        if head.owns_embedding:
            grow.embed(head.embedding, into.embedding)
        grow.head(head.final_norm, head.head, into.final_norm, into.head)
        if head.vocabulary is not None and into.vocabulary is not None:
            into.vocabulary.copy_(head.vocabulary)
        if isinstance(head, Eagle3Head) and isinstance(into, Eagle3Head):
            self._write_eagle3(head, into)
        elif isinstance(head, BlockHead) and isinstance(into, BlockHead):
            self._write_block(head, into)

    def _write_eagle3(self, head: Eagle3Head, into: Eagle3Head) -> None:
        grow, layer, large = self._inflation, head.layers[0], into.layers[0]
        fc = grow.work(head.fc)
        for norm, ones in ((head.input_norm, into.input_norm), (head.fc_norm, into.fc_norm)):
            if norm is not None and ones is not None:
                fc = grow.folded(fc, norm.flatten())
                ones.fill_(1)
        into.fc.copy_(self._framed(fc, self.frame))
        for ones in (into.state_norm, large.attention_norm, large.mlp_norm):
            ones.fill_(1)
        halves = zip(grow.work(layer.qkv).chunk(2, dim=1), (layer.attention_norm, head.state_norm), strict=True)
        qkv = torch.cat([grow.folded(half, norm) @ self.frame for half, norm in halves], dim=1)
        grow.attention(qkv, layer, large)
        grow.mlp(layer, large)

    def _write_block(self, head: BlockHead, into: BlockHead) -> None:
        grow, frame = self._inflation, self._feature_frame()
        into.fc.copy_(self._framed(grow.work(head.fc), frame))
        into.feature_norm.fill_(1)
        for layer, large in zip(head.layers, into.layers, strict=True):
            large.attention_norm.fill_(1)
            large.mlp_norm.fill_(1)
            qkv = grow.folded(layer.qkv, layer.attention_norm) @ self.frame
            grow.attention(qkv + grow.folded(layer.qkv, head.feature_norm) @ frame, layer, large)
            grow.mlp(layer, large)
        self._write_block_outputs(head, into)

    def _write_block_outputs(self, head: BlockHead, into: BlockHead) -> None:
        grow, hidden = self._inflation, head.config.hidden_size
        if head.mask_embedding is not None:
            into.mask_embedding = (grow.work(head.mask_embedding) @ self.frame).to(into.dtype)
        for small, large in (
            (head.markov_in, into.markov_in),
            (head.markov_out, into.markov_out),
            (head.confidence_bias, into.confidence_bias),
        ):
            if small is not None and large is not None:
                large.copy_(small)
        if head.confidence_weight is not None and into.confidence_weight is not None:
            state, markov = head.confidence_weight[:, :hidden], head.confidence_weight[:, hidden:]
            into.confidence_weight.copy_(
                torch.cat((grow.folded(state, head.final_norm) @ self.frame, grow.work(markov)), dim=1)
            )

    def _framed(self, fc: Tensor, out_frame: Tensor) -> Tensor:
        """fc [d, features * d] -> [D, features * D], which reads the target's frame and writes `out_frame`."""
        parts = fc.split(self.frame.shape[0], dim=1)
        return torch.cat([out_frame.t() @ (part @ self.frame) for part in parts], dim=1)

    def _feature_frame(self) -> Tensor:
        """[d, D]: orthonormal rows, orthogonal to those of the target's frame."""
        small, large = self.frame.shape
        if 2 * small > large:
            raise ConfigError(f"hidden_size={large}: expected at least {2 * small}, twice that of the block head")
        free = self._inflation.orthonormal(large, small)
        free = free - self.frame.t() @ (self.frame @ free)
        return torch.linalg.qr(free)[0].t()


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({}, (_run, _parser), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.heads.inflate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder or GGUF file of the small target")
    parser.add_argument("head", metavar="HEAD", type=Path, help="folder of its head")
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the inflated head")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the written weights (bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="that the target was inflated with (0)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plain", action="store_true", help="leave zeros where the larger shape adds nothing")
    return parser


def _run(options: argparse.Namespace) -> None:
    target = load_model(options.model, torch.float32, "cpu")
    config = read_head_config(options.head)
    if config is None:
        raise ModelError(f"{options.head} is no draft head; expected a folder whose config.json describes one")
    head = load_head(options.head, config, target, torch.float32)
    dtype, device = getattr(torch, options.dtype), pick_device(options.device)
    large = _shell(target, SHAPES[options.shape], dtype, torch.device(device), options.seed)
    result = inflate_head(head, target, large, options.seed, dense=not options.plain)
    write_head(result, options.out)
    print(f"{options.out}: {sum(weight.nbytes for weight in result.own_weights()) / 1e6:,.0f} MB")


def _shell(target: Transformer, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Transformer:
    """The inflated target without its layers and its output, which a head of it does not need."""
    config = inflated_config(target.config, shape, dtype)
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    Inflation(target.config, shape, device, seed, dense=True).embed(target.embedding, embedding)
    norm = torch.ones(config.hidden_size, dtype=dtype, device=device)
    return Transformer(config, embedding, (), norm, embedding, target.max_positions)


if __name__ == "__main__":
    sys.exit(main())
