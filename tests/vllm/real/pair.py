"""A tiny random Llama and its draft: the same weights, shaken a little. Both have the same tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers

from tests.checkpoint import write_tokenizer

NOISE = 0.01  # on weights of standard deviation 0.3


def write_pair(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(config)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += NOISE * torch.randn_like(weight)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name)
        file = str(folder / name / "tokenizer.json")
        marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        transformers.PreTrainedTokenizerFast(tokenizer_file=file, **marks).save_pretrained(folder / name)
