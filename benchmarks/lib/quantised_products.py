"""The products of some layers with one kind of weights, each by its name in `PARTS`, and what is said of them.

quantised_cuda.py has those of a GPU: it needs Triton, which this module does not import.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from faser.models.quantised import Weight, add_linear, linear, tensors_of
from faser.models.transformer import Layer, Transformer

BYTES_PER_SECOND = 4.3e12
EPS = 1e-5
Records = list[dict[str, Any]]


def num_bytes(weight: Weight) -> int:
    return sum(each.nbytes for each in tensors_of(weight).values())


def digits(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


class Products:
    """The products of some layers on a device, each by its name in `PARTS`."""

    def __init__(self, model: Transformer, num_rows: int) -> None:
        config = model.config

        def rows(size: int) -> Tensor:
            return torch.randn(num_rows, size, device=model.device).to(model.dtype)

        self.model = model
        self.hidden, self.normed = rows(config.hidden_size), rows(config.hidden_size)
        self.qkv = rows((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self.attended = rows(config.num_heads * config.head_dim)
        self.gate_up, self.activated = rows(2 * config.intermediate_size), rows(config.intermediate_size)

    def run_all(self, name: str) -> None:
        for layer in self.model.layers:
            self.run(name, layer)

    def run(self, name: str, layer: Layer) -> None:
        """On a CPU without norm and activation."""
        weight = getattr(layer, name)
        if name in ("qkv", "gate_up"):
            linear(self.hidden, weight)
        else:
            add_linear(self.hidden, self.attended if name == "out" else self.activated, weight)

    def microseconds(self, name: str) -> float:
        """Of one product; the median of some runs."""
        times = []
        for _ in range(5):
            started = time.perf_counter()
            self.run_all(name)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6 / self.model.num_layers
