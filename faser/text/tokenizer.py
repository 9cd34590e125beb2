"""Text from tokens and back, one token at a time.

Knows tokenizer.json and what it means for text to be finished: characters arrive in pieces, and the last pieces of a
text may still change. Knows nothing of models, requests or steps: a token pushed is a token emitted, and the answers
are the same however the tokens were grouped. Imports no torch.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
import tokenizers.decoders

from faser.errors import InvalidRequest, ModelError

TOKENIZER_FILE = "tokenizer.json"

_HALF = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
_MAX_PEEK = 64  # tokens; a longer unfinished stretch is not looked into until it is finished


class Tokenizer:
    """A tokenizer.json: its post-processor alone decides which special tokens an encoded text gets."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # some published files cut at 512 tokens or pad; a prompt is served as given
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._byte_ids = _byte_fallback_ids(backend)
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._pieces: dict[int, bytes] = {}  # what `piece` was asked for before

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        file = Path(path) / TOKENIZER_FILE
        if not file.is_file():
            raise ModelError(
                f"{path}: no {TOKENIZER_FILE} there; expected a model folder with one, as Hugging Face writes it "
                f"(a folder with only tokenizer.model: convert it with transformers' save_pretrained)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{file}: not a readable tokenizer ({error}); download or convert it again") from error
        return cls(backend)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """The inverse of `to_json`."""
        return cls(tokenizers.Tokenizer.from_str(text))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. Special tokens count with their own text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def to_json(self) -> str:
        """The contents of tokenizer.json, without truncation and padding."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; empty where it leads to none."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half of a surrogate pair at character {error.start}; send well-formed Unicode"
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; ids the vocabulary does not have (a model's may be padded) are skipped."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for by itself; not always whole characters. Empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if self.is_byte_level:
            known = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def piece(self, token_id: int) -> bytes:
        """`token_bytes`, but nothing for a token that `decode` drops."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = b"" if self.is_silent(token_id) else self.token_bytes(token_id)
        return found

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` drops the token before it decodes anything."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a run that `decode` reads as a whole."""
        return token_id in self._byte_ids


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids of <0x00>..<0xFF>, if the decoder reads them as bytes: then a lone <0x80> is no character."""
    probe = backend.token_to_id("<0x80>")
    if probe is None or backend.decode([probe], skip_special_tokens=False) != _HALF:
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TextStream:
    """Decodes one request's tokens as they come. All that `push` and `finish` return, joined, is decode(all ids).

    What a token adds depends on the tokens before it: a leading space is dropped at the start of a text only, bytes
    join into characters. So each piece is decoded behind the piece before it, whose own text is then cut off. A piece
    ends where the text can no longer change: not within a character, and, where single bytes are tokens of their own
    (byte fallback), not within a run of them, since one wrong byte spoils the whole run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last finished piece, then the tokens held back
        self._num_finished = 0  # tokens of the window that belong to the finished piece
        self._finished_text = ""  # that piece decoded at the head of the window
        self._next_try = 1  # tokens to hold before decoding again

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became certain."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id) or self.num_held < self._next_try:
            return ""
        new_text = self._held_text()
        if not new_text or new_text.endswith(_HALF):
            # A character has at most four tokens. Longer stretches are noise: try ever less often, for linear cost.
            self._next_try = self.num_held + max(1, self.num_held // 4)
            return ""
        self._start_piece()
        return new_text

    def peek(self) -> str:
        """What `finish` would return now: the text held back, which later tokens may still change."""
        return self._held_text() if self.num_held else ""

    def finish(self) -> str:
        """Give up waiting: the rest of the text, unfinished characters as replacement characters."""
        rest = self.peek()
        self._window, self._num_finished, self._finished_text, self._next_try = [], 0, "", 1
        return rest

    @property
    def num_held(self) -> int:
        """Tokens whose text is held back."""
        return len(self._window) - self._num_finished

    def _held_text(self) -> str:
        return self._tokenizer.decode(self._window)[len(self._finished_text) :]

    def _start_piece(self) -> None:
        """What was held is finished, and becomes the context of what comes next."""
        self._window = self._window[self._num_finished :]
        self._num_finished = len(self._window)
        self._finished_text = self._tokenizer.decode(self._window)
        self._next_try = 1


class ByteTextStream(TextStream):
    """The same for tokenizers whose tokens are bytes by themselves. Much cheaper: nothing is decoded twice.

    Only an unfinished character is held back; bytes that can no longer become one are replaced at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_pending = 0

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if not piece:
            return ""
        text = self._decoder.decode(piece)
        self._num_pending = self._num_pending + 1 if self._decoder.getstate()[0] else 0
        return text

    def peek(self) -> str:
        return self._decoder.getstate()[0].decode(errors="replace")

    def finish(self) -> str:
        self._num_pending = 0
        return self._decoder.decode(b"", final=True)

    @property
    def num_held(self) -> int:
        return self._num_pending


def make_text_stream(tokenizer: Tokenizer) -> TextStream:
    """The cheapest stream that is right for the tokenizer."""
    return ByteTextStream(tokenizer) if tokenizer.is_byte_level else TextStream(tokenizer)


class StopChecker:
    """Watches one request's text for its stop strings.

    A stop string counts when a token after the first `num_ignored` completes it, also if it began among those. Of
    several completed by one token, the one that begins first decides where the text is cut.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], num_ignored: int = 0) -> None:
        self._stream = make_text_stream(tokenizer)
        self._stop = tuple(stop)
        self._num_ignored = num_ignored
        self._num_tokens = 0
        self._certain = ""  # text that cannot change any more
        self._num_searched = 0  # characters in which no stop string ends, or only ignored ones
        self._cut: str | None = None  # the answer, once a stop string was found

    @property
    def text(self) -> str:
        """The output so far, decode(all ids), or what comes before the stop string."""
        return self._certain + self._stream.peek() if self._cut is None else self._cut

    def push(self, token_id: int) -> bool:
        """Take one token; whether a stop string is complete. Tokens after that are not looked at."""
        if self._cut is not None:
            return True
        self._num_tokens += 1
        self._certain += self._stream.push(token_id)
        visible = self._visible()
        start = self._first_stop(visible) if self._num_tokens > self._num_ignored else None
        self._num_searched = max(self._num_searched, len(visible))
        if start is not None:
            self._cut = visible[:start]
        return start is not None

    def num_held(self) -> int:
        """How many trailing characters of `text` may still change or be the beginning of a stop string."""
        if self._cut is not None:
            return 0
        return len(self.text) - len(self._certain) + num_held_back(self._certain, self._stop)

    def _visible(self) -> str:
        """The text to search: with the characters that are whole by now, even if a later byte could spoil them."""
        if not 0 < self._stream.num_held <= _MAX_PEEK:
            return self._certain
        return self._certain + self._stream.peek().rstrip(_HALF)

    def _first_stop(self, text: str) -> int | None:
        """Where the first stop string begins that ends behind what was searched before."""
        starts = [text.find(stop, max(0, self._num_searched - len(stop) + 1)) for stop in self._stop]
        return min((start for start in starts if start >= 0), default=None)


def num_held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop string: the longest such end counts."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(length < len(s) and s.startswith(text[-length:]) for s in stop):
            return length
    return 0
