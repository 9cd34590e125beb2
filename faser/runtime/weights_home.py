"""A draft's own weights in one block of memory, so that they can leave a device and come back as one copy.

Knows tensors; no device. The addresses of the weights never change again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from faser.models.transformer import Transformer

ALIGNMENT = 256  # bytes


def own_weights(draft: Transformer, target: Transformer) -> list[Tensor]:
    """Weights of the draft that the target does not have too. A patch draft shares the target's embedding."""
    shared = {weight.untyped_storage().data_ptr() for weight in target.weights()}
    return [weight for weight in draft.weights() if weight.untyped_storage().data_ptr() not in shared]


def home_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes of a block that holds these weights."""
    return sum(_aligned_bytes(weight) for weight in weights)


@torch.inference_mode()
def move_in(weights: Sequence[Tensor], home: Tensor) -> None:
    """Copy the weights into `home`, uint8 [home_bytes], and let the tensors be views of it. Strides stay."""
    start = 0
    for weight in weights:
        size = weight.numel() * weight.element_size()
        place = home[start : start + size].view(weight.dtype).as_strided(weight.shape, weight.stride())
        place.copy_(weight)
        weight.set_(place)  # type: ignore[call-overload]
        start += _aligned_bytes(weight)


def _aligned_bytes(weight: Tensor) -> int:
    return -(-weight.numel() * weight.element_size() // ALIGNMENT) * ALIGNMENT
