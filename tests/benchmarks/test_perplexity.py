"""benchmarks/perplexity.py: the number it prints is that of the text's probability."""

from __future__ import annotations

import json
import lzma

import pytest
import torch
import transformers

from benchmarks import perplexity
from faser.models.source import open_target
from tests.checkpoint import write_tokenizer
from tests.models.reference import save_hf
from tools import quantise

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_it_is_the_perplexity_that_transformers_computes(tmp_path, capsys):
    reference = save_hf(tmp_path / "model", transformers.LlamaConfig(**SIZES))
    write_tokenizer(tmp_path / "model")
    text = tmp_path / "text.xz"
    text.write_bytes(lzma.compress(b"the quick brown fox jumps over the lazy dog " * 5))
    assert quantise.main([str(tmp_path / "model"), str(tmp_path / "int4"), "--format", "int4", "--group", "32"]) == 0
    capsys.readouterr()
    with torch.inference_mode():
        perplexity.main(
            [str(text), str(tmp_path / "model"), str(tmp_path / "int4"), "--tokens", "40", "--window", "64"]
        )
        token_ids = open_target(str(tmp_path / "model")).tokenizer().encode(perplexity.read_text(text))[:40]
        ids = torch.tensor([token_ids])
        expected = reference(ids, labels=ids).loss.exp()
    *_, last = capsys.readouterr().out.strip().splitlines()
    plain, rounded = json.loads(last)["records"]
    assert plain["perplexity"] == pytest.approx(float(expected), rel=1e-3)
    assert rounded["perplexity"] != plain["perplexity"]
