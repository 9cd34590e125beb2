"""Quantise a model: a folder that FASER, vLLM and transformers load.

    python -m tools.quantise MODEL OUT --format int4
    python -m tools.quantise MODEL OUT --format fp8-static --calibrate TEXT
    python -m tools.quantise MODEL OUT --format plain --calibrate TEXT --kv-scales

  fp8-block    8-bit floats, a scale per 128 x 128 weights; rows are rounded by 128 columns (quant_method fp8)
  fp8-channel  8-bit floats, a scale per output; each row is rounded by its own largest number (compressed-tensors)
  fp8-static   the same with one scale for all rows of a matrix, the largest number in the calibration text
  int4         4-bit integers, a scale per group of columns (compressed-tensors, pack-quantized)
  plain        bfloat16, for --kv-scales (compressed-tensors)

Weights are rounded to the nearest number. With a calibration text, int4 also tries smaller scales for each group,
which clip its largest weights, and keeps the one with the least error on the inputs that the text makes. Embedding,
head and norms stay as they are. With --kv-scales the folder also has scales for 8-bit keys and values: the largest
number that the text makes of each, in each layer, is the largest 8-bit float then. MODEL is a Hugging Face folder, a
hub name or a GGUF file of a Llama or Qwen3, or `default`, the model that `faser serve` has by default.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from faser import LLM, SamplingParams
from faser.errors import ConfigError
from faser.models.config import config_dict
from faser.models.quantised import Fp8Matrix, GroupMatrix, QuantisedMatrix
from faser.models.quantised.matrix import FP8_MAX, plain
from faser.models.quantised.placement import PARTS
from faser.models.quantised.rounding import to_fp8, to_groups
from faser.models.source import FolderSource, open_target
from faser.models.transformer import Attend, Transformer
from faser.models.weights import SINGLE_FILE, destinations_of
from tools.commands import run_command

FORMATS = ("fp8-block", "fp8-channel", "fp8-static", "int4", "plain")
BLOCK = 128
_CHUNK = 512  # tokens of the calibration text that are read together
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of the largest weight that scales are tried for
_FIELDS = {part: name for name, parts in PARTS.items() for part in parts}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


@dataclass
class Inputs:
    """What a text puts into a matrix."""

    energy: Tensor  # [K] sum of squares by column
    largest: float = 0.0


@dataclass
class Seen:
    """What a text puts into a layer."""

    inputs: dict[str, Inputs]  # by field of Layer
    key: float = 0.0  # the largest number that a key has at any position
    value: float = 0.0

    @property
    def kv_scales(self) -> dict[str, Tensor]:
        largest = {"k_scale": self.key, "v_scale": self.value}
        return {name: torch.tensor([max(number, 1e-6) / FP8_MAX]) for name, number in largest.items()}


@dataclass(frozen=True)
class _Watched(QuantisedMatrix):
    """A plain matrix that keeps account of its inputs."""

    weight: Tensor
    inputs: Inputs = field(compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def format(self) -> str:
        return "watched"

    def dequantise(self) -> Tensor:
        return self.weight.float()

    def product(self, x: Tensor) -> Tensor:
        self.inputs.energy.add_(x.float().square().sum(0))
        self.inputs.largest = max(self.inputs.largest, float(x.abs().max()))
        return torch.nn.functional.linear(x, self.weight)

    def select(self, rows: slice | Tensor) -> QuantisedMatrix:
        return _Watched(self.weight[rows], self.inputs)


class _WatchedModel(Transformer):
    """A plain model that keeps account of the inputs of its matrices, and of its keys and values."""

    def __init__(self, model: Transformer) -> None:
        self.seen = [
            Seen({name: Inputs(torch.zeros(getattr(layer, name).shape[1])) for name in PARTS}) for layer in model.layers
        ]
        layers = tuple(
            replace(layer, **{name: _Watched(plain(getattr(layer, name)), seen.inputs[name]) for name in PARTS})
            for layer, seen in zip(model.layers, self.seen, strict=True)
        )
        super().__init__(model.config, model.embedding, layers, model.final_norm, model.head, model.max_positions)

    def run_layers(self, hidden: Tensor, attend: Attend, first: int = 0, last: int | None = None) -> Tensor:
        return super().run_layers(hidden, partial(self._attend, attend), first, last)

    def _attend(self, attend: Attend, index: int, qkv: Tensor) -> Tensor:
        config, seen = self.config, self.seen[index]
        _, keys, values = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        turning = torch.hypot(*keys.float().chunk(2, dim=-1))  # a turn gives one of the two numbers all of it at most
        seen.key = max(seen.key, float(turning.max()) * config.rope.attention_factor)
        seen.value = max(seen.value, float(values.abs().max()))
        return attend(index, qkv)


def calibrate(model: Transformer, token_ids: Sequence[int]) -> list[Seen]:
    """What a text puts into every layer."""
    watched = _WatchedModel(model)
    llm = LLM(watched, policy="off", prefix_caching=False, device="cpu")
    size = min(_CHUNK, model.max_positions - 1)
    try:
        chunks = [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
        llm.generate(chunks, SamplingParams(max_tokens=1))
    finally:
        llm.close()
    return watched.seen


def quantise(weight: Tensor, kind: str, group: int, inputs: Inputs | None) -> QuantisedMatrix:
    """weight [N, K] in a format; `inputs` of the calibration text, if there is one."""
    if kind == "fp8-block":
        return to_fp8(weight, BLOCK)
    if kind == "int4":
        if inputs is None:
            return to_groups(weight, 4, group, dtype=torch.bfloat16)
        return _clipped(weight, group, inputs.energy)
    matrix = to_fp8(weight)
    if kind == "fp8-channel":
        return matrix
    assert inputs is not None
    return replace(matrix, input_scale=torch.tensor(max(inputs.largest, 1e-6) / FP8_MAX))


def _clipped(weight: Tensor, group: int, energy: Tensor) -> GroupMatrix:
    """For each group the scale with the least squared error, columns weighted by the energy of their inputs."""
    best, least = None, torch.tensor(torch.inf)
    weight, shares = weight.float(), energy.view(-1, group)
    groups = weight.view(weight.shape[0], -1, group)
    limits = groups.abs().amax(-1, keepdim=True)
    for clip in _CLIPS:
        tried = to_groups(groups.clamp(-clip * limits, clip * limits).flatten(1), 4, group, dtype=torch.bfloat16)
        error = ((tried.dequantise() - weight).view(groups.shape).square() * shares).sum(-1)
        if best is None:
            best, least = tried, error
            continue
        better = error < least
        codes = torch.where(better.repeat_interleave(group // 2, 1), tried.codes, best.codes)
        best = replace(best, codes=codes, scales=torch.where(better, tried.scales, best.scales))
        least = torch.minimum(least, error)
    assert best is not None
    return best


# ---- a folder ----


def stored(matrix: QuantisedMatrix, kind: str) -> dict[str, Tensor]:
    """The tensors of a matrix by suffix, as the format asks."""
    if isinstance(matrix, GroupMatrix):
        return {
            "weight_packed": matrix.codes.contiguous().view(torch.int32),  # low bits first, as compressed-tensors
            "weight_scale": matrix.scales,
            "weight_shape": torch.tensor(matrix.shape),
        }
    assert isinstance(matrix, Fp8Matrix)
    if kind == "fp8-block":
        return {"weight": matrix.values, "weight_scale_inv": matrix.scales}
    tensors = {"weight": matrix.values, "weight_scale": matrix.scales}
    return tensors if matrix.input_scale is None else {**tensors, "input_scale": matrix.input_scale.view(1)}


def description(kind: str, group: int, kv_scales: bool = False) -> dict[str, Any]:
    """The `quantization_config`."""
    described = _of_weights(kind, group)
    if kv_scales and described["quant_method"] == "compressed-tensors":
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        described["kv_cache_scheme"] = scheme
    return described


def _of_weights(kind: str, group: int) -> dict[str, Any]:
    if kind == "plain":
        return {
            "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed",
            "config_groups": {},
        }  # fmt: skip
    if kind == "fp8-block":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    if kind == "int4":
        weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
        inputs = None
    else:
        is_dynamic = kind == "fp8-channel"
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        inputs = {
            "num_bits": 8, "type": "float", "strategy": "token" if is_dynamic else "tensor", "symmetric": True,
            "dynamic": is_dynamic,
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int4" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**weights, "symmetric": True, "dynamic": False},
                "input_activations": inputs,
            }
        },
    }


def write_folder(
    model: Transformer, folder: Path, kind: str, group: int, seen: Sequence[Seen] | None, kv_scales: bool = False
) -> int:
    """Write config.json and the weights; the bytes of the weights."""
    tensors: dict[str, Tensor] = {}
    for name, destination in destinations_of(model).items():
        index, part = _place(name)
        if part not in _FIELDS or kind == "plain":
            # A norm of all heads has a row for each head in memory.
            whole = destination.tensor.shape == destination.shape
            tensors[name] = (destination.tensor if whole else destination.tensor[0]).bfloat16().contiguous()
            continue
        known = None if seen is None else seen[index].inputs[_FIELDS[part]]
        for suffix, tensor in stored(quantise(destination.tensor, kind, group, known), kind).items():
            tensors[name.removesuffix("weight") + suffix] = tensor.contiguous()
    if kv_scales and seen is not None:
        for index, each in enumerate(seen):
            tensors.update({f"model.layers.{index}.self_attn.{name}": one for name, one in each.kv_scales.items()})
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config_dict(model.config, "bfloat16"), "quantization_config": description(kind, group, kv_scales)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _place(name: str) -> tuple[int, str]:
    """model.layers.3.mlp.up_proj.weight -> 3, mlp.up_proj."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or parts[-1] != "weight":
        return -1, ""
    return int(parts[2]), ".".join(parts[3:-1])


