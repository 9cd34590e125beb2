"""The values that flow between the parts: requests, plans, results, outputs.

Knows the vocabulary (docs/architecture.md) and what a well-formed request is. Knows nothing of tensors, pages being
free or taken, or time. Everything that crosses a boundary is frozen and complete when built.

Array shapes use B for the requests of one step. Integers are numpy so that a step over 256 requests costs a
handful of array operations, not thousands of Python ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from faser.errors import InvalidRequest

if TYPE_CHECKING:
    from faser.policy.early_exit import ExitRule
    from faser.policy.stopping import Stopping

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

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


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _in_range(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return bool(math.isfinite(value) and low <= value <= high)


@dataclass(frozen=True)
class Grammar:
    """A language the whole output must belong to: a regular expression, or a JSON Schema given as JSON text."""

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
    request's draft length; 0 opts it out of speculation; the output is the same either way.
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
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer of at least 1"
        )
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(
            _in_range(self.temperature, 0, 100), "temperature", self.temperature, "a number from 0 (greedy) to 100"
        )
        _require(
            _in_range(self.top_p, 0, 1) and self.top_p > 0,
            "top_p",
            self.top_p,
            "a number above 0 and at most 1 (1 keeps all)",
        )
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer of at least 0 (0 keeps all)")
        _require(_in_range(self.min_p, 0, 1), "min_p", self.min_p, "a number from 0 (keeps all) to 1")
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed", self.seed, "None or a 64-bit integer",
        )  # fmt: skip
        _require(
            isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop),
            "stop", self.stop, "a string or a list of non-empty strings",
        )  # fmt: skip
        _require(
            isinstance(ids, tuple) and all(_is_int(i) and i >= 0 for i in ids),
            "stop_token_ids", self.stop_token_ids, "a list of token ids",
        )  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(
            _in_range(self.presence_penalty, -2, 2), "presence_penalty", self.presence_penalty, "a number from -2 to 2"
        )
        _require(
            _in_range(self.frequency_penalty, -2, 2),
            "frequency_penalty",
            self.frequency_penalty,
            "a number from -2 to 2",
        )
        _require(
            _in_range(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "a number above 0 (1 is no penalty) and at most 100",
        )  # fmt: skip
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs", self.logprobs, f"None or an integer from 0 to {MAX_LOGPROBS}",
        )  # fmt: skip
        _require(
            self.max_draft is None or (_is_int(self.max_draft) and self.max_draft >= 0),
            "max_draft", self.max_draft, "None or an integer of at least 0 (0 is no speculation for this request)",
        )  # fmt: skip
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "None or a Grammar"
        )
        self._check_grammar_ends()
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
        object.__setattr__(self, "logit_bias", self._checked_bias())

    def _check_grammar_ends(self) -> None:
        """A whole text must be able to end: what forbids the end tokens leaves a finished grammar no token at all."""
        if self.grammar is None:
            return
        for name, given in (("min_tokens", self.min_tokens > 0), ("ignore_eos", self.ignore_eos)):
            if given:
                raise InvalidRequest(
                    f"grammar cannot be combined with {name}={getattr(self, name)!r}: the output ends when the grammar "
                    "says so; remove it"
                )

    def _checked_bias(self) -> Mapping[int, float] | None:
        bias = self.logit_bias
        if bias is None:
            return None
        expected = "a mapping from token id to a number from -100 to 100"
        _require(isinstance(bias, Mapping), "logit_bias", bias, expected)
        for token, value in bias.items():
            _require(
                _is_int(token) and token >= 0 and _in_range(value, -100, 100), "logit_bias", {token: value}, expected
            )
        return MappingProxyType({int(token): float(value) for token, value in bias.items()}) if bias else None

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's own log-probability of one emitted token, and of its most likely rivals, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), as many as asked for


@dataclass(frozen=True)
class Stats:
    """What speculation did: drafted = pruned + verified, and every step emits accepted + 1 bonus token."""

    drafted: int = 0
    verified: int = 0
    accepted: int = 0  # and kept: tokens behind a stop do not count
    steps: int = 0  # steps that emitted tokens, so that accepted + steps is the number of tokens
    cached: int = 0  # prompt tokens found in the prefix cache when the request first ran
    lengths: tuple[int, ...] = ()  # index k: how many of these steps drafted k tokens; up to the longest, or 32

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
    error: str | None = None  # why, where finish_reason is FAILED


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a stream brings at a time: the tokens of one step, and the text that became certain with them.

    Joined over a stream, token_ids and text are the output's. Text may come later than its tokens: a character can
    take several, and what could be the beginning of a stop string is kept until it is not.
    """

    token_ids: tuple[int, ...]
    num_accepted: int  # the first of token_ids, drafts the target agreed with; those after them are its own
    pieces: tuple[tuple[str, bool], ...]  # the text in order, each piece with whether its last token was accepted
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None  # set in the last chunk only, as are the two below
    stats: Stats | None = None
    error: str | None = None  # why, where finish_reason is FAILED

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine, checked and tokenised."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # already drawn where the user gave none: the noise is a function of it
    stop_ids: frozenset[int] = frozenset()  # the end tokens in force, and the user's stop_token_ids


