"""From the engine's tokens to the text and JSON of an answer, for one HTTP request with one or more choices.

Knows text, log-probabilities and OpenAI's formats; knows no sockets. Text is sent when it can no longer change: not
within a character, and not while it may be the beginning of a stop string.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from secrets import token_hex
from time import time
from typing import Any, NamedTuple

import msgspec

from faser.request import Finish, FinishReason, Progress, SamplingParams, TokenLogprobs
from faser.server.protocol import (
    AnswerMessage,
    ApiError,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    Delta,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from faser.text.tokenizer import Tokenizer, make_text_stream, num_held_back

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_TEXT_ALONE = PromptDetails()
_MARK = f"text-{token_hex(16)}"  # a placeholder for the text of an event; unique


def _event(value: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encode(value)


class ChoiceText:
    """One choice's tokens as text. Without a tokenizer there is none.

    The engine looks for stop strings. Here text is only held back while it may be the beginning of one.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._stream = make_text_stream(tokenizer) if tokenizer is not None else None
        self._stop = tuple(params.stop)
        self._held = ""
        self._num_shown = 0  # characters

    def push(self, token_ids: Sequence[int], finish: Finish | None) -> str:
        """Take tokens; return the text that became certain."""
        if self._stream is None:
            return ""
        if finish is not None and finish.stop_id is not None:
            token_ids = token_ids[:-1]
        text = "".join(map(self._stream.push, token_ids))
        if finish is not None:
            text += self._stream.finish()
        return self._release(text, finish) if self._stop else text

    def _release(self, text: str, finish: Finish | None) -> str:
        """What of the held and the new text may be shown. At the end the engine says where the text ends."""
        text = self._held + text
        end = len(text) - num_held_back(text, self._stop)
        if finish is not None:
            end = len(text) if finish.text is None else max(0, len(finish.text) - self._num_shown)
        self._held = text[end:]
        self._num_shown += end
        return text[:end]


class Piece(NamedTuple):
    """New text and log-probabilities of a choice."""

    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


