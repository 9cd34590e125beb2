"""Predicts the seconds of steps from a profile, and corrects itself by the steps that run.

Knows plans and seconds, no tensors. The policies and the simulator use it. Three things are corrected: the speed of
each model (one factor), the seconds of verifications by rows (a smooth curve), and the seconds of the host. What
overlapping takes is corrected in overlap.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.curve import Context, Rows, Table, look_up
from faser.cost.overlap import OverlapCost
from faser.cost.profile import Profile
from faser.step import StepPlan, StepSeconds

SPEED_DECAY = 0.98  # of the speed factors and the host's seconds, at every step: half-life 34 steps
ERROR_DECAY = 0.97  # of the mean error, at every step: half-life 23 steps
COMMON_ERROR_DECAY = 0.7  # of the log error that all row counts share, at every step: half-life 2 steps
DEVIATION_RATE = 0.03  # share of a step's log error, less the common one, that moves the deviation at its row count
MAX_DEVIATION_ERROR = 0.5  # bound of one step's log error
TABLE_INTERVAL = 16  # steps between two updates of the corrected table
MAX_FACTOR = 4.0  # bound of the speed factors of a measured profile
MAX_STEADY_LAG = 2  # context tokens a draft computes first in steady state: the bonus, and the last draft if accepted


class _Trust(NamedTuple):
    """How far a profile is trusted, by its kind."""

    num_steps: int  # running steps that it counts as
    error: float  # initial mean error of predictions, as a share
    max_factor: float  # bound of the speed factors


TRUST = {
    "measured": _Trust(50, 0.05, MAX_FACTOR),
    "idle": _Trust(50, 0.05, MAX_FACTOR),
    "quick": _Trust(10, 0.2, 16.0),
    "assumed": _Trust(0, 0.5, 256.0),
}


class ProfiledCost:
    """A profile and the corrections of it. Where rows may be arrays the answer has their shape."""

    drafts_whole_batch = False  # whether the draft computes all requests of a step if it drafts for one

    def __init__(self, profile: Profile, draft_span: int | None = None) -> None:
        self._draft_span = draft_span  # tokens of a context that the draft reads at most; None: all
        self.host = profile.host  # seconds of every step outside both models
        self.overlap = OverlapCost()
        self.adopt(profile)

    def adopt(self, profile: Profile) -> None:
        """Go on with a newly measured profile of the same models and machine."""
        trust = TRUST[profile.kind]
        self.profile = profile
        self.error = profile.errors.get("verify", trust.error)  # mean error of recent predictions, as a share
        self._target, self._draft = _Speed(trust), _Speed(trust)
        self.overlap.adopt(profile.besides, profile.await_seconds)
        sizes = profile.verify.rows if profile.verify.is_stepped else ()
        self.row_sizes: IntArray = np.array(sizes, dtype=np.int64)  # of a verification's graphs; none: every row counts
        # more rows than the graphs of decoding have run as steps with prompts do
        beyond = slice(profile.verify.max_rows + 1, None)
        tables = zip(profile.verify.table, profile.prompts.table, strict=True)
        seconds, per_token = (np.concatenate((mine, others[beyond])) for mine, others in tables)
        self._decoding = _Deviations((seconds, per_token))

    @property
    def factors(self) -> tuple[float, float]:
        """Speed factors of the target and of the draft: measured / profiled seconds."""
        return self._target.factor, self._draft.factor

    # ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def verify(self, rows: Rows, context: Context, prompt_rows: int = 0) -> FloatArray:
        """The target over `rows` rows of decoding requests, with `prompt_rows` beside them."""
        return self._target.factor * self._verify(rows, context, prompt_rows)

    def exit_check(self, drafts: int) -> float:
        """Seconds of an early exit's check of `drafts` drafts."""
        check = self.profile.exit_check
        return 0.0 if check is None else float(self._target.factor * check(drafts, 0.0))

    def first_draft(self, requests: Rows, context: Context, rows: int = 0) -> FloatArray:
        """The draft's first token. `rows`: rows of that forward if any draft fell behind; 0: none did."""
        return self._draft.factor * self._first_draft(requests, context, rows)

    def next_draft(self, requests: Rows, context: Context) -> FloatArray:
        """Each further drafted token."""
        return self._draft.factor * self._next_draft(requests, context)

    def read_by_draft(self, num_tokens: IntArray) -> IntArray:
        """[B] tokens that the draft reads of contexts of num_tokens [B]."""
        return num_tokens if self._draft_span is None else np.minimum(num_tokens, self._draft_span)

    def parts(self, plan: StepPlan) -> StepSeconds:
        """Seconds of both models in the step."""
        lead, draft, verify = self._corrected(plan)
        return StepSeconds(lead + draft, verify, self.overlap.hidden_in(plan, draft, verify))

    def predict(self, plan: StepPlan) -> float:
        """Seconds of the step."""
        return self.parts(plan).total + self.host + (self.overlap.await_seconds if plan.waits else 0.0)

    def _verify(self, rows: Rows, context: Context, prompt_rows: int) -> FloatArray:
        prompts = self.profile.prompts
        if prompt_rows:
            return prompts(rows + prompt_rows, context)
        return look_up(self._decoding.table, prompts.slope, rows, context)

    def _first_draft(self, requests: Rows, context: Context, rows: int) -> FloatArray:
        context = self._seen(requests, context)
        return self.profile.catch_up(rows, context) if rows else self.profile.first_draft(requests, context)

    def _next_draft(self, requests: Rows, context: Context) -> FloatArray:
        return self.profile.next_draft(requests, self._seen(requests, context))

    def _seen(self, requests: Rows, context: Context) -> Context:
        """What the draft reads of these requests' contexts together, at most."""
        return context if self._draft_span is None else np.minimum(context, np.multiply(requests, self._draft_span))

    def _corrected(self, plan: StepPlan) -> tuple[float, float, float]:
        """Seconds of a lead, of the other drafts, and of the target."""
        lead, draft, verify = self._profiled(plan)
        return self._draft.factor * lead, self._draft.factor * draft, self._target.factor * verify

    def _profiled(self, plan: StepPlan) -> tuple[float, float, float]:
        """The same without the speed factors."""
        work = work_of(plan, self._draft_span)
        verify = float(self._verify(work.rows, work.context, work.prompt_rows))
        if not work.num_drafting:
            return 0.0, 0.0, verify
        first = float(self._first_draft(work.num_drafting, work.draft_context, work.catch_up_rows))
        lengths = plan.by_draft.lengths
        deeper = np.arange(1, int(lengths.max()))[:, None] < lengths
        rows, read = deeper.sum(axis=1), deeper @ self.read_by_draft(plan.num_tokens)
        lead = 0 if plan.overlap is None else int(plan.overlap.lead.max(initial=0))
        others = self._next_draft(rows, read)
        if not lead:
            return 0.0, first + float(others.sum()), verify
        return first + float(others[: lead - 1].sum()), float(others[lead - 1 :].sum()), verify

    # ── corrections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        """Take in what a step took: both models `spent`, where that was measured, and the whole step in `seconds`."""
        self.overlap.forget(plan)
        if plan.drafts_beside:
            if spent.total > 0:
                self.overlap.learn(plan, spent, *self._corrected(plan))
                if plan.waits:
                    self.overlap.learn_wait(seconds - spent.total - self.host)
            return
        _, draft, verify = self._profiled(plan)
        expected = self._draft.factor * draft + self._target.factor * verify
        self._learn_error(expected, spent.draft + spent.verify)
        if verify > 0 and spent.verify > 0:
            # a pause of the process says nothing of the host: bounded by the seconds expected of the whole step
            host = min(max(seconds - spent.draft - spent.verify, 0.0), expected + self.host)
            self.host += (1 - SPEED_DECAY) * (host - self.host)
            if plan.only_decodes:
                rows = int(plan.num_rows.sum() + plan.judged.sum())
                self._decoding.learn(rows, math.log(spent.verify / (self._target.factor * verify)))
            self._target.learn(spent.verify / verify)
        if draft > 0 and spent.draft > 0:
            self._draft.learn(spent.draft / draft)

    def _learn_error(self, predicted: float, measured: float) -> None:
        if predicted > 0 and measured > 0:
            error = min(1.0, abs(math.log(measured / predicted)))
            self.error = ERROR_DECAY * self.error + (1 - ERROR_DECAY) * error


