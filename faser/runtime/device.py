"""What a device must offer the runtime. One implementation today: faser/runtime/cpu.py."""

from __future__ import annotations

from typing import Protocol

import torch

from faser.config import DEVICES
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.runtime.batch import Rows
from faser.runtime.kv_cache import KVCache
from faser.types import IntArray


class Attention(Protocol):
    """Attention over the rows of one forward, ready to be called for each layer. Two may be in use at once."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to their pages, attend.

        qkv [rows, num_heads + 2 * num_kv_heads, head_dim] → [rows, num_heads * head_dim]
        """
        ...


class Device(Protocol):
    """Memory and attention of one kind of hardware."""

    @property
    def name(self) -> str: ...

    def default_kv_memory(self) -> int:
        """Bytes to give to KV pages where the user did not say."""
        ...

    def kv_cache(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype) -> KVCache: ...

    def attention(self, model: Transformer, cache: KVCache, table: IntArray, rows: Rows) -> Attention:
        """`table` [slots, columns] holds the page of each request's each page_size tokens."""
        ...


def make_device(name: str) -> Device:
    """The device by a name EngineOptions let pass; auto is the CPU, the only one of this version."""
    from faser.runtime.cpu import CpuDevice

    assert name in DEVICES, name
    return CpuDevice()
