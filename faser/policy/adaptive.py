"""`faser`, the default: a length for each request and each load, priced by what forwards cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.cost.profiled_cost import MAX_STEADY_LAG, ProfiledCost, catch_up_rows
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance, Calibration
from faser.policy.base import PRIOR_RATE, BatchView, Guesses, Outcome, Policy
from faser.policy.estimates import TYPICAL_REST, typical_rest
from faser.policy.evidence import UNTRUSTED_LENGTH, MeasuredGain, is_trusted
from faser.policy.residency import Regret, ResidencyRule
from faser.policy.tries import Tries
from faser.rules.stopping import Stopping

DEPTH = ADAPTIVE_MAX_LENGTH
MAX_DRAFTS = 512  # drafted tokens in one step; beyond 512 rows every row costs its full share
CHECK_GAIN = 0.15  # seconds a confidence check saves / seconds per drafted token, by replay (docs/lab.md)
MAX_CHECKED = 2  # requests with confidence checks: drafts end together, and among three one is mostly confident
TRAFFIC_SECONDS = 0.5  # time constant of the measured rate of prompt rows
LASTING_SHARE = 0.75  # of that rate, which is expected to last
MAX_RUNNING = 256  # requests a batch is expected to grow to
PROMPT_SHARE_DECAY = 0.99  # of the share of steps that have prompts, at every step: half-life 69 steps
SLACK = 0.1  # share of steps without prompts, below which a token is worth less and less (`_price`)
PROMPT_ROWS = 512  # prompt rows of the step from which is told what decoding adds to steps with prompts

DRAFTS = np.arange(MAX_DRAFTS + 1)
MIN_DRAFTING = -(-DRAFTS // DEPTH)  # fewest requests that can draft 0, 1, 2, … tokens together
POSITIONS = np.arange(DEPTH)
ROWS = np.arange(1, DEPTH + 2)  # verified rows of a request, by its length

Numbers = TypeVar("Numbers", IntArray, FloatArray)


class Adaptive(Policy):
    """Drafts the tokens that are most likely accepted, as long as each is worth more than it costs.

    Candidates are pairs (request, position). Survival is the chance that a request's draft is accepted up to that
    position (faser/policy/acceptance.py). For every depth and every number of drafted tokens, taken in order of
    value, the expected output tokens and the seconds of the step are computed; each position of the draft is priced
    with the requests that reach it and what the draft reads of their contexts.

    The value of a token is its survival times the request's weight, less what the draft reads for it. A token saves its
    request a row in a later step. With a long context that row is dear, for the target reads the context once in every
    step, whatever the length: the weight is the request's share of a step without drafts. Without weights short
    requests would hold up long ones, which then fill the batch.

    The fastest of these steps has the most tokens per second. Its seconds per token are the price: what a token saves
    later. Where prompts fill every step, a token saves only what it would have added to one: rows, the reading of its
    context, drafts. The lengths chosen maximise price × expected tokens - seconds of the step. If no drafts have a
    positive value, all lengths are 0 and the draft does not run.

    Requests whose drafts fell behind join if their catch-up takes fewer seconds than they will save until they end, all
    together, in the batch that recent traffic will lead to. So requests do not switch back and forth.

    Where one or two requests decode and a confidence check is cheap enough, lengths are the longest allowed and a rule
    stops drafting when another token is not worth its cost (faser/rules/stopping.py).

    A draft of which little is known is only tried: by a few requests, and also where it would pay only if it is better
    than expected (tries.py).

    Where costs predict steps too poorly to tell whether drafting pays, measured speed decides (evidence.py).

    Tokens from prompt lookup cost rows of the verification alone. A request looks its drafts up where that brings more
    accepted tokens than the draft would; and all requests do, or draft nothing, where not running the draft is faster.
    """

    name = "faser"
    max_length = DEPTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(DEPTH)
        self._checked_acceptance = Acceptance(DEPTH, is_checked=True)  # of drafts with confidence checks
        self._calibration = Calibration()
        self._measured = MeasuredGain()
        self._tries = Tries()
        self._is_try = False  # the lengths given last
        self._gain = 1.0  # factor in speed that the latest drafts are expected to bring
        self._cost: ProfiledCost | None = None  # the latest
        self._plain_seconds: dict[int, float] = {}  # latest prediction for a step without drafts, by requests
        self._stopping: Stopping | None = None
        self._prompt_rows = self._prompt_seconds = self._seconds = 0.0  # decaying sums over steps
        self._prompt_share = 0.0  # share of recent steps that have prompts

    def learn(self, outcome: Outcome) -> None:
        # with the next step planned already, the lengths given last may be that step's
        is_trying = self._is_try or not self._acceptance.is_proven
        was_try = is_trying and bool(outcome.of_draft[0].any())
        self._tries.learn(self._draft_steps(outcome) if is_trying else 0.0)
        if outcome.confidence is None:
            self._acceptance.learn(outcome)
        else:  # deeper tokens were drafted only where the draft was confident
            self._acceptance.learn(outcome, depth=1)
            self._checked_acceptance.learn(outcome)
            self._calibration.learn(outcome)
        if outcome.is_looked_up is None and not was_try:  # else the speed is not that of usual drafts alone
            self._measured.learn(outcome, self._plain_seconds.get(outcome.slots.size, 0.0))
        kept = math.exp(-outcome.seconds / TRAFFIC_SECONDS)
        self._prompt_rows = kept * self._prompt_rows + outcome.num_prefill_rows
        self._prompt_seconds = kept * self._prompt_seconds + outcome.seconds * (outcome.num_prefill_rows > 0)
        self._seconds = kept * self._seconds + outcome.seconds
        self._prompt_share += (1 - PROMPT_SHARE_DECAY) * ((outcome.num_prefill_rows > 0) - self._prompt_share)

    def stopping(self) -> Stopping | None:
        return self._stopping

    def lengths(self, view: BatchView) -> IntArray:
        self._stopping, self._is_try, self._cost = None, False, view.cost
        none = np.zeros(view.num_requests, dtype=np.int64)
        if not view.limit.any() or self._measured.rules_out(view.num_requests):
            return none
        if view.lookup is not None and view.lookup.is_alone:
            return self._paying(view)
        if self._acceptance.is_proven:
            lengths = self._paying(view)
            if lengths.any():
                self._tries.end(self._gain)
                return lengths
        if not self._acceptance.may_be_tried:
            self._tries.end()
            return none
        if view.num_prefill_rows and self._prompt_share < 1 - SLACK:  # what a try costs beside prompts is less clear
            return none
        assert view.cost is not None
        if not self._tries.may_go_on:
            return none
        hoped_gain = self._hoped_gain(view, view.cost)
        lengths = self._tries.lengths(view, view.cost, int(self._acceptance.num_accepted), hoped_gain)
        self._is_try = bool(lengths.any())
        return lengths

    def _draft_steps(self, outcome: Outcome) -> float:
        """What drafts cost in a step, in steps without drafts: by the profile, for a single step may be slow."""
        rows, cost = outcome.lag, self._cost
        if cost is None or not rows.any():
            return 0.0
        contexts = np.zeros_like(rows) if outcome.num_tokens is None else outcome.num_tokens
        context, is_drafted = float(contexts.sum()), rows > 0
        read = float(cost.read_by_draft(contexts[is_drafted]).sum())
        draft = cost.first_draft(int(np.count_nonzero(is_drafted)), read, catch_up_rows(rows))
        plain = cost.verify(rows.size, context)
        verified = cost.verify(rows.size + int(outcome.lengths.sum()), context) - plain
        return float((draft + verified) / (plain + cost.host))

    def _hoped_gain(self, view: BatchView, cost: ProfiledCost) -> float:
        """Factor in speed if the draft is as good as may be hoped; 1: it would not pay even then."""
        batch = _DecodingBatch(view, cost)
        value = self._survival(view, hopes=True) * batch.weights[:, None]
        steps = _StepPrices(batch, _DraftOrder.of(value, batch.reading))
        fastest = steps.fastest
        if fastest is None:
            return 1.0
        price = self._price(fastest.seconds_per_token, steps.seconds_beside)
        gain = batch.plain_seconds / (batch.size * fastest.seconds_per_token)
        pays = steps.most_valuable(price) is not None and self._measured.allows(batch.size, gain, cost.error)
        return gain if pays else 1.0

    def _paying(self, view: BatchView) -> IntArray:
        """The lengths of greatest value, by what is known."""
        none = np.zeros(view.num_requests, dtype=np.int64)
        may_draft = view.limit > 0
        assert view.cost is not None
        is_late = view.lag > MAX_STEADY_LAG
        if is_late[may_draft].all() and not self._catch_up_pays(view, view.cost, may_draft, may_draft):
            return none  # the usual case in large batches; what follows takes several times as long
        batch = _DecodingBatch(view, view.cost)
        self._plain_seconds[batch.size] = batch.plain_seconds
        value = self._survival(view) * batch.weights[:, None]
        max_price = self._price(batch.plain_seconds / batch.size, lambda: batch.plain_seconds_beside)
        is_alone = view.lookup is not None and view.lookup.is_alone
        if not is_alone and batch.can_never_pay(max_price * float(value.max())):
            return none
        drafts = _DraftOrder.of(value, None if is_alone else batch.reading)
        steps = _StepPrices(batch, drafts, np.zeros_like(may_draft) if is_alone else None)
        fastest = steps.fastest
        if fastest is None:
            return none
        drafting = fastest.lengths > 0
        late = drafting & is_late
        if late.any() and not self._catch_up_pays(view, view.cost, drafting, late):
            steps = _StepPrices(batch, drafts.without(is_late))
            fastest = steps.fastest
        if fastest is None:
            return none
        price = self._price(fastest.seconds_per_token, steps.seconds_beside)
        chosen = steps.most_valuable(price)
        if chosen is None:
            return none
        self._gain = expected_gain = batch.plain_seconds / (batch.size * fastest.seconds_per_token)
        if not self._measured.allows(batch.size, expected_gain, view.cost.error):
            return none
        longest = DEPTH if is_trusted(expected_gain, view.cost.error) else UNTRUSTED_LENGTH
        stop_seconds = None if is_alone else view.cost.profile.stop_seconds
        if stop_seconds is None or not self._checks_pay(view, view.cost, stop_seconds):
            return np.minimum(chosen.lengths, longest)
        self._stopping = self._rule(view, view.cost, stop_seconds, price)
        return np.where(chosen.lengths > 0, np.minimum(view.limit, longest), 0)

    def guesses(self, view: BatchView) -> Guesses:
        lookup = view.lookup
        if lookup is None or lookup.is_alone or not lookup.limit.any():
            return super().guesses(view)
        drafted = self.lengths(view)
        if self._is_try:
            return self._beside_try(view, drafted)
        own = np.where(drafted[:, None] > 0, self._survival(view), 0.0)
        found = lookup.survival[:, : own.shape[1]]
        is_better = (lookup.limit > 0) & (found.sum(axis=1) >= own.sum(axis=1))
        assert view.cost is not None
        batch = _DecodingBatch(view, view.cost)
        found, own = found * batch.weights[:, None], own * batch.weights[:, None]
        best = np.where(is_better[:, None], found, own)
        with_draft = _StepPrices(batch, _DraftOrder.of(best, np.where(is_better, 0.0, batch.reading)), ~is_better)
        without = _StepPrices(batch, _DraftOrder.of(found), np.zeros_like(is_better))
        steps = max((with_draft, without), key=_StepPrices.speed)
        fastest = steps.fastest
        if fastest is None:
            return Guesses(np.zeros_like(drafted), is_better)
        is_looked_up = lookup.limit > 0 if steps is without else is_better
        drafted = np.where(fastest.lengths > 0, drafted, 0)
        return Guesses(np.where(is_looked_up, self._lookup_lengths(view.cost, batch, steps), drafted), is_looked_up)

    def _beside_try(self, view: BatchView, tried: IntArray) -> Guesses:
        """The others look up what they found."""
        assert view.lookup is not None
        assert view.cost is not None
        batch = _DecodingBatch(view, view.cost)
        found = np.where(tried[:, None] > 0, 0.0, view.lookup.survival[:, :DEPTH]) * batch.weights[:, None]
        steps = _StepPrices(batch, _DraftOrder.of(found), np.zeros(tried.shape, dtype=np.bool_))
        looked_up = np.zeros_like(tried) if steps.fastest is None else self._lookup_lengths(view.cost, batch, steps)
        return Guesses(tried + looked_up, tried == 0)

    def _lookup_lengths(self, cost: ProfiledCost, batch: _DecodingBatch, steps: _StepPrices) -> IntArray:
        """The lengths of greatest value; only those of drafts that are looked up count."""
        fastest = steps.fastest
        assert fastest is not None
        chosen = steps.most_valuable(self._price(fastest.seconds_per_token, steps.seconds_beside))
        if chosen is None:
            return np.zeros_like(fastest.lengths)
        expected_gain = batch.plain_seconds / (batch.size * fastest.seconds_per_token)
        return np.minimum(chosen.lengths, DEPTH if is_trusted(expected_gain, cost.error) else UNTRUSTED_LENGTH)

    def expected_gain(self, view: BatchView) -> float:
        if not view.limit.any() or self._measured.rules_out(view.num_requests):
            return 1.0
        assert view.cost is not None
        batch = _DecodingBatch(view, view.cost)
        value = self._survival(view) * batch.weights[:, None]
        fastest = _StepPrices(batch, _DraftOrder.of(value, batch.reading)).fastest
        if fastest is None:
            return 1.0
        gain = batch.plain_seconds / (batch.size * fastest.seconds_per_token)
        # beside prompts drafts take rows and time that prompts could have
        return 1.0 + (gain - 1.0) * (1.0 - self._prompt_seconds / max(self._seconds, 1e-9))

    def residency_rule(self) -> ResidencyRule:
        return Regret()

    def _catch_up_pays(self, view: BatchView, cost: ProfiledCost, drafting: BoolArray, late: BoolArray) -> bool:
        """Whether the `late` requests save more seconds, together and until they end, than their catch-up takes."""
        number, context = int(np.count_nonzero(drafting)), float(drafting @ cost.read_by_draft(view.num_tokens))
        rows = int(drafting @ view.lag)
        seconds = float(cost.first_draft(number, context, rows) - cost.first_draft(number, context))
        rest = typical_rest(view)
        return float(late @ (rest * self._saved_by_token(view, cost))) > seconds

    def _saved_by_token(self, view: BatchView, cost: ProfiledCost) -> FloatArray:
        """[B] seconds that drafts save per output token, in the batch that recent traffic will lead to."""
        size, mean = self._coming_size(view, cost), _mean(view.num_tokens)
        tokens = 1 + self._acceptance.likely_rates.cumprod().cumsum()

        def saved(context: float) -> FloatArray:
            """[DEPTH] by length; linear in the context of all requests."""
            verify = cost.verify(size * ROWS, context) + cost.host
            drafts = cost.first_draft(size, context) + POSITIONS * cost.next_draft(size, context)
            found: FloatArray = (verify[0] - (verify[1:] + drafts) / tokens) / size
            return found

        without, with_context = saved(0.0), saved(size * mean)
        best = int(with_context.argmax())
        per_token = (with_context[best] - without[best]) / mean
        each: FloatArray = without[best] + per_token * view.num_tokens
        return each

    def _coming_size(self, view: BatchView, cost: ProfiledCost) -> int:
        """The batch size, at least the present one, at which output tokens per second meet what traffic asks for.

        Prompts take a share of the time, and every prompt asks for an answer. In a burst the batch has yet to grow, and
        in a large batch drafts save little: catching up now would never be repaid.
        """
        if view.num_requests >= MAX_RUNNING:
            return view.num_requests
        sizes = np.arange(view.num_requests, MAX_RUNNING + 1)
        context = _mean(view.num_tokens)
        seconds = cost.verify(sizes, (sizes * context).astype(np.float64)) + cost.host
        row = float(cost.verify(1, context, PROMPT_ROWS) - cost.verify(1, context)) / PROMPT_ROWS
        rows_per_second = LASTING_SHARE * self._prompt_rows / max(self._seconds, 1e-9)
        prompt = context - _mean(view.num_output)
        answer = _mean(np.minimum(view.num_output + view.remaining, TYPICAL_REST + 2 * view.num_output))
        asked = rows_per_second / prompt * answer  # output tokens per second
        suffices = sizes * max(0.0, 1 - rows_per_second * row) >= asked * seconds
        return int(sizes[suffices.argmax()]) if suffices.any() else MAX_RUNNING

    def _survival(self, view: BatchView, *, hopes: bool = False) -> FloatArray:
        """[B, depth] P(a draft is accepted up to each position), to a depth that MAX_DRAFTS leaves room for."""
        depth = min(DEPTH, MAX_DRAFTS // view.num_requests + 2)
        if view.lookup is not None and view.lookup.is_alone:
            return view.lookup.survival[:, :depth]
        survival: FloatArray = self._acceptance.position_rates(view, depth, hopes=hopes).cumprod(axis=1)
        survival[POSITIONS[:depth] >= view.limit[:, None]] = 0.0
        return survival

    def _rule(self, view: BatchView, cost: ProfiledCost, stop_seconds: float, price: float) -> Stopping:
        """Another token is drafted for all requests at once: its cost depends on how many they have drafted."""
        size, context = view.num_requests, float(view.num_tokens.sum())
        rows = cost.verify(size * ROWS, context, view.num_prefill_rows)
        read = float(cost.read_by_draft(view.num_tokens).sum())
        seconds = cost.next_draft(size, read) + (rows[1:] - rows[:-1]) + stop_seconds
        return Stopping(self._checked_acceptance.position_rates(view), seconds, price, self._calibration.weights)

    def _checks_pay(self, view: BatchView, cost: ProfiledCost, stop_seconds: float) -> bool:
        """Whether a confidence check saves more than its seconds; the requests of a batch share the gain.

        It saves the drafting of tokens that would be rejected: the less, the better the draft.
        """
        size = view.num_requests
        if size > MAX_CHECKED:
            return False
        rejected = min(1.0, (1 - float(self._acceptance.likely_rates[0])) / (1 - PRIOR_RATE))
        return rejected * CHECK_GAIN / size * float(cost.next_draft(size, 0.0)) > stop_seconds

    def _price(self, share: float, beside: Callable[[], float]) -> float:
        """Seconds a token is worth: `share` is its part of a step without prompts, `beside` what it adds to one with.

        A token saved beside prompts shortens a later step without prompts by `share`, as long as there are some.
        As the share of steps without prompts falls from SLACK to 0, the worth falls from `share` to `beside`.
        """
        weight = min(1.0, (1 - self._prompt_share) / SLACK)
        return share if weight == 1.0 else weight * share + (1 - weight) * beside()


class _DecodingBatch:
    """Seconds of the step, by the number of drafted tokens: looked up once per view."""

    def __init__(self, view: BatchView, cost: ProfiledCost) -> None:
        self.size = view.num_requests
        self.host = cost.host
        self._cost = cost
        self._context = float(view.num_tokens.sum())
        self._tokens, self._read = view.num_tokens, cost.read_by_draft(view.num_tokens)
        self._max_drafts = min(MAX_DRAFTS, self.size * DEPTH)
        rows, prompt_rows = self.size + DRAFTS[: self._max_drafts + 1], view.num_prefill_rows
        # [drafts + 1] of the verification: without prompt rows, and with those of this step
        self.alone = cost.verify(rows, self._context)
        self.beside = cost.verify(rows, self._context, prompt_rows) if prompt_rows else self.alone

    @property
    def plain_seconds(self) -> float:
        """Of a step without drafts and prompts."""
        return float(self.alone[0]) + self.host

    @cached_property
    def weights(self) -> FloatArray:
        """[B] the request's share of a step without drafts, over the mean share: rows are alike, contexts are not."""
        own = self._tokens * (float(self.alone[0] - self._cost.verify(self.size, 0.0)) / self._context)
        weights: FloatArray = 1 + (own - own.mean()) * (self.size / self.plain_seconds)
        return weights

    @property
    def reading(self) -> FloatArray:
        """[B] what the draft reads of the request for each token, as a share of the seconds that a token is worth."""
        per_token = float(self._cost.next_draft(self.size, 1.0) - self._cost.next_draft(self.size, 0.0))
        share: FloatArray = self._read.astype(np.float64) * (per_token * self.size / self.plain_seconds)
        return share

    def draft_seconds(self, is_drafted: BoolArray, owner: IntArray) -> FloatArray:
        """[D, N] of each position, if the first n of tokens [N] are drafted. `is_drafted` [D, N]: at which position."""
        drafting, read = is_drafted.cumsum(axis=1), (is_drafted * self._read[owner]).cumsum(axis=1)
        seconds = self._cost.next_draft(drafting, read)
        seconds[0] = self._cost.first_draft(drafting[0], read[0])
        return seconds

    @cached_property
    def added(self) -> FloatArray:
        """[drafts + 1] of the verification: how much longer it makes a step that has prompts anyway."""
        few = self._cost.verify(self.size, self._context, PROMPT_ROWS)
        many = self._cost.verify(self.size + PROMPT_ROWS, self._context, PROMPT_ROWS)
        read = few - self._cost.verify(self.size, 0.0, PROMPT_ROWS)
        row = (many - few) / PROMPT_ROWS
        added: FloatArray = row * (self.size + DRAFTS[: self._max_drafts + 1]) + read
        return np.maximum(added, 1e-9)  # a profile may say that it adds nothing

    @property
    def plain_seconds_beside(self) -> float:
        """What a token without drafts adds to a step that has prompts."""
        return float(self.added[0]) / self.size

    def can_never_pay(self, worth: float) -> bool:
        """Whether no number of drafts pays, even if each saves `worth` seconds: usual if prompts fill every step."""
        drafts = slice(1, self._max_drafts + 1)
        first = self._cost.first_draft(MIN_DRAFTING[drafts], 0.0)
        return bool((worth * DRAFTS[drafts] <= self.beside[drafts] - self.beside[0] + first).all())


