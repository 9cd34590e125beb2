"""Where a model's keys and values live.

Knows bytes and layout; which page belongs to whom is the page pool's business (faser/pages.py). A page holds page_size
tokens; a token's entry is its key heads followed by its value heads, so that writing a row is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from faser.errors import ConfigError
from faser.models.config import ModelConfig


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    return config.num_layers * page_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def fitting_pages(
    budget: int, models: Sequence[tuple[ModelConfig, torch.dtype]], page_size: int, most: int = 2**40
) -> int:
    """Pages of each model that `budget` bytes hold together, at most `most`; refused where it holds not one."""
    page = sum(bytes_per_page(config, page_size, dtype) for config, dtype in models)
    if budget < page:
        raise ConfigError(
            f"kv_memory of {budget / 2**30:.6f} GiB: one page of {page_size} tokens takes "
            f"{page / 2**30:.6f} GiB; give more"
        )
    return min(budget // page, most)


class KVCache:
    """pages: [num_layers, num_pages, page_size, 2 * num_kv_heads, head_dim]"""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (config.num_layers, num_pages, page_size, 2 * config.num_kv_heads, config.head_dim)
        self.pages = _lazy_zeros(num_pages * bytes_per_page(config, page_size, dtype)).view(dtype).view(shape)

    def layer(self, index: int) -> torch.Tensor:
        """[num_pages, page_size, 2 * num_kv_heads, head_dim]"""
        return self.pages[index]

    def layer_rows(self, index: int) -> torch.Tensor:
        """[num_pages * page_size, 2 * num_kv_heads, head_dim]"""
        return self.pages[index].flatten(0, 1)


def _lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros the system hands out page by page, on first touch. Zeros, not garbage: a masked NaN is still a NaN."""
    try:
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    except MemoryError as error:
        raise ConfigError(f"no memory for a KV cache of {num_bytes / 2**30:.2f} GiB; lower kv_memory") from error
