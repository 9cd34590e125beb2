"""How fast are quantised weights: one product at a time, and whole steps, against bfloat16 and against the memory?

The floor is the bytes of the weights (of a step: of the KV too) over 4.3 TB/s, what an H200 copies at. Weights are
random and quantised here; speed does not depend on what they say.

  product  one product of some layers in one CUDA graph, each with weights of its own; norm, activation and residual
           included.
  step     what a step of the engine takes while every request decodes, without drafts.
  plans    products cut up in many ways (GPU): the three fastest beside the chosen one, each with the result's error.

    python3 -m benchmarks.quantised [--model 8B] [--rows 1 4 16 64 128 256] [--formats bf16 fp8-channel fp8-block int4]
        [--parts product step plans] [--layers 6] [--prompt 64] [--output 48]
    python3 -m benchmarks.quantised --tiny --device cpu

Targets, 8B: a step of FP8 at least 1.6 times as fast as of bfloat16 at 1 row, 1.2 at 128, nowhere slower; of int4 at
least 2.2 at 1 row, not slower up to 64. A product of FP8 at 85 % of the floor's speed at 1 to 16 rows, of int4 at 70 %.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_steps import run_batch
from benchmarks.lib.quantised_products import BYTES_PER_SECOND, EPS, Products, Records, digits, num_bytes
from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.config import ModelConfig
from faser.models.quantised import QuantisedMatrix, Weight
from faser.models.quantised.matrix import plain
from faser.models.quantised.packed import for_cpu
from faser.models.quantised.placement import PARTS, for_gpu
from faser.models.quantised.rounding import to_fp8, to_groups
from faser.models.transformer import Layer, Transformer, matrices_of
from faser.runtime.device import make_device
from tools.inflate import SHAPES, Shape

PAGE_SIZE = 16
MODELS = {
    "8B": SHAPES["llama-8b"],
    "32B": SHAPES["qwen-32b"],
    "70B": Shape(hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672),
    "tiny": Shape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256),
}
FORMATS: dict[str, Callable[[Tensor], QuantisedMatrix] | None] = {
    "bf16": None,
    "fp8-channel": to_fp8,
    "fp8-block": lambda weight: to_fp8(weight, 128),
    "int4": lambda weight: to_groups(weight, 4, 128, dtype=torch.bfloat16),
}


def make_model(shape: Shape, kind: str, device: str, vocabulary: int) -> Transformer:
    """Layers in a format; embedding and head as plain as in public checkpoints."""
    config = ModelConfig(
        family="llama", vocab_size=vocabulary, norm_eps=EPS, max_positions=1024, eos_token_ids=(2,), dtype="bfloat16",
        **asdict(replace(shape, num_layers=0)),
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    outer = Transformer.random(config, 0, dtype, device=device)
    one = replace(config, num_layers=1)
    layers: list[Layer] = []
    for seed in range(shape.num_layers):  # one plain layer at a time: 70B do not fit as bfloat16
        (layer,) = Transformer.random(replace(one, vocab_size=1), seed, dtype, device=device).layers
        placed: dict[str, Any] = {name: place(plain(getattr(layer, name)), kind) for name in PARTS}
        layers.append(replace(layer, **placed))
    config = replace(config, num_layers=shape.num_layers)
    return Transformer(config, outer.embedding, tuple(layers), outer.final_norm, outer.head)


def place(weight: Tensor, kind: str) -> Weight:
    """A matrix as its device holds it."""
    quantise = FORMATS[kind]
    if quantise is None:
        return weight
    matrix = quantise(weight.contiguous())
    if weight.device.type == "cpu":
        return for_cpu(matrix, weight.dtype, packs=True)
    kept = for_gpu(matrix, weight.device)
    assert kept is not None
    return kept


# ---- one product ----


def products_of(model: Transformer, rows: Sequence[int]) -> Sequence[Products]:
    if model.device.type != "cuda":
        return [Products(model, num_rows) for num_rows in rows]
    from benchmarks.lib.quantised_cuda import CudaProducts, compile_products

    sizes = [CudaProducts(model, num_rows) for num_rows in rows]
    compile_products(sizes)
    return sizes


def measure_products(model: Transformer, kind: str, rows: Sequence[int]) -> Records:
    sizes, records = products_of(model, rows), []
    for num_rows, products in zip(rows, sizes, strict=True):
        for name in PARTS:
            floor = num_bytes(getattr(model.layers[0], name)) / BYTES_PER_SECOND * 1e6
            us = products.microseconds(name)
            records.append(
                {"format": kind, "rows": num_rows, "product": name, "us": digits(us), "floor_us": digits(floor),
                 "of_floor": digits(floor / us)}
            )  # fmt: skip
    return records


# ---- a whole step ----


def measure_steps(model: Transformer, kind: str, args: argparse.Namespace) -> Records:
    device: Any = make_device(args.device)
    most = max(args.rows)
    options = EngineOptions(
        policy="off", prefix_caching=False, profiling="none", max_running=most, max_model_len=1024,
        num_pages=most * (2 + (args.prompt + args.output) // PAGE_SIZE), page_size=PAGE_SIZE,
    )  # fmt: skip
    engine = build_engine(model, None, options, device=device)
    weights, records = sum(map(num_bytes, matrices_of(model))), []
    config = model.config
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    for batch in args.rows:
        run_batch(engine, batch, args.prompt, args.output // 2)
        step = run_batch(engine, batch, args.prompt, args.output)["step_ms"]
        floor = 1e3 * (weights + kv_bytes * batch * (args.prompt + args.output // 2)) / BYTES_PER_SECOND
        records.append(
            {"format": kind, "rows": batch, "step_ms": digits(step), "floor_ms": digits(floor),
             "of_floor": digits(floor / step)}
        )  # fmt: skip
    engine.close()
    return records


# ---- what is said ----


def add_speedups(records: Records, key: str) -> None:
    """How many times as fast as bfloat16 at the same rows."""
    plain_times = {(r["rows"], r.get("product")): r[key] for r in records if r["format"] == "bf16"}
    for record in records:
        plain_time = plain_times.get((record["rows"], record.get("product")))
        record["speedup"] = None if plain_time is None else round(plain_time / record[key], 2)


def show(title: str, records: Records, key: str) -> None:
    print(f"{title}: {key}, times as fast as bf16, share of the floor's speed")
    for record in records:
        speedup = "" if record["speedup"] is None else f"{record['speedup']:6.2f}x"
        print(
            f"  {record['format']:12} {record['rows']:4} rows {record.get('product', ''):8} {record[key]:10.3f} "
            f"{speedup} {100 * record['of_floor']:5.1f} %",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.tiny:
        args.model, args.rows, args.layers, args.prompt, args.output, args.vocabulary = "tiny", [1, 4], 2, 8, 8, 4096
    if "plans" in args.parts and args.device == "cpu":
        raise SystemExit("plans are those of a GPU: leave them out of --parts")
    shape, products, steps, plans = MODELS[args.model], [], [], []
    for kind in args.formats:
        few = replace(shape, num_layers=min(args.layers, shape.num_layers))
        if "product" in args.parts:
            products += measure_products(make_model(few, kind, args.device, 64), kind, args.rows)
        if "plans" in args.parts and FORMATS[kind] is not None:
            from benchmarks.lib.quantised_cuda import try_plans

            plans += try_plans(make_model(few, kind, args.device, 64), kind, args.rows)
        if "step" in args.parts:
            steps += measure_steps(make_model(shape, kind, args.device, args.vocabulary), kind, args)
        gc.collect()  # an engine and its graphs refer to each other
        if args.device == "cuda":
            torch.cuda.empty_cache()
    for title, records, key in (("product", products, "us"), ("step", steps, "step_ms")):
        add_speedups(records, key)
        show(title, records, key)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    found = {"model": args.model, "device": name, "products": products, "steps": steps, "plans": plans}
    print(json.dumps({"benchmark": "quantised", **found}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 128, 256], help="of a product; requests")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--parts", nargs="+", choices=("product", "step", "plans"), default=["product", "step"])
    parser.add_argument("--layers", type=int, default=6, help="of products (6)")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    return parser


if __name__ == "__main__":
    with torch.inference_mode():
        main()
