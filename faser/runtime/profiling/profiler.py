"""Measures what forwards cost, by running made-up steps through the very executor that will serve.

Knows plans, limits and how a device wants to be profiled; knows nothing of models or kernels. The steps have arbitrary
tokens and whatever the KV pages hold, which costs what real requests cost. They leave no mark: the scheduler and its
page pools never hear of them, no page is published, and a request writes its pages and its slot before it reads them.
It must be done before the executor serves anybody.

Every request of a step has pages of its own, counted from the first; where the pool is too small for that they begin
again with the first, so that requests share pages and a cache may help more than it will in earnest.

What is measured, coarse before fine and several times at some distance, for as long as there is time:

* steps that decode, with no, one and three drafted tokens each, at two contexts: verification by rows, and drafts by
  requests, where the tokens behind the first cost what three take longer than one;
* steps in which prompts, or drafts that fell behind, share the batch: some requests that decode, at two contexts, and
  as many more rows as are wanted;
* one draft, looked at between its tokens and not: what a look costs; likewise verifications with an early exit;
* random batches that none of this was made from, ragged in length and context: how wrong the profile is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import KEPT_UP, NOTHING, Beside, Curve, Profile, ProfiledCost, work_of
from faser.engine.engine import AsyncExecutor, Executor
from faser.engine.pages import NO_WRITES
from faser.engine.scheduler import Limits
from faser.policy.early_exit import ExitPoint, ExitRule
from faser.policy.stopping import Stopping
from faser.progress import Update
from faser.request import SamplingParams
from faser.rules.overlap import OverlapPlan
from faser.runtime.device import Profiling
from faser.step import Admission, PageWrites, StepPlan, StepResult, StepSeconds

SHORT, LONG = 64, 1024  # tokens of context a request, where there is room
SOME, MORE = 1, 3  # drafted tokens; the difference is due to those behind the first
TURNS = (1, 2, 2)  # all steps once, and again while there is time: so often each, after one to warm up
LEAST_NEXT = 0.3  # of the first drafted token's seconds, that a further one takes
LEAST_DECODED = 5  # batches at both ends
WARM_UP = 0.02  # of the time
DECODED, MIXED, ALL = 0.55, 0.8, 1.0  # shares of the time that are spent when each kind of step is done
LEAST_PROMPT_ROWS = 64
MECHANISM_REQUESTS = (1, 4, 16, 64)  # that drafts are dropped or overlap for
BESIDE = 0.4  # seconds of profiling, of all others, that drafting beside verification may take besides
MOST_BESIDE = 32  # requests that decode beside prompts
HELD_OUT = 12  # random batches
QUICK_SECONDS = 1.2  # of a start
QUICK_REQUESTS = 4
PERIOD = 8  # of the made-up tokens: they repeat, so that prompt lookup finds drafts


@dataclass(frozen=True)
class Subject:
    """What is profiled: an executor that has served nobody yet, and what it was made for."""

    executor: Executor
    limits: Limits
    num_pages: int
    page_size: int
    speculates: bool
    has_draft_model: bool
    usual_length: int  # what the policy drafts at most, as far as it says
    vocab_size: int
    how: Profiling
    exit_layer: int = 0  # of the target, after which an early exit looks at drafts; 0: there is none
    exit_candidates: tuple[int, ...] = (0,)  # how many it may compare them with
    splits: tuple[int, ...] = ()  # of the device, for drafting beside a verification: see Device
    assumed: Profile | None = None  # what to go by where nothing was measured (faser/runtime/profiling/assumed.py)

    @property
    def longest(self) -> int:
        """Tokens drafted at most, as far as a context and a step have room for them."""
        room = min(self._room - 2, self.limits.max_batch_tokens - 1)
        return max(0, min(max(self.usual_length, MORE), room)) if self.speculates else 0

    @property
    def most_context(self) -> int:
        """Tokens of one request, with room for its drafts and a token of the target behind them."""
        return max(1, min(LONG, self._room - self.longest - 1))

    @property
    def _room(self) -> int:
        draft = self.limits.draft_max_len
        return self.limits.max_model_len if draft is None else min(self.limits.max_model_len, draft)

    def contexts(self, num_requests: int) -> list[int]:
        """Tokens a request at which so many are measured: short and long, or one where there is no room for two."""
        if not num_requests:
            return [1]
        long = max(1, min(self.most_context, self.how.most_context // num_requests))
        return sorted({min(SHORT, max(1, long // 2)), long})

    @property
    def can_draft_beside(self) -> bool:
        """A verification; there is room for a frontier, as many drafts behind it, and the token of the target."""
        has_room = self.contexts(1)[0] + 2 * MORE + 1 <= self._room
        return bool(self.splits) and self.has_draft_model and self.longest >= MORE and has_room

    def has_room_for(self, batch: Batch) -> bool:
        most = self.limits.max_batch_tokens
        return max(int((batch.num_rows + batch.lengths).sum()), int(batch.draft_rows.sum())) <= most

    def graph_of(self, rows: int) -> int:
        """The rows that so many run as."""
        return next((size for size in self.how.graph_rows if size >= rows), rows)


def measure_quick(subject: Subject, about: Mapping[str, Any], clock: Callable[[], float] = perf_counter) -> Profile:
    """A rough profile of a few steps, made in about QUICK_SECONDS; what it leaves out is assumed."""
    return _Rounds(subject, QUICK_SECONDS, lambda done, total: None, clock).quick_profile(about)


def measure(
    subject: Subject,
    about: Mapping[str, Any],
    seconds: float | None = None,
    update: Update = lambda done, total: None,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """A profile, made in about so many seconds. Short of time it is coarser, and at worst without held-out errors."""
    rounds = _Rounds(subject, subject.how.seconds if seconds is None else seconds, update, clock)
    profile = rounds.profile(about)
    return replace(profile, errors=rounds.errors(ProfiledCost(profile)))


# ── made-up steps ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Batch:
    """The requests of a made-up step. Arrays are [B]."""

    num_tokens: IntArray
    num_rows: IntArray  # the last of num_tokens
    lengths: IntArray
    draft_rows: IntArray  # likewise the last of num_tokens
    is_looked_at: bool = False  # its drafts are, between their tokens, and always found good enough to go on
    exits: ExitRule | None = None  # and by its points in the target, to no effect
    overlaps: bool = False  # drafts of as many tokens are verified meanwhile, and those are
    draft_sms: int = 0  # see OverlapPlan
    leads: bool = False  # see OverlapPlan: the step waits for the result of the step before

    @classmethod
    def decoding(cls, num_tokens: IntArray, lengths: IntArray, lag: IntArray | None = None) -> Batch:
        """One row each, and drafts. Of the requests that draft, every other one has had all its drafts accepted."""
        lag = np.arange(num_tokens.size) % KEPT_UP + 1 if lag is None else lag
        draft_rows = np.where(lengths > 0, np.minimum(lag, num_tokens), 0)
        return cls(num_tokens, np.ones_like(num_tokens), lengths, draft_rows)

    def beside(self, other: Batch) -> Batch:
        return Batch(
            np.concatenate((self.num_tokens, other.num_tokens)),
            np.concatenate((self.num_rows, other.num_rows)),
            np.concatenate((self.lengths, other.lengths)),
            np.concatenate((self.draft_rows, other.draft_rows)),
        )


def _alike(num_requests: int, length: int, context: int) -> Batch:
    return Batch.decoding(_each(num_requests, context), _each(num_requests, length))


def _each(count: int, value: int) -> IntArray:
    return np.full(count, value, dtype=np.int64)


def decoding_batches(subject: Subject) -> list[Batch]:
    """By requests, drafted tokens and context: the ends together, then one number of requests after the other."""
    fewest, *others = _coarse_first(_request_sizes(subject))
    groups = [[fewest, *others[:1]], *([size] for size in others[1:])]
    return [
        _alike(size, length, subject.contexts(size)[which])
        for sizes in groups
        for which in (0, -1)
        for size in sizes
        for length in _lengths(subject, size)
        if which == 0 or len(subject.contexts(size)) > 1
    ]


def _request_sizes(subject: Subject) -> list[int]:
    """Up to as many requests as can be measured with all drafts."""
    most = min(subject.limits.max_running, max(1, subject.how.most_rows // (1 + min(MORE, subject.longest))))
    sizes = subject.how.graph_rows or tuple(1 << i for i in range(most.bit_length()))
    return [*(size for size in sizes if size < most), most]


def _lengths(subject: Subject, num_requests: int) -> list[int]:
    """Drafts first: a profile needs them most. Where no graphs run, rows are rows, and those of drafts will do."""
    lengths = sorted({0, min(SOME, subject.longest), min(MORE, subject.longest)}, reverse=True)
    return lengths if subject.how.graph_rows or num_requests == 1 or not subject.longest else lengths[:-1]


def all_batches(subject: Subject) -> list[list[Batch]]:
    """Those that decode, have prompts, catch up and are held out, as far as a step has room for them."""
    makers = (decoding_batches, prompt_batches, catch_up_batches, held_out_batches)
    return [[batch for batch in make(subject) if subject.has_room_for(batch)] for make in makers]


def quick_batches(subject: Subject) -> list[Batch]:
    """One request and a few, with drafts and without; then a prompt. What matters most comes first."""
    few = min(QUICK_REQUESTS, subject.limits.max_running)
    shapes = [(1, MORE), (1, 0), (few, MORE), (1, SOME), (few, SOME)]
    drafted = [(size, min(length, subject.longest)) for size, length in shapes]
    batches = [_alike(size, length, subject.contexts(size)[0]) for size, length in dict.fromkeys(drafted)]
    rows = min(LEAST_PROMPT_ROWS, subject.most_context, subject.limits.max_batch_tokens)
    prompt = Batch(_each(1, rows), _each(1, rows), _each(1, 0), _each(1, 0))
    return [batch for batch in [*batches, prompt] if subject.has_room_for(batch)]


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    """Both ends, then ever finer in between."""
    order, stride = [sizes[0], sizes[-1]], 1 << len(sizes).bit_length()
    while stride:
        order += sizes[::stride]
        stride //= 2
    return list(dict.fromkeys(order))


def _prompt_sizes(subject: Subject) -> list[int]:
    """Rows of steps with prompts. Without graphs they go on where the rows of decoding end: one size will do."""
    limits, how = subject.limits, subject.how
    room = (limits.max_running - limits.max_running // 2) * subject.most_context
    most = min(limits.max_batch_tokens, how.most_prompt_rows, room)
    if not how.graph_rows:
        return [most]
    doubled = _coarse_first([*(size for size in _doublings(most) if size < most), most])
    others = [size for size in how.mixed_rows if LEAST_PROMPT_ROWS < size < most]
    return list(dict.fromkeys([*doubled, *(_coarse_first(others) if others else [])]))


def _doublings(most: int) -> list[int]:
    return [LEAST_PROMPT_ROWS << i for i in range(most.bit_length())]


def prompt_batches(subject: Subject) -> list[Batch]:
    """Requests that decode, and prompts from their beginning on."""
    batches = []
    for rows in _prompt_sizes(subject):
        size = _num_beside(subject, rows)
        chunks = _chunks(subject, rows - size)
        prompts = Batch(chunks, chunks, np.zeros_like(chunks), np.zeros_like(chunks))
        batches += [_alike(size, 0, context).beside(prompts) for context in _contexts_beside(subject, size, rows)]
    return batches


def catch_up_batches(subject: Subject) -> list[Batch]:
    """Requests whose draft kept up, and some it has yet to see, all drafting one token."""
    if not (subject.has_draft_model and subject.longest):
        return []
    batches = []
    for rows in _prompt_sizes(subject):
        size = _num_beside(subject, rows)
        for context in _contexts_beside(subject, size, rows):
            kept_up = _alike(size, SOME, context)
            chunks = _chunks(subject, rows - int(kept_up.draft_rows.sum()))
            if chunks.size and chunks.min() > KEPT_UP:
                behind = Batch.decoding(chunks, np.ones_like(chunks), lag=chunks)
                batches.append(kept_up.beside(behind))
    return batches


def _num_beside(subject: Subject, rows: int) -> int:
    """Requests that decode in a step of so many rows."""
    return min(subject.limits.max_running // 2, rows // 4, subject.how.most_rows // 8, MOST_BESIDE)


def _contexts_beside(subject: Subject, num_requests: int, rows: int) -> list[int]:
    """Two, at some sizes. Where no graphs run context costs what it does without prompts, and is known."""
    contexts = subject.contexts(num_requests)
    return contexts if subject.how.graph_rows and rows in _doublings(rows) else contexts[:1]


def _chunks(subject: Subject, rows: int) -> IntArray:
    """Rows shared by as few requests as can hold them."""
    count = -(-rows // subject.most_context)
    ends: IntArray = np.linspace(0, rows, count + 1).astype(np.int64)
    return np.diff(ends)


def held_out_batches(subject: Subject) -> list[Batch]:
    """Few requests as often as many, and before them; some draft, each with a length and a context of its own."""
    random = np.random.default_rng(0)
    most = subject.limits.max_running
    sizes = np.exp(random.uniform(0, np.log(most + 1), HELD_OUT)).astype(np.int64).clip(1, most)
    sizes.sort()
    return [_random_batch(subject, int(size), random) for size in sizes]


def _random_batch(subject: Subject, size: int, random: np.random.Generator) -> Batch:
    least, most = subject.contexts(size)[0], subject.contexts(size)[-1]
    lengths = random.integers(0, subject.longest + 1, size)
    lengths[np.cumsum(lengths) > subject.limits.max_batch_tokens - size] = 0
    return Batch.decoding(random.integers(least, most + 1, size), lengths, random.integers(1, KEPT_UP + 1, size))


# ── running them ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measured:
    """A step that ran several times: the plan, with as many drafts as there were, and its seconds at best."""

    plan: StepPlan
    draft: float
    verify: float
    total: float  # of both; less than their sum where they overlap
    steps: FloatArray  # seconds of the whole step, of each time they could be told
    host: FloatArray  # likewise, outside both models

    @property
    def seconds(self) -> StepSeconds:
        return StepSeconds(self.draft, self.verify)

    def or_better(self, other: Measured | None) -> Measured:
        if other is None:
            return self
        return Measured(
            self.plan,
            min(self.draft, other.draft),
            min(self.verify, other.verify),
            min(self.total, other.total),
            np.concatenate((self.steps, other.steps)),
            np.concatenate((self.host, other.host)),
        )


class Steps:
    """Makes plans of batches and runs them on an executor that serves nobody yet."""

    def __init__(self, subject: Subject, clock: Callable[[], float]) -> None:
        self._subject = subject
        self._clock = clock
        self._is_first = True

    def run(self, batch: Batch, repeats: int) -> Measured:
        """A batch, once to warm up and then so many times. The fastest counts: all that disturbs makes it slower."""
        first = self._plan_with_pages(batch)
        if self._is_first:
            first = replace(first, admitted=self.admissions(self._subject.limits.max_running))
            self._is_first = False
        return self.run_plan(first, repeats)

    def run_plan(self, first: StepPlan, repeats: int) -> Measured:
        again = replace(first, admitted=(), target_pages=NO_WRITES, draft_pages=NO_WRITES)
        plans = [first, *[again] * repeats]
        times, results = [self._clock()], []
        for result in self._execute(plans):
            times.append(self._clock())
            results.append(result)
        draft, verify, total = (
            np.array([getattr(each.seconds, name) for each in results]) for name in ("draft", "verify", "total")
        )
        # With the next step under way the time between two results is a step's; behind the last there is none.
        told = slice(1, -1) if self._runs_ahead(first) else slice(1, None)
        steps = np.diff(times)[told]
        host = np.maximum(steps - total[told], 0.0)
        plan = replace(again, lengths=results[-1].num_drafted)
        return Measured(plan, float(draft.min()), float(verify.min()), float(total.min()), steps, host)

    def release(self) -> None:
        """Give all slots back. No step is without requests, so that one that is given back takes part."""
        slots = tuple(range(self._subject.limits.max_running))
        self._subject.executor.execute(replace(self._plan_with_pages(_alike(1, 0, 1)), released=slots))

    def _execute(self, plans: Sequence[StepPlan]) -> Iterator[StepResult]:
        """As the engine does: where it can be, the next step is under way before this one's result is asked for."""
        executor = self._subject.executor
        if not (isinstance(executor, AsyncExecutor) and self._runs_ahead(plans[0])):
            yield from map(executor.execute, plans)
            return
        executor.submit(plans[0])
        for plan in plans[1:]:
            executor.submit(plan)
            yield executor.collect()
        yield executor.collect()

    def _runs_ahead(self, plan: StepPlan) -> bool:
        executor = self._subject.executor
        return isinstance(executor, AsyncExecutor) and executor.may_run_ahead(plan)

    def plan(self, batch: Batch) -> StepPlan:
        """The step of a batch, without admissions and pages."""
        subject = self._subject
        draft_rows = batch.draft_rows if subject.has_draft_model else np.zeros_like(batch.draft_rows)
        frontier = np.zeros_like(batch.lengths)
        if batch.overlaps:
            frontier, draft_rows = batch.lengths, np.minimum(draft_rows, 1)
        overlap = None
        if batch.overlaps or batch.draft_sms:
            none = np.zeros_like(batch.lengths)
            overlap = OverlapPlan(frontier, none, batch.overlaps, batch.leads, batch.draft_sms)
        return StepPlan(
            admitted=(),
            released=(),
            slots=np.arange(batch.num_tokens.size),
            num_tokens=batch.num_tokens,
            start=batch.num_tokens - batch.num_rows,
            num_rows=batch.num_rows,
            lengths=batch.lengths,
            draft_start=batch.num_tokens + frontier - draft_rows,
            draft_rows=draft_rows,
            unsettled=np.zeros(batch.num_tokens.size, dtype=np.bool_),
            target_pages=NO_WRITES,
            draft_pages=NO_WRITES,
            stopping=_never_stopping(batch) if batch.is_looked_at else None,
            exits=batch.exits,
            overlap=overlap,
        )

    def _plan_with_pages(self, batch: Batch) -> StepPlan:
        pages = self._pages(batch)
        draft_pages = pages if self._subject.has_draft_model else NO_WRITES
        return replace(self.plan(batch), target_pages=pages, draft_pages=draft_pages)

    def _pages(self, batch: Batch) -> PageWrites:
        """One request behind the other: a CPU hands out memory as pages are touched, and should hand out little."""
        counts = -(-(batch.num_tokens + (1 + batch.overlaps) * batch.lengths) // self._subject.page_size)
        slots = np.repeat(np.arange(counts.size), counts)
        columns = np.arange(slots.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return PageWrites(slots, columns, np.arange(slots.size) % self._subject.num_pages)

    def admissions(self, num_slots: int) -> tuple[Admission, ...]:
        tokens = np.random.default_rng(0).integers(0, self._subject.vocab_size, (num_slots, PERIOD))
        size = self._subject.most_context
        return tuple(
            Admission(slot, np.resize(some, size), size, SamplingParams(), 0, frozenset())
            for slot, some in enumerate(tokens)
        )


def _never_stopping(batch: Batch) -> Stopping:
    depth = int(batch.lengths.max()) + 1
    return Stopping(np.ones((batch.lengths.size, depth)), np.zeros(depth), price=1.0, calibration=(0.0, 1.0))


class _Rounds:
    """Goes through all batches while there is time, and makes a profile of what they took."""

    def __init__(self, subject: Subject, seconds: float, update: Update, clock: Callable[[], float]) -> None:
        self._subject = subject
        self._seconds = seconds
        self._update = update
        self._clock = clock
        self._started = clock()
        self._aside = 0.0  # seconds that do not count
        self._steps = Steps(subject, clock)
        self._expected = ProfiledCost(subject.assumed) if subject.assumed is not None else None
        self._decoding, *self._mixed, self._held_out = all_batches(subject)

    def profile(self, about: Mapping[str, Any]) -> Profile:
        self._warm_up()
        samples = Samples(self._subject)
        # what no profile can be made without is measured however late it is
        least_decoded, least_mixed = (LEAST_DECODED, 1) if self._expected is None else (1, 0)
        samples.add(self._run(self._decoding, DECODED, least_decoded))
        for number, batches in enumerate(self._mixed, 1):
            until = DECODED + (MIXED - DECODED) * number / len(self._mixed)
            samples.add(self._run(batches, until, least_mixed))
        looks, (check, candidates) = self._stop_seconds(), self._exit_check()
        started = self._clock()
        besides, waiting = self._besides(), self._await_seconds()
        self._aside = self._clock() - started
        return replace(
            samples.profile(about),
            stop_seconds=looks,
            exit_check=check,
            exit_candidates=candidates,
            besides=besides,
            await_seconds=waiting,
        )

    def quick_profile(self, about: Mapping[str, Any]) -> Profile:
        subject, samples = self._subject, Samples(self._subject)
        if subject.how.graph_rows:  # a GPU runs hundreds of steps meanwhile
            samples.add(self._run(self._decoding, DECODED, least=1))
            for batches in self._mixed:
                samples.add(self._run(batches, MIXED, least=0))
            looks = self._stop_seconds()
        else:
            samples.add(self._run_quickly(quick_batches(subject)))
            looks = subject.assumed.stop_seconds if subject.assumed is not None else None
        self._steps.release()
        return replace(samples.profile(about), stop_seconds=looks, kind="quick")

    def _run_quickly(self, batches: Sequence[Batch]) -> Iterator[Measured]:
        """Each once, as long as there is time; the first also to warm up."""
        self._steps.run(batches[0], 0)
        for number, batch in enumerate(batches):
            if number == 0 or self._has_time_for(batch, 1):
                yield self._measure(batch, 0)

    def _measure(self, batch: Batch, repeats: int) -> Measured:
        measured = self._steps.run(batch, repeats)
        if self._expected is not None:
            self._expected.learn(measured.plan, measured.seconds, measured.total)
        return measured

    def _has_time_for(self, batch: Batch, runs: int) -> bool:
        """Whether a batch would end within the time, as far as is known; a slow machine leaves the large ones out."""
        left = self._seconds - (self._clock() - self._started - self._aside)
        if self._expected is None:
            return left > 0
        return runs * self._expected.predict(self._steps.plan(batch)) <= left

    def errors(self, cost: ProfiledCost) -> dict[str, float]:
        """Of the held-out batches: the mean and the worst share by which predictions are wrong. Frees the slots."""
        found = errors_of(cost, self._run(self._held_out, ALL, least=0))
        self._steps.release()
        self._update(100, 100)
        return found

    def _stop_seconds(self) -> float | None:
        """Of a look at one draft. It may keep the host or the device waiting: what counts is the whole step."""
        subject = self._subject
        plain = _alike(1, MORE, subject.contexts(1)[0])
        if not subject.has_draft_model or subject.longest < MORE or not self._has_time_for(plain, 2 * (1 + max(TURNS))):
            return None
        unseen, seen = (self._steps.run(replace(plain, is_looked_at=looked), max(TURNS)) for looked in (False, True))
        return max(0.0, float(seen.steps.min() - unseen.steps.min())) / (MORE - SOME)

    def _some_drafting(self, is_over: Callable[[Batch], bool]) -> Iterator[Batch]:
        """Batches of a few sizes that draft alike, as far as there is room and time."""
        subject = self._subject
        for size in MECHANISM_REQUESTS:
            batch = _alike(size, MORE, subject.contexts(size)[0])
            if size > subject.limits.max_running or not subject.has_room_for(batch) or is_over(batch):
                return
            yield batch

    def _besides(self) -> tuple[Beside, ...]:
        """Drafting beside a verification, the device shared in each way there is; for few requests in all ways first.

        It has seconds of its own, for it comes last and a slow model would have left none.
        """
        subject = self._subject
        if not subject.can_draft_beside:
            return ()
        splits, ends = list(subject.splits), self._clock() + BESIDE * self._seconds
        found: dict[int, dict[int, tuple[StepSeconds, StepSeconds, float]]] = {split: {} for split in splits}
        for plain in self._some_drafting(lambda _: self._clock() >= ends):
            apart = self._steps.run(plain, max(TURNS))
            for split in splits.copy():
                alone, together = (
                    self._steps.run(replace(plain, overlaps=overlaps, draft_sms=split), max(TURNS))
                    for overlaps in (False, True)
                )
                if min(apart.draft, apart.verify) > 0:
                    found[split][plain.lengths.size] = apart.seconds, alone.seconds, together.total
                if together.total > apart.draft + apart.verify:
                    splits.remove(split)  # larger batches need more of the device
        return tuple(Beside.of(split, batches) for split, batches in found.items() if batches)

    def _await_seconds(self) -> float:
        """What the host needs between two steps, where the second has to wait for it."""
        subject = self._subject
        if not subject.can_draft_beside or not isinstance(subject.executor, AsyncExecutor):
            return 0.0
        plain = replace(_alike(1, MORE, subject.contexts(1)[0]), overlaps=True)
        ahead, waiting = (self._steps.run(replace(plain, leads=leads), max(TURNS)) for leads in (False, True))
        return max(0.0, float(waiting.steps.min() - ahead.steps.min()))

    def _exit_check(self) -> tuple[Curve | None, int]:
        """Of an early exit's look at drafts, by their number: what a verification takes longer that has one.

        And with how many candidates that is cheapest.
        """
        subject = self._subject
        if not subject.exit_layer or subject.longest < MORE:
            return None, 0
        seconds: dict[int, list[float]] = {}  # by drafts: with each number of candidates
        runs = (1 + len(subject.exit_candidates)) * (1 + max(TURNS))
        for plain in self._some_drafting(lambda batch: not self._has_time_for(batch, runs)):
            points = [ExitPoint.by_rank(subject.exit_layer, 1, each) for each in subject.exit_candidates]
            looked = [replace(plain, exits=ExitRule((point,), is_trial=True)) for point in points]
            without, *with_it = (self._steps.run(batch, max(TURNS)).verify for batch in (plain, *looked))
            seconds[int(plain.lengths.sum())] = [each - without for each in with_it]
        if not seconds:
            return None, 0
        table = np.maximum.accumulate(np.maximum(list(seconds.values()), 0.0), axis=0)
        best = int(table[-1].argmin())
        check = Curve(tuple(seconds), tuple(table[:, best].tolist()), (0.0,) * len(seconds))
        return check, subject.exit_candidates[best]

    def _warm_up(self) -> None:
        """Clocks rise, and whatever is only made once is made."""
        self._steps.run(self._decoding[0], 0)
        while self._spent() < WARM_UP:
            self._steps.run(self._decoding[0], 1)

    def _run(self, batches: Sequence[Batch], until: float, least: int) -> list[Measured]:
        """As many batches as can be run, as often as can be, until that share of the time is spent."""
        found: dict[int, Measured] = {}
        for turn, repeats in enumerate(TURNS):
            for number, batch in enumerate(batches):
                is_late = self._spent() >= until
                if is_late and (turn > 0 or number >= least):
                    return list(found.values())
                if (turn > 0 or number >= least) and not self._has_time_for(batch, 1 + repeats):
                    continue
                measured = self._measure(batch, 0 if is_late else repeats)
                found[number] = measured.or_better(found.get(number))
                self._update(min(100, int(100 * self._spent())) if self._seconds > 0 else 100, 100)
        return list(found.values())

    def _spent(self) -> float:
        """The share of the time."""
        spent = self._clock() - self._started - self._aside
        return spent / self._seconds if self._seconds > 0 else float("inf")


def errors_of(cost: ProfiledCost, several: Iterable[Measured]) -> dict[str, float]:
    """Of steps that a profile was not made from: the mean and the worst error of its predictions, as shares."""
    found = defaultdict(list)
    for measured in several:
        predicted = cost.parts(measured.plan)
        for name in ("verify", "draft"):
            seconds = getattr(measured, name)
            if seconds > 0 and getattr(predicted, name) > 0:
                found[name].append(abs(getattr(predicted, name) / seconds - 1))
    means = {name: float(np.mean(errors)) for name, errors in found.items()}
    return means | {f"{name}_worst": max(errors) for name, errors in found.items()}


# ── from seconds to curves ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sample:
    rows: int
    context: int
    seconds: float


class Samples:
    """What was measured, by the curve it belongs to."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._verify: list[Sample] = []
        self._prompts: list[Sample] = []
        self._catch_up: list[Sample] = []
        # by requests, rows and context of a first draft: seconds by length
        self._drafts: defaultdict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        self._host: list[float] = []

    def add(self, several: Iterable[Measured]) -> None:
        for measured in several:
            self._add(measured)

    def _add(self, measured: Measured) -> None:
        plan = measured.plan
        work, graphs = work_of(plan), self._subject.how.graph_rows
        all_rows = work.rows + work.prompt_rows
        in_graph = not work.prompt_rows and (not graphs or work.rows <= graphs[-1])
        if in_graph:
            rows = self._subject.graph_of(work.rows)
            self._verify.append(Sample(rows, work.context, measured.verify))
        if not in_graph or not graphs:  # without graphs rows are rows
            self._prompts.append(Sample(all_rows, work.context, measured.verify))
        if work.catch_up_rows:
            self._catch_up.append(Sample(work.catch_up_rows, work.draft_context, measured.draft))
        elif work.num_drafting:
            key = work.num_drafting, int(plan.draft_rows.sum()), work.draft_context
            self._drafts[key][int(plan.lengths.max())] = measured.draft
        if not work.prompt_rows and not work.catch_up_rows:
            self._host += measured.host.tolist()

    def profile(self, about: Mapping[str, Any]) -> Profile:
        limits, longest = self._subject.limits, self._subject.longest
        assumed = self._subject.assumed
        target, draft = (None, None) if assumed is None else (assumed.verify, assumed.first_draft)
        verify = make_curve(self._verify, prior=target)
        first = make_curve(self._first_drafts(), prior=draft)
        following = make_curve(self._next_drafts(), default=first, prior=draft)
        has_graphs = bool(self._subject.how.graph_rows)
        catch_up = self._catch_up if has_graphs else self._catch_up + self._first_forwards()
        return Profile(
            about=about,
            verify=self._stepped(verify, limits.max_running * (1 + longest)),
            prompts=self._stepped_below(make_curve(self._prompts, verify, has_graphs, target)),
            first_draft=self._stepped(first, limits.max_running),
            next_draft=self._stepped(following, limits.max_running),
            catch_up=self._stepped_below(make_curve(catch_up, first, has_graphs, draft)),
            host=float(np.median(self._host)) if self._host else assumed.host if assumed is not None else 0.0,
        )

    def _first_drafts(self) -> list[Sample]:
        graph_of = self._subject.graph_of
        return [
            Sample(graph_of(requests), context, _first_token(seconds))
            for (requests, _, context), seconds in self._drafts.items()
        ]

    def _first_forwards(self) -> list[Sample]:
        """The same by rows, as those that catch up are counted."""
        return [Sample(rows, context, _first_token(seconds)) for (_, rows, context), seconds in self._drafts.items()]

    def _next_drafts(self) -> list[Sample]:
        graph_of = self._subject.graph_of
        return [
            Sample(graph_of(requests), context, _next_token(_first_token(seconds), seconds[length], length))
            for (requests, _, context), seconds in self._drafts.items()
            for length in seconds
            if length > SOME
        ]

    def _stepped(self, curve: Curve, most_rows: int) -> Curve:
        """With a point for every graph up to the one that holds so many rows: those not measured lie in between."""
        graphs = self._subject.how.graph_rows
        if not graphs or curve is NOTHING:
            return curve
        sizes = [size for size in graphs if size <= self._subject.graph_of(min(most_rows, graphs[-1]))]
        return _with_steps(curve, sizes, sizes[-1])

    def _stepped_below(self, curve: Curve) -> Curve:
        """Likewise of steps with prompts, which go on where graphs end."""
        sizes = [size for size in self._subject.how.mixed_rows if size <= self._subject.limits.max_batch_tokens]
        if not sizes or curve is NOTHING:
            return curve
        return _with_steps(curve, [*sizes, *(rows for rows in curve.rows if rows > sizes[-1])], sizes[-1])


def _with_steps(curve: Curve, sizes: Sequence[int], stepped_to: int) -> Curve:
    seconds = curve(np.array(sizes), 0.0)
    per_token = np.maximum(curve(np.array(sizes), 1.0) - seconds, 0.0)
    return Curve(tuple(sizes), tuple(seconds.tolist()), tuple(per_token.tolist()), stepped_to)


def _first_token(seconds: Mapping[int, float]) -> float:
    """Of a draft, by the seconds of drafts of some lengths; without one of a single token, each counts alike."""
    length = min(seconds)
    return seconds[length] / max(length, SOME)


def _next_token(first: float, whole: float, length: int) -> float:
    """Of the tokens behind the first. They read the same weights: whatever noise says, they are not free."""
    return max((whole - first) / (length - SOME), LEAST_NEXT * first)


def make_curve(
    samples: Iterable[Sample], default: Curve = NOTHING, one_slope: bool = False, prior: Curve | None = None
) -> Curve:
    """A point for each number of rows; more rows never take less time.

    Where only one context was measured, others say what context costs. `one_slope`: it costs the same at all of them,
    so that the noise of large steps is not taken for it. `prior` is the assumed shape: it says what context costs where
    no two contexts were measured, and how the curve goes on where no rows were.
    """
    groups: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.rows].append(sample)
    if not groups:
        return default if default is not NOTHING or prior is None else prior
    lines = {rows: fit_line(group) for rows, group in sorted(groups.items()) if _num_contexts(group) > 1}
    slopes = [slope for _, slope in lines.values()]
    points = []
    for rows, group in sorted(groups.items()):
        if rows in lines and not one_slope:
            points.append((rows, *lines[rows]))
            continue
        slope = 0.0
        if lines:
            slope = float(np.median(slopes) if one_slope else np.interp(rows, list(lines), slopes))
        elif prior is not None:
            slope = _ratio_to(prior, group) * float(prior(rows, 1.0) - prior(rows, 0.0))
        points.append((rows, _at_slope(group, slope), slope))
    if prior is not None and prior is not NOTHING:
        points = _continued(points, prior)
    rows_of, seconds, per_token = zip(*points, strict=True)
    return Curve(rows_of, seconds, per_token).monotone()


def _ratio_to(prior: Curve, samples: Sequence[Sample]) -> float:
    """How many times as long as assumed it took."""
    assumed = [float(prior(each.rows, each.context)) for each in samples]
    ratios = [each.seconds / seconds for each, seconds in zip(samples, assumed, strict=True) if seconds > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _continued(points: list[tuple[int, float, float]], prior: Curve) -> list[tuple[int, float, float]]:
    """Points for the rows below and above those measured, as many times as long as assumed as the nearest one."""

    def scaled(rows: int, nearest: tuple[int, float, float]) -> tuple[int, float, float]:
        base = float(prior(nearest[0], 0.0))
        factor = nearest[1] / base if base > 0 and nearest[1] > 0 else 1.0
        return rows, factor * float(prior(rows, 0.0)), nearest[2]

    first, last = points[0], points[-1]
    below = [scaled(rows, first) for rows in prior.rows if rows < first[0]]
    above = [scaled(rows, last) for rows in prior.rows if rows > last[0]]
    return [*below, *points, *above]


def _num_contexts(samples: Sequence[Sample]) -> int:
    return len({sample.context for sample in samples})


def _at_slope(samples: Sequence[Sample], slope: float) -> float:
    return max(0.0, float(np.median([sample.seconds - slope * sample.context for sample in samples])))


def fit_line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds with no context and for each token of it, neither below 0, that are least wrong in share."""
    context, seconds = (np.array([getattr(each, name) for each in samples], float) for name in ("context", "seconds"))
    if not seconds.all():
        return float(np.median(seconds)), 0.0
    base, slope = np.linalg.lstsq(np.stack((1 / seconds, context / seconds), axis=1), np.ones_like(seconds))[0]
    if slope < 0:
        return float(np.median(seconds)), 0.0
    if base < 0:
        return 0.0, float(np.median(seconds / context))
    return float(base), float(slope)
