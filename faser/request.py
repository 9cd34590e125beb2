"""What a user sets and gets: sampling parameters, requests, their progress and outputs.

Knows what a well-formed request is. Knows nothing of tensors, pages or time. Every value is frozen and complete when it
is made.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.errors import InvalidRequest
from faser.vision import Vision

MAX_LOGPROBS = 20
GRAMMAR_KINDS = ("json_schema", "regex")


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"
    FAILED = "failed"


def _require(valid: bool, name: str, value: object, expected: str) -> None:
    if not valid:
        raise InvalidRequest(f"{name}={value!r}: expected {expected}")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def _is_number(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return bool(math.isfinite(value) and low <= value <= high)


@dataclass(frozen=True)
class Grammar:
    """What the whole output must match: a regular expression, or a JSON Schema as JSON text."""

    kind: str  # one of GRAMMAR_KINDS
    text: str

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMAR_KINDS, "grammar kind", self.kind, f"one of {', '.join(GRAMMAR_KINDS)}")
        _require(isinstance(self.text, str) and bool(self.text), "grammar", self.text, "a non-empty string")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples. The defaults are greedy decoding of 64 tokens.

    The target's distribution is built in this order: logit_bias, repetition, presence and frequency penalties, the ban
    on end tokens below min_tokens, the grammar's mask, temperature, top_k, top_p, min_p. Temperature 0 takes the best
    token after the mask. `logprobs` reports the model's own log-probabilities, before any of this. `max_draft` caps the
    request's draft length (0: no speculation); it never changes the output.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    max_draft: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = tuple(stop) if isinstance(stop, Sequence) else stop
        ids = self.stop_token_ids
        ids = tuple(ids) if isinstance(ids, (Sequence, np.ndarray)) else ids
        has_strings = isinstance(stop, tuple) and all(isinstance(each, str) and each for each in stop)
        has_ids = isinstance(ids, tuple) and all(_is_int(each, 0) for each in ids)
        has_limit = _is_int(self.max_tokens, 1)
        # field: (whether its value is valid, what is expected)
        checks = {
            "max_tokens": (has_limit, "an integer of at least 1"),
            "min_tokens": (
                has_limit and _is_int(self.min_tokens, 0, self.max_tokens),
                f"an integer from 0 to max_tokens ({self.max_tokens})",
            ),
            "temperature": (_is_number(self.temperature, 0, 100), "a number from 0 (greedy) to 100"),
            "top_p": (_is_number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and at most 1 (1 keeps all)"),
            "top_k": (_is_int(self.top_k, 0), "an integer of at least 0 (0 keeps all)"),
            "min_p": (_is_number(self.min_p, 0, 1), "a number from 0 (keeps all) to 1"),
            "seed": (self.seed is None or _is_int(self.seed, -(2**63), 2**64 - 1), "None or a 64-bit integer"),
            "stop": (has_strings, "a string or a list of non-empty strings"),
            "stop_token_ids": (has_ids, "a list of token ids"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "presence_penalty": (_is_number(self.presence_penalty, -2, 2), "a number from -2 to 2"),
            "frequency_penalty": (_is_number(self.frequency_penalty, -2, 2), "a number from -2 to 2"),
            "repetition_penalty": (
                _is_number(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0,
                "a number above 0 (1 is no penalty) and at most 100",
            ),
            "logprobs": (
                self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS),
                f"None or an integer from 0 to {MAX_LOGPROBS}",
            ),
            "max_draft": (
                self.max_draft is None or _is_int(self.max_draft, 0),
                "None or an integer of at least 0 (0 is no speculation for this request)",
            ),
            "grammar": (self.grammar is None or isinstance(self.grammar, Grammar), "None or a Grammar"),
        }  # fmt: skip
        for name, (valid, expected) in checks.items():
            _require(valid, name, getattr(self, name), expected)
        self._check_grammar_ends()
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
        object.__setattr__(self, "logit_bias", self._checked_bias())

    def _check_grammar_ends(self) -> None:
        """The output must be able to end: behind a complete text, a grammar allows the end tokens alone."""
        for name in ("min_tokens", "ignore_eos"):
            if self.grammar is not None and getattr(self, name):
                raise InvalidRequest(
                    f"{name}={getattr(self, name)!r} cannot be combined with a grammar, which says where the output "
                    "ends; remove it"
                )

    def _checked_bias(self) -> Mapping[int, float] | None:
        bias = self.logit_bias
        if bias is None:
            return None
        expected = "a mapping from token id to a number from -100 to 100"
        _require(isinstance(bias, Mapping), "logit_bias", bias, expected)
        for token, value in bias.items():
            _require(_is_int(token, 0) and _is_number(value, -100, 100), "logit_bias", {token: value}, expected)
        return MappingProxyType({int(token): float(value) for token, value in bias.items()}) if bias else None

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest where a field names a token that a model of this vocabulary does not have."""
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def stop_ids(self, end_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end the output: the model's end tokens, unless ignored, and the request's own."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else end_ids)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise InvalidRequest(f"{name}: {unknown} is no token id; expected 0 to {vocab_size - 1}")


def draw_seed(given: int | None) -> int:
    """The given seed as an unsigned 64-bit word; a random one where none is given."""
    return (secrets.randbits(64) if given is None else given) % 2**64


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's own log-probability of one emitted token, and of the likeliest tokens at its position, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), as many as asked for


@dataclass(frozen=True)
class Stats:
    """What speculation did: drafted = pruned + verified, and every step emits accepted + 1 bonus token."""

    drafted: int = 0
    verified: int = 0
    accepted: int = 0  # without tokens after a stop
    steps: int = 0  # that emitted tokens: accepted + steps = output tokens
    cached: int = 0  # prompt tokens found in the prefix cache when the request first ran
    reused: int = 0  # prompt tokens whose KV came from the latest context of its session
    lengths: tuple[int, ...] = ()  # [k]: steps that drafted k tokens; ends with the longest, at most 32
    looked_up: int = 0  # of drafted, tokens from prompt lookup; the others are a draft model's or a head's
    lookup_accepted: int = 0  # of accepted, tokens from prompt lookup

    @property
    def pruned(self) -> int:
        return self.drafted - self.verified


@dataclass(frozen=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    stats: Stats = field(default_factory=Stats)
    error: str | None = None  # the reason, where finish_reason is FAILED


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One item of a stream: the tokens of one step, and the text that became certain with them.

    Joined over a stream, token_ids and text are those of the output. Text may come later than its tokens: a character
    can take several tokens, and text that may be the beginning of a stop string is held back.
    """

    token_ids: tuple[int, ...]
    num_accepted: int  # the first num_accepted of token_ids are accepted drafts, the others the target's own
    pieces: tuple[tuple[str, bool], ...]  # (text, whether its last token is an accepted draft), in order
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None  # this and the next two: in the last chunk only
    stats: Stats | None = None
    error: str | None = None  # the reason, where finish_reason is FAILED

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, eq=False)
class Reuse:
    """Tokens of a prompt whose KV is taken from another context, where they stood behind other tokens.

    That is an approximation: their KV depends on tokens that are no longer there. Range i of the prompt, starts[i] …
    ends[i] - 1, has the KV of the tokens from sources[i] on. Ranges ascend and do not reach the last token.
    """

    starts: IntArray  # [ranges]
    ends: IntArray
    sources: IntArray

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    def covers(self, starts: IntArray, ends: IntArray) -> BoolArray:
        """[n] whether each of these ranges lies within one that is taken."""
        place = np.searchsorted(self.starts, starts, side="right") - 1
        known = place >= 0
        covered: BoolArray = known & (ends <= np.where(known, self.ends[np.maximum(place, 0)], 0))
        return covered


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt for the engine, checked and tokenised."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # given or drawn; the sampling noise is a function of it
    stop_ids: frozenset[int] = frozenset()  # end tokens of the model unless ignored, and the user's stop_token_ids
    vision: Vision | None = None  # the pictures that some of the prompt's tokens stand for
    session: str | None = None  # its context is kept under this name for the next request of the session
    reuse: Reuse | None = None  # what it takes from the context that its session has kept


@dataclass(frozen=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    stats: Stats
    stop_id: int | None = None  # the token that ended it, if one did; it is not part of the text
    error: str | None = None  # the reason, where it failed
    text: str | None = None  # only for requests with stop strings: the whole output up to the one found


class Progress(NamedTuple):
    """What one step did for one request: accepted tokens and the bonus token, or its end."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: Finish | None
