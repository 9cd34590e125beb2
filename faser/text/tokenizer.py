"""Tokens from text, and text from tokens, one token at a time.

Knows tokenizer.json, and when text is certain: a character can take several tokens, and the end of a text may still
change. Knows nothing of models, requests or steps: the text does not depend on how tokens are grouped into steps.
Imports no torch.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
import tokenizers.decoders

from faser.errors import InvalidRequest, ModelError
from faser.text.control import ControlTokens
from faser.text.traced import Traced

TOKENIZER_FILE = "tokenizer.json"

_HALF = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
_MAX_PEEK = 64  # tokens; stop strings are not looked for in more held tokens than this


class Tokenizer:
    """A tokenizer.json. Its post-processor alone decides which special tokens an encoded text gets."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # some published files cut at 512 tokens or pad; a prompt is served as given
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._byte_ids = _byte_fallback_ids(backend)
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._pieces: dict[int, bytes] = {}  # earlier results of `piece`

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
        """The ids of a text; may be empty. Control tokens that it spells are control tokens."""
        _check_unicode(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, text: Traced, neutral: Callable[[], Traced]) -> list[int]:
        """The ids of a rendered conversation. Its control tokens are those that the template wrote.

        `neutral`: the same conversation without a user's words. It shows whether the template's own control tokens are
        traced. Where they are not, they cannot be told from a user's, so a user's are refused.
        """
        _check_unicode(text)
        controls = self.controls
        found = controls.encode(text)
        if not found.foreign:
            return found.token_ids
        expected = controls.encode(neutral())
        if not expected.foreign:
            return controls.encode_as_text(text, found)
        if found.control_ids != expected.control_ids:
            raise InvalidRequest(
                f"the messages hold {found.foreign[0]}, and the model's chat template makes its control tokens in a "
                "way that cannot be told from them; remove it"
            )
        return found.token_ids

    @cached_property
    def controls(self) -> ControlTokens:
        return ControlTokens(self._backend)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that the vocabulary lacks are skipped: a model's vocabulary may be padded."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters; empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if self.is_byte_level:
            known = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token, as `encode` would find it; bytes of half a character are replaced."""
        return self.token_bytes(token_id).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        """`token_bytes`, but empty for a token that `decode` drops."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = b"" if self.is_silent(token_id) else self.token_bytes(token_id)
        return found

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` drops the token: special tokens, and ids without a token."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte (byte fallback); `decode` reads a run of them as a whole."""
        return token_id in self._byte_ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has half of a surrogate pair at character {error.start}; send well-formed Unicode"
        ) from error


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids of <0x00> … <0xFF>, if the decoder reads them as bytes: it does if <0x80> alone is no character."""
    probe = backend.token_to_id("<0x80>")
    if probe is None or backend.decode([probe], skip_special_tokens=False) != _HALF:
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the character that byte-level tokenizers write: printable Latin-1 as itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TextStream:
    """Decodes one request's tokens as they come. The results of `push` and `finish`, joined, are decode(all ids).

    The text of a token depends on the tokens before it: a leading space is dropped only at the start of a text, and
    bytes join into characters. So each piece is decoded together with the previous piece, whose text is then cut off. A
    piece ends where the text can no longer change: not within a character, and not within a run of single-byte tokens
    (byte fallback), because one wrong byte spoils the whole run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens of the last finished piece, then those held back
        self._num_finished = 0  # tokens of the finished piece
        self._finished_text = ""  # its text
        self._next_try = 1  # held tokens at which to decode again

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became certain."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id) or self.num_held < self._next_try:
            return ""
        new_text = self._held_text()
        if not new_text or new_text.endswith(_HALF):
            # A character has at most four tokens. More are noise: decode ever less often, so that the cost is linear.
            self._next_try = self.num_held + max(1, self.num_held // 4)
            return ""
        self._window = self._window[self._num_finished :]  # the held tokens become the finished piece
        self._num_finished = len(self._window)
        self._finished_text = self._tokenizer.decode(self._window)
        self._next_try = 1
        return new_text

    def peek(self) -> str:
        """The text of the held tokens, which later tokens may still change."""
        return self._held_text() if self.num_held else ""

    def finish(self) -> str:
        """The rest of the text; unfinished characters become replacement characters."""
        rest = self.peek()
        self._window, self._num_finished, self._finished_text, self._next_try = [], 0, "", 1
        return rest

    @property
    def num_held(self) -> int:
        """Tokens whose text is held back."""
        return len(self._window) - self._num_finished

    def _held_text(self) -> str:
        return self._tokenizer.decode(self._window)[len(self._finished_text) :]


class ByteTextStream(TextStream):
    """A TextStream for tokenizers whose tokens are bytes. Much cheaper: nothing is decoded twice.

    Only an unfinished character is held back. Bytes that cannot become a character are replaced at once.
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
    """The cheapest stream that is correct for the tokenizer."""
    return ByteTextStream(tokenizer) if tokenizer.is_byte_level else TextStream(tokenizer)


class StopChecker:
    """Looks for stop strings in one request's text.

    A stop string counts if it is completed after the first `num_ignored` tokens, even if it began within them. If one
    token completes several, the text is cut where the first of them begins.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], num_ignored: int = 0) -> None:
        self._stream = make_text_stream(tokenizer)
        self._stop = tuple(stop)
        self._num_ignored = num_ignored
        self._num_tokens = 0
        self._certain = ""  # text that cannot change any more
        self._num_searched = 0  # characters in which no stop string that counts ends
        self._cut: str | None = None  # the text before the stop string, once one was found

    @property
    def text(self) -> str:
        """The output so far, decode(all ids); up to the stop string, once one was found."""
        return self._certain + self._stream.peek() if self._cut is None else self._cut

    def push(self, token_id: int) -> bool:
        """Take one token; returns whether a stop string is complete. Later tokens are ignored."""
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
        """Characters at the end of `text` that may still change or be the beginning of a stop string."""
        if self._cut is not None:
            return 0
        return len(self.text) - len(self._certain) + num_held_back(self._certain, self._stop)

    def _visible(self) -> str:
        """The text to search: also held characters that are complete, although a later byte could spoil them."""
        if not 0 < self._stream.num_held <= _MAX_PEEK:
            return self._certain
        return self._certain + self._stream.peek().rstrip(_HALF)

    def _first_stop(self, text: str) -> int | None:
        """Where the first stop string begins, of those that end after the text searched before."""
        starts = [text.find(stop, max(0, self._num_searched - len(stop) + 1)) for stop in self._stop]
        return min((start for start in starts if start >= 0), default=None)


def num_held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop string; the most that may."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(length < len(s) and s.startswith(text[-length:]) for s in stop):
            return length
    return 0
