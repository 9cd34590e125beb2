"""Whether a draft fits its target: a token id must mean the same text to both. Reads no weight.

Knows tokenizer.json and the vocabulary of a GGUF file. Vocabularies padded to different sizes fit where the tokenizers
agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser.errors import ModelError
from faser.models.config import ModelConfig, read_object
from faser.models.gguf.reader import is_gguf, open_file
from faser.models.gguf.tokenizer import read_vocabulary
from faser.models.weights import list_names
from faser.text.tokenizer import TOKENIZER_FILE


def check_pair(target: Path, draft: Path, target_config: ModelConfig, draft_config: ModelConfig) -> None:
    """Raise ModelError unless the tokenizers of two models are the same; each is a GGUF file or a folder.

    Of two folders without a tokenizer, only the sizes of the vocabularies can be compared.
    """
    if _has_tokenizer(target) or _has_tokenizer(draft):
        compare_tokenizers(target, draft)
    elif target_config.vocab_size != draft_config.vocab_size:
        raise ModelError(
            f"the draft in {draft} has {draft_config.vocab_size} tokens and the target in {target} has "
            f"{target_config.vocab_size}; expected the same tokenizer: choose a draft of the target's family"
        )


def compare_tokenizers(target: Path, draft: Path) -> None:
    """Merges are compared between models of the same format; padding tokens are not."""
    (target_ids, target_merges), (draft_ids, draft_merges) = _read_tokenizer(target), _read_tokenizer(draft)
    tokens = target_ids.keys() | draft_ids.keys()
    differing = [token for token in tokens if target_ids.get(token) != draft_ids.get(token)]
    if differing:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in the ids of {len(differing)} tokens "
            f"({list_names(map(repr, differing))}); choose a draft of the target's family"
        )
    if is_gguf(target) == is_gguf(draft) and target_merges != draft_merges:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in their merges; choose a draft of the target's family"
        )


def _has_tokenizer(model: Path) -> bool:
    return is_gguf(model) or (model / TOKENIZER_FILE).is_file()


def _read_tokenizer(model: Path) -> tuple[dict[str, int], list[str]]:
    """Ids by token, and the merges."""
    if is_gguf(model):
        vocabulary = read_vocabulary(open_file(model))
        return vocabulary.used_ids, vocabulary.merges
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{file}: missing, so the pair cannot be checked; fetch it, or copy it from the other model")
    data = read_object(file)
    try:
        return _token_ids(data), _merges(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{file}: not a tokenizer.json ({reason}); fetch the model again") from error


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token. Added tokens count too: some tools list them in the vocabulary as well, others do not."""
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # unigram models: [[token, score], ...] in order of id
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    return {**vocab, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}}


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges as "left right"; some files hold them as pairs."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"].get("merges") or []]
