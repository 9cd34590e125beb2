"""A draft's own weights in one block of memory, so that they can leave a device and come back as one copy.

Knows tensors; no device. A tensor keeps its identity when it moves, so models and their layers need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.models.transformer import Decoder

ALIGNMENT = 256  # bytes


def own_weights(draft: Decoder, target: Decoder) -> list[Tensor]:
    """Weights of the draft that the target does not have too. A patch draft shares the target's embedding."""
    shared = {weight.untyped_storage().data_ptr() for weight in target.weights()}
    return [weight for weight in draft.weights() if weight.untyped_storage().data_ptr() not in shared]


def home_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes of a block that holds these weights."""
    return sum(_aligned_bytes(weight) for weight in weights)


def move_in(weights: Sequence[Tensor], home: Tensor) -> None:
    """Copy the weights into `home`, uint8 [home_bytes], and let the tensors be views of it. Strides stay."""
    places = WeightsHome(weights)
    places.save(home)
    places.enter(home)


@dataclass(frozen=True)
class _WeightPlace:
    """Of one weight in a block."""

    start: int  # bytes
    stop: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(self.dtype).as_strided(self.shape, self.stride)


class WeightsHome:
    """Weights, and the place of each in a block of bytes. Blocks are uint8 [num_bytes], on any device."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = tuple(weights)
        self.num_bytes = home_bytes(weights)
        places, start = [], 0
        for weight in weights:
            stop = start + weight.numel() * weight.element_size()
            places.append(_WeightPlace(start, stop, weight.dtype, weight.shape, weight.stride()))
            start += _aligned_bytes(weight)
        self._places = tuple(places)

    @property
    def device(self) -> torch.device:
        return self._weights[0].device

    @torch.inference_mode()
    def save(self, block: Tensor) -> None:
        """Copy the weights into a block."""
        for weight, place in zip(self._weights, self._places, strict=True):
            place.view(block).copy_(weight)

    @torch.inference_mode()
    def enter(self, block: Tensor) -> None:
        """Let the weights be views of a block that holds them, or will."""
        for weight, place in zip(self._weights, self._places, strict=True):
            weight.set_(place.view(block))  # type: ignore[call-overload]

    @torch.inference_mode()
    def leave(self) -> None:
        """Let the weights be empty, so that the memory they are in can be freed."""
        for weight in self._weights:
            weight.set_(weight.new_empty(0))  # type: ignore[call-overload]


def _aligned_bytes(weight: Tensor) -> int:
    return -(-weight.numel() * weight.element_size() // ALIGNMENT) * ALIGNMENT
