"""A draft is paired with a target only if a token id means the same text to both. Files: test_gguf.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.errors import ModelError
from faser.models.source import check_pair
from tests.tiny import CONFIGS, VOCABULARY

CONFIG = CONFIGS["llama3"]
TOKENIZER = {
    "added_tokens": [{"id": 4, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "aab": 3}, "merges": ["a b", "a ab"]},
}


def pair(tmp_path: Path, target: object, draft: object, draft_size: int = VOCABULARY) -> None:
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, tokenizer in zip(folders, (target, draft), strict=True):
        folder.mkdir()
        if tokenizer is not None:
            (folder / "tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
    check_pair(*folders, CONFIG, replace(CONFIG, vocab_size=draft_size))


def changed(**model: object) -> dict[str, Any]:
    return TOKENIZER | {"model": TOKENIZER["model"] | model}


def test_the_same_tokenizer_pairs_whatever_the_padding(tmp_path: Path) -> None:
    pair(tmp_path, TOKENIZER, TOKENIZER, draft_size=128)


def test_two_spellings_of_the_same_tokenizer_pair(tmp_path: Path) -> None:
    vocab = {"<end>": 4, "aab": 3, "ab": 2, "b": 1, "a": 0}
    pair(tmp_path, TOKENIZER, changed(vocab=vocab, merges=[["a", "b"], ["a", "ab"]]))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (changed(vocab={"a": 1, "b": 0, "ab": 2, "aab": 3}), "differ in the ids of 2 tokens ('a', 'b')"),
        (changed(vocab={"a": 0, "b": 1, "ab": 2}), "differ in the ids of 1 tokens ('aab')"),
        (TOKENIZER | {"added_tokens": [{"id": 5, "content": "<end>"}]}, "differ in the ids of 1 tokens ('<end>')"),
        (TOKENIZER | {"added_tokens": []}, "differ in the ids of 1 tokens ('<end>')"),
        (changed(merges=["a ab", "a b"]), "merges"),
        (changed(vocab=[["a", -1.0], ["b", -2.0]]), "differ in the ids"),
        ({"model": {}}, "not a tokenizer.json"),
        ("{", "cannot be read as JSON"),
        (None, "missing, so the pair cannot be checked"),
    ],
)
def test_a_draft_with_another_tokenizer_is_refused(draft: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as complaint:
        pair(tmp_path, TOKENIZER, draft)
    assert message in str(complaint.value)
    assert str(tmp_path / "draft") in str(complaint.value)


def test_without_tokenizers_the_vocabularies_must_be_equal(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"128 tokens and the target .* {VOCABULARY}"):
        pair(tmp_path, None, None, draft_size=128)
    check_pair(tmp_path / "target", tmp_path / "draft", CONFIG, CONFIG)
