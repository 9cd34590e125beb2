"""Simulated machines whose seconds are a profile's own predictions: profiling one must give its profile back."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from faser.arrays import IntArray
from faser.cost.curve import NOTHING, Curve
from faser.cost.overlap import OverlapProfile
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import Limits
from faser.runtime.device import Profiling
from faser.runtime.profiling.batches import Subject
from faser.runtime.profiling.profiler import measure
from faser.step import StepPlan, StepResult
from tests.traffic.simulated import Time

MS, NS = 1e-3, 1e-9
CHECK = 0.03 * MS  # of a draft's confidence, between two of its tokens
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MIXED = (32, 64, 96, 128, 256, 384, 512, 768, 1024)
GPU = Profiling(12.0, SIZES, MIXED, most_rows=1024, most_context=2**18, most_prompt_rows=4096)
LIMITS = Limits(32, 2048, 4096, 4096)
CPU = Profiling(6.0, (), (), most_rows=64, most_context=4096, most_prompt_rows=128)


def line(rows: tuple[int, ...], base: float, slope: float, per_token: float, stepped_to: int) -> Curve:
    seconds = tuple(base + slope * each for each in rows)
    return Curve(rows, seconds, (per_token,) * len(rows), stepped_to)


def machine(how: Profiling) -> Profile:
    """Milliseconds like an H200's. Where no graphs run, all rows of a model cost alike."""
    rows, mixed = how.graph_rows or (1, 512), (*(how.mixed_rows or (1,)), 4096)
    stepped, below = max(how.graph_rows, default=0), max(how.mixed_rows, default=0)
    behind = 2.0 if stepped else 1.0
    return Profile(
        about={},
        verify=line(rows, 4 * MS, 0.02 * MS, 27 * NS, stepped),
        prompts=line(mixed, 4 * MS * behind, 0.02 * MS, 27 * NS, below),
        first_draft=line(rows, 0.8 * MS, 0.005 * MS, 7 * NS, stepped),
        next_draft=line(rows, 0.7 * MS, 0.004 * MS, 7 * NS, stepped),
        catch_up=line(mixed, 0.8 * MS * behind, 0.005 * MS / 1.5, 7 * NS, below),
        host=0.1 * MS,
    )


class Simulated:
    """Takes the seconds of a profile, and holds every plan against the limits."""

    def __init__(self, profile: Profile, limits: Limits, num_pages: int, page_size: int, slowness: float = 1.0) -> None:
        self.cost = ProfiledCost(profile)
        self.time = Time()
        self.limits = limits
        self.num_pages, self.page_size, self.slowness = num_pages, page_size, slowness
        self.taken: set[int] = set()  # slots
        self.plans: list[StepPlan] = []
        self.tables = np.full((2, limits.max_running, -(-limits.max_model_len // page_size)), -1)

    def execute(self, plan: StepPlan) -> StepResult:
        self.check(plan)
        parts = self.cost.parts(plan)
        if plan.stopping is not None:
            assert plan.stopping.watch(np.arange(plan.slots.size)).goes_on([1e-9] * plan.slots.size)
            parts = replace(parts, draft=parts.draft + (int(plan.lengths.max()) - 1) * CHECK)
        seconds = replace(parts, draft=self.slowness * parts.draft, verify=self.slowness * parts.verify)
        self.time.pass_by(seconds.total + self.cost.host)
        self.plans.append(plan)
        emitted = int(plan.samples.sum())
        return StepResult(
            plan.lengths, plan.lengths, np.zeros_like(plan.lengths), np.zeros(emitted, dtype=np.int64), seconds=seconds
        )

    def check(self, plan: StepPlan) -> None:
        limits, ends = self.limits, plan.num_tokens + plan.frontier + plan.lengths
        self.taken |= {new.slot for new in plan.admitted}
        self.taken -= set(plan.released)
        for table, writes in zip(self.tables, (plan.target_pages, plan.draft_pages), strict=True):
            assert ((writes.pages >= 0) & (writes.pages < self.num_pages)).all()
            table[writes.slots, writes.columns] = writes.pages
        assert plan.slots.size <= limits.max_running
        assert (plan.num_rows + plan.judged).sum() <= limits.max_batch_tokens
        assert plan.draft_rows.sum() <= limits.max_batch_tokens
        assert (plan.num_rows >= 1).all()
        assert (plan.start >= 0).all()
        assert (plan.draft_start >= 0).all()
        assert ends.max() < limits.max_model_len
        if limits.draft_max_len is not None:
            assert ends[plan.lengths > 0].max(initial=0) <= limits.draft_max_len + 1
        self.check_pages(plan, ends)

    def check_pages(self, plan: StepPlan, ends: IntArray) -> None:
        counts = -(-ends // self.page_size)
        held = [self.tables[0, slot, :count] for slot, count in zip(plan.slots, counts, strict=True)]
        pages = np.concatenate(held)
        assert (pages >= 0).all()
        assert len(set(pages.tolist())) == min(pages.size, self.num_pages), "requests share pages that need not"

    def close(self) -> None: ...


class SimulatedAhead(Simulated):
    """Runs a step when it is submitted."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.results: deque[StepResult] = deque()
        self.most = 0

    def submit(self, plan: StepPlan) -> None:
        self.results.append(self.execute(plan))
        self.most = max(self.most, len(self.results))

    def collect(self) -> StepResult:
        return self.results.popleft()

    def finish_launch(self) -> None: ...

    def may_run_ahead(self, plan: StepPlan) -> bool:
        return True

    def discard(self) -> None:
        self.results.clear()


SLOWER = {0: (1.0, 1.0), 16: (1.3, 1.1), 48: (1.2, 1.02)}  # drafting and verification on parts, by draft_sms
LEFT = {0: 0.8, 16: 0.1, 48: 0.9}  # of the shorter, for one request; for sixteen twice as much


class Shared(Simulated):
    """Has parts, on which both models are slower, and both at once take longer than the longer of them."""

    def __init__(self, profile: Profile, *args) -> None:
        besides = tuple(
            OverlapProfile(
                split, NOTHING, NOTHING, NOTHING, Curve((1, 16), (left, 2 * left), (0.0, 0.0)),
                *(Curve((1,), (each,), (0.0,)) for each in SLOWER[split]),
            )
            for split, left in LEFT.items()
        )  # fmt: skip
        super().__init__(replace(profile, besides=besides), *args)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        draft, verify = (1.0, 1.0) if plan.drafts_beside or plan.overlap is None else SLOWER[plan.overlap.draft_sms]
        spent = result.seconds
        return replace(result, seconds=replace(spent, draft=draft * spent.draft, verify=verify * spent.verify))


class Waiting(SimulatedAhead):
    """Takes longer for a step that waits for the one before it."""

    WAIT = 0.2 * MS

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.waits:
            self.time.pass_by(self.WAIT)
        return super().execute(plan)


def make_subject(how=GPU, limits=LIMITS, kind=Simulated, num_pages=20_000, **others) -> Subject:
    executor = kind(machine(how), limits, num_pages, 16)
    given = {"speculates": True, "has_draft_model": True, "usual_length": 4, **others}
    return Subject(
        executor=executor, limits=limits, num_pages=num_pages, page_size=16, vocab_size=100, how=how, **given
    )


def profile_of(subject: Subject, seconds: float | None = None, update=lambda done, total: None) -> Profile:
    return measure(subject, {"hardware": "simulated"}, seconds, update, subject.executor.time.now)
