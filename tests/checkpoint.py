"""A small checkpoint with a tokenizer, as people download it."""

from pathlib import Path

import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.models.reference import save_hf

TEXT = ["the quick brown fox jumps over the lazy dog", "a draft proposes and the target disposes", "Größe, naïve, 東京"]


def write_checkpoint(folder: Path, max_position_embeddings: int = 128) -> None:
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max_position_embeddings, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_hf(folder, config)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, extra: int = 0) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=300 + extra,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.save(str(folder / "tokenizer.json"))