class Work(NamedTuple):
    """What a plan asks of the two models, in the terms of a profile."""

    rows: int  # of decoding requests, drafts included
    prompt_rows: int
    context: int  # tokens that the target reads
    num_drafting: int  # requests with rows in the draft's first forward
    catch_up_rows: int  # rows of the draft's first forward if any draft fell behind; 0: none did
    draft_context: int  # tokens that the draft reads


def catch_up_rows(rows: IntArray) -> int:
    """Rows of the draft's first forward if any draft fell behind, else 0. `rows` [B]: of each request."""
    return int(rows.sum()) if rows.max(initial=0) > MAX_STEADY_LAG else 0


def work_of(plan: StepPlan, draft_span: int | None = None) -> Work:
    """`draft_span`: tokens of a context that the draft reads at most; None: all."""
    read = plan.num_tokens if draft_span is None else np.minimum(plan.num_tokens, draft_span)
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows == 1)))
    num_rows = int(plan.num_rows.sum())
    longest = int(plan.draft_rows.max(initial=0))
    return Work(
        rows=num_decoding + int(plan.judged.sum()),
        prompt_rows=num_rows - num_decoding,
        context=num_rows + int(plan.start.sum()),
        num_drafting=int(np.count_nonzero(plan.draft_rows)) if longest else 0,
        catch_up_rows=catch_up_rows(plan.draft_rows),
        draft_context=int((plan.draft_rows > 0) @ read) if longest else 0,
    )


