"""What the forwards of one pair of models cost on one machine: seconds by rows and context, measured and kept.

A `Profile` is plain numbers, saved as JSON by what it was measured on; `ProfiledCost` predicts with it and corrects
itself by the steps that run. Knows plans and seconds, no tensors: the policies and the simulator read it.

A forward's seconds are linear in the tokens of context it reads, at every number of rows; between two measured numbers
of rows they are interpolated, or, where graphs of fixed sizes run, those of the next larger size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.errors import ConfigError
from faser.machine import atomic_write
from faser.step import StepPlan, StepSeconds

VERSION = 4
FADING = 0.98  # weight of what was known of the machine's speed against the next step
KEPT_UP = 2  # context tokens a draft computes at most where nobody's fell behind
LEAST_AWAITED = 1e-4  # seconds
LEARNING, FORGETTING, MOST_SLOWER = 0.1, 0.999, 2.0  # how fast, of steps that overlap, and how much one may say
MOST_FACTOR = 4.0  # how far the steps that run may correct a profile that was measured
MAX_KEPT_ERROR = 0.2  # mean error of predictions, as a share, of a profile that is worth keeping
# By kind of profile: how many steps it counts as against those that run, the error of a prediction to begin with, and
# the bounds of its corrections.
TRUST = {
    "measured": (50, 0.05, MOST_FACTOR),
    "idle": (50, 0.05, MOST_FACTOR),
    "quick": (10, 0.2, 16.0),
    "assumed": (0, 0.5, 256.0),
}
SHAPE_LEARNING = 0.03  # share of a step's error, beyond the usual, that goes to predictions for its number of rows
USUAL_FADING = 0.7  # of the usual error: what all sizes share is the machine's speed
MAX_SHAPE_ERROR = 0.5  # of log seconds, that one step may tell
SHAPE_STEPS = 16  # between two updates of the table
ERROR_FADING = 0.97  # of the mean error

Rows = IntArray | int
Context = IntArray | FloatArray | float


@dataclass(frozen=True)
class Curve:
    """Seconds of one kind of forward. All tuples are of one size, rows ascending."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]  # with no context
    per_token: tuple[float, ...]  # more, for each token of context that is read
    stepped_to: int = 0  # rows up to so many run as the next larger of `rows`

    def __post_init__(self) -> None:
        sizes = {len(self.rows), len(self.seconds), len(self.per_token)}
        rises = all(a < b for a, b in zip((0, *self.rows), self.rows, strict=False))
        if len(sizes) != 1 or not self.rows or not rises:
            raise ConfigError("a curve needs rows that rise from 1 on, and as many seconds and seconds per token")
        if not all(0 <= each < math.inf for each in (*self.seconds, *self.per_token)):
            raise ConfigError("a curve's seconds are finite numbers of at least 0")

    def monotone(self) -> Curve:
        """More rows never take less time: where measurements say so, neighbours share their mean."""
        pools: list[list[float]] = []  # [sum, count] of neighbours that share a value
        for value in self.seconds:
            pools.append([value, 1.0])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                total, count = pools.pop()
                pools[-1][0] += total
                pools[-1][1] += count
        seconds = [total / count for total, count in pools for _ in range(int(count))]
        return replace(self, seconds=tuple(seconds))

    @property
    def is_stepped(self) -> bool:
        return self.stepped_to >= self.rows[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The rows at which it becomes dearer at once."""
        return tuple(size for size in self.rows if size <= self.stepped_to)

    @property
    def most_rows(self) -> int:
        """The largest measured; more than that a stepped curve does not run."""
        return self.rows[-1]

    @cached_property
    def rise(self) -> float:
        """Seconds of each row beyond the last."""
        if self.is_stepped or len(self.rows) == 1:
            return 0.0
        return max(0.0, (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2]))

    @cached_property
    def table(self) -> tuple[FloatArray, FloatArray]:
        """Seconds and seconds per token of every number of rows up to the last: policies ask for thousands at once."""
        rows = np.arange(self.rows[-1] + 1)
        stepped = rows[: self.stepped_to + 1]
        stepped[:] = np.array(self.rows)[np.searchsorted(self.rows, stepped)]
        seconds, per_token = (np.interp(rows, self.rows, each) for each in (self.seconds, self.per_token))
        seconds[0] = per_token[0] = 0.0
        return seconds, per_token

    def __call__(self, rows: Rows, context: Context) -> FloatArray:
        """For each number of rows; beyond the last measured one the last rise goes on. No rows take no time."""
        return _look_up(self.table, self.rise, rows, context)


def _look_up(table: tuple[FloatArray, FloatArray], rise: float, rows: Rows, context: Context) -> FloatArray:
    seconds, per_token = table
    last = seconds.size - 1
    index = min(rows, last) if isinstance(rows, int) else np.minimum(rows, last)
    found: FloatArray = seconds[index] + per_token[index] * context
    return found + rise * (rows - index) if rise else found


NOTHING = Curve((1,), (0.0,), (0.0,))
SAME = Curve((1,), (1.0,), (0.0,))


@dataclass(frozen=True)
class Beside:
    """Drafting beside a verification on a device that is shared in one way; all by requests."""

    draft_sms: int  # that drafting has to itself; 0: all are shared
    draft: Curve  # seconds on its part of the device, while nothing else runs
    verify: Curve  # likewise
    together: Curve  # of both, when both run
    share: Curve  # by which that is more than the longer of these, of the shorter on the whole device
    draft_factor: Curve = SAME  # how many times as long it takes on its part as on the whole device
    verify_factor: Curve = SAME  # likewise; may be below 1, where its programs come out even on fewer SMs

    @classmethod
    def of(cls, draft_sms: int, batches: Mapping[int, tuple[StepSeconds, StepSeconds, float]]) -> Beside:
        """By requests: both in turn on the whole device and on their parts, and the seconds of both at once."""
        columns = []
        for apart, alone, together in batches.values():
            share = max(0.0, (together - max(alone.draft, alone.verify)) / min(apart.draft, apart.verify))
            factors = alone.draft / apart.draft, alone.verify / apart.verify
            columns.append((alone.draft, alone.verify, together, share, *factors))
        none = (0.0,) * len(batches)
        return cls(draft_sms, *(Curve(tuple(batches), each, none) for each in zip(*columns, strict=True)))

    def total(self, draft: float, verify: float, requests: int, draft_rows: int) -> float:
        """Seconds of both at once that take so many on the whole device, one after the other.

        Branches, `draft_rows` beyond the requests, are as good as free until drafting takes longer than the
        verification. For more rows than were measured drafting is taken to be as much slower as for those.
        """
        on_part = verify * float(self.verify_factor(requests, 0.0))
        drafting = draft * float(self.draft_factor(requests, 0.0))
        both = max(on_part, drafting) + float(self.share(requests, 0.0)) * min(draft, verify)
        branched = min(draft_rows, self.draft_factor.most_rows)
        return max(both, draft * float(self.draft_factor(branched, 0.0))) if draft_rows > requests else both


@dataclass(frozen=True)
class Profile:
    """The forwards of a target and its draft. A draft without a model has NOTHING for its curves."""

    about: Mapping[str, Any]  # what it holds for: hardware, models, dtype, versions
    verify: Curve  # rows of requests that decode, drafts included
    prompts: Curve  # likewise where prompt rows share the step, all rows counted
    first_draft: Curve  # requests whose draft kept up, by their number
    next_draft: Curve  # and each further token
    catch_up: Curve  # the first draft where some have more to compute, by rows
    host: float  # seconds of a step outside both models
    stop_seconds: float | None = None  # of a look at a draft between two of its tokens; None: it cannot be looked at
    exit_check: Curve | None = None  # of an early exit's look at so many drafts, going on included; None: there is none
    exit_candidates: int = 0  # that it compares them with; 0: the whole vocabulary
    besides: tuple[Beside, ...] = ()  # ways to draft beside a verification
    await_seconds: float = 0.0  # of a step that does not begin before the one before it is known, more than of others
    # of configurations it was not made from: share of the seconds, mean and worst
    errors: Mapping[str, float] = field(default_factory=dict)
    # a key of TRUST. measured: all of it; idle: all but early exit and overlap; quick: a few steps; assumed: nothing
    kind: str = "measured"

    def why_not_kept(self) -> str | None:
        """The one rule by which all commands keep a profile: why it is not good enough, or None if it is."""
        if self.kind == "assumed":
            return "nothing was measured"
        names = ["verify"] + ["draft"] * any(self.first_draft.seconds)
        unknown = [name for name in names if name not in self.errors]
        if unknown:
            return f"there was no time to check its predictions ({', '.join(unknown)})"
        wrong = [f"{name} {100 * self.errors[name]:.0f} %" for name in names if self.errors[name] > MAX_KEPT_ERROR]
        return (
            f"its predictions are off by more than {100 * MAX_KEPT_ERROR:.0f} % ({', '.join(wrong)})" if wrong else None
        )

    @property
    def accuracy(self) -> str:
        """The errors, in a line for people."""
        said = [
            f"{name} {100 * self.errors[name]:.1f} % off (worst {100 * self.errors.get(f'{name}_worst', 0.0):.1f} %)"
            for name in ("verify", "draft")
            if name in self.errors
        ]
        return ", ".join(said) or "how far it is off was not measured"

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for what no profile is."""
        version = given.get("version") if isinstance(given, Mapping) else None
        if version != VERSION:
            raise ConfigError(f"no profile: version {version!r}; expected {VERSION}")
        try:
            curves = {name: _curve_of(given[name]) for name in CURVES}
            errors = {str(name): float(error) for name, error in given["errors"].items()}
            looks, check = given["stop_seconds"], given.get("exit_check")
            return cls(
                dict(given["about"]),
                host=float(given["host"]),
                stop_seconds=None if looks is None else float(looks),
                exit_check=None if check is None else _curve_of(check),
                exit_candidates=int(given.get("exit_candidates", 0)),
                besides=tuple(_beside_of(each) for each in given.get("besides", ())),
                await_seconds=float(given.get("await_seconds", 0.0)),
                errors=errors,
                kind=_kind_of(given.get("kind", "measured")),
                **curves,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"no profile, though it says version {VERSION} ({type(error).__name__}: {error})"
            ) from None

    def save(self, path: Path) -> None:
        atomic_write(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a profile ({error})") from None


CURVES = ("verify", "prompts", "first_draft", "next_draft", "catch_up")


def _curve_of(given: Mapping[str, Any]) -> Curve:
    return Curve(
        tuple(map(int, given["rows"])),
        tuple(map(float, given["seconds"])),
        tuple(map(float, given["per_token"])),
        int(given["stepped_to"]),
    )


def _kind_of(given: object) -> str:
    if given not in TRUST:
        raise ValueError(f"kind {given!r} is none of {', '.join(TRUST)}")
    return str(given)


def _beside_of(given: Mapping[str, Any]) -> Beside:
    return Beside(int(given["draft_sms"]), **{name: _curve_of(given[name]) for name in given if name != "draft_sms"})


class Work(NamedTuple):
    """What a plan asks of the two models, in the terms of a profile."""

    rows: int  # of requests that decode, drafts included
    prompt_rows: int
    context: int  # tokens that the target reads
    num_drafting: int  # requests the draft computes anything for
    catch_up_rows: int  # all rows of the draft's first forward where somebody's draft fell behind, else 0
    draft_context: int


def work_of(plan: StepPlan) -> Work:
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows == 1)))
    num_rows = int(plan.num_rows.sum())
    longest = int(plan.draft_rows.max(initial=0))
    return Work(
        rows=num_decoding + int(plan.judged.sum()),
        prompt_rows=num_rows - num_decoding,
        context=num_rows + int(plan.start.sum()),
        num_drafting=int(np.count_nonzero(plan.draft_rows)) if longest else 0,
        catch_up_rows=int(plan.draft_rows.sum()) if longest > KEPT_UP else 0,
        draft_context=int((plan.draft_rows > 0) @ plan.num_tokens) if longest else 0,
    )


