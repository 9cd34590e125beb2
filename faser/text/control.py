"""Control tokens: the template's own stay control tokens, and what a user writes stays text.

Knows tokenizers and texts that remember who wrote them (traced.py). Knows no templates and no requests.

A text without a user's control tokens is encoded as ever. For all others there is a second tokenizer, the same one with
other names for its control tokens: nobody can guess these names. The control tokens that the template wrote are renamed
in the text too, so that they are found, and everything else is text: `<|im_end|>` of a user becomes `<`, `|`, `im`, ….
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import tokenizers

from faser.text.traced import Traced

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # characters that no text needs and no normalizer changes
_SECRET_LENGTH = 8  # characters of 16 bits each
_SPACE = "\u2581"  # what SentencePiece writes for a space


@dataclass(frozen=True)
class Encoded:
    """A text as its tokenizer takes it, control tokens of users included."""

    token_ids: list[int]
    control_ids: list[int]
    places: list[tuple[int, int]]  # where the control tokens stand, without the white space that they take
    foreign: list[str]  # the texts of those that the template did not write


class ControlTokens:
    """The control tokens of a tokenizer, by id."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.texts = {i: token.content for i, token in added.items() if token.content and is_control(token)}
        self._backend = backend
        self._lock = Lock()
        self._second: tokenizers.Tokenizer | None = None
        secret = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_SECRET_LENGTH))
        self._names = {text: secret + chr(_PRIVATE_USE[n]) for n, text in enumerate(self.texts.values())}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced) -> Encoded:
        """The ids of a text, and the control tokens among them."""
        found, plain = self._backend.encode(text, add_special_tokens=False), str.__str__(text)
        token_ids = found.ids
        controls = [i for i, token_id in enumerate(token_ids) if token_id in self.texts]
        places = [_stripped(plain, *_place(found, i)) for i in controls]
        foreign = [plain[start:end] for start, end in places if not text.is_own(start, end)]
        return Encoded(token_ids, [token_ids[i] for i in controls], places, foreign)

    def encode_as_text(self, text: Traced, found: Encoded) -> list[int]:
        """The ids of a text whose control tokens are those alone that its template wrote. `found`: of `encode`."""
        is_found = bytearray(len(text))
        for start, end in found.places:
            is_found[start:end] = b"\1" * (end - start)
        renamed, place = [], 0
        for part, is_own in text.runs():
            renamed.append(self._renamed(part, is_found[place : place + len(part)]) if is_own else part)
            place += len(part)
        return list(self._second_backend().encode("".join(renamed), add_special_tokens=False).ids)

    def _renamed(self, text: str, is_found: bytearray) -> str:
        """The template's text with its control tokens renamed: those that the tokenizer takes for such."""

        def name(match: re.Match[str]) -> str:
            return self._names[match[0]] if any(is_found[slice(*match.span())]) else match[0]

        return self._pattern.sub(name, text)

    def prepare(self) -> None:
        """Make the second tokenizer now; a large one takes a second."""
        self._second_backend()

    def _second_backend(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._second is None:
                data = json.loads(self._backend.to_str())
                _rename(data, {i: self._names[text] for i, text in self.texts.items()})
                self._second = tokenizers.Tokenizer.from_str(json.dumps(data))
        return self._second


def is_control(token: tokenizers.AddedToken) -> bool:
    """Special tokens, and other added ones with a sign in them, e.g. <tool_call>. Words and runs of spaces are text."""
    return token.special or any(unicodedata.category(c)[0] in "PS" for c in token.content.replace(_SPACE, ""))


def _place(encoding: tokenizers.Encoding, index: int) -> tuple[int, int]:
    """The characters of a token."""
    place = encoding.token_to_chars(index)
    assert place is not None, "only tokens of a post-processor have no characters, and it adds none here"
    return place


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    taken = text[start:end]
    return end - len(taken.lstrip()), start + len(taken.rstrip())


def _rename(data: dict[str, Any], names: dict[int, str]) -> None:
    """Give tokens of a tokenizer.json other names. The model makes them of no text then, not even by merging."""
    model = data["model"]
    old = {text: names[i] for text, i in _vocabulary(model["vocab"]) if i in names}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {old.get(text, text): i for text, i in model["vocab"].items()}
    else:  # of a unigram model: [[text, score], …] in order of id
        model["vocab"] = [[old.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in old:
        model["unk_token"] = old[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, old)]


def _vocabulary(vocab: Any) -> Iterator[tuple[str, int]]:
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((text, i) for i, (text, _) in enumerate(vocab))


def _makes(merge: str | list[str], texts: dict[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in texts or right in texts or left + right in texts
