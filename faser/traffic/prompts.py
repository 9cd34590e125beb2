"""Prompts of a given length: real text by category, cut or padded, random tokens, or zeros.

Knows the shipped texts, text files and how a chat template wraps a message. A tokenizer is given as a function.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from faser.arrays import IntArray
from faser.errors import ConfigError, InvalidRequest
from faser.traffic.traces import DATA, open_text

SHIPPED = {name: DATA / f"{name}.jsonl.xz" for name in ("specbench", "mtbench", "gsm8k")}
RANDOM = "random"
_MARK = "@@@"  # stands for the message in a chat template
_SEPARATOR = "\n\n"

Encode = Callable[[str], list[int]]


class Prompts(Protocol):
    def take(self, length: int) -> tuple[str, Sequence[int]]:
        """The category of the next prompt, and its `length` tokens."""
        ...


@dataclass(frozen=True)
class RandomPrompts:
    """For runs in which only cost matters."""

    vocab_size: int
    random: np.random.Generator

    def take(self, length: int) -> tuple[str, tuple[int, ...]]:
        return RANDOM, tuple(self.random.integers(0, self.vocab_size, size=length).tolist())


def _turns(texts: Mapping[str, Sequence[str]], random: np.random.Generator) -> Iterator[tuple[str, int]]:
    """Categories in turn, and the index of a text in turn within each; every round is in a new random order."""

    def rounds(size: int) -> Iterator[int]:
        while True:
            yield from random.permutation(size).tolist()

    names, orders = list(texts), {name: rounds(len(some)) for name, some in texts.items()}
    for i in rounds(len(names)):
        yield names[i], next(orders[names[i]])


class Blank(Sequence[int]):
    """A prompt of which only the length matters: zeros that take no memory, as a sequence or as an array."""

    __slots__ = ("_array", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._array: IntArray = np.broadcast_to(np.int64(0), size)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        chosen = range(self._size)[index]
        return 0 if isinstance(chosen, int) else Blank(len(chosen))

    def __array__(self, dtype: object = None, copy: bool | None = None) -> IntArray:
        return self._array


_blank = lru_cache(maxsize=None)(Blank)  # requests of one length share one


class BlankPrompts:
    """For a simulator, which reads no prompts. Categories are those that `TextPrompts` draws with the same seed."""

    def __init__(self, texts: Mapping[str, Sequence[str]], random: np.random.Generator) -> None:
        self._turns = _turns(texts, random)

    def take(self, length: int) -> tuple[str, Sequence[int]]:
        return next(self._turns)[0], _blank(length)


@dataclass
class TextPrompts:
    """Real texts, wrapped as a chat message."""

    texts: dict[str, list[str]]
    encode: Encode
    around: tuple[list[int], list[int]]  # what the chat template puts before and after a message
    random: np.random.Generator
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._turns = _turns(self.texts, self.random)

    def take(self, length: int) -> tuple[str, tuple[int, ...]]:
        category, chosen = next(self._turns)
        head, tail = self.around
        room = length - len(head) - len(tail)
        if room < 1:  # too short for the template
            return category, tuple(self._body(category, chosen, length))
        return category, (*head, *self._body(category, chosen, room), *tail)

    def _body(self, category: str, chosen: int, length: int) -> list[int]:
        """A long text is cut at its end; a short one is preceded by others of its category."""
        texts = self.texts[category]
        body = self._encoded(texts[chosen])[:length]
        before = chosen
        while len(body) < length:
            before = (before - 1) % len(texts)
            body = self._encoded(texts[before] + _SEPARATOR)[-(length - len(body)) :] + body
            if before == chosen and not body:
                raise ConfigError(f"--prompts: the texts of category {category!r} encode to no token of the model")
        return body

    def _encoded(self, text: str) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = self.encode(text)
        return self._tokens[text]


def read_texts(names: str) -> dict[str, list[str]]:
    """Texts by category. `names` lists shipped sources and files, separated by commas."""
    found: dict[str, list[str]] = {}
    for name in names.split(","):
        path = SHIPPED.get(name) or Path(name).expanduser()
        if not path.is_file():
            known = ", ".join((*SHIPPED, RANDOM))
            raise ConfigError(f"--prompts {name}: no such file; give a text or JSON Lines file, or one of {known}")
        for category, text in _read(path, name):
            found.setdefault(category, []).append(text)
    return found


def _read(path: Path, name: str) -> list[tuple[str, str]]:
    try:
        with open_text(path) as file:
            if ".jsonl" in path.suffixes:
                texts = [_text_of(json.loads(line), path) for line in file if line.strip()]
            else:
                texts = [(path.name.split(".")[0], part.strip()) for part in file.read().split("\n\n") if part.strip()]
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise ConfigError(f"--prompts {name}: cannot be read ({error or type(error).__name__})") from None
    if not texts:
        raise ConfigError(
            f"--prompts {name}: it holds no text; expected paragraphs, or JSON Lines with prompt or turns"
        )
    return texts


def _text_of(record: Any, path: Path) -> tuple[str, str]:
    fields = record if isinstance(record, dict) else {}
    turns = fields.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else None
    for name in ("prompt", "text", "question"):
        text = text or fields.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"--prompts {path}: expected prompt, text, question or turns in every line, not {record!r}")
    return str(fields.get("category") or path.name.split(".")[0]), text


def enclosing_tokens(render: Callable[[Sequence[dict[str, str]]], str], encode: Encode) -> tuple[list[int], list[int]]:
    """The tokens a chat template puts before and after one message; none if it refuses a single message."""
    try:
        before, found, after = render([{"role": "user", "content": _MARK}]).partition(_MARK)
    except InvalidRequest:
        return [], []
    return (encode(before), encode(after)) if found else ([], [])
