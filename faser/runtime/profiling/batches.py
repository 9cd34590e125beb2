"""What is profiled, and the batches of made-up requests to profile it with.

Knows limits and how a device wants to be profiled; no plans, no seconds, no kernels. Batches come coarse before fine,
so that a profile can be made whenever the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.cost.profile import Profile
from faser.cost.profiled_cost import MAX_STEADY_LAG
from faser.engine.engine import Executor
from faser.engine.residency import DraftMemory
from faser.limits import Limits
from faser.rules.early_exit import ExitRule
from faser.runtime.device import Profiling

SHORT_CONTEXT, LONG_CONTEXT = 64, 1024  # tokens of a request, where there is room
SHORT_DRAFT, LONG_DRAFT = 1, 3  # drafted tokens; the difference in seconds is that of the tokens behind the first
MIN_PROMPT_ROWS = 64
MAX_BESIDE_PROMPTS = 32  # decoding requests in a step with prompts
NUM_HELD_OUT = 12  # random batches
QUICK_REQUESTS = 4


@dataclass(frozen=True)
class Subject:
    """What is profiled: an executor that has served no request yet, and the sizes it was made for."""

    executor: Executor
    limits: Limits
    num_pages: int  # of the target
    page_size: int
    speculates: bool
    has_draft_model: bool
    usual_length: int  # the policy's max_length
    vocab_size: int
    how: Profiling
    exit_layer: int = 0  # of the target, after which an early exit checks drafts; 0: no early exit
    exit_candidates: tuple[int, ...] = (0,)  # numbers of vocabulary entries to compare drafts with
    splits: tuple[int, ...] = ()  # SMs of drafting beside a verification: see Device
    draft_memory: DraftMemory | None = None  # where the draft can leave the device
    leaving_bytes: int = 0  # of the draft's weights, as far as they leave
    page_bytes: tuple[int, int] = (0, 0)  # of one KV page of the target and of the draft
    num_draft_pages: int | None = None  # None: as many as of the target
    assumed: Profile | None = None  # predicts what was not measured (faser/runtime/profiling/assumed.py)

    @property
    def max_length(self) -> int:
        """The longest draft to measure, as far as a context and a step have room for it."""
        room = min(self._room - 2, self.limits.max_batch_tokens - 1)
        if self.limits.head is not None:
            room = min(room, self.limits.head.max_length)
        return max(0, min(max(self.usual_length, LONG_DRAFT), room)) if self.speculates else 0

    @property
    def max_context(self) -> int:
        """Tokens of one request, with room for its drafts and the target's token behind them."""
        return max(1, min(LONG_CONTEXT, self._room - max(self.max_length, self._block_rows) - 1))

    @property
    def _block_rows(self) -> int:
        return 0 if self.limits.head is None else self.limits.head.block_rows

    def rows_behind(self, lengths: IntArray) -> IntArray:
        """[B] rows behind the context that must have pages, in a step that drafts `lengths` tokens."""
        return np.where(lengths > 0, np.maximum(lengths, self._block_rows), 0)

    @property
    def _room(self) -> int:
        draft = self.limits.draft_max_len
        return self.limits.max_model_len if draft is None else min(self.limits.max_model_len, draft)

    def contexts(self, num_requests: int) -> list[int]:
        """Tokens of each request: a short and a long context, or one where there is no room for two."""
        if not num_requests:
            return [1]
        long = max(1, min(self.max_context, self.how.most_context // num_requests))
        return sorted({min(SHORT_CONTEXT, max(1, long // 2)), long})

    @property
    def can_overlap(self) -> bool:
        """Whether drafting beside a verification can be measured: a frontier, as many drafts, and a token must fit."""
        has_room = self.contexts(1)[0] + 2 * LONG_DRAFT + 1 <= self._room
        return bool(self.splits) and self.has_draft_model and self.max_length >= LONG_DRAFT and has_room

    def has_room_for(self, batch: Batch) -> bool:
        rows = max(int((batch.num_rows + batch.lengths).sum()), int(batch.draft_rows.sum()))
        return rows <= self.limits.max_batch_tokens

    def graph_size(self, rows: int) -> int:
        """The rows that a forward of `rows` rows runs with."""
        return next((size for size in self.how.graph_rows if size >= rows), rows)


@dataclass(frozen=True)
class Batch:
    """The requests of a made-up step. Arrays are [B]."""

    num_tokens: IntArray
    num_rows: IntArray  # the last of num_tokens
    lengths: IntArray
    draft_rows: IntArray  # the last of num_tokens
    has_checks: bool = False  # confidence checks between drafted tokens, which always let drafting go on
    exits: ExitRule | None = None  # a trial: it drops nothing
    overlaps: bool = False  # drafts of the same lengths are verified while these are drafted
    draft_sms: int = 0  # see OverlapPlan
    leads: bool = False  # see OverlapPlan: the step waits for the result of the step before

    @classmethod
    def decoding(cls, num_tokens: IntArray, lengths: IntArray, lag: IntArray | None = None) -> Batch:
        """One row and `lengths` drafts each. Without `lag`, every other request has a lag of 1, the others of 2."""
        lag = np.arange(num_tokens.size) % MAX_STEADY_LAG + 1 if lag is None else lag
        draft_rows = np.where(lengths > 0, np.minimum(lag, num_tokens), 0)
        return cls(num_tokens, np.ones_like(num_tokens), lengths, draft_rows)

    @classmethod
    def alike(cls, num_requests: int, length: int, context: int) -> Batch:
        """Decoding requests of one length and context."""
        return cls.decoding(_full(num_requests, context), _full(num_requests, length))

    def beside(self, other: Batch) -> Batch:
        return Batch(
            np.concatenate((self.num_tokens, other.num_tokens)),
            np.concatenate((self.num_rows, other.num_rows)),
            np.concatenate((self.lengths, other.lengths)),
            np.concatenate((self.draft_rows, other.draft_rows)),
        )


def _full(count: int, value: int) -> IntArray:
    return np.full(count, value, dtype=np.int64)


def all_batches(subject: Subject) -> list[list[Batch]]:
    """Those that decode, have prompts, catch up, and are held out, as far as a step has room for them."""
    makers = (decoding_batches, prompt_batches, catch_up_batches, held_out_batches)
    return [[batch for batch in make(subject) if subject.has_room_for(batch)] for make in makers]


def quick_batches(subject: Subject) -> list[Batch]:
    """One request and a few, with drafts and without; then a prompt. The most important batches come first."""
    few = min(QUICK_REQUESTS, subject.limits.max_running)
    shapes = [(1, LONG_DRAFT), (1, 0), (few, LONG_DRAFT), (1, SHORT_DRAFT), (few, SHORT_DRAFT)]
    drafted = [(size, min(length, subject.max_length)) for size, length in shapes]
    batches = [Batch.alike(size, length, subject.contexts(size)[0]) for size, length in dict.fromkeys(drafted)]
    rows = min(MIN_PROMPT_ROWS, subject.max_context, subject.limits.max_batch_tokens)
    prompt = Batch(_full(1, rows), _full(1, rows), _full(1, 0), _full(1, 0))
    return [batch for batch in [*batches, prompt] if subject.has_room_for(batch)]


def decoding_batches(subject: Subject) -> list[Batch]:
    """By requests, drafted tokens and context. The fewest and the most requests first, then the others one by one."""
    fewest, *others = _coarse_first(_request_counts(subject))
    groups = [[fewest, *others[:1]], *([size] for size in others[1:])]
    return [
        Batch.alike(size, length, subject.contexts(size)[which])
        for sizes in groups
        for which in (0, -1)
        for size in sizes
        for length in _lengths(subject, size)
        if which == 0 or len(subject.contexts(size)) > 1
    ]


def _request_counts(subject: Subject) -> list[int]:
    """Up to as many requests as can be measured with LONG_DRAFT drafts each."""
    most = min(subject.limits.max_running, max(1, subject.how.most_rows // (1 + min(LONG_DRAFT, subject.max_length))))
    sizes = subject.how.graph_rows or tuple(1 << i for i in range(most.bit_length()))
    return [*(size for size in sizes if size < most), most]


def _lengths(subject: Subject, num_requests: int) -> list[int]:
    """Longest first: a profile needs drafts most. Without graphs, batches with drafts measure row counts too."""
    lengths = sorted({0, min(SHORT_DRAFT, subject.max_length), min(LONG_DRAFT, subject.max_length)}, reverse=True)
    return lengths if subject.how.graph_rows or num_requests == 1 or not subject.max_length else lengths[:-1]


def prompt_batches(subject: Subject) -> list[Batch]:
    """Decoding requests, and prompts from their beginning on."""
    batches = []
    for rows in _prompt_row_counts(subject):
        size = _num_beside_prompts(subject, rows)
        chunks = _chunks(subject, rows - size)
        prompts = Batch(chunks, chunks, np.zeros_like(chunks), np.zeros_like(chunks))
        contexts = _contexts_beside_prompts(subject, size, rows)
        batches += [Batch.alike(size, 0, context).beside(prompts) for context in contexts]
    return batches


def catch_up_batches(subject: Subject) -> list[Batch]:
    """Requests whose draft kept up, and requests whose draft has computed nothing; all draft one token."""
    if not (subject.has_draft_model and subject.max_length):
        return []
    batches = []
    for rows in _prompt_row_counts(subject):
        size = _num_beside_prompts(subject, rows)
        for context in _contexts_beside_prompts(subject, size, rows):
            kept_up = Batch.alike(size, SHORT_DRAFT, context)
            chunks = _chunks(subject, rows - int(kept_up.draft_rows.sum()))
            if chunks.size and chunks.min() > MAX_STEADY_LAG:
                behind = Batch.decoding(chunks, np.ones_like(chunks), lag=chunks)
                batches.append(kept_up.beside(behind))
    return batches


def _prompt_row_counts(subject: Subject) -> list[int]:
    """Rows of steps with prompts. Without graphs the curve of decoding goes on: the largest count is enough."""
    limits, how = subject.limits, subject.how
    room = (limits.max_running - limits.max_running // 2) * subject.max_context
    most = min(limits.max_batch_tokens, how.most_prompt_rows, room)
    if not how.graph_rows:
        return [most]
    doubled = _coarse_first([*(size for size in _doublings(most) if size < most), most])
    others = [size for size in how.mixed_rows if MIN_PROMPT_ROWS < size < most]
    return list(dict.fromkeys([*doubled, *(_coarse_first(others) if others else [])]))


def _doublings(most: int) -> list[int]:
    return [MIN_PROMPT_ROWS << i for i in range(most.bit_length())]


def _num_beside_prompts(subject: Subject, rows: int) -> int:
    """Decoding requests in a step of `rows` rows."""
    return min(subject.limits.max_running // 2, rows // 4, subject.how.most_rows // 8, MAX_BESIDE_PROMPTS)


def _contexts_beside_prompts(subject: Subject, num_requests: int, rows: int) -> list[int]:
    """Two at some row counts. Without graphs one: context costs what it does in steps without prompts."""
    contexts = subject.contexts(num_requests)
    return contexts if subject.how.graph_rows and rows in _doublings(rows) else contexts[:1]


def _chunks(subject: Subject, rows: int) -> IntArray:
    """Rows divided among as few requests as can hold them."""
    count = -(-rows // subject.max_context)
    ends: IntArray = np.linspace(0, rows, count + 1).astype(np.int64)
    return np.diff(ends)


def held_out_batches(subject: Subject) -> list[Batch]:
    """Random batches, log-uniform in requests, the small ones first; lengths and contexts differ by request."""
    random = np.random.default_rng(0)
    most = subject.limits.max_running
    sizes = np.exp(random.uniform(0, np.log(most + 1), NUM_HELD_OUT)).astype(np.int64).clip(1, most)
    sizes.sort()
    return [_random_batch(subject, int(size), random) for size in sizes]


def _random_batch(subject: Subject, size: int, random: np.random.Generator) -> Batch:
    shortest, longest = subject.contexts(size)[0], subject.contexts(size)[-1]
    lengths = random.integers(0, subject.max_length + 1, size)
    lengths[np.cumsum(lengths) > subject.limits.max_batch_tokens - size] = 0
    num_tokens, lag = random.integers(shortest, longest + 1, size), random.integers(1, MAX_STEADY_LAG + 1, size)
    return Batch.decoding(num_tokens, lengths, lag)


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    """Both ends, then ever finer in between."""
    order, stride = [sizes[0], sizes[-1]], 1 << len(sizes).bit_length()
    while stride:
        order += sizes[::stride]
        stride //= 2
    return list(dict.fromkeys(order))