class Cost(Protocol):
    """Seconds, as policies ask for them. Rows may be arrays; the answer then has their shape."""

    @property
    def row_sizes(self) -> IntArray:
        """Rows at which a verification becomes dearer at once, ascending; none where it rises with every row."""
        ...

    @property
    def error(self) -> float:
        """Mean error of late predictions, as a share: how far these costs can be trusted."""
        ...

    @property
    def host(self) -> float:
        """Of every step, outside both models."""
        ...

    @property
    def stop_seconds(self) -> float | None:
        """Of a look at a draft between two of its tokens; None: it cannot be looked at."""
        ...

    @property
    def splits(self) -> tuple[int, ...]:
        """SMs that drafting may have to itself beside a verification (0: none), as far as it is known what it takes."""
        ...

    @property
    def await_seconds(self) -> float:
        """Of a step that does not begin before the one before it is known, more than of others."""
        ...

    def hidden(self, draft: float, verify: float, requests: int, draft_sms: int = 0, draft_rows: int = 0) -> float:
        """Of so many seconds of both for so many requests, those that overlapping hides.

        `draft_rows`, where there are more of them than requests: branches.
        """
        ...

    def verify(self, rows: Rows, context: Context, prompt_rows: int = 0) -> FloatArray:
        """The target, over so many rows of requests that decode, and prompt rows beside them."""
        ...

    def first_draft(self, requests: Rows, context: Context, rows: int = 0) -> FloatArray:
        """The draft's first token for so many requests. `rows`: those it computes if anybody's draft fell behind."""
        ...

    def next_draft(self, requests: Rows, context: Context) -> FloatArray:
        """Each further token."""
        ...


