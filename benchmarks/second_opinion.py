"""Do other packages read the same weights from quantised folders as FASER does?

    python3 -m benchmarks.second_opinion write FOLDERS      # where FASER is installed
    python3 benchmarks/second_opinion.py check FOLDERS      # in an environment of its own

`write` quantises a small random model in every format of tools/quantise.py, and puts the weights that FASER reads
beside each folder. `check` loads the folders with transformers and compares all weights bit by bit, in bfloat16. It
then lets autoawq, gptqmodel and compressed-tensors read made-up words of their layouts; what FASER reads from the same
words is tested against their digests. `check` needs torch, transformers, accelerate, compressed-tensors, gptqmodel and
the files of autoawq (`pip install --no-deps autoawq`), but not FASER. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPECTED = "expected.safetensors"  # in a folder beside the model's own, for it would be taken for weights
FORMATS = ("fp8-block", "fp8-channel", "fp8-static", "int4", "int4 calibrated")
PARTIAL = "fp8-block, partial blocks"  # 192 outputs: a block and a half
N, K, GROUP = 32, 64, 32  # of matrices of made-up words


# ---- folders ----


def write(folders: Path) -> None:
    from faser.models.config import ModelConfig
    from faser.models.quantised.folders import load
    from faser.models.transformer import Transformer
    from faser.models.weights import destinations_of
    from tools import quantise

    for name in (*FORMATS, PARTIAL):
        config = ModelConfig(
            family="llama", vocab_size=320, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=192 if name == PARTIAL else 256, norm_eps=1e-5, max_positions=64, eos_token_ids=(2,),
        )  # fmt: skip
        model, kind = Transformer.random(config, 0, std=0.1), name.split(",")[0].split()[0]
        seen = quantise.calibrate(model, range(3, 63)) if kind == "fp8-static" or "calibrated" in name else None
        folder = folders / name / "model"
        quantise.write_folder(model, folder, kind, 64 if kind == "int4" else 0, seen)
        found = destinations_of(load(folder, ModelConfig.from_folder(folder), torch.bfloat16, quantised="off"))
        save_file({key: each.tensor.contiguous() for key, each in found.items()}, folders / name / EXPECTED)


def check_folder(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    is_blocks = folder.name.startswith("fp8-block")
    how = FineGrainedFP8Config(dequantize=True) if is_blocks else CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, quantization_config=how)
    found, expected = model.state_dict(), load_file(folder / EXPECTED)
    differ = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
    return {"tensors": len(expected), "differ": differ, "unknown": sorted(found.keys() - expected.keys())}


# ---- made-up words ----


def words(*shape: int, salt: int = 0) -> Tensor:
    """int32 whose bits look random."""
    numbers = torch.arange(salt, salt + torch.Size(shape).numel(), dtype=torch.int64)
    mixed = (numbers * 2654435761 + 40503) % 2**32 * 2246822519 % 2**32
    return (mixed - 2**31).to(torch.int32).view(shape)


def stored(layout: str) -> dict[str, Tensor]:
    """The tensors of a matrix [N, K] in a layout. Scales are powers of two, so that weights are exact."""
    scales = 2.0 ** (torch.arange(K // GROUP * N) * 5 % 7 - 4).view(K // GROUP, N).half()
    if layout == "awq":
        return {"qweight": words(K, N // 8), "qzeros": words(K // GROUP, N // 8, salt=999), "scales": scales}
    if layout.startswith("gptq"):
        zeros = words(K // GROUP, N // 8, salt=999) & 0x77777777  # version 1 adds one to each
        groups = torch.arange(K) // GROUP
        if "act-order" in layout:
            groups = groups[torch.arange(K) * 27 % K]
        return {"qweight": words(K // 8, N), "qzeros": zeros, "scales": scales, "g_idx": groups.int()}
    tensors = {"weight_packed": words(N, K // 8), "weight_scale": scales.t().contiguous()}
    return tensors if "zeros" not in layout else {**tensors, "weight_zero_point": words(N // 8, K // GROUP, salt=999)}


def digest(weight: Tensor) -> str:
    """Of a matrix [N, K]."""
    assert weight.shape == (N, K)
    return blake2b(weight.float().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def read_awq(tensors: Mapping[str, Tensor], layout: str) -> Tensor:
    package = importlib.util.find_spec("awq")  # its import asks for a GPU's packages
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weight: Tensor = module.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    return weight.t()


def read_gptq(tensors: Mapping[str, Tensor], layout: str) -> Tensor:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    sizes = {"in_features": K, "out_features": N, "bias": False}
    linear = TorchLinear(bits=4, group_size=GROUP, sym=False, desc_act="act-order" in layout, **sizes)
    for name, tensor in tensors.items():
        getattr(linear, name).copy_(tensor)
    if "v2" not in layout:
        convert_gptq_v1_to_v2_format_module(linear, bits=4, pack_dtype=torch.int32)
    linear.post_init()
    weight: Tensor = linear.dequantize_weight()
    return weight.t()


def read_compressed(tensors: Mapping[str, Tensor], layout: str) -> Tensor:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    how = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric="zeros" not in layout
    )  # fmt: skip
    given = {**tensors, "weight_shape": torch.tensor([N, K])}
    read = PackedQuantizationCompressor.decompress(given, QuantizationScheme(targets=["Linear"], weights=how))
    weight: Tensor = read["weight"]
    return weight


READERS: dict[str, Callable[[Mapping[str, Tensor], str], Tensor]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "gptq v2": read_gptq,
    "gptq act-order": read_gptq,
    "compressed int4": read_compressed,
    "compressed int4 zeros": read_compressed,
}


# ---- the command ----


def check(folders: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"folders": {}, "words": {}}
    for folder in sorted(each for each in folders.iterdir() if (each / EXPECTED).is_file()):
        found["folders"][folder.name] = result = check_folder(folder)
        print(f"{folder.name:28} {result['tensors']} tensors, {len(result['differ'])} differ", flush=True)
    for layout, read in READERS.items():
        found["words"][layout] = digest(read(stored(layout), layout))
        print(f"{layout:28} {found['words'][layout]}", flush=True)
    names = ("torch", "transformers", "compressed-tensors", "autoawq", "gptqmodel")
    return {"benchmark": "second opinion", "versions": {name: version(name) for name in names}, **found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("folders", metavar="FOLDERS", type=Path)
    args = parser.parse_args(arguments)
    if args.what == "write":
        write(args.folders)
    else:
        print(json.dumps(check(args.folders)))


if __name__ == "__main__":
    sys.exit(main())