class _Speed:
    """Measured / profiled seconds of one model: the mean of the first steps, then a decaying average."""

    def __init__(self, trust: _Trust) -> None:
        self.factor = 1.0
        self._num_steps = trust.num_steps
        self._max_factor = trust.max_factor

    def learn(self, ratio: float) -> None:
        self._num_steps += 1
        weight = max(1 - SPEED_DECAY, 1 / (self._num_steps + 1))
        factor = self.factor + weight * (ratio - self.factor)
        self.factor = min(self._max_factor, max(1 / self._max_factor, factor))


class _Deviations:
    """How verifications without prompts deviate from the profile by rows, beyond what all row counts share."""

    def __init__(self, profiled: Table) -> None:
        self.table = profiled  # with the deviations
        self._profiled = profiled
        self._logs: FloatArray = np.zeros((profiled[0].size - 1).bit_length() + 1)  # at 1, 2, 4, … rows
        self._common_error = 0.0
        self._num_steps = 0

    def learn(self, num_rows: int, error: float) -> None:
        """Move the deviation at the two powers of two around this row count. `error`: log(measured / predicted)."""
        error = min(MAX_DEVIATION_ERROR, max(-MAX_DEVIATION_ERROR, error))
        self._common_error = COMMON_ERROR_DECAY * self._common_error + (1 - COMMON_ERROR_DECAY) * error
        moved = DEVIATION_RATE * (error - self._common_error)
        below, share = divmod(math.log2(num_rows), 1.0)
        for power, weight in ((int(below), 1 - share), (int(below) + 1, share)):
            if power < self._logs.size:
                self._logs[power] += weight * moved
        self._num_steps += 1
        if self._num_steps % TABLE_INTERVAL == 0:
            self.table = self._corrected()

    def _corrected(self) -> Table:
        """The profiled table times the deviations; seconds never fall as rows rise."""
        seconds, per_token = self._profiled
        rows = np.log2(np.maximum(np.arange(seconds.size), 1))
        factor = np.exp(np.interp(rows, np.arange(self._logs.size), self._logs))
        return np.maximum.accumulate(factor * seconds), factor * per_token
