"""Do the matrix products of a decoder run at memory speed at few rows, and by how much do they beat cuBLAS?

At few rows a product costs its weights' bytes over the memory bandwidth, and a stack of layers the sum of that: the
floor, at 4.3 TB/s, what an H200 copies at. What comes on top is the start of each kernel, its tail, and the wait of
each for the one before.

  product  one product of every layer in one CUDA graph, each with weights of its own, so that none is in the L2 cache;
           norm, activation and residual included. `ours` is the plan that `linear_plans.choose` takes, `cublas` is
           cuBLAS behind our kernels for norm and activation.
  stack    all products of all layers and the head as one graph, without attention. `plain` is torch: F.rms_norm, mm,
           silu, addmm.
  plans    other plans than the chosen one, product by product, the three fastest (in the document all): what
           `linear_plans.choose` is made from. A few layers do.

    python3 -m benchmarks.cuda_linear [--models 1B 8B] [--rows 1 2 4 8 16 32 64 128] [--vocabulary 128256]
    python3 -m benchmarks.cuda_linear --plans [--products gate_up] [--layers 6] [--models 32B] …

Target: the 1B stack at one row within 1.15 of its floor. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from faser.runtime.cuda import linear
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.linear import LinearWorkspace
from faser.runtime.cuda.linear_plans import CUBLAS, TILE_ROWS, Plan, Product, choose, persistent
from tools import inflate
from tools.inflate import Shape

BYTES_PER_SECOND = 4.3e12
EPS = 1e-5
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")


SHAPES = {
    "0.6B": inflate.SHAPES["qwen-0.6b"],
    "1B": inflate.SHAPES["llama-1b"],
    "7B": Shape(
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
    ),
    "8B": inflate.SHAPES["llama-8b"],
    "32B": inflate.SHAPES["qwen-32b"],
    "70B": Shape(
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
    ),
}
KINDS: dict[str, Product] = {
    "qkv": "norm", "out": "residual", "gate_up": "gate_up", "down": "residual", "head": "head",
}  # fmt: skip
MOST_SPLIT = 400  # programs that share K, with --plans


def weight_shape(shape: Shape, product: str, vocabulary: int) -> tuple[int, int]:
    """N, K."""
    return {
        "qkv": ((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden_size),
        "out": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (vocabulary, shape.hidden_size),
    }[product]


class Stack:
    """Random weights of every layer, buffers, and the three implementations."""

    def __init__(
        self, shape: Shape, vocabulary: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.num_layers = shape.num_layers
        self.weights: dict[str, list[Tensor]] = {}
        for product in PRODUCTS:
            n, k = weight_shape(shape, product, vocabulary)
            copies = 1 if product == "head" else shape.num_layers
            self.weights[product] = [
                torch.empty(n, k, device=device, dtype=dtype).normal_(0, 0.02) for _ in range(copies)
            ]
        self.norm = torch.ones(shape.hidden_size, device=device, dtype=dtype)
        self.workspace = LinearWorkspace.allocate(device)

    def allocate(self, num_rows: int) -> None:
        def rows(like: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.randn(num_rows, like.shape[dim], device=like.device).to(dtype or like.dtype)

        first = {product: weights[0] for product, weights in self.weights.items()}
        self.hidden, self.normed = rows(first["qkv"], 1), rows(first["qkv"], 1)
        self.qkv, self.attended = rows(first["qkv"], 0), rows(first["out"], 1)
        self.gate_up, self.activated = rows(first["gate_up"], 0), rows(first["down"], 1)
        self.logits = rows(first["head"], 0, torch.float32)

    def num_bytes(self, product: str) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights[product])

    def run_product(self, product: str, layer: int, plan: Plan | None = None) -> None:
        weight = self.weights[product][layer]
        if product == "qkv":
            linear.norm_linear(
                self.hidden, self.norm, EPS, weight, None, self.qkv, self.normed, self.workspace, plan
            )  # fmt: skip
        elif product == "gate_up":
            linear.norm_gate_up(self.hidden, self.norm, EPS, weight, self.activated, self.normed, self.gate_up, plan)
        elif product == "head":
            linear.norm_linear(
                self.hidden, self.norm, EPS, weight, None, self.logits, self.normed, None, plan, product="head"
            )
        else:
            x = self.attended if product == "out" else self.activated
            linear.linear_residual(x, weight, self.hidden, None, self.workspace, plan)

    def run(self, plan: Plan | None = None) -> None:
        for layer in range(self.num_layers):
            for product in PRODUCTS[:-1]:
                self.run_product(product, layer, plan)
        self.run_product("head", 0, plan)

    def run_plain(self) -> None:
        hidden = self.hidden
        for qkv, out, gate_up, down in zip(*(self.weights[product] for product in PRODUCTS[:-1]), strict=True):
            torch.mm(F.rms_norm(hidden, hidden.shape[-1:], self.norm, EPS), qkv.t(), out=self.qkv)
            hidden = torch.addmm(hidden, self.attended, out.t())
            both = torch.mm(F.rms_norm(hidden, hidden.shape[-1:], self.norm, EPS), gate_up.t())
            gate, up = both.chunk(2, dim=-1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), down.t())
        normed = F.rms_norm(hidden, hidden.shape[-1:], self.norm, EPS)
        torch.mm(normed, self.weights["head"][0].t()).float()


def milliseconds(run: Callable[[], None], replays: int = 9) -> float:
    """Median over replays of a graph of what `run` enqueues."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(marks))


