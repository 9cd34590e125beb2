"""The profiler on machines that are known: one that takes simulated seconds, and tiny models that must not notice.

No test here measures time. What a simulated machine takes is a profile's own prediction, so that profiling it must
give that profile back.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from faser import build
from faser.arrays import IntArray
from faser.bench import command as bench_command
from faser.build import build_engine, load_pair
from faser.cli.main import main
from faser.config import EngineOptions
from faser.cost.profile import NOTHING, Beside, Curve, Profile, ProfiledCost
from faser.cost.step_cost import StepCost
from faser.engine.scheduler import Limits
from faser.errors import ConfigError
from faser.policy import BatchView, Fixed
from faser.runtime.device import Profiling
from faser.runtime.profiling import saved as saved_profiles
from faser.runtime.profiling.profiler import HELD_OUT, Sample, Subject, fit_line, make_curve, measure, measure_quick
from faser.step import StepPlan, StepResult, StepSeconds
from tests.bench.simulated import Time
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import make_draft, make_model

MS, NS = 1e-3, 1e-9
LOOK = 0.03 * MS  # at a draft, between two of its tokens
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
            parts = replace(parts, draft=parts.draft + (int(plan.lengths.max()) - 1) * LOOK)
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
            Beside(
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
        if plan.overlap is not None and plan.overlap.leads:
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


def assert_same(found: Curve, right: Curve, rows, context=(0, 2000)) -> None:
    for each in context:
        np.testing.assert_allclose(found(np.array(rows), each), right(np.array(rows), each), rtol=1e-3)


@pytest.mark.parametrize("kind", [Simulated, SimulatedAhead])
def test_profiling_a_machine_with_graphs_gives_the_machine(kind):
    subject = make_subject(kind=kind)
    found, right = profile_of(subject), machine(GPU)
    assert found.verify.rows == SIZES
    assert found.verify.is_stepped
    assert_same(found.verify, right.verify, range(1, 129))
    assert found.first_draft.rows == found.next_draft.rows == tuple(size for size in SIZES if size <= 32)
    assert_same(found.first_draft, right.first_draft, range(1, 33))
    assert_same(found.next_draft, right.next_draft, range(1, 33))
    assert found.prompts.rows == found.catch_up.rows == (*MIXED, 2048)
    assert found.prompts.stepped_to == found.catch_up.stepped_to == MIXED[-1]
    assert_same(found.prompts, right.prompts, range(33, 2049))
    assert_same(found.catch_up, right.catch_up, range(33, 2049))
    assert found.stop_seconds == pytest.approx(LOOK, rel=0.01)
    assert found.about == {"hardware": "simulated"}
    assert set(found.errors) == {"verify", "draft", "verify_worst", "draft_worst"}
    assert max(found.errors.values()) < 1e-3
    if kind is Simulated:
        assert found.host == pytest.approx(0.1 * MS, rel=0.01)
    else:
        assert subject.executor.most == 2, "no step was submitted while another ran"


def test_profiling_a_machine_without_graphs_gives_the_machine():
    found, right = profile_of(make_subject(CPU, Limits(16, 512, 2048, 2048))), machine(CPU)
    assert not any(curve.stepped_to for curve in (found.verify, found.prompts, found.first_draft, found.next_draft))
    assert_same(found.verify, right.verify, range(1, 65))
    assert_same(found.next_draft, right.next_draft, range(1, 17))
    assert_same(found.prompts, right.prompts, range(1, 512))
    assert found.errors["verify"] < 1e-3
    assert found.errors["draft"] < 0.02  # a request has one or two rows there, and counts as one and a half


def test_the_slots_are_given_back_and_progress_reaches_its_end():
    told = []
    subject = make_subject()
    profile_of(subject, update=lambda done, total: told.append((done, total)))
    assert subject.executor.taken == set()
    assert subject.executor.plans[-1].released == tuple(range(32))
    done, total = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == total[-1]


def plain_parts(subject: Subject, size: int) -> StepSeconds:
    """Of so many requests that draft three tokens each, by what the profiler ran."""
    alike = [plan for plan in subject.executor.plans if plan.drafts_beside and plan.slots.size == size]
    plan = replace(alike[0], overlap=None)
    return subject.executor.cost.parts(plan)


def test_drafting_beside_verification_is_measured_in_each_way_the_device_is_shared():
    subject = make_subject(kind=Shared, splits=(0, 16, 48))
    found = profile_of(subject)
    assert [each.draft_sms for each in found.besides] == [0, 16, 48]
    for beside in found.besides:
        left, (draft, verify) = LEFT[beside.draft_sms], SLOWER[beside.draft_sms]
        few = beside.draft_sms == 48  # where it is slower for four than both in turn, and more are not looked at
        assert beside.share.rows == ((1, 4) if few else (1, 4, 16))
        assert beside.share.seconds == pytest.approx([left, 1.2 * left, 2 * left][: 2 if few else 3], rel=0.02)
        for size in beside.share.rows:
            apart = plain_parts(subject, size)
            assert float(beside.draft(size, 0)) == pytest.approx(draft * apart.draft, rel=0.02)
            assert float(beside.verify(size, 0)) == pytest.approx(verify * apart.verify, rel=0.02)
            share = float(beside.share(size, 0))
            both = verify * apart.verify + share * apart.draft
            assert float(beside.together(size, 0)) == pytest.approx(both, rel=0.02)
            assert float(beside.draft_factor(size, 0)) == pytest.approx(draft, rel=0.02)
            assert float(beside.verify_factor(size, 0)) == pytest.approx(verify, rel=0.02)
    assert found.await_seconds == 0
    assert ProfiledCost(found).splits == (0, 16, 48)


def test_what_is_not_shared_is_not_measured_beside():
    subjects = [
        make_subject(),
        make_subject(splits=(0,), has_draft_model=False),
        make_subject(splits=(0,), limits=Limits(1, 2, 64, 64)),  # there is no room for drafts
    ]
    for subject in subjects:
        found = profile_of(subject)
        assert (found.besides, found.await_seconds) == ((), 0.0)
        assert not any(plan.drafts_beside for plan in subject.executor.plans)


@pytest.mark.parametrize("splits", [(), (0,)])
def test_what_waiting_takes_is_measured_where_somebody_may_wait(splits):
    found = profile_of(make_subject(kind=Waiting, splits=splits))
    assert found.await_seconds == pytest.approx(Waiting.WAIT if splits else 0.0)


@pytest.mark.parametrize("how", [GPU, CPU])
@pytest.mark.parametrize(
    "limits",
    [
        Limits(1, 1, 2), Limits(1, 1, 4096, 4096), Limits(1, 2048, 4096, 4096), Limits(6, 7, 64, 64),
        Limits(7, 64, 3, 3), Limits(5, 64, 8, 4), Limits(64, 64, 8192, 8192), Limits(100, 4096, 40, 20),
        Limits(3, 5, 9, 9),
    ],
)  # fmt: skip
def test_any_limits_are_kept_to(how, limits):
    profile_of(make_subject(how, limits, splits=(0,)))
    profile_of(make_subject(how, limits, splits=(0,)), seconds=0)


def test_a_small_pool_is_shared():
    subject = make_subject(num_pages=5)
    assert max(profile_of(subject).errors.values()) < 1e-3


def test_without_time_there_is_a_profile_and_few_steps():
    subject = make_subject()
    found = profile_of(subject, seconds=0)
    assert len(subject.executor.plans) < 15
    assert found.errors == {}
    assert found.verify.rows == SIZES
    assert found.first_draft.rows[-1] == 32
    # of one context only: what that costs is taken to be the rows'
    right = machine(GPU).verify
    np.testing.assert_allclose(found.verify(np.array([1, 128]), 0), right(np.array([1, 128]), 0), rtol=0.05)


def test_a_slow_machine_is_profiled_in_about_the_time_there_is():
    subject = make_subject()
    slow = subject.executor
    slow.slowness = 10.0
    before = slow.time.now()
    found = profile_of(subject, seconds=3.0)
    assert slow.time.now() - before < 5.0  # by its own clock
    assert float(found.verify(1, 0)) == pytest.approx(10 * float(machine(GPU).verify(1, 0)), rel=0.05)


@pytest.mark.parametrize("speculates", [True, False])
def test_without_a_draft_model_drafting_costs_nothing(speculates):
    subject = make_subject(has_draft_model=False, speculates=speculates, limits=Limits(32, 2048, 4096))
    found = profile_of(subject)
    assert found.first_draft == found.next_draft == found.catch_up == NOTHING
    assert found.stop_seconds is None
    assert any(plan.lengths.any() for plan in subject.executor.plans) == speculates
    assert_same(found.verify, machine(GPU).verify, range(1, 33))
    assert "draft" not in found.errors


def test_held_out_batches_are_ragged():
    subject = make_subject()
    profile_of(subject)
    ragged = {tuple(plan.lengths.tolist()) for plan in subject.executor.plans if len(set(plan.lengths.tolist())) > 3}
    assert len(ragged) > HELD_OUT / 3


@pytest.mark.parametrize(
    ("samples", "right"),
    [
        ([(100, 2.0), (300, 4.0)], (1.0, 0.01)),
        ([(100, 2.0), (300, 1.0)], (1.5, 0.0)),  # noise: more context is never faster
        ([(100, 1.0), (300, 5.0)], (0.0, (1 / 100 + 5 / 300) / 2)),
        ([(100, 0.0), (300, 0.0)], (0.0, 0.0)),
    ],
)
def test_a_line_is_never_below_nothing(samples, right):
    assert fit_line([Sample(1, *each) for each in samples]) == pytest.approx(right)


def test_rows_seen_with_one_context_borrow_what_context_costs():
    found = make_curve([Sample(1, 100, 2.0), Sample(1, 300, 4.0), Sample(8, 100, 5.0), Sample(4, 1000, 13.0)])
    assert (found.rows, found.seconds) == ((1, 4, 8), pytest.approx((1.0, 3.0, 4.0)))
    assert found.per_token == pytest.approx((0.01, 0.01, 0.01))
    assert make_curve([Sample(1, 100, 2.0), Sample(1, 100, 4.0)]) == Curve((1,), (3.0,), (0.0,))


# ---- real executors ----


class Costly:
    """Drafts three tokens, and is only asked by who knows what they cost."""

    name = "costly"
    needs_cost = True
    max_length = 3

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        assert float(view.cost.verify(view.num_requests, 100)) >= 0  # an interpreter measures nothing
        return np.full(view.num_requests, 3, dtype=np.int64)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pair():
    target = make_model()
    return target, make_draft(target)


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_requests_get_the_same_tokens_after_profiling(pair, kind, cache):
    target, draft = pair
    requests = make_requests(target.config)
    right = reference(target, requests)
    engine = make_engine(target, draft if kind == "model" else "ngram", Costly())
    assert isinstance(engine.cost, ProfiledCost)
    assert_equal(serve(engine, requests), right)
    plain = serve(make_engine(target, draft if kind == "model" else "ngram", Fixed(3)), requests)
    assert plain.tokens == right.tokens


def make_full(*args, **others):
    return make_engine(*args, profiling="full", **others)


def stub(monkeypatch) -> list[Subject]:
    """Measuring takes no time, and is counted."""
    measured: list[Subject] = []

    def fake(subject, about, seconds, update):
        measured.append(subject)
        return replace(machine(CPU), about=about, errors={"verify": 0.1, "verify_worst": 0.1, "draft": 0.05})

    monkeypatch.setattr(build, "measure", fake)
    return measured


def test_a_policy_that_asks_for_costs_gets_a_profile_that_is_kept(pair, cache, monkeypatch, caplog):
    measured = stub(monkeypatch)
    with caplog.at_level(logging.INFO, "faser.engine.engine"):
        engine = make_full(*pair, Costly())
        assert engine.cost is engine.scheduler.cost
        assert "profiled in" in caplog.text
        (path,) = (cache / "profiles").iterdir()
        assert Profile.load(path).about["max_running"] == 8
        again = make_full(*pair, Costly())
    assert again.cost.profile == engine.cost.profile
    assert len(measured) == 1
    assert "earlier start: verify 10.0 % off" in caplog.text


def test_a_policy_that_does_not_ask_costs_no_time(pair, cache, monkeypatch):
    monkeypatch.setattr(build, "measure", lambda *_: pytest.fail("measured for nobody"))
    engine = make_full(*pair, Fixed(3))
    assert isinstance(engine.cost, StepCost)
    assert engine.scheduler.cost is None
    assert not cache.exists()


def test_other_sizes_and_other_models_have_profiles_of_their_own(pair, cache, monkeypatch):
    measured = stub(monkeypatch)
    target, draft = pair
    for _ in range(2):
        make_full(target, draft, Costly())
        make_full(target, draft, Costly(), max_running=4)
        make_full(target, "ngram", Costly())
        make_full(make_model("qwen3"), "ngram", Costly())
    assert len(measured) == len(list((cache / "profiles").iterdir())) == 4


@pytest.mark.parametrize("content", ["{", json.dumps(replace(machine(CPU), about={"hardware": "an abacus"}).to_dict())])
def test_a_broken_or_foreign_file_is_measured_again_with_a_warning(pair, cache, monkeypatch, caplog, content):
    measured = stub(monkeypatch)
    make_full(*pair, Costly())
    (path,) = (cache / "profiles").iterdir()
    path.write_text(content)
    make_full(*pair, Costly())
    assert len(measured) == 2
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["WARNING"]
    assert "abacus" in caplog.text or "cannot be read" in caplog.text
    make_full(*pair, Costly())
    assert len(measured) == 2, "the new one was not kept"


def test_a_cache_that_cannot_be_written_is_a_warning(pair, tmp_path, monkeypatch, caplog):
    measured = stub(monkeypatch)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "file"))
    assert isinstance(make_full(*pair, Costly()).cost, ProfiledCost)
    assert len(measured) == 1
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("errors", [{"verify": 0.9}, {"verify": 0.1, "draft": 0.9}, {}])
def test_a_profile_of_a_busy_machine_is_used_and_not_kept(pair, cache, monkeypatch, caplog, errors):
    noisy = replace(machine(CPU), errors=errors)
    monkeypatch.setattr(build, "measure", lambda subject, about, *_: replace(noisy, about=about))
    assert make_full(*pair, Costly()).cost.profile.errors == noisy.errors
    assert not cache.exists()
    assert "not kept" in caplog.text


def test_folders_of_the_cache(monkeypatch, tmp_path):
    for name in ("FASER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert saved_profiles.path_of({}).parent == tmp_path / ".cache" / "faser" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert saved_profiles.path_of({}).parent == tmp_path / "xdg" / "faser" / "profiles"
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "own"))
    assert saved_profiles.path_of({}).parent == tmp_path / "own" / "profiles"


def test_a_given_profile_is_used_as_it_is(pair, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "measure", lambda *_: pytest.fail("measured what was given"))
    path = tmp_path / "given.json"
    replace(machine(CPU), about={"hardware": "an abacus"}).save(path)
    for policy in (Costly(), Fixed(2)):
        assert make_engine(*pair, policy, profile=str(path)).cost.profile.about == {"hardware": "an abacus"}
    assert "an abacus" in caplog.text
    assert not cache.exists()


def test_a_given_profile_that_is_none_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as a profile"):
        load_pair("no/such/model", None, EngineOptions(profile=str(tmp_path / "nowhere.json")))


# ---- quick profiles, completed in idle moments ----


def quick_of(subject: Subject) -> Profile:
    return measure_quick(subject, {"hardware": "simulated"}, subject.executor.time.now)


@pytest.mark.parametrize("how", [GPU, CPU])
@pytest.mark.parametrize("slowness", [1.0, 30.0, 300.0])
def test_a_quick_profile_is_done_at_once_however_slow_the_machine(how, slowness):
    limits = LIMITS if how is GPU else Limits(16, 512, 2048, 2048)
    subject = make_subject(how, limits, assumed=replace(machine(how), kind="assumed"))
    subject.executor.slowness = slowness
    before = subject.executor.time.now()
    found = quick_of(subject)
    steps = 3 * slowness * float(machine(how).verify(4, 0) + machine(how).first_draft(1, 0) * 3)
    assert subject.executor.time.now() - before < max(2.0, steps)  # three steps are the least it takes
    assert found.kind == "quick"
    assert found.why_not_kept() is not None
    # the shape was right and the scale was measured, so all of it is right
    for rows in (1, 4, 32):
        assert float(found.verify(rows, 64)) == pytest.approx(slowness * float(machine(how).verify(rows, 64)), rel=0.1)
    assert float(found.next_draft(1, 64)) == pytest.approx(slowness * float(machine(how).next_draft(1, 64)), rel=0.3)


def test_a_curve_goes_on_as_assumed_where_nothing_was_measured():
    assumed = Curve((1, 8, 64), (1.0, 2.0, 10.0), (0.1, 0.1, 0.1))
    found = make_curve([Sample(8, 0, 6.0)], prior=assumed)
    assert found.rows == (1, 8, 64)
    assert found.seconds == pytest.approx((3.0, 6.0, 30.0))
    assert found.per_token == pytest.approx((0.3, 0.3, 0.3))
    assert make_curve([], prior=assumed) == assumed


def test_more_rows_never_take_less_time():
    """64 rows that were measured to be slower than 128 were disturbed."""
    found = make_curve([Sample(1, 0, 1.0), Sample(64, 0, 9.0), Sample(128, 0, 7.0), Sample(256, 0, 20.0)])
    assert found.seconds == pytest.approx((1.0, 8.0, 8.0, 20.0))


def test_a_budget_is_kept_where_batches_are_too_slow_for_it():
    subject = make_subject(CPU, Limits(16, 512, 2048, 2048), assumed=replace(machine(CPU), kind="assumed"))
    subject.executor.slowness = 50.0  # one row takes 0.2 s, 64 rows 0.3 s, a draft of three 0.1 s
    before = subject.executor.time.now()
    found = profile_of(subject, seconds=6.0)
    assert subject.executor.time.now() - before < 7.0
    assert float(found.verify(16, 0)) == pytest.approx(50 * float(machine(CPU).verify(16, 0)), rel=0.1)


def test_nothing_is_measured_where_nothing_should_be(pair, cache, monkeypatch):
    for name in ("measure", "measure_quick"):
        monkeypatch.setattr(build, name, lambda *_: pytest.fail("measured"))
    engine = make_engine(*pair, Costly(), profiling="none")
    assert engine.cost.profile.kind == "assumed"
    assert not engine.use_idle_moment()
    assert not cache.exists()


@pytest.mark.parametrize("command", [["generate", "a b"], ["generate", "--chat", "a b"]])
def test_generate_does_not_profile(folder, cache, monkeypatch, command):
    for name in ("measure", "measure_quick"):
        monkeypatch.setattr(build, name, lambda *_: pytest.fail("measured"))
    template = folder.parent / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    chat = ["--chat-template", str(template)] if "--chat" in command else []
    given = ["--model", str(folder), "--draft", str(folder), "--device", "cpu", "--max-model-len", "64"]
    assert main([*command, *chat, *given, "--max-tokens", "4"]) == 0
    assert not (cache / "profiles").exists()


def test_idle_moments_complete_the_profile_and_keep_it(pair, cache, monkeypatch):
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)
    target, draft = pair
    requests = make_requests(target.config)
    right = reference(target, requests)
    engine = make_engine(target, draft, Costly())
    assert engine.cost.profile.kind == "quick"
    assert not cache.exists()
    more, moments = True, 0
    while more:
        if moments % 7 == 3:  # requests come in between, and what they left in the prefix cache is found
            assert_equal(serve(engine, requests), right)
        more = engine.use_idle_moment()
        engine.scheduler.check()
        moments += 1
    assert engine.scheduler.num_prefix_hits > 0
    assert engine.cost.profile.kind == "idle"
    (path,) = (cache / "profiles").iterdir()
    assert Profile.load(path) == engine.cost.profile
    assert_equal(serve(engine, requests), right)


def test_a_profile_of_idle_moments_is_no_full_one(pair, cache, monkeypatch):
    measured = stub(monkeypatch)
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)
    engine = make_engine(*pair, Costly())
    while engine.use_idle_moment():
        pass
    assert make_engine(*pair, Costly()).cost.profile.kind == "idle"
    assert make_full(*pair, Costly()).cost.profile.kind == "measured"
    assert len(measured) == 1


def test_a_made_up_step_that_fails_leaves_nothing_behind(pair, cache):
    discarded = []

    class Asynchronous(Simulated):
        submit = collect = finish_launch = may_run_ahead = None

        def discard(self) -> None:
            discarded.append(True)

    engine = make_engine(*pair, Costly())
    engine._async = Asynchronous(machine(CPU), LIMITS, 10, 16)
    engine._on_idle = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.use_idle_moment()
    assert discarded == [True]


def test_idle_moments_leave_the_prefix_cache_alone(pair, cache):
    """Where only cached pages are left there is nothing to measure on."""
    target, draft = pair
    engine = make_engine(target, draft, Costly(), num_pages=24, max_model_len=80)
    serve(engine, make_requests(target.config))
    pool = engine.scheduler.target_pages
    cached = pool.num_available - pool.num_free
    assert cached > 0
    while engine.use_idle_moment():
        assert pool.num_available - pool.num_free == cached
    assert pool.num_available - pool.num_free == cached


def test_no_idle_moment_is_used_while_there_are_requests(pair, cache):
    target, draft = pair
    engine = make_engine(target, draft, Costly())
    engine.add(make_requests(target.config)[0])
    assert not engine.use_idle_moment()
    assert engine.scheduler.lend_slots(np.array([1])) is None


@pytest.mark.parametrize(
    ("errors", "kind", "says"),
    [
        ({"verify": 0.05, "draft": 0.05}, "measured", None),
        ({"verify": 0.05, "draft": 0.5}, "measured", "draft 50 %"),
        ({"verify": 0.05}, "measured", "no time"),
        ({"verify": 0.05, "draft": 0.05}, "assumed", "nothing was measured"),
    ],
)
def test_one_rule_says_which_profiles_are_kept(errors, kind, says):
    reason = replace(machine(CPU), errors=errors, kind=kind).why_not_kept()
    assert reason is None if says is None else says in reason


def test_the_command_keeps_no_profile_that_a_server_would_not(model, folder, cache, capsys, monkeypatch):
    noisy = replace(machine(CPU), errors={"verify": 0.9, "draft": 0.1})
    monkeypatch.setattr(build, "measure", lambda subject, about, *_: replace(noisy, about=about))
    assert main(["profile", *model, "--draft", str(folder)]) == 0
    assert "not kept: its predictions are off by more than 20 % (verify 90 %)" in capsys.readouterr().out
    assert not (cache / "profiles").exists()


# ---- the commands ----


@pytest.fixture
def model(folder):
    return ["--model", str(folder), "--max-model-len", "64", "--device", "cpu", "--max-running", "4"]


def test_the_command_prints_tables_and_one_line_and_keeps_the_profile(model, folder, cache, capsys, monkeypatch):
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)  # a busy machine may be off by much
    assert main(["profile", *model, "--draft", str(folder), "--budget", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = Profile.from_dict(json.loads(last))
    assert any(line.startswith("verification, by rows") for line in lines)
    assert any("µs per 1,000 tokens" in line for line in lines)
    assert any("on batches it was not made from: " in line for line in lines)
    (path,) = (cache / "profiles").iterdir()
    assert Profile.load(path) == found
    assert any(line.endswith(f"kept in {path}") for line in lines)
    options = EngineOptions(policy=Costly(), device="cpu", max_model_len=64, max_running=4)
    loaded = load_pair(str(folder), str(folder), options)
    assert build_engine(loaded.target, loaded.draft, options).cost.profile == found


def test_the_command_says_plainly_when_predictions_are_off(model, folder, cache, capsys, monkeypatch):
    stub(monkeypatch)
    assert main(["profile", *model, "--draft", "ngram", "--out", str(cache / "here" / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "verify: above the 7.5 % aimed at" in out
    assert "first drafted token" in out
    assert Profile.load(cache / "here" / "p.json").errors["verify"] == 0.1
    assert not (cache / "profiles").exists()


@pytest.mark.parametrize(
    ("wrong", "says"), [(["--budget", "0"], "seconds above 0"), (["--out", "/dev/null/x"], "cannot be written")]
)
def test_what_cannot_work_is_refused(model, monkeypatch, capsys, wrong, says):
    stub(monkeypatch)
    assert main(["profile", *model, *wrong]) == 1
    assert says in capsys.readouterr().err


def test_bench_profiles_for_any_of_its_policies(model, cache, monkeypatch, capsys):
    measured = stub(monkeypatch)
    asking = {"costly": Costly(), "off": Fixed(0)}
    monkeypatch.setattr(bench_command, "make_policy", asking.__getitem__)
    monkeypatch.setattr("faser.config.make_policy", asking.__getitem__)
    monkeypatch.setattr("faser.bench.play.make_policy", asking.__getitem__)
    traffic = ["--arrivals", "poisson:60", "--duration", "0.1", "--prompt-len", "8", "--output-len", "4"]
    assert main(["bench", *model, "--draft", "ngram", "--policies", "off,costly", *traffic]) == 0
    assert len(measured) == 1
    assert [run["system"] for run in json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]] == ["off", "costly"]
