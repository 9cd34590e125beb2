"""The memory of a model's keys and values.

Knows bytes and layout; who holds a page is known to the page pool (faser/engine/pages.py). A page holds page_size
tokens; a token's entry is its key heads followed by its value heads, so that writing a row is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.models.config import ModelConfig
from faser.models.transformer import Decoder, Transformer

GIB = 2**30
ROUNDED = torch.float8_e4m3fn
ROUNDED_MOST = 448.0  # the largest number that it has
USEFUL_TOKENS = 256  # of one request, prompt and output; kv_memory must hold these, or max_model_len if less


@dataclass(frozen=True)
class KvFormat:
    """How a model's keys and values are stored: as they are, or rounded to 8-bit floats."""

    dtype: torch.dtype
    scales: tuple[tuple[float, float], ...] = ()  # of keys and of values, by layer; empty: 1

    @classmethod
    def of(cls, model: Decoder) -> KvFormat:
        """As the model computes them."""
        return cls(model.dtype)

    @classmethod
    def rounded(cls, model: Transformer) -> KvFormat:
        """As 8-bit floats, with the scales of the checkpoint."""
        return cls(ROUNDED, model.kv_scales)

    @property
    def is_rounded(self) -> bool:
        return self.dtype is ROUNDED

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What the stored keys and values of a layer are multiplied by."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def round_kv(x: Tensor, scale: float) -> Tensor:
    """x / scale as 8-bit floats. What is beyond their range becomes the largest of them."""
    return (x.float() / scale).clamp_(-ROUNDED_MOST, ROUNDED_MOST).to(ROUNDED)


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    return config.num_layers * page_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def feature_bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """The target's features of a page, for a draft head of this shape."""
    return page_size * config.hidden_size * dtype.itemsize


def fitting_pages(
    budget: int,
    models: Sequence[tuple[ModelConfig, torch.dtype]],
    page_size: int,
    max_model_len: int,
    most: int = 2**40,
    feature_bytes: int = 0,
    most_draft_pages: int = 2**40,
) -> int:
    """Pages of the target that `budget` bytes hold, at most `most`, with `feature_bytes` for each page.

    The draft has as many pages, at most `most_draft_pages`.
    """
    page, *draft = (bytes_per_page(config, page_size, dtype) for config, dtype in models)
    least = useful_pages(page_size, max_model_len)
    return min(divided_pages(budget, page + feature_bytes, sum(draft), most_draft_pages, page_size, least), most)


def divided_pages(
    budget: int, page_bytes: int, draft_page_bytes: int, most_draft_pages: int, page_size: int, least: int
) -> int:
    """Pages of the target. What the draft's window does not take of its share goes to the target."""
    require_useful(budget, page_bytes + draft_page_bytes, page_size, least)
    alike = budget // (page_bytes + draft_page_bytes)
    if alike <= most_draft_pages:
        return alike
    return (budget - most_draft_pages * draft_page_bytes) // page_bytes


def useful_pages(page_size: int, max_model_len: int) -> int:
    """Pages of one request of a useful length."""
    return -(-min(USEFUL_TOKENS, max_model_len) // page_size)


def require_useful(budget: int, page_bytes: int, page_size: int, num_pages: int) -> None:
    """Refuse a budget that holds fewer than `num_pages` pages."""
    least = num_pages * page_bytes
    if budget < least:
        held = budget // page_bytes * page_size
        raise ConfigError(
            f"kv_memory of {budget / GIB:.4g} GiB holds {held} tokens, too few for a request of "
            f"{num_pages * page_size}; give at least {math.ceil(least / GIB * 1000) / 1000:g} GiB"
        )


def require_room(asked: int | None, room: int) -> None:
    """Refuse bytes for KV pages that the device does not have."""
    if asked is not None and asked > room:
        raise ConfigError(
            f"kv_memory of {asked / GIB:.4g} GiB: there is room for at most {max(0, room) / GIB:.1f} GiB; "
            "give less, or leave it out for the device's choice"
        )


def pages_over(memory: torch.Tensor, config: ModelConfig, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_layers, pages, page_size, 2 * num_kv_heads, head_dim] over a block of bytes.

    The bytes must be zero: garbage would not do, for a masked NaN is still a NaN.
    """
    return memory.view(dtype).view(config.num_layers, -1, page_size, 2 * config.num_kv_heads, config.head_dim)
