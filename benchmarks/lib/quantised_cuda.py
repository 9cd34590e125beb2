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
from faser.runtime.cuda.linear_plans import MAX_SPLIT_PROGRAMS, TILE_ROWS, Plan
from faser.runtime.cuda.quantised_plans import padded

SMALL_TILES = ((64, 2), (32, 2), (32, 1), (16, 1))  # outputs and warps of a program


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
        kept, self.hidden = self.hidden, self.hidden.clone()  # products with a residual add to it
        self.run(name, self.model.layers[0], plan)
        result = {"qkv": self.qkv, "gate_up": self.activated}.get(name, self.hidden).float()
        self.hidden = kept
        return result


def compile_products(sizes: Sequence[CudaProducts]) -> None:
    compile_all([partial(each.run_all, name) for each in sizes for name in PARTS])


def candidates(kind: str, num_rows: int, name: str, shape: tuple[int, int]) -> Iterator[Plan]:
    """Plans to try for a product of tiles. With 64 outputs and 4 warps a tensor core takes a warp group at a time."""
    (n, k), is_gated = shape, name == "gate_up"
    n //= 1 + is_gated
    for (block_n, warps), stages in itertools.product(((64, 4), (128, 8), *SMALL_TILES), (3, 5, 8)):
        stage = block_n * (1 + is_gated) * (64 if kind == "int4" else 128) + padded(num_rows) * 256
        for split in (1,) if is_gated else (1, 2, 4, 8, 16):
            programs = triton.cdiv(n, block_n) * split
            is_usual = 100 <= programs <= MAX_SPLIT_PROGRAMS or split == 1
            fits = stages * stage <= 200 * 1024 and (split == 1 or block_n * padded(num_rows) <= 64 * TILE_ROWS)
            if fits and is_usual and split * 256 <= k:
                yield Plan("tiles", block_n, 128, warps, split=split, num_stages=stages)


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