class Choice:
    def __init__(self, index: int, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.index = index
        self.finish: Finish | None = None
        self.num_tokens = 0
        self._text = ChoiceText(tokenizer, params)

    def feed(self, progress: Iterable[Progress]) -> Piece:
        """Take what arrived at once. A failed choice fails the whole answer."""
        text = ""
        logprobs: list[TokenLogprobs] = []
        for item in progress:
            self.num_tokens += len(item.token_ids)
            self.finish = item.finish
            if item.finish is not None and item.finish.reason is FinishReason.FAILED:
                raise ApiError(500, item.finish.error or "the request failed", code="request_failed")
            if item.logprobs is not None:
                num_shown = len(item.token_ids) - (item.finish is not None and item.finish.stop_id is not None)
                logprobs += item.logprobs[:num_shown]
            text += self._text.push(item.token_ids, item.finish)
        return Piece(text, logprobs, self.finish.reason.value if self.finish is not None else None)


class Answerer(ABC):
    """The format of one answer: whole, or event by event."""

    _prefix: str  # of the answer's id

    def __init__(self, model: str, tokenizer: Tokenizer | None, wants_logprobs: bool) -> None:
        # repeated in every event
        self._id, self._created, self._model = f"{self._prefix}-{token_hex(12)}", int(time()), model
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._envelopes: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def opening(self, choice: int) -> bytes:
        """The event before the first text of a choice; empty if there is none."""

    def usage_event(self, usage: Usage) -> bytes:
        return _event(self._part([], usage))

    @abstractmethod
    def _part(self, choices: list[Any], usage: Usage | None = None) -> msgspec.Struct: ...

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes: ...

    def event(self, choice: int, piece: Piece) -> bytes:
        """One event of a stream; empty if there is nothing to send yet.

        Most events differ in their text alone, so the bytes around it are made once per choice.
        """
        text, logprobs, finish_reason = piece
        if finish_reason or logprobs or self._wants_logprobs:
            return self._event(choice, piece)
        if not text:
            return b""
        if choice not in self._envelopes:
            before, _, after = self._event(choice, Piece(_MARK, [], None)).partition(_encode(_MARK))
            self._envelopes[choice] = before, after
        before, after = self._envelopes[choice]
        return before + _encode(text) + after

    @abstractmethod
    def _event(self, choice: int, piece: Piece) -> bytes: ...

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes. The bytes of a part of a character are spelt out, as OpenAI does."""
        if self._tokenizer is None:
            return "", b""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


class CompletionAnswerer(Answerer):
    _prefix = "cmpl"

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, wants_logprobs: bool, echo: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, tokenizer, wants_logprobs)
        self._echo = echo  # the prompt's text before each choice
        self._offsets: dict[int, int] = {}  # where a choice's next token begins in its text

    def opening(self, choice: int) -> bytes:
        return _event(self._part([CompletionChoice(choice, self._echo[choice])])) if self._echo is not None else b""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        choices = [
            self._choice(index, piece, self._echo[index] if self._echo is not None else "")
            for index, piece in enumerate(pieces)
        ]
        return _encode(self._part(choices, usage))

    def _event(self, choice: int, piece: Piece) -> bytes:
        return _event(self._part([self._choice(choice, piece)]))

    def _part(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage)

    def _choice(self, index: int, piece: Piece, before: str = "") -> CompletionChoice:
        return CompletionChoice(index, before + piece.text, self._logprobs(index, piece.logprobs), piece.finish_reason)

    def _logprobs(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        found = [self._token(item.token_id) for item in logprobs]
        tokens, offsets = [token for token, _ in found], []
        offset = self._offsets.get(choice, len(self._echo[choice]) if self._echo is not None else 0)
        for _, raw in found:
            offsets.append(offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in raw)  # characters that begin in this token
        self._offsets[choice] = offset
        return CompletionLogprobs(
            tokens,
            [item.logprob for item in logprobs],
            [
                {self._token(i)[0]: logprob for i, logprob in (*item.top, (item.token_id, item.logprob))}
                for item in logprobs
            ],
            offsets,
        )


class ChatAnswerer(Answerer):
    _prefix = "chatcmpl"

    def opening(self, choice: int) -> bytes:
        return _event(self._part([ChatDelta(choice, Delta("assistant", ""))]))

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        choices = [
            ChatChoice(i, AnswerMessage("assistant", piece.text), self._logprobs(piece.logprobs), piece.finish_reason)
            for i, piece in enumerate(pieces)
        ]
        return _encode(ChatCompletion(self._id, "chat.completion", self._created, self._model, choices, usage))

    def _event(self, choice: int, piece: Piece) -> bytes:
        delta = Delta(content=piece.text) if piece.text else Delta()
        return _event(self._part([ChatDelta(choice, delta, self._logprobs(piece.logprobs), piece.finish_reason)]))

    def _part(self, choices: list[ChatDelta], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs(
            [
                TokenLogprob(
                    *self._scored(item.token_id, item.logprob), [TopLogprob(*self._scored(*t)) for t in item.top]
                )
                for item in logprobs
            ]
        )

    def _scored(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token, raw = self._token(token_id)
        return token, logprob, list(raw)


def count_usage(prompts: Sequence[int], choices: Iterable[Choice], details: PromptDetails = _TEXT_ALONE) -> Usage:
    """Tokens of all choices. A prompt shared by several choices counts once. `details`: what the prompts show."""
    choices = list(choices)
    ends = [choice.finish.stats for choice in choices if choice.finish is not None]
    num_output = sum(choice.num_tokens for choice in choices)
    num_prompt = sum(prompts)
    per_prompt = len(choices) // len(prompts)
    return Usage(
        num_prompt,
        num_output,
        num_prompt + num_output,
        msgspec.structs.replace(details, cached_tokens=sum(stats.cached for stats in ends[::per_prompt])),
        CompletionDetails(sum(s.accepted for s in ends), sum(s.drafted - s.accepted for s in ends)),
    )