def measure_product(stack: Stack, product: str, plan: Plan | None) -> float:
    """Microseconds of one product. The head exists once and is run twice in a row."""
    layers = [0, 0] if product == "head" else range(stack.num_layers)

    def run() -> None:
        for layer in layers:
            stack.run_product(product, layer, plan)

    return milliseconds(run) * 1e3 / len(layers)


def measure(name: str, rows: list[int], vocabulary: int) -> list[dict[str, Any]]:
    stack = Stack(SHAPES[name], vocabulary)
    floor = sum(stack.num_bytes(product) for product in PRODUCTS) / BYTES_PER_SECOND * 1e3
    records = []
    for num_rows in rows:
        stack.allocate(num_rows)
        record: dict[str, Any] = {"model": name, "rows": num_rows, "floor_ms": round(floor, 3)}
        for product in PRODUCTS:
            bytes_each = stack.num_bytes(product) / len(stack.weights[product])
            record[product] = {
                "floor_us": round(bytes_each / BYTES_PER_SECOND * 1e6, 1),
                "ours_us": round(measure_product(stack, product, None), 1),
                "cublas_us": round(measure_product(stack, product, CUBLAS), 1),
            }
        record["ours_ms"] = round(milliseconds(stack.run), 3)
        record["cublas_ms"] = round(milliseconds(lambda: stack.run(CUBLAS)), 3)
        record["plain_ms"] = round(milliseconds(stack.run_plain), 3)
        record["ratio_to_floor"] = round(record["ours_ms"] / floor, 3)
        records.append(record)
    return records


