"""`faser`, the default: a length for each request and each load, priced by what forwards cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import KEPT_UP, Cost
from faser.policy.acceptance import Acceptance, Calibration
from faser.policy.base import MOST_LENGTH, BatchView, Outcome
from faser.policy.evidence import UNTRUSTED_LENGTH, MeasuredGain, is_trusted
from faser.policy.stopping import Stopping

DEPTH = MOST_LENGTH
MOST_SLOTS = 512  # in one step; where so many rows are verified, every row costs its full share
TYPICAL_REST = 128  # tokens a request goes on for, as far as anybody knows, and as many again as it has put out
LOOK_GAIN = 0.15  # of what a token takes to draft, by replay (docs/lab.md): of one request, or of two together
MOST_LOOKED_AT = 2  # requests: drafts that are looked at end together, and of more there is mostly one that looks good
SPAN = 0.5  # seconds of steps that traffic is counted over
LASTING = 0.75  # of that traffic, that is expected to go on
MOST_RUNNING = 256  # requests a batch is expected to grow to
FADING = 0.99  # weight of the steps before in the share of steps that have prompts
SLACK = 0.1  # share of steps without prompts below which they are taken to be running out
PROMPT_ROWS = 512  # a step with about so many prompt rows says what one more row costs beside prompts

SLOTS = np.arange(MOST_SLOTS + 1)
LEAST_DRAFTING = -(-SLOTS // DEPTH)  # requests that so many slots belong to at least
LEVELS = np.arange(DEPTH)
ROWS = np.arange(1, DEPTH + 2)  # of a request, by its length

Flags = NDArray[np.bool_]
Numbers = TypeVar("Numbers", IntArray, FloatArray)


class Adaptive:
    """Admits (request, position) slots in the order in which they are likely to be accepted, as long as that pays.

    A slot's survival is the chance that its draft is accepted that far (faser/policy/acceptance.py). For every depth
    and number of slots the expected tokens and the seconds of the step are known; drafting is priced as it runs, each
    position with the requests that reach it. The fastest step has the most tokens per second. From that follows what a
    token is worth: the seconds it saves later, its share of such a step; or only the row it saves, where prompts fill
    every step. Drafts must be worth more than they cost. Requests whose drafts fell behind join if what they will save
    until they end, all together and in the batch that the traffic of late will make, exceeds their catch-up; so nobody
    flutters. If nothing is worth it all lengths are 0 and the draft does not run.
    Where so few decode that a look at the draft's confidence between two of its tokens pays, lengths are as long as
    they may be, and drafts stop where another token would not be worth its cost.
    Where costs predict steps too poorly to tell whether drafting pays, what was measured decides (evidence.py).
    """

    name = "faser"
    max_length = DEPTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(DEPTH)
        self._looked_at = Acceptance(DEPTH)  # of drafts that go on because they look good
        self._calibration = Calibration()
        self._measured = MeasuredGain()
        self._plain_seconds: dict[int, float] = {}  # of a step without drafts, by requests, as predicted last
        self._stopping: Stopping | None = None
        self._prompt_rows = self._seconds = 0.0  # of late
        self._beside_prompts = 0.0  # share of steps, of late

    def learn(self, outcome: Outcome) -> None:
        if outcome.confidence is None:
            self._acceptance.learn(outcome)
        else:  # only the first token of each says something of drafts nobody looks at
            self._acceptance.learn(outcome, depth=1)
            self._looked_at.learn(outcome)
            self._calibration.learn(outcome)
        self._measured.learn(outcome, self._plain_seconds.get(outcome.slots.size, 0.0))
        kept = math.exp(-outcome.seconds / SPAN)
        self._prompt_rows = kept * self._prompt_rows + outcome.num_prefill_rows
        self._seconds = kept * self._seconds + outcome.seconds
        self._beside_prompts += (1 - FADING) * ((outcome.num_prefill_rows > 0) - self._beside_prompts)

    def stopping(self) -> Stopping | None:
        return self._stopping

    def lengths(self, view: BatchView) -> IntArray:
        self._stopping = None
        none = np.zeros(view.num_requests, dtype=np.int64)
        may_draft = view.limit > 0
        if not may_draft.any() or self._measured.rules_out(view.num_requests):
            return none
        assert view.cost is not None
        is_late = view.lag > KEPT_UP
        if is_late[may_draft].all() and not self._catch_up_pays(view, view.cost, may_draft, may_draft):
            return none  # mostly so where many run; what follows takes several times as long
        batch = _Batch(view, view.cost)
        self._plain_seconds[batch.size] = batch.plain_seconds
        survival = self._survival(view)
        row = batch.row_beside_prompts()
        worth = self._price(batch.plain_seconds / batch.size, row)
        if batch.can_never_pay(worth * float(survival.max())):
            return none
        slots = _Slots.of(survival)
        steps = _Steps(batch, slots)
        fastest = steps.fastest()
        if fastest is None:
            return none
        drafting = fastest.lengths > 0
        late = drafting & is_late
        if late.any() and not self._catch_up_pays(view, view.cost, drafting, late):
            steps = _Steps(batch, slots.without(is_late))
            fastest = steps.fastest()
        if fastest is None:
            return none
        price = self._price(fastest.seconds_per_token, row)
        chosen = steps.most_valuable(price)
        if chosen is None:
            return none
        expected_gain = batch.plain_seconds / (batch.size * fastest.seconds_per_token)
        if not self._measured.allows(batch.size, expected_gain, view.cost.error):
            return none
        longest = DEPTH if is_trusted(expected_gain, view.cost.error) else UNTRUSTED_LENGTH
        if view.cost.stop_seconds is None or not _worth_a_look(view, view.cost, view.cost.stop_seconds):
            return np.minimum(chosen.lengths, longest)
        self._stopping = self._rule(view, view.cost, view.cost.stop_seconds, price)
        return np.where(chosen.lengths > 0, np.minimum(view.limit, longest), 0)

    def _catch_up_pays(self, view: BatchView, cost: Cost, drafting: Flags, late: Flags) -> bool:
        """Whether the late ones of those that draft save more, together and until they end, than catching up takes."""
        number, context = int(np.count_nonzero(drafting)), float(drafting @ view.num_tokens)
        rows = int(drafting @ view.lag)
        seconds = float(cost.first_draft(number, context, rows) - cost.first_draft(number, context))
        rest = np.minimum(view.remaining, TYPICAL_REST + view.num_output)
        return self._saved_by_token(view, cost) * float(late @ rest) > seconds

    def _saved_by_token(self, view: BatchView, cost: Cost) -> float:
        """Seconds that drafts save for every token, in the batch that the traffic of late will make."""
        size = self._coming_size(view, cost)
        context = size * _mean(view.num_tokens)
        verify = cost.verify(size * ROWS, context) + cost.host
        drafts = cost.first_draft(size, context) + LEVELS * cost.next_draft(size, context)
        tokens = 1 + self._acceptance.rates.cumprod().cumsum()
        return float(verify[0] - ((verify[1:] + drafts) / tokens).min()) / size

    def _coming_size(self, view: BatchView, cost: Cost) -> int:
        """Requests in the batch, when it puts out as many tokens as are asked for: at least as many as there are.

        Prompts take a share of the time, and every prompt asks for an answer. In a burst the batch is yet to grow, and
        in a large batch drafts save little: what a draft's prompt costs now would never be repaid.
        """
        if view.num_requests >= MOST_RUNNING:
            return view.num_requests
        sizes = np.arange(view.num_requests, MOST_RUNNING + 1)
        context = _mean(view.num_tokens)
        seconds = cost.verify(sizes, (sizes * context).astype(np.float64)) + cost.host
        row = float(cost.verify(1, context, PROMPT_ROWS) - cost.verify(1, context)) / PROMPT_ROWS
        rows_per_second = LASTING * self._prompt_rows / max(self._seconds, 1e-9)
        prompt = context - _mean(view.num_output)
        answer = _mean(np.minimum(view.num_output + view.remaining, TYPICAL_REST + 2 * view.num_output))
        asked = rows_per_second / prompt * answer  # tokens a second
        suffices = sizes * max(0.0, 1 - rows_per_second * row) >= asked * seconds
        return int(sizes[suffices.argmax()]) if suffices.any() else MOST_RUNNING

    def _survival(self, view: BatchView) -> FloatArray:
        """[B, depth] the chance that a draft is accepted so far, to the depth that so many requests might reach."""
        depth = min(DEPTH, MOST_SLOTS // view.num_requests + 2)
        survival: FloatArray = self._acceptance.rates_of(view, depth).cumprod(axis=1)
        survival[LEVELS[:depth] >= view.limit[:, None]] = 0.0
        return survival

    def _rule(self, view: BatchView, cost: Cost, stop_seconds: float, price: float) -> Stopping:
        """Every further token is drafted for all that go on: what it costs depends on how many there are already."""
        size, context = view.num_requests, float(view.num_tokens.sum())
        rows = cost.verify(size * ROWS, context, view.num_prefill_rows)
        seconds = cost.next_draft(size, context) + (rows[1:] - rows[:-1]) + stop_seconds
        return Stopping(self._looked_at.rates_of(view), seconds, price, self._calibration.weights)

    def _price(self, share: float, row: float) -> float:
        """Seconds a token is worth: `share` is its part of a step without prompts, `row` what one saves beside them.

        There are as many steps with prompts as there are prompts; what a token saves, wherever it comes, is its share
        of a step without. Only where hardly any such step is left does it save no more than a row.
        """
        return row + (share - row) * min(1.0, (1 - self._beside_prompts) / SLACK)


class _Batch:
    """What a step costs for the requests of a view, by what might be drafted: asked for once, looked at many times."""

    def __init__(self, view: BatchView, cost: Cost) -> None:
        self.size = view.num_requests
        self.host = cost.host
        self._cost = cost
        self._context = float(view.num_tokens.sum())
        self._num_slots = min(MOST_SLOTS, self.size * DEPTH)
        rows, prompt_rows = self.size + SLOTS[: self._num_slots + 1], view.num_prefill_rows
        # [0 … slots] of the target, by slots: without prompts beside them, and with those there are
        self.alone = cost.verify(rows, self._context)
        self.beside = cost.verify(rows, self._context, prompt_rows) if prompt_rows else self.alone

    @property
    def plain_seconds(self) -> float:
        """Of a step without drafts and prompts."""
        return float(self.alone[0]) + self.host

    @cached_property
    def drafts(self) -> tuple[FloatArray, FloatArray]:
        """[0 … size] of the draft's first token and of each further one, by the requests that draft it."""
        drafting = np.arange(self.size + 1)
        context = (drafting * (self._context / self.size)).astype(np.float64)
        return self._cost.first_draft(drafting, context), self._cost.next_draft(drafting, context)

    def row_beside_prompts(self) -> float:
        """Of one more row in a step that has prompts."""
        few = self._cost.verify(self.size, self._context, PROMPT_ROWS)
        many = self._cost.verify(self.size + PROMPT_ROWS, self._context, PROMPT_ROWS)
        return float(many - few) / PROMPT_ROWS

    def can_never_pay(self, most: float) -> bool:
        """Whether no number of slots would, were each worth `most`: mostly so where prompts fill every step."""
        slots = slice(1, self._num_slots + 1)
        first = self._cost.first_draft(LEAST_DRAFTING[slots], 0.0)
        return bool((most * SLOTS[slots] <= self.beside[slots] - self.beside[0] + first).all())


