"""A quick profile is completed in idle moments."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from faser.cost.profile import Profile
from faser.runtime.profiling.saved import WRITER
from tests.faults import armed
from tests.runtime.profiling.engines import Costly, make_full, stub
from tests.runtime.profiling.machine import CPU, LIMITS, Simulated, machine
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve


def wait_for_writers() -> None:
    """Profiles are written in threads of their own."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join(60)
            assert not thread.is_alive()


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
    assert engine.scheduler.prefixes.num_hits > 0
    assert engine.cost.profile.kind == "idle"
    wait_for_writers()
    (path,) = (cache / "profiles").iterdir()
    assert Profile.load(path) == engine.cost.profile
    assert_equal(serve(engine, requests), right)


def test_a_full_profile_replaces_one_of_idle_moments(pair, cache, monkeypatch):
    measured = stub(monkeypatch)
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)
    engine = make_engine(*pair, Costly())
    while engine.use_idle_moment():
        pass
    wait_for_writers()
    assert make_engine(*pair, Costly()).cost.profile.kind == "idle"
    assert make_full(*pair, Costly()).cost.profile.kind == "measured"
    assert len(measured) == 1


def test_a_disk_that_hangs_delays_no_request(pair, cache, monkeypatch):
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)
    begun, may_end = threading.Event(), threading.Event()
    save = Profile.save

    def slowly(profile, path) -> None:
        begun.set()
        assert may_end.wait(60)
        save(profile, path)

    monkeypatch.setattr(Profile, "save", slowly)
    engine = make_engine(*pair, Costly())
    while engine.use_idle_moment():
        pass
    assert begun.wait(60)
    requests = make_requests(pair[0].config)[:3]
    assert_equal(serve(engine, requests), reference(pair[0], requests))
    assert not cache.exists(), "it is still being written"
    may_end.set()
    wait_for_writers()
    assert len(list((cache / "profiles").iterdir())) == 1


def test_a_full_disk_is_said_once_and_the_engine_goes_on(pair, cache, monkeypatch, caplog):
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)
    with caplog.at_level(logging.WARNING), armed("write:1-999:full_disk"):
        engine = make_engine(*pair, Costly())
        while engine.use_idle_moment():
            pass
        wait_for_writers()
        requests = make_requests(pair[0].config)[:3]
        assert_equal(serve(engine, requests), reference(pair[0], requests))
        engine.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the profile cannot be kept for the next start: [Errno 28] No space left on device"
    ]
    assert not list((cache / "profiles").iterdir()), "nothing half written is left"


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


def test_batches_that_can_never_fit_the_pool_do_not_keep_a_profile_from_being_saved(pair, cache, monkeypatch):
    monkeypatch.setattr(Profile, "why_not_kept", lambda self: None)  # a busy machine measures badly
    engine = make_engine(*pair, Costly(), num_pages=40, max_model_len=80)
    while engine.use_idle_moment():
        pass
    assert engine.cost.profile.kind == "idle"


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
