"""A full profile has the seconds of a move, where the draft can move. No test measures time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faser.build import LoadedPair, measure_profile
from faser.config import EngineOptions
from faser.cost.residency import ResidencyProfile
from faser.errors import MoveError
from faser.runtime.profiling.profiler import measure_quick
from faser.runtime.profiling.residency import round_trip
from tests.runtime.profiling.machine import make_subject, profile_of
from tests.tiny import make_draft, make_model


class CountedMemory:
    """Two parts of 5 ms to leave, three of 20 ms to come back. `breaks` is the number of a call that fails."""

    pages_gained = 50
    load_seconds = 0.06

    def __init__(self, time, breaks: int | None = None) -> None:
        self.time, self.breaks, self.calls, self.is_away = time, breaks, [], False

    def offload(self) -> bool:
        return self._call("lend", 0.005, 2)

    def load(self) -> bool:
        return self._call("reclaim", 0.02, 3)

    def _call(self, name: str, seconds: float, parts: int) -> bool:
        self.calls.append(name)
        self.time.pass_by(seconds)
        if len(self.calls) == self.breaks:
            raise MoveError("no memory")
        is_done = self.calls.count(name) >= parts
        if is_done:
            self.is_away = name == "lend"
        return is_done


def movable(breaks=None):
    subject = make_subject()
    memory = CountedMemory(subject.executor.time, breaks)
    sizes = {"page_bytes": (16 * 1024, 16 * 256), "leaving_bytes": 10_000}
    return replace(subject, draft_memory=memory, page_size=16, **sizes), memory


def test_a_full_profile_has_one_round_trip():
    subject, memory = movable()
    found = profile_of(subject).residency
    assert found == ResidencyProfile(10_000, 1024, 256, pytest.approx(0.01), pytest.approx(0.06))
    assert memory.calls == ["lend"] * 2 + ["reclaim"] * 3
    assert not memory.is_away


def test_without_a_draft_that_can_move_there_is_none():
    assert profile_of(make_subject()).residency is None


def test_a_quick_profile_moves_nothing():
    subject, memory = movable()
    assert measure_quick(subject, {}, subject.executor.time.now).residency is None
    assert memory.calls == []


def test_a_draft_that_cannot_leave_is_brought_back():
    subject, memory = movable(breaks=2)
    assert round_trip(subject, subject.executor.time.now) is None
    assert not memory.is_away


def test_a_draft_that_cannot_come_back_is_an_error():
    subject, _ = movable(breaks=3)
    with pytest.raises(MoveError, match="no memory"):
        round_trip(subject, subject.executor.time.now)


def test_the_draft_of_a_real_engine_is_back_after_the_profile():
    target = make_model()
    draft = make_draft(target)
    options = EngineOptions(policy="fixed:2", device="cpu", max_model_len=64, max_running=4, num_pages=8, offload="on")
    profile, _ = measure_profile(LoadedPair(target, draft, None), options, budget=0.2)
    assert profile.residency.weight_bytes > 0
    assert profile.residency.target_token_bytes == 2 * target.num_layers * 2 * 8 * 4, "keys and values, in float32"
    assert not any(weight.count_nonzero() == 0 for weight in draft.weights()), "all weights are loaded"
