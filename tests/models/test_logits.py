"""Logits are those of transformers, for every family and every kind of rotary embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.kv_cache import bytes_per_page, pages_over
from faser.step import PageWrites
from tests.models.reference import LLAMA3_ROPE, SIZES, YARN_ROPE, forward, save_hf, small_config

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
TOLERANCE = 1e-4

CASES: dict[str, transformers.PreTrainedConfig] = {
    "llama 2, every head its own keys": LlamaConfig(**(SIZES | {"num_key_value_heads": 4})),
    "llama 3, grouped heads and llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama, linear rope": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama, biases and tied head": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None, head_dim=20),
    "mistral, a window": MistralConfig(**SIZES, sliding_window=20, head_dim=20),
    "qwen2, windows behind the first layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=17, max_window_layers=1
    ),
    "qwen3, windows by turns": Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2, bias and tied head": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, yarn": Qwen2Config(**SIZES, rope_parameters=YARN_ROPE),
    "qwen2, yarn with every option": Qwen2Config(
        **SIZES,
        rope_parameters=YARN_ROPE
        | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
    ),
    "qwen2, yarn with a given attention factor": Qwen2Config(
        **SIZES, rope_parameters=YARN_ROPE | {"attention_factor": 0.9}
    ),
    "qwen3, normed heads of their own size": Qwen3Config(**SIZES, head_dim=32),
    "qwen3, biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = save_hf(tmp_path, CASES[name])
    config = ModelConfig.from_folder(tmp_path)
    model = weights.load(tmp_path, config, torch.float32)
    # Up to the last position: with llama3 and yarn, beyond those of pre-training.
    token_ids = torch.randint(0, 96, (128,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = oracle(token_ids[None]).logits[0]
    assert expected.abs().max() > 1
    assert (forward(model, token_ids, config.layer_windows) - expected).abs().max() < TOLERANCE
    assert bool(config.windows) == ("window" in name and "no window" not in name)
    assert (paged_forward(model, token_ids) - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def paged_forward(model: Transformer, token_ids: torch.Tensor) -> torch.Tensor:
    """The same by the rows and pages of a CPU, in several steps."""
    num_pages = len(token_ids) // 4
    memory = torch.zeros(num_pages * bytes_per_page(model.config, 4, torch.float32), dtype=torch.uint8)
    runner = ModelRunner(model, pages_over(memory, model.config, 4, torch.float32), 1, len(token_ids))
    runner.apply(PageWrites(np.zeros(num_pages, dtype=np.int64), np.arange(num_pages), np.arange(num_pages)[::-1]))
    parts = []
    for start, end in ((0, 50), (50, 51), (51, 59), (59, 128)):
        rows = Rows.of(np.array([0]), np.array([start]), np.array([end - start]))
        hidden = runner.run(rows, model.embed(token_ids[start:end]))
        parts.append(runner.logits(hidden, np.arange(end - start)))
    return torch.cat(parts)


@pytest.mark.parametrize(("rows", "tied"), [(1, True), (5, True), (6, True), (48, True), (49, True), (8, False)])
def test_the_head_gives_the_same_at_any_number_of_rows(rows: int, tied: bool) -> None:
    model = Transformer.random(small_config(tie_embeddings=tied), seed=0, std=0.2)
    hidden = torch.randn(rows, 48, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = model.logits(hidden)
        expected = (
            torch.nn.functional.rms_norm(hidden, (48,), model.final_norm, 1e-5).double() @ model.head.double().t()
        )
    assert logits.is_contiguous()
    assert (logits - expected).abs().max() < 1e-5