class ProfiledCost:
    """A profile, corrected by the steps that run: how fast the machine is of late, and by how much each number of rows
    deviates from that.
    """

    def __init__(self, profile: Profile) -> None:
        # of both at once, by split and whether there are branches
        self._beside_factors: dict[tuple[int, bool], float] = {}
        self._host = profile.host
        self.adopt(profile)

    def adopt(self, profile: Profile) -> None:
        """Go on with another profile of the same models and machine, which was measured just now."""
        self.profile = profile
        self._num_steps, self._error, self._most_factor = TRUST[profile.kind]
        self._error = profile.errors.get("verify", self._error)
        self._num_drafts = self._num_steps
        self._target_factor = self._draft_factor = 1.0
        self._await, self._num_awaited = profile.await_seconds, 4  # the profile counts as so many steps
        self._besides = {each.draft_sms: each for each in profile.besides}
        sizes = profile.verify.rows if profile.verify.is_stepped else ()
        self._row_sizes: IntArray = np.array(sizes, dtype=np.int64)
        # more rows than graphs have run as prompts do
        beyond = slice(profile.verify.most_rows + 1, None)
        tables = zip(profile.verify.table, profile.prompts.table, strict=True)
        seconds, per_token = (np.concatenate((mine, others[beyond])) for mine, others in tables)
        self._measured: tuple[FloatArray, FloatArray] = seconds, per_token
        self._pure = self._measured  # the same, with the deviations
        # log deviation of a verification without prompts, at 1, 2, 4, … rows
        self._shape: FloatArray = np.zeros((seconds.size - 1).bit_length() + 1)
        self._num_shaped = 0
        self._usual_error = 0.0

    @property
    def row_sizes(self) -> IntArray:
        return self._row_sizes

    @property
    def error(self) -> float:
        return self._error

    @property
    def host(self) -> float:
        return self._host

    @property
    def stop_seconds(self) -> float | None:
        return self.profile.stop_seconds

    @property
    def splits(self) -> tuple[int, ...]:
        return tuple(self._besides)

    @property
    def await_seconds(self) -> float:
        return self._await

    @property
    def factors(self) -> tuple[float, float]:
        """Of the target's seconds and the draft's."""
        return self._target_factor, self._draft_factor

    def verify(self, rows: Rows, context: Context, prompt_rows: int = 0) -> FloatArray:
        seconds: FloatArray = self._target_factor * self._verify(rows, context, prompt_rows)
        return seconds

    def exit_check(self, drafts: int) -> float:
        """Of an early exit's look at so many drafts."""
        check = self.profile.exit_check
        return 0.0 if check is None else float(self._target_factor * check(drafts, 0.0))

    def first_draft(self, requests: Rows, context: Context, rows: int = 0) -> FloatArray:
        seconds: FloatArray = self._draft_factor * self._first_draft(requests, context, rows)
        return seconds

    def next_draft(self, requests: Rows, context: Context) -> FloatArray:
        seconds: FloatArray = self._draft_factor * self.profile.next_draft(requests, context)
        return seconds

    def parts(self, plan: StepPlan) -> StepSeconds:
        """Seconds of both models in the step."""
        lead, draft, verify = self._corrected(plan)
        return StepSeconds(lead + draft, verify, self._hidden_in(plan, draft, verify))

    def predict(self, plan: StepPlan) -> float:
        """Seconds of the step."""
        return self.parts(plan).total + self._host + (self._await if plan.waits else 0.0)

    def hidden(self, draft: float, verify: float, requests: int, draft_sms: int = 0, draft_rows: int = 0) -> float:
        """Of so many seconds of both for so many requests, those that overlapping hides; negative where it slows.

        None, for more requests than were measured.
        """
        beside = self._besides.get(draft_sms)
        if beside is None or requests > beside.share.most_rows:
            return 0.0
        factor = self._beside_factors.get((draft_sms, draft_rows > requests), 1.0)
        return draft + verify - factor * beside.total(draft, verify, requests, draft_rows)

    def _hidden_in(self, plan: StepPlan, draft: float, verify: float) -> float:
        """Likewise, of a plan that drafts for so long beside its verification."""
        if not plan.overlaps or not plan.lengths.any():
            return 0.0
        requests = int(np.count_nonzero(plan.lengths))
        return self.hidden(draft, verify, requests, plan.draft_sms, requests + int(plan.num_branches.sum()))

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        """Take in how long a step really took, by its parts where they were measured."""
        self._forget(_way(plan) if plan.overlaps else None, plan.waits)
        if plan.overlaps:
            if spent.total > 0:
                self._learn_beside(plan, spent)
            if plan.waits and spent.total > 0:
                more = min(max(seconds - spent.total - self._host, 0.0), 2 * self._await + LEAST_AWAITED)  # no pause
                self._num_awaited += 1
                self._await += max(1 / self._num_awaited, LEARNING) * (more - self._await)
            return
        _, draft, verify = self._of_plan(plan)
        self._learn_error(self._draft_factor * draft + self._target_factor * verify, spent.draft + spent.verify)
        if verify > 0 and spent.verify > 0:
            # one pause of the process is no speed of the machine: a step counts as twice what it should be at most
            most = self._draft_factor * draft + self._target_factor * verify + self._host
            self._host += (1 - FADING) * (min(max(seconds - spent.draft - spent.verify, 0.0), most) - self._host)
            if plan.only_decodes:
                self._learn_shape(int(plan.num_rows.sum() + plan.judged.sum()), spent.verify, verify)
            self._num_steps += 1
            self._target_factor = self._moved(self._target_factor, spent.verify / verify, self._num_steps)
        if draft > 0 and spent.draft > 0:
            self._num_drafts += 1
            self._draft_factor = self._moved(self._draft_factor, spent.draft / draft, self._num_drafts)

    def _moved(self, factor: float, ratio: float, num_steps: int) -> float:
        """A factor after one more step: a mean of the first steps, then a slow average."""
        weight = max(1 - FADING, 1 / (num_steps + 1))
        return min(self._most_factor, max(1 / self._most_factor, factor + weight * (ratio - factor)))

    def _learn_error(self, predicted: float, measured: float) -> None:
        if predicted > 0 and measured > 0:
            error = min(1.0, abs(math.log(measured / predicted)))
            self._error = ERROR_FADING * self._error + (1 - ERROR_FADING) * error

    def _learn_shape(self, num_rows: int, measured: float, verify: float) -> None:
        """Move the deviation at the two powers of two around this number of rows.

        What steps of all sizes are off by is left to the factor.
        """
        error = math.log(measured / (self._target_factor * verify))
        error = min(MAX_SHAPE_ERROR, max(-MAX_SHAPE_ERROR, error))
        self._usual_error = USUAL_FADING * self._usual_error + (1 - USUAL_FADING) * error
        moved = SHAPE_LEARNING * (error - self._usual_error)
        below, share = divmod(math.log2(num_rows), 1.0)
        for knot, weight in ((int(below), 1 - share), (int(below) + 1, share)):
            if knot < self._shape.size:
                self._shape[knot] += weight * moved
        self._num_shaped += 1
        if self._num_shaped % SHAPE_STEPS == 0:
            self._pure = self._shaped()

    def _shaped(self) -> tuple[FloatArray, FloatArray]:
        """The table of verifications with the deviations; more rows never take less time."""
        seconds, per_token = self._measured
        rows = np.log2(np.maximum(np.arange(seconds.size), 1))
        factor = np.exp(np.interp(rows, np.arange(self._shape.size), self._shape))
        return np.maximum.accumulate(factor * seconds), factor * per_token

    def _forget(self, way: tuple[int, bool] | None, waits: bool) -> None:
        """What a step says nothing of becomes what the profile says: what was slow once is tried again."""
        for each, factor in self._beside_factors.items():
            if each != way:
                self._beside_factors[each] = FORGETTING * factor + 1 - FORGETTING
        if not waits:
            self._await += (1 - FORGETTING) * (self.profile.await_seconds - self._await)

    def _learn_beside(self, plan: StepPlan, spent: StepSeconds) -> None:
        """A step that overlapped says how long both take at once, not how long either does.

        Not one with prompts, which are verified on the whole device.
        """
        lead, draft, verify = self._corrected(plan)
        beside, requests = self._besides.get(plan.draft_sms), int(np.count_nonzero(plan.lengths))
        is_known = beside is not None and 0 < requests <= beside.share.most_rows
        if not is_known or not plan.only_decodes or spent.total <= lead:
            return
        way = _way(plan)
        factor = self._beside_factors.get(way, 1.0)
        expected = draft + verify - self._hidden_in(plan, draft, verify)
        ratio = min(MOST_SLOWER, max(1 / MOST_SLOWER, (spent.total - lead) / expected))
        moved = factor * (1 + LEARNING * (ratio - 1))
        self._beside_factors[way] = min(MOST_SLOWER, max(1 / MOST_SLOWER, moved))

    def _verify(self, rows: Rows, context: Context, prompt_rows: int) -> FloatArray:
        prompts = self.profile.prompts
        if prompt_rows:
            return prompts(rows + prompt_rows, context)
        return _look_up(self._pure, prompts.rise, rows, context)

    def _first_draft(self, requests: Rows, context: Context, rows: int) -> FloatArray:
        return self.profile.catch_up(rows, context) if rows else self.profile.first_draft(requests, context)

    def _corrected(self, plan: StepPlan) -> tuple[float, float, float]:
        """Seconds of a lead, of the other drafts and of the target."""
        lead, draft, verify = self._of_plan(plan)
        return self._draft_factor * lead, self._draft_factor * draft, self._target_factor * verify

    def _of_plan(self, plan: StepPlan) -> tuple[float, float, float]:
        """Likewise, uncorrected."""
        work = work_of(plan)
        verify = float(self._verify(work.rows, work.context, work.prompt_rows))
        if not work.num_drafting:
            return 0.0, 0.0, verify
        first = float(self._first_draft(work.num_drafting, work.draft_context, work.catch_up_rows))
        deeper = np.arange(1, int(plan.lengths.max()))[:, None] < plan.lengths
        rows, read = deeper.sum(axis=1), deeper @ plan.num_tokens
        lead = int(plan.lead.max(initial=0))
        if plan.outcomes:  # behind the first draft that is not verified
            rows[lead:] += plan.num_branches.sum()
            read[lead:] += plan.num_branches @ plan.num_tokens
        others = self.profile.next_draft(rows, read)
        if not lead:
            return 0.0, first + float(others.sum()), verify
        return first + float(others[: lead - 1].sum()), float(others[lead - 1 :].sum()), verify


def _way(plan: StepPlan) -> tuple[int, bool]:
    return plan.draft_sms, bool(plan.num_branches.any())
