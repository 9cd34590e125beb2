"""`faser`, the default: a length for each request and each load, priced by what forwards cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.policy.acceptance import Acceptance, Calibration
from faser.policy.base import MOST_LENGTH, BatchView, Outcome
from faser.policy.stopping import Stopping
from faser.profile import KEPT_UP, Cost
from faser.types import FloatArray, IntArray

DEPTH = MOST_LENGTH
MOST_SLOTS = 512  # in one step; where so many rows are verified, every row costs its full share
TYPICAL_REST = 128  # tokens a request goes on for, as far as anybody knows, and as many again as it has put out
LOOK_GAIN = 0.1  # of the step of a single request, by replay (docs/lab.md); of several as much for all of them
MOST_LOOKED_AT = 4  # requests: drafts that are looked at end together, and of more there is always one that looks good
HORIZON = 256  # steps that a load is expected to last
FADING = 0.99  # weight of the steps before in the share of steps that have prompts
SLACK = 0.1  # share of steps without prompts below which they are taken to be running out
PROMPT_ROWS = 512  # a step with about so many prompt rows says what one more row costs beside prompts

Value = Callable[[FloatArray, FloatArray], FloatArray]  # of a step, by the tokens drafts add and its seconds


class Adaptive:
    """Admits (request, position) slots in the order in which they are likely to be accepted, as long as that pays.

    A slot's survival is the chance that its draft is accepted that far (faser/policy/acceptance.py). For every depth
    and number of slots the expected tokens and the seconds of the step are known; drafting is priced as it runs, each
    position with the requests that reach it. The fastest step has the most tokens per second. From that follows what a
    token is worth: the seconds it saves later, its share of such a step; or only the row it saves, where prompts fill
    every step. Drafts must be worth more than they cost. A request whose draft fell behind joins only if what it gains
    until it ends, as far as that can be guessed, exceeds its catch-up, or, where nobody drafts yet, if all together
    soon gain more than theirs; so nobody flutters. If nothing is worth it all lengths are 0 and the draft does not run.
    Where so few decode that a look at the draft's confidence between two of its tokens pays, lengths are as long as
    they may be, and drafts stop where another token would not be worth its cost.
    """

    name = "faser"
    max_length = DEPTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(DEPTH)
        self._looked_at = Acceptance(DEPTH)  # of drafts that go on because they look good
        self._calibration = Calibration()
        self._stopping: Stopping | None = None
        self._beside_prompts = 0.0  # share of steps, of late

    def learn(self, outcome: Outcome) -> None:
        if outcome.confidence is None:
            self._acceptance.learn(outcome)
        else:  # only the first token of each says something of drafts nobody looks at
            self._acceptance.learn(outcome, depth=1)
            self._looked_at.learn(outcome)
            self._calibration.learn(outcome)
        self._beside_prompts += (1 - FADING) * ((outcome.num_prefill_rows > 0) - self._beside_prompts)

    def stopping(self) -> Stopping | None:
        return self._stopping

    def lengths(self, view: BatchView) -> IntArray:
        self._stopping = None
        none = np.zeros(view.num_requests, dtype=np.int64)
        if not view.limit.any():
            return none
        assert view.cost is not None
        survival = self._acceptance.rates_of(view).cumprod(axis=1)
        survival[np.arange(DEPTH) >= view.limit[:, None]] = 0.0
        row = _row_beside_prompts(view, view.cost)
        if self._can_never_pay(view, view.cost, row, float(survival.max())):
            return none
        steps = _Steps(view, view.cost, survival)
        fastest = steps.fastest()
        if fastest is None:
            return none
        worth = self._price(fastest.plain_seconds / view.num_requests, row)
        late = _Catchup.of(view, view.cost, fastest, worth)
        dear = late.too_dear(view, fastest)
        if dear.any():
            survival[dear] = 0.0
            others = _Steps(view, view.cost, survival)
            without = others.fastest()
            if without is not None or not late.pays_together():
                steps, fastest = others, without
        if fastest is None:
            return none
        price = self._price(fastest.seconds_per_token, row)
        chosen = steps.best(lambda gain, seconds: price * gain - seconds, view.num_prefill_rows)
        if chosen is None:
            return none
        if view.cost.stop_seconds is None or not _worth_a_look(view.cost.stop_seconds, fastest):
            return chosen.lengths
        self._stopping = self._rule(view, view.cost, view.cost.stop_seconds, price)
        return np.where(chosen.lengths > 0, np.minimum(view.limit, DEPTH), 0)

    def _rule(self, view: BatchView, cost: Cost, stop_seconds: float, price: float) -> Stopping:
        """Every further token is drafted for all that go on: what it costs depends on how many there are already."""
        size, context = view.num_requests, float(view.num_tokens.sum())
        rows = cost.verify(size * np.arange(1, DEPTH + 2), context, view.num_prefill_rows)
        seconds = cost.next_draft(size, context) + np.diff(rows) + stop_seconds
        return Stopping(self._looked_at.rates_of(view), seconds, price, self._calibration.weights)

    def _price(self, share: float, row: float) -> float:
        """Seconds a token is worth: `share` is its part of a step without prompts, `row` what one saves beside them.

        There are as many steps with prompts as there are prompts; what a token saves, wherever it comes, is its share
        of a step without. Only where hardly any such step is left does it save no more than a row.
        """
        return row + (share - row) * min(1.0, (1 - self._beside_prompts) / SLACK)

    def _can_never_pay(self, view: BatchView, cost: Cost, row: float, surest: float) -> bool:
        """Whether no number of slots would, were all as sure as the surest: mostly so where prompts fill every step."""
        size, context, rows = view.num_requests, float(view.num_tokens.sum()), view.num_prefill_rows
        price = self._price(float(cost.verify(size, context) + cost.host) / size, row)
        slots = np.arange(1, min(MOST_SLOTS, size * DEPTH) + 1)
        more = cost.verify(size + slots, context, rows) - cost.verify(size, context, rows)
        return bool((price * surest * slots <= more + cost.first_draft(-(-slots // DEPTH), 0.0)).all())


@dataclass(frozen=True)
class _Choice:
    """Lengths, and what is expected of them."""

    lengths: IntArray
    gains: FloatArray  # [B] tokens
    seconds: float  # of the step
    plain_seconds: float  # of the step without drafts

    @property
    def num_tokens(self) -> float:
        """Of the step."""
        return self.lengths.size + float(self.gains.sum())

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def slot_seconds(self) -> float:
        """What one drafted token costs, drafting and verification."""
        return (self.seconds - self.plain_seconds) / max(1, int(self.lengths.sum()))


class _Steps:
    """The steps that could be taken: the likeliest n slots that are no deeper than d, for every n [N] and d [D]."""

    def __init__(self, view: BatchView, cost: Cost, survival: FloatArray) -> None:
        self._cost = cost
        self._size = view.num_requests
        self._context = float(view.num_tokens.sum())
        depth = min(DEPTH, MOST_SLOTS // self._size + 2)
        flat = survival[:, :depth].ravel()
        # of one request always in the order of their positions, for survival falls
        order = np.argsort(-flat, kind="stable")[: min(MOST_SLOTS, np.count_nonzero(flat))]
        self._owner, self._level = order // depth, order % depth
        self._survival = flat[order]
        levels = self._level == np.arange(self._level.max(initial=0) + 1)[:, None]
        drafting = levels.cumsum(axis=1)  # [D, N] requests that draft each position
        self._count = drafting.cumsum(axis=0)
        self._gain = np.where(levels, self._survival, 0.0).cumsum(axis=1).cumsum(axis=0)
        context = drafting * (self._context / self._size)
        seconds = cost.next_draft(drafting, context)
        seconds[0] = cost.first_draft(drafting[0], context[0])
        self._draft_seconds = seconds.cumsum(axis=0) + cost.host

    def fastest(self) -> _Choice | None:
        """The most tokens per second, without prompts beside them."""
        return self.best(lambda gain, seconds: (self._size + gain) / seconds)

    def best(self, value: Value, prompt_rows: int = 0) -> _Choice | None:
        """The most valuable step; None if that is the one without drafts."""
        plain = float(self._cost.verify(self._size, self._context, prompt_rows)) + self._cost.host
        seconds = self._cost.verify(self._size + self._count, self._context, prompt_rows) + self._draft_seconds
        values = value(self._gain, seconds)
        if values.size == 0:
            return None
        best = int(values.argmax())
        if values.flat[best] <= value(np.zeros(1), np.array([plain]))[0]:
            return None
        depth, last = divmod(best, values.shape[1])
        taken = self._level[: last + 1] <= depth
        owner = self._owner[: last + 1][taken]
        lengths = np.bincount(owner, minlength=self._size)
        gains: FloatArray = np.bincount(owner, self._survival[: last + 1][taken], minlength=self._size).astype(
            np.float64
        )
        return _Choice(lengths, gains, float(seconds.flat[best]), plain)


def _row_beside_prompts(view: BatchView, cost: Cost) -> float:
    """Seconds of one more row in a step that has prompts."""
    rows = view.num_requests + np.array([0, PROMPT_ROWS])
    few, many = cost.verify(rows, float(view.num_tokens.sum()), PROMPT_ROWS)
    return float(many - few) / PROMPT_ROWS


def _worth_a_look(stop_seconds: float, fastest: _Choice) -> bool:
    """Whether to look at drafts while they are made; what that gains is shared by all whose drafts end together."""
    size = fastest.lengths.size
    return size <= MOST_LOOKED_AT and LOOK_GAIN / size * fastest.seconds > stop_seconds * int(fastest.lengths.max())


@dataclass(frozen=True)
class _Catchup:
    """What it takes before everybody who drafts in a step can, and what that brings. Arrays are [B]."""

    behind: NDArray[np.bool_]
    seconds: FloatArray  # each one's part
    saved: FloatArray  # seconds, in every step

    @classmethod
    def of(cls, view: BatchView, cost: Cost, fastest: _Choice, worth: float) -> _Catchup:
        """`worth`: seconds that a token is, where nobody drafts."""
        drafting = fastest.lengths > 0
        behind = drafting & (view.lag > KEPT_UP)
        saved = worth * fastest.gains - fastest.slot_seconds * fastest.lengths
        if not behind.any():
            return cls(behind, np.zeros(behind.size), saved)
        number, context = int(drafting.sum()), float(view.num_tokens[drafting].sum())
        rows = int(view.lag[drafting].sum())
        late = float(cost.first_draft(number, context, rows) - cost.first_draft(number, context))
        share = np.where(behind, view.lag, 0)
        return cls(behind, late * share / int(share.sum()), saved)

    def too_dear(self, view: BatchView, fastest: _Choice) -> NDArray[np.bool_]:
        """Whose part exceeds what they save until they end."""
        rest = np.minimum(view.remaining, TYPICAL_REST + view.num_output) / (1 + fastest.gains)  # steps
        dear: NDArray[np.bool_] = self.behind & (self.saved * rest <= self.seconds)
        return dear

    def pays_together(self) -> bool:
        """Whether to begin drafting at all is worth all of it: those who come later join for little."""
        return float(self.saved.sum()) * HORIZON > float(self.seconds.sum())
