"""Memory for weights: allocated in the storage order that is fast on a device, or filled with random numbers.

Knows shapes, dtypes and devices. Knows nothing of what a weight is for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Allocator:
    """Allocates tensors; matrices in the storage order that is fast on the device, or, if told so, without memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device, only_vectors: bool = False) -> None:
        self.dtype = dtype
        self.device = device
        self.only_vectors = only_vectors

    def vector(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, num_out: int, num_in: int) -> Tensor:
        if self.only_vectors:
            return torch.empty(num_out, num_in, dtype=self.dtype, device="meta")
        if self.device.type == "cpu":
            return self.vector(num_in, num_out).t()
        return self.vector(num_out, num_in)


def fill_random(weights: Iterable[Tensor], norms: Iterable[Tensor], seed: int, std: float) -> None:
    """Random weights of this standard deviation; those that are among `norms` are near 1."""
    norm_ids, generator = {id(norm) for norm in norms}, None
    for weight in weights:
        generator = generator or torch.Generator(device=weight.device).manual_seed(seed)
        centre, spread = (1.0, 0.1) if id(weight) in norm_ids else (0.0, std)
        # Filled in storage order: filling a transposed matrix by its strides is slow.
        (weight.t() if weight.dim() == 2 and not weight.is_contiguous() else weight).normal_(
            centre, spread, generator=generator
        )