@dataclass(frozen=True)
class _DraftOrder:
    """Tokens that could be drafted, by falling value; those of one request in order of position. Arrays are [N]."""

    owner: IntArray
    position: IntArray
    value: FloatArray

    @classmethod
    def of(cls, value: FloatArray, reading: FloatArray | None = None) -> _DraftOrder:
        """Those with a value above 0. Values [B, depth] fall with the position. `reading` [B] moves requests back."""
        depth, flat = value.shape[1], value.ravel()
        rank = flat if reading is None else np.where(value > 0, value - reading[:, None], -np.inf).ravel()
        order = np.argsort(-rank, kind="stable")[: np.count_nonzero(flat)]
        owner = order // depth
        return cls(owner, order - depth * owner, flat[order])

    def without(self, requests: BoolArray) -> _DraftOrder:
        kept = ~requests[self.owner]
        return _DraftOrder(self.owner[kept], self.position[kept], self.value[kept])


@dataclass(frozen=True)
class _LengthChoice:
    """Lengths, and what is expected of the step."""

    lengths: IntArray
    num_tokens: float
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


class _StepPrices:
    """All steps considered: the likeliest n drafts among those of at most d positions, for every n [N] and d [D].

    `uses_draft` [B]: the requests whose tokens the draft makes; None: all. The others cost rows alone.
    """

    def __init__(self, batch: _DecodingBatch, drafts: _DraftOrder, uses_draft: BoolArray | None = None) -> None:
        self._batch = batch
        self._owner, self._position = drafts.owner[:MAX_DRAFTS], drafts.position[:MAX_DRAFTS]
        value = drafts.value[:MAX_DRAFTS]
        is_at = self._position == POSITIONS[: self._position.max(initial=0) + 1, None]
        reaching = is_at.cumsum(axis=1)  # [D, N] requests that have a draft at each position
        is_drafted = is_at if uses_draft is None else is_at & uses_draft[self._owner]
        self._draft_seconds = _sum_down(batch.draft_seconds(is_drafted, self._owner)) + batch.host
        self._gain = _sum_down((is_at * value).cumsum(axis=1))
        self._count = _sum_down(reaching)

    @cached_property
    def fastest(self) -> _LengthChoice | None:
        """The step with the most tokens per second, without prompt rows."""
        size = self._batch.size
        return self._best(self._batch.alone, lambda gain, seconds: (size + gain) / seconds)

    def seconds_beside(self) -> float:
        """The least seconds that a token adds to a step that has prompts."""
        size, host = self._batch.size, self._batch.host
        best = self._best(self._batch.added, lambda gain, seconds: (size + gain) / (seconds - host))
        return self._batch.plain_seconds_beside if best is None else (best.seconds - host) / best.num_tokens

    def speed(self) -> float:
        """Tokens per second of the fastest step; 0 if it has no drafts."""
        fastest = self.fastest
        return 0.0 if fastest is None else 1 / fastest.seconds_per_token

    def most_valuable(self, price: float) -> _LengthChoice | None:
        """The step with the largest price × gain - seconds, with the prompt rows of this step."""
        return self._best(self._batch.beside, lambda gain, seconds: price * gain - seconds)

    def _best(self, verify: FloatArray, value: Callable[[Any, Any], Any]) -> _LengthChoice | None:
        """The step with the largest value(gain, seconds); None if it has no drafts. `verify`: seconds by drafts."""
        if not self._owner.size:
            return None
        plain = float(verify[0]) + self._batch.host
        seconds = verify[self._count] + self._draft_seconds
        values = value(self._gain, seconds)
        best = int(values.argmax())
        if values.flat[best] <= value(0.0, plain):
            return None
        depth, last = divmod(best, values.shape[1])
        taken = self._position[: last + 1] <= depth
        lengths = np.bincount(self._owner[: last + 1][taken], minlength=self._batch.size)
        return _LengthChoice(lengths, self._batch.size + float(self._gain.flat[best]), float(seconds.flat[best]))


def _mean(numbers: IntArray) -> float:
    """Twice as fast as numbers.mean()."""
    return int(numbers.sum()) / numbers.size


def _sum_down(rows: Numbers) -> Numbers:
    """[D, N] cumulative sum over D, in place: three times as fast as cumsum(axis=0) for a few long rows."""
    for above, row in pairwise(rows):
        row += above
    return rows