@dataclass(frozen=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    stats: Stats
    stop_id: int | None = None  # the token that ended it, where one did; it is not part of the text
    error: str | None = None  # why it failed, where it did
    text: str | None = None  # set only where stop strings were looked for: the text before the one found


class Progress(NamedTuple):
    """What one request gained in one step: accepted tokens and the bonus, or its end."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: Finish | None


@dataclass(frozen=True)
class Admission:
    """All an executor must know of a request before its first step (again after a preemption)."""

    slot: int
    token_ids: IntArray  # the whole context: the prompt, and what was generated before a preemption
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class PageWrites:
    """Entries of a page table written since the last plan: table[slots, columns] = pages."""

    slots: IntArray
    columns: IntArray
    pages: IntArray


NONE: IntArray = np.zeros(0, dtype=np.int64)
# Rows of a draft with branches: a model of 1B takes about as long for so many as for one, and on a part of the device,
# where more rows are slow, a 0.6B does.
MOST_DRAFT_ROWS = 64


@dataclass(frozen=True)
class StepPlan:
    """One step, complete: who runs, which rows, how many tokens each drafts. All arrays are [B] and in one order.

    The target computes the rows of positions start … start + num_rows - 1, and, where that reaches the end of the
    context (`samples`), the drafted tokens behind them. The draft first computes draft_rows context tokens from
    draft_start on (1 or 2 in steady state, more to catch up), then drafts `lengths` tokens.

    A request may have drafts of an earlier step behind its context, its `frontier`; new ones come behind them. A plan
    that `overlaps` verifies the frontier alone, while the draft goes on as if all of it were accepted. The last row of
    it says what the first new draft should have been: if it is, and the frontier was accepted, the others are the next
    frontier (a hit); else they are void. A request without a frontier may have a `lead`: the first of its new drafts,
    which the verification waits for and judges instead.

    With `outcomes` the draft goes on for other cases, too: of every token that may turn out to be the last one, the
    draft's next best guesses, so many of them. Behind each it drafts as many tokens as the next frontier has. Where the
    verification ends with one of these, that branch is adopted: it becomes the next frontier, and that is a hit. There
    are as many as leave the draft MOST_DRAFT_ROWS; where that is too few, every token has fewer guesses.

    A plan made while the step before it runs does not know how many drafts that will accept. Requests that drafted are
    `unsettled`: their numbers hold if all drafts are accepted, and `settle` says what they are if some are not. Most
    plans run all the same, and settle themselves on the device; one that `waits` is run when it is settled.
    """

    admitted: tuple[Admission, ...]
    released: tuple[int, ...]  # slots that ended since the last plan and are not admitted anew in this one
    slots: IntArray
    num_tokens: IntArray
    start: IntArray
    num_rows: IntArray
    lengths: IntArray
    frontier: IntArray
    draft_start: IntArray
    draft_rows: IntArray
    unsettled: NDArray[np.bool_]
    target_pages: PageWrites
    draft_pages: PageWrites
    stopping: Stopping | None = None  # drafts may end before `lengths`, by this rule
    exits: ExitRule | None = None  # drafts may be dropped in the midst of the verification, by this one
    overlaps: bool = False
    lead: IntArray = field(default_factory=lambda: NONE)  # [B], or [0] where nobody has one
    outcomes: int = 0
    leads: bool = False  # a frontier that turns out to be void is drafted anew, as a lead
    waits: bool = False  # it does not begin before it is settled
    draft_sms: int = 0  # of the device that the drafting has to itself where it overlaps; 0: all is shared

    def settle(self, settling: Settling) -> StepPlan:
        """The plan as it stands when it is known what came of the step before."""
        unsettled = self.unsettled
        num_tokens = self.num_tokens - np.where(unsettled, settling.refused, 0)
        missed = unsettled & settling.missed
        frontier = np.where(missed, 0, self.frontier)
        lead, lengths = self.lead, self.lengths
        if self.leads and missed.any():
            anew = np.where(missed & (self.draft_rows > 0), self.frontier, 0)
            lead, lengths = lead + anew if lead.size else anew, lengths + anew
        # what the draft computed holds as far as its tokens do: to the end of a frontier that is left
        valid = np.minimum(self.draft_start, num_tokens + frontier - 1 - settling.short)
        draft_start = np.where(unsettled, valid, self.draft_start)
        redone = unsettled & (self.draft_rows > 0)  # the draft always catches up with these
        return replace(
            self,
            num_tokens=num_tokens,
            start=self.start - (self.num_tokens - num_tokens),
            lengths=lengths,
            lead=lead,
            frontier=frontier,
            draft_start=draft_start,
            draft_rows=np.where(redone, num_tokens + frontier - draft_start, self.draft_rows),
            unsettled=np.zeros_like(unsettled),
        )

    def of(self, some: NDArray[np.bool_]) -> StepPlan:
        """The plan of these requests alone; rules to stop or to exit by are not theirs."""
        names = (
            "slots", "num_tokens", "start", "num_rows", "lengths", "frontier", "draft_start", "draft_rows", "unsettled",
        )  # fmt: skip
        own = {name: getattr(self, name)[some] for name in names}
        return replace(self, **own, lead=self.lead[some] if self.lead.size else NONE, stopping=None, exits=None)

    @cached_property
    def judged(self) -> IntArray:
        """[B] the drafts that the target verifies."""
        return self.judged_of(self.lengths)

    def judged_of(self, num_drafted: IntArray) -> IntArray:
        """Likewise where so many were drafted."""
        if not self.overlaps:
            return self.frontier + num_drafted
        return self.frontier + np.minimum(self.lead, num_drafted) if self.lead.size else self.frontier

    def chunks_of(self, num_drafted: IntArray) -> IntArray:
        """[B] of so many new drafts those that are not verified in this step."""
        return self.frontier + num_drafted - self.judged_of(num_drafted)

    @cached_property
    def branch_points(self) -> IntArray:
        """[B] the tokens that may turn out to be the last, where anything would be drafted behind another one."""
        goes_on = (self.chunks_of(self.lengths) > 1) & (self.draft_rows > 0) & self.samples
        return np.where(goes_on, self.judged + 1, 0)

    def guesses(self, points: int) -> int:
        """For each of so many tokens that may be the last, as far as there is room."""
        return max(0, min(self.outcomes, (MOST_DRAFT_ROWS - self.slots.size) // points)) if points else 0

    @cached_property
    def num_branches(self) -> IntArray:
        """[B]"""
        return self.branch_points * self.guesses(int(self.branch_points.sum())) if self.outcomes else 0 * self.lengths

    @property
    def only_decodes(self) -> bool:
        """Whether nobody has a prompt to compute."""
        return bool(self.samples.all()) and not (self.num_rows > 1).any()

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """Which requests emit tokens: those whose rows reach the end of their context."""
        reached: NDArray[np.bool_] = self.start + self.num_rows == self.num_tokens
        return reached


@dataclass(frozen=True)
class Settling:
    """What came of a step that another was planned behind, of the requests that were counted on. Arrays are [B]."""

    refused: IntArray  # of the drafts it was to verify, those it did not accept
    short: NDArray[np.bool_]  # it drafted fewer than planned, and accepted all: the draft has not computed the last
    missed: NDArray[np.bool_]  # what it drafted behind those is void

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult) -> Settling:
        return cls(
            plan.judged - result.num_accepted,
            (result.num_drafted < plan.lengths)
            & (result.num_accepted == plan.frontier + result.num_drafted)
            & (not plan.overlaps),
            np.zeros(plan.slots.size, dtype=np.bool_) if result.hits is None else ~result.hits,
        )

    def spread(self, slots: IntArray, num_slots: int) -> Settling:
        """By slot, of the requests in these slots; nothing came of the others."""
        none = np.zeros(num_slots, dtype=np.bool_)
        found = Settling(none.astype(np.int64), none, none.copy())
        found.refused[slots], found.short[slots], found.missed[slots] = self.refused, self.short, self.missed
        return found

    def __getitem__(self, some: IntArray | NDArray[np.bool_]) -> Settling:
        return Settling(self.refused[some], self.short[some], self.missed[some])


@dataclass(frozen=True)
class StepSeconds:
    """Where the executor's time went."""

    draft: float = 0.0
    verify: float = 0.0
    hidden: float = 0.0  # of both, in which both ran

    @property
    def total(self) -> float:
        return self.draft + self.verify - self.hidden


@dataclass(frozen=True)
class ExitReadings:
    """What the points of an early exit saw of n drafts, and what they left; see faser/policy/early_exit.py."""

    owner: IntArray  # [n] index in the plan
    place: IntArray  # [n] within the owner's drafts, from 0
    features: FloatArray  # [points, n, F]; NaN at points that a draft did not reach
    kept: IntArray  # [points, B] drafts that each request still has behind the point


@dataclass(frozen=True)
class StepResult:
    """What came of a plan, in the plan's order. Arrays are [B] but for token_ids.

    token_ids is flat: for each request that samples, its accepted tokens and the bonus.
    """

    num_drafted: IntArray
    num_verified: IntArray
    num_accepted: IntArray
    token_ids: IntArray
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in the plan
    failures: Mapping[int, str] = field(
        default_factory=dict
    )  # by index in the plan: a request that cannot go on, and why
    seconds: StepSeconds = StepSeconds()
    confidence: FloatArray | None = None  # [B, depth] the draft's own, of what it drafted, where it was looked at
    exits: ExitReadings | None = None  # where the plan has a rule to exit by
    hits: NDArray[np.bool_] | None = None  # [B] who has a next frontier, where the plan overlaps
    adopted: NDArray[np.bool_] | None = None  # [B] and of these, whose is a branch, where the plan has outcomes