def fitting_group(model: Transformer, wanted: int) -> int:
    """The largest group up to `wanted` that divides the inputs of every matrix."""
    columns = [getattr(model.layers[0], name).shape[1] for name in PARTS]
    fitting = [size for size in (128, 64, 32) if size <= wanted and not any(k % size for k in columns)]
    if not fitting:
        raise ConfigError(f"no group of {wanted} columns or less divides {columns}; choose another model or format")
    return fitting[0]


def has_cut_blocks(model: Transformer) -> bool:
    """Whether a matrix has several blocks along a side, the last of them cut."""
    matrices = [each for name, each in destinations_of(model).items() if _place(name)[1] in _FIELDS]
    return any(side > BLOCK and side % BLOCK for each in matrices for side in each.shape)


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({}, (lambda options: _run(options, print), _parser), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.quantise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the quantised model")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--group", type=int, default=128, choices=(32, 64, 128), help="int4: columns (128, or less)")
    parser.add_argument("--calibrate", metavar="TEXT", type=Path, help="a text file to learn scales from")
    parser.add_argument("--kv-scales", action="store_true", help="write scales of 8-bit keys and values, too")
    parser.add_argument("--tokens", type=int, default=8192, help="of the calibration text that are used (8192)")
    return parser


def _run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError(f"{options.out}: expected a new or an empty folder; remove it or choose another")
    if options.format == "fp8-static" and options.calibrate is None:
        raise ConfigError("fp8-static needs the inputs of a text: give --calibrate TEXT")
    if options.kv_scales and options.calibrate is None:
        raise ConfigError("--kv-scales needs the keys and values of a text: give --calibrate TEXT")
    if options.format == "plain" and not options.kv_scales:
        raise ConfigError("--format plain rounds no weights: give --kv-scales, or another format")
    source = open_target(None if options.model == "default" else options.model)
    if source.config.quantisation is not None:
        raise ConfigError(f"{options.model} is quantised; start from the original")
    config_dict(source.config, "bfloat16")  # refuses what cannot be written
    tokenizer = source.tokenizer()
    if options.calibrate is not None and tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer, which a calibration text needs")
    model = source.load(torch.float32, source.config.max_positions, lambda *_: None, "cpu")
    group = fitting_group(model, options.group) if options.format == "int4" else 0
    seen = None
    if options.calibrate is not None and tokenizer is not None:
        token_ids = tokenizer.encode(options.calibrate.read_text(encoding="utf-8"))[: options.tokens]
        say(f"reading {len(token_ids)} tokens of {options.calibrate}")
        seen = calibrate(model, token_ids)
    if options.format == "fp8-block" and has_cut_blocks(model):
        cut = f"blocks are cut where a side is no multiple of {BLOCK}"
        say(f"{cut}; transformers 5.23 reads these wrongly, and fp8-channel rightly (docs/lab.md)")
    num_bytes = write_folder(model, options.out, options.format, group, seen, options.kv_scales)
    if isinstance(source, FolderSource):
        for path in sorted({path for pattern in _TOKENIZER_FILES for path in source.path.glob(pattern)}):
            shutil.copy(path, options.out / path.name)
    elif tokenizer is not None:
        (options.out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    kind = f"{options.format} in groups of {group}" if group else options.format
    say(f"{options.out}: {kind}, {num_bytes / 1e6:.1f} MB, {model.num_bytes / 2e6:.1f} MB in bfloat16")


if __name__ == "__main__":
    sys.exit(main())
