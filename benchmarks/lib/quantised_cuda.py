"""Products with quantised weights as the CUDA executor computes them, and other plans for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.cuda_linear import milliseconds
from benchmarks.lib.quantised_products import BYTES_PER_SECOND, EPS, Products, Records, digits, num_bytes
from faser.models.quantised.placement import PARTS
from faser.models.transformer import Layer, Transformer, matrices_of
from faser.runtime.cuda import linear as ours
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.linear import LinearWorkspace
from faser.runtime.cuda.linear_plans import NUM_SMS, Plan
from faser.runtime.cuda.quantised_plans import fits_workspace, padded

SHARED_BYTES = 200 * 1024  # of a program, at most
# Outputs and warps of a program. With 64 outputs and 4 warps a tensor core takes a warp group at a time.
TILES = ((64, 4), (64, 2), (32, 2), (32, 1), (16, 1))


class CudaProducts(Products):
    """As the CUDA executor computes them, in one graph."""

    def __init__(self, model: Transformer, num_rows: int) -> None:
        super().__init__(model, num_rows)
        self.workspace = LinearWorkspace.allocate(model.device, matrices_of(model), num_rows)

    def run_all(self, name: str, plan: Plan | None = None) -> None:
        for layer in self.model.layers:
            self.run(name, layer, plan)

    def run(self, name: str, layer: Layer, plan: Plan | None = None) -> None:
        norm, memory = layer.mlp_norm, self.workspace
        if name == "qkv":
            ours.norm_linear(self.hidden, norm, EPS, layer.qkv, None, self.qkv, self.normed, memory, plan)
        elif name == "gate_up":
            ours.norm_gate_up(
                self.hidden, norm, EPS, layer.gate_up, self.activated, self.normed, self.gate_up, plan, workspace=memory
            )
        elif name == "out":
            ours.linear_residual(self.attended, layer.out, self.hidden, None, memory, plan)
        else:
            ours.linear_residual(self.activated, layer.down, self.hidden, None, memory, plan)

    def microseconds(self, name: str, plan: Plan | None = None) -> float:
        return milliseconds(lambda: self.run_all(name, plan)) * 1e3 / self.model.num_layers

    def error(self, name: str, plan: Plan | None) -> float:
        """Norm of the difference from the chosen plan's result over that result's norm."""
        results = [self._result(name, each) for each in (None, plan)]
        return digits(float((results[1] - results[0]).norm() / results[0].norm()))

    def _result(self, name: str, plan: Plan | None) -> Tensor:
        kept, self.hidden = self.hidden, self.hidden.clone()
        if name in ("out", "down"):  # these add to it, and what is there would hide the product
            self.hidden.zero_()
        self.run(name, self.model.layers[0], plan)
        result = {"qkv": self.qkv, "gate_up": self.activated}.get(name, self.hidden).float()
        self.hidden = kept
        return result


def compile_products(sizes: Sequence[CudaProducts]) -> None:
    compile_all([partial(each.run_all, name) for each in sizes for name in PARTS])


def candidates(kind: str, num_rows: int, name: str, shape: tuple[int, int]) -> Iterator[Plan]:
    """Plans to try for a product of tiles: programs of few outputs to many, and few programs on an SM to many.

    Many warps on an SM hide the chain from a load to a sum. What an SM has in flight is then shared out among its
    programs: 32 KB keep its part of the memory busy, 64 KB leave some room.
    """
    (n, k), is_gated = shape, name == "gate_up"
    n //= 1 + is_gated
    step, step_bytes = (128, 64) if kind == "int4" else (128, 128)
    tried = set()
    for (block_n, warps), per_sm, in_flight in itertools.product(TILES, (2, 4, 8), (32, 64)):
        num_blocks = triton.cdiv(n, block_n)
        split = 1 if is_gated else max(1, min(per_sm * NUM_SMS // num_blocks, k // (2 * step)))
        resident = min(per_sm, max(1, round(num_blocks * split / NUM_SMS)))
        stage_bytes = block_n * (1 + is_gated) * step_bytes
        row_bytes = padded(num_rows) * step * (2 if kind == "int4" else 1)
        most = SHARED_BYTES // (stage_bytes + row_bytes)
        if most < 2:
            continue
        stages = max(2, min(8, most, in_flight * 1024 // (resident * stage_bytes)))
        plan = Plan("tiles", block_n, step, warps, split=split, num_stages=stages)
        if plan not in tried and (split == 1 or fits_workspace(plan, num_rows, num_blocks)):
            tried.add(plan)
            yield plan


def try_plans(model: Transformer, kind: str, rows: Sequence[int]) -> Records:
    records = []
    for num_rows, name in itertools.product(rows, PARTS):
        products, shape = CudaProducts(model, num_rows), getattr(model.layers[0], name).shape
        plans: list[Plan | None] = [None, *candidates(kind, num_rows, name, shape)]
        compile_all([partial(products.run_all, name, plan) for plan in plans])
        floor = num_bytes(getattr(model.layers[0], name)) / BYTES_PER_SECOND * 1e6
        tried = []
        for plan in plans:
            with suppress(OutOfResources):
                us = products.microseconds(name, plan)
                found = {"us": digits(us), "of_floor": digits(floor / us), "error": products.error(name, plan)}
                tried.append({**found, "plan": None if plan is None else asdict(plan)})
        best = sorted(tried[1:], key=lambda each: each["us"])[:3]
        records.append({"format": kind, "rows": num_rows, "product": name, "chosen": tried[0], "best": best})
        for each in (tried[0], *best):
            print(f"  {kind:12} {num_rows:4} rows {name:8} {each}", flush=True)
    return records
