"""Quantised matrices from GGUF blocks stand for the weights that the package gguf reads from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the package gguf is missing: pip install gguf")

import gguf

from faser.models.gguf.blocks import KEPT_TYPES, to_matrix


def random_blocks(kind: str, num_rows: int, num_columns: int) -> np.ndarray:
    """Random bytes with random finite scales: every bit of a block has a meaning."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(len(kind))
    raw = random.integers(0, 256, (num_rows, num_columns // block_size, block_bytes), dtype=np.uint8)
    places = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    for start in places:
        scales = random.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., start : start + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_a_matrix_of_blocks_has_the_weights_that_llama_cpp_means(kind):
    raw = random_blocks(kind, 6, 512)
    matrix = to_matrix(raw.reshape(-1), kind, 6)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert matrix.shape == (6, 512)
    assert torch.allclose(matrix.dequantise(), torch.from_numpy(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_a_matrix_takes_hardly_more_memory_than_its_blocks(kind):
    raw = random_blocks(kind, 6, 512)
    assert to_matrix(raw.reshape(-1), kind, 6).num_bytes <= 1.03 * raw.nbytes