def candidates(product: str, num_rows: int, n: int, k: int) -> Iterator[Plan]:
    """Plans to try; n is the number of outputs (of the MLP: of its gate alone). Some cannot be launched."""
    if num_rows > TILE_ROWS:
        yield CUBLAS
        return
    num_blocks = -(-n // 64)
    for block_k, stages in ((64, 4), (64, 8), (128, 3), (128, 4), (128, 5), (128, 8), (256, 3)):
        plan = Plan("tiles", 64, block_k, num_stages=stages)
        if stages * linear.stage_bytes(plan, num_rows, product == "gate_up", 2) > linear.H200_SHARED_BYTES:
            continue
        yield plan
        for split in (2, 3, 4, 5, 6, 8, 10, 12, 16) if product in ("qkv", "out", "down") and stages < 5 else ():
            if 100 <= split * num_blocks <= MOST_SPLIT and split * block_k <= k:
                yield replace(plan, split=split)
    if num_rows > 4:
        yield CUBLAS
        return
    for block_n, block_k, warps, per_sm in itertools.product((1, 2, 4), (1024, 2048), (4, 8), (0, 4, 8)):
        if warps == block_k // 256 and per_sm * warps in (0, 32):
            yield Plan("chunks", block_n, block_k, warps, per_sm=per_sm)
    for block_n, warps, programs in itertools.product((1, 2), (4, 8, 16), (132, 264, 396)):
        if 512 * warps <= k <= 1024 * warps and programs * block_n < n:
            yield persistent(block_n, k, warps, programs, n)


def try_plans(name: str, rows: list[int], vocabulary: int, products: list[str], layers: int) -> list[dict[str, Any]]:
    shape, records = SHAPES[name], []
    stack = Stack(replace(shape, num_layers=layers), vocabulary)
    for num_rows, product in itertools.product(rows, products):
        stack.allocate(num_rows)
        n, k = weight_shape(shape, product, vocabulary)
        n //= 1 + (product == "gate_up")
        chosen = choose(KINDS[product], num_rows, n, k, torch.bfloat16)
        plans = list(dict.fromkeys((chosen, *candidates(product, num_rows, n, k))))
        found: list[tuple[float, Plan]] = []
        with patch.object(linear, "MAX_SPLIT_PROGRAMS", MOST_SPLIT):
            stack.workspace = LinearWorkspace.allocate(stack.norm.device)
            compile_all(partial(stack.run_product, product, 0, plan) for plan in plans)
            found.append((round(measure_product(stack, product, chosen), 1), chosen))
            for plan in plans[1:]:
                with contextlib.suppress(OutOfResources):  # too many registers
                    found.append((round(measure_product(stack, product, plan), 1), plan))
        floor = stack.num_bytes(product) / len(stack.weights[product]) / BYTES_PER_SECOND * 1e6
        print(f"{name} {num_rows} rows, {product}: chosen {found[0][0]} us, floor {floor:.1f}", flush=True)
        found.sort(key=lambda each: each[0])
        for microseconds, plan in found[:3]:
            print(f"  {microseconds}  {plan}", flush=True)
        tried = [asdict(plan) | {"us": us, "chosen": plan == chosen} for us, plan in found]
        records.append({"model": name, "rows": num_rows, "product": product, "n": n, "k": k,
                        "floor_us": round(floor, 1), "plans": tried})  # fmt: skip
    return records


def show(records: list[dict[str, Any]]) -> None:
    print("product, microseconds: ours / cublas (floor)")
    print(f"{'':8}" + "".join(f"{product:>24}" for product in PRODUCTS))
    for record in records:
        cells = [record[product] for product in PRODUCTS]
        texts = [f"{cell['ours_us']} / {cell['cublas_us']} ({cell['floor_us']})" for cell in cells]
        print(f"{record['model']} {record['rows']:>4} " + "".join(f"{text:>24}" for text in texts))
    print("stack, milliseconds")
    for record in records:
        print(
            f"{record['model']} {record['rows']:>4} rows: ours {record['ours_ms']:.3f}, cublas "
            f"{record['cublas_ms']:.3f}, plain {record['plain_ms']:.3f}, floor {record['floor_ms']:.3f}, "
            f"ours / floor {record['ratio_to_floor']:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--plans", action="store_true", help="try other plans")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=PRODUCTS, help="of --plans (all)")
    parser.add_argument("--layers", type=int, default=6, help="of --plans (6)")
    arguments = parser.parse_args()
    records = []
    for name in arguments.models:
        if arguments.plans:
            records += try_plans(name, arguments.rows, arguments.vocabulary, arguments.products, arguments.layers)
        else:
            records += measure(name, arguments.rows, arguments.vocabulary)
    if not arguments.plans:
        show(records)
    print(json.dumps({"benchmark": "cuda_linear", "device": torch.cuda.get_device_name(), "records": records}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