@dataclass(frozen=True)
class _Slots:
    """Slots (request, position), the likeliest first; of one request in the order of positions. Arrays are [N]."""

    owner: IntArray
    level: IntArray
    survival: FloatArray

    @classmethod
    def of(cls, survival: FloatArray) -> _Slots:
        """Those that have any chance. Survival falls with every position."""
        depth, flat = survival.shape[1], survival.ravel()
        order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
        owner = order // depth
        return cls(owner, order - depth * owner, flat[order])

    def without(self, requests: Flags) -> _Slots:
        kept = ~requests[self.owner]
        return _Slots(self.owner[kept], self.level[kept], self.survival[kept])


@dataclass(frozen=True)
class _Choice:
    """Lengths, and what is expected of them."""

    lengths: IntArray
    gains: FloatArray  # [B] tokens
    seconds: float  # of the step

    @property
    def num_tokens(self) -> float:
        """Of the step."""
        return self.lengths.size + float(self.gains.sum())

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


class _Steps:
    """The steps that could be taken: the likeliest n slots that are no deeper than d, for every n [N] and d [D]."""

    def __init__(self, batch: _Batch, slots: _Slots) -> None:
        self._batch = batch
        self._owner, self._level = slots.owner[:MOST_SLOTS], slots.level[:MOST_SLOTS]
        self._survival = slots.survival[:MOST_SLOTS]
        levels = self._level == LEVELS[: self._level.max(initial=0) + 1, None]
        drafting = levels.cumsum(axis=1)  # [D, N] requests that draft each position
        first, further = batch.drafts
        seconds = further[drafting]
        seconds[0] = first[drafting[0]]
        self._draft_seconds = _added_up(seconds) + batch.host
        self._gain = _added_up((levels * self._survival).cumsum(axis=1))
        self._count = _added_up(drafting)

    def fastest(self) -> _Choice | None:
        """The most tokens per second, without prompts beside them."""
        size = self._batch.size
        return self._best(self._batch.alone, lambda gain, seconds: (size + gain) / seconds)

    def most_valuable(self, price: float) -> _Choice | None:
        """The most seconds saved beyond its own, with the prompts there are, where a token saves `price`."""
        return self._best(self._batch.beside, lambda gain, seconds: price * gain - seconds)

    def _best(self, verify: FloatArray, value: Callable[[Any, Any], Any]) -> _Choice | None:
        """The step of most value, by the tokens that drafts add and its seconds; None if it has no drafts.

        `verify`: seconds by slots.
        """
        if not self._owner.size:
            return None
        plain = float(verify[0]) + self._batch.host
        seconds = verify[self._count] + self._draft_seconds
        values = value(self._gain, seconds)
        best = int(values.argmax())
        if values.flat[best] <= value(0.0, plain):
            return None
        depth, last = divmod(best, values.shape[1])
        taken = self._level[: last + 1] <= depth
        owner = self._owner[: last + 1][taken]
        lengths = np.bincount(owner, minlength=self._batch.size)
        gains = np.bincount(owner, self._survival[: last + 1][taken], minlength=self._batch.size).astype(np.float64)
        return _Choice(lengths, gains, float(seconds.flat[best]))


def _mean(numbers: IntArray) -> float:
    """As numbers.mean(), which takes more than twice as long."""
    return int(numbers.sum()) / numbers.size


def _added_up(levels: Numbers) -> Numbers:
    """[D, N] each with all above it, in place: of a few long rows cumsum(axis=0) takes three times as long."""
    for above, level in pairwise(levels):
        level += above
    return levels


def _worth_a_look(view: BatchView, cost: Cost, stop_seconds: float) -> bool:
    """Whether to look at drafts while they are made; what that gains is shared by all whose drafts end together."""
    size = view.num_requests
    return size <= MOST_LOOKED_AT and LOOK_GAIN / size * float(cost.next_draft(size, 0.0)) > stop_seconds
