"""The engine's process, without the process: a worker on one end of a socket pair, the test on the other."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from threading import Event, Thread
from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from faser.engine.engine import Engine
from faser.errors import FaserError
from faser.policy import Fixed
from faser.request import FinishReason, Grammar, SamplingParams
from faser.server.messages import (
    Add,
    Cancel,
    DraftResidency,
    EndSession,
    Frames,
    FromEngine,
    Outputs,
    Refused,
    Running,
    SentGrid,
    SentVision,
    Start,
    frame,
    large_frame,
    socket_pair,
)
from faser.server.watchdog import Watchdog
from faser.server.worker import Served, Worker
from faser.vision import Grid, Vision
from tests.oracle import SEED, World, expected_output
from tests.server.paced_engine import StubResidency


class Link:
    """The test's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames(FromEngine)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, object] = {}
        self.refused: dict[str, str] = {}
        self.running: list[int] = []
        self.snapshot = None

    def send(self, *messages) -> None:
        self.connection.sendall(b"".join(map(frame, messages)))

    def receive(self) -> None:
        data = self.connection.recv(1 << 20)
        assert data, "the worker left"
        for message in self.frames.feed(data):
            if isinstance(message, Refused):
                self.refused[message.id] = message.message
            elif isinstance(message, Running):
                self.running.append(message.number)
            elif isinstance(message, Outputs):
                self.take(message)

    def take(self, message: Outputs) -> None:
        for item in message.progress:
            self.tokens.setdefault(item.request_id, []).extend(item.token_ids)
            if item.finish is not None:
                self.ends[item.request_id] = item.finish
        self.snapshot = message.snapshot or self.snapshot

    def until(self, condition) -> None:
        end = monotonic() + 60
        while not condition():
            assert monotonic() < end, "it never came true"
            self.receive()


def add(name: str, prompt: list[int], max_tokens: int) -> Add:
    return Add(name, prompt, SamplingParams(max_tokens=max_tokens), SEED, [])


@contextmanager
def working(executor=None, residency=None, kind=Engine):
    """A worker over an engine whose tokens are known beforehand."""
    world = World(Fixed(2), agreement=0.5)
    engine = kind(world.scheduler, executor(world.executor) if executor else world.executor, residency=residency)
    ours, theirs = socket_pair()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with theirs:
                Worker(Served(engine, None, None), theirs).run()
        except FaserError as error:
            failures.append(error)

    thread = Thread(target=run)
    thread.start()
    with ours:
        ours.settimeout(60)
        yield Link(ours), failures
    thread.join(60)
    assert not thread.is_alive(), "a worker ends with its socket"


def test_requests_are_answered_and_the_worker_becomes_idle():
    with working() as (link, _):
        link.send(add("a", [1, 2, 3], 10), add("b", [2, 2], 5))
        link.until(lambda: len(link.ends) == 2)
        assert link.tokens == {
            "a": expected_output([1, 2, 3], SEED, 10),
            "b": expected_output([2, 2], SEED, 5),
        }
        link.until(lambda: link.snapshot is not None and link.snapshot.pages_held == 0)
        assert link.snapshot.emitted == 15
        assert sum(link.snapshot.lengths) == sum(end.stats.steps for end in link.ends.values())


def test_a_server_that_leaves_frames_unread_ends_the_worker_without_an_error(monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with working() as (link, failures):
        link.send(add("a", [1, 2, 3], 10))
        select.select([link.connection], [], [], 60)
    assert not raised
    assert not failures


@pytest.mark.parametrize("factory", ["make", "refuse"])
def test_a_server_that_goes_while_its_engine_starts_leaves_no_traceback(folder, factory):
    ours, theirs = socket_pair()
    watchdog = Watchdog()
    given = theirs.fileno(), watchdog.descriptor
    command = ["-m", "faser.server.worker", str(given[0]), f"tests.server.paced_engine:{factory}", str(given[1])]
    with theirs:
        process = subprocess.Popen([sys.executable, *command], pass_fds=given, stderr=subprocess.PIPE, text=True)
    with ours:
        ours.sendall(frame(Start(str(folder), None, {}, None, None, "warning")))
    _, errors = process.communicate(timeout=60)
    watchdog.close()
    assert "Traceback" not in errors
    assert process.returncode == (0 if factory == "make" else 1)


def test_the_snapshot_says_where_the_draft_is():
    residency = StubResidency(StubResidency.RESIDENT)
    with working(residency=residency) as (link, _):
        link.until(lambda: link.snapshot is not None)
        assert link.snapshot.residency == DraftResidency(True, 0.0, 0, 0, 0.0, None)
        residency.stats = StubResidency.STRANDED
        link.send(add("a", [1, 2, 3], 10))
        link.until(lambda: not link.snapshot.residency.is_resident)
        assert link.snapshot.draft_failure == "it could not be loaded (out of memory)"
        assert link.snapshot.num_pages == 64


def test_a_move_of_an_idle_engine_is_told(monkeypatch):
    monkeypatch.setattr("faser.server.worker.REST_SECONDS", 0.0)

    class Returning(StubResidency):
        def proceed(self) -> bool:
            self.stats = StubResidency.RESIDENT
            return False

    with working(residency=Returning(StubResidency.STRANDED)) as (link, _):
        link.until(lambda: link.snapshot is not None and link.snapshot.residency.is_resident)


def test_without_residency_the_snapshot_has_none():
    with working() as (link, _):
        link.until(lambda: link.snapshot is not None)
        assert link.snapshot.residency is None
        assert link.snapshot.draft_failure is None


def test_a_cancelled_request_is_gone_before_the_next_step():
    with working() as (link, _):
        # both frames are there before the first step: the request must never run
        link.send(add("a", [1, 2, 3], 50), Cancel("a"), add("b", [1], 3))
        link.until(lambda: len(link.ends) == 2)
        assert link.ends["a"].reason is FinishReason.CANCELLED
        assert link.tokens["a"] == []
        assert link.tokens["b"] == expected_output([1], SEED, 3)


def test_a_request_that_can_never_fit_is_refused_and_no_other_is_lost():
    with working() as (link, _):
        link.send(add("a", [1] * 4000, 10), add("b", [1], 3), add("b", [1], 3))
        link.until(lambda: len(link.ends) == 1 and len(link.refused) == 2)
        assert "4010" in link.refused["a"]
        assert "already in use" in link.refused["b"]


class Held:
    """Executes nothing until the test says so."""

    def __init__(self, inner) -> None:
        self.inner, self.go = inner, Event()

    def execute(self, plan):
        assert self.go.wait(60)
        return self.inner.execute(plan)

    def close(self) -> None: ...


def test_what_runs_is_known_before_the_first_step_ends():
    held = []
    with working(lambda inner: held.append(Held(inner)) or held[0]) as (link, _):
        link.send(add("a", [1, 2], 2), add("b", [1, 3], 2))
        link.until(lambda: link.running == [2])
        assert link.tokens == {}
        held[0].go.set()
        link.until(lambda: len(link.ends) == 2)


def test_what_runs_is_not_repeated_while_it_does_not_change():
    with working() as (link, _):
        link.send(add("a", [1, 2], 20), add("b", [1, 3], 20))
        link.until(lambda: len(link.ends) == 2)
        assert link.running[0] == 2
        assert len(link.running) <= 2, "at the start, and when one of the two has ended"


class Failing:
    """Raises in the steps it is told to."""

    def __init__(self, inner, which, error=None) -> None:
        self.inner, self.which, self.number = inner, which, 0
        self.error = error or RuntimeError("private")

    def execute(self, plan):
        self.number += 1
        if self.number in self.which:
            raise self.error
        return self.inner.execute(plan)

    def close(self) -> None: ...


def test_a_failed_step_fails_its_requests_with_a_reason_and_the_worker_goes_on():
    with working(lambda inner: Failing(inner, {2})) as (link, _):
        link.send(add("a", [1, 2], 50), add("b", [1, 3], 50))
        link.until(lambda: len(link.ends) == 2)
        assert {end.reason for end in link.ends.values()} == {FinishReason.FAILED}
        assert all("RuntimeError" in end.error and "private" not in end.error for end in link.ends.values())
        link.send(add("c", [1, 2], 5))
        link.until(lambda: "c" in link.ends)
        assert link.tokens["c"] == expected_output([1, 2], SEED, 5)


def test_requests_that_wait_do_not_notice_a_failed_step():
    with working(lambda inner: Failing(inner, {2})) as (link, _):
        link.send(*(add(name, [1, 2], 8) for name in "abcdefg"))
        link.until(lambda: len(link.ends) == 7)
        failed = [name for name, end in link.ends.items() if end.reason is FinishReason.FAILED]
        assert sorted(failed) == list("abcd"), "four run at a time"
        for name in "efg":
            assert link.tokens[name] == expected_output([1, 2], SEED, 8)


def test_an_error_of_the_device_ends_the_worker_at_once():
    def lose(inner):
        return Failing(inner, {2}, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))

    with working(lose) as (link, failures):
        link.send(add("a", [1, 2], 50))
        with pytest.raises(AssertionError, match="the worker left"):
            link.until(lambda: "a" in link.ends)
    assert "the device failed" in str(failures[0])


def test_steps_that_always_fail_end_the_worker():
    with working(lambda inner: Failing(inner, range(100))) as (link, failures):
        for name in "abc":
            link.send(add(name, [1], 5))
            link.until(lambda name=name: name in link.ends)
        assert link.connection.recv(1 << 20) == b""
    assert "3 steps failed in a row" in str(failures[0])


PARAMS = [
    SamplingParams(),
    SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, stop=["a", "b"], stop_token_ids=[4], seed=-1),
    SamplingParams(logit_bias={3: 1.5, 70000: -100.0}, logprobs=0, max_draft=0, ignore_eos=True),
    SamplingParams(grammar=Grammar("regex", "a+")),
]


@pytest.mark.parametrize("params", PARAMS)
def test_parameters_are_the_same_in_the_other_process(params):
    (message,) = Frames(Add).feed(frame(Add("x", [1], params, 2**64 - 1, [])))
    assert message.params == params
    assert message.seed == 2**64 - 1


# ---- pictures ----


def make_vision(num_grids: int = 2, side: int = 4, positions: bool = True) -> Vision:
    """Grids of side × side patches of 14 pixels; the second keeps two groups."""
    random = np.random.default_rng(num_grids)
    kept = [np.array([0, 3]) if i == 1 else None for i in range(num_grids)]
    grids = tuple(
        Grid(random.integers(0, 256, (side**2 if k is None else 4 * len(k), 3, 2, 14, 14), np.uint8), side, side, 2, k)
        for k in kept
    )
    starts = np.cumsum([1] + [grid.num_tokens for grid in grids])[:-1]
    num_tokens = int(starts[-1]) + grids[-1].num_tokens + 2
    return Vision(grids, starts, random.integers(0, 9, (num_tokens, 3)) if positions else None)


def assert_same(found: Vision, right: Vision) -> None:
    assert [grid.name for grid in found.grids] == [grid.name for grid in right.grids]
    for one, other in zip(found.grids, right.grids, strict=True):
        # The name was sent; a grid of the same arrays computes it again.
        assert Grid(one.patches, one.height, one.width, one.merge_size, one.kept).name == other.name
        assert (one.kept is None) == (other.kept is None)
    np.testing.assert_array_equal(found.starts, right.starts)
    assert (found.positions is None) == (right.positions is None)
    np.testing.assert_array_equal(found.rotary_positions(40), right.rotary_positions(40))


@pytest.mark.parametrize("positions", [True, False])
def test_pictures_are_the_same_in_the_other_process(positions):
    right = make_vision(3, positions=positions)
    sent = Add("x", [1], SamplingParams(), 0, [], [], SentVision.of(right))
    assert large_frame(sent) == frame(sent)
    (message,) = Frames(Add).feed(large_frame(sent))
    assert_same(message.vision.vision(), right)
    assert message.vision.num_bytes == sum(grid.patches.nbytes for grid in right.grids)


def test_a_session_takes_over_what_it_kept_and_gives_it_up_at_its_end():
    prompt, taken = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1], ([0], [8], [0])
    with working() as (link, _):
        link.send(replace_struct(add("a", prompt, 4), session="s"))
        link.until(lambda: "a" in link.ends)
        link.until(lambda: link.snapshot.pages_held > 0)
        link.send(replace_struct(add("b", prompt, 4), session="s", reuse=taken))
        link.until(lambda: "b" in link.ends)
        assert link.ends["b"].stats.reused == link.snapshot.tokens_reused == 8
        assert link.tokens["b"] == link.tokens["a"]
        link.send(replace_struct(add("c", prompt, 4), reuse=taken))
        link.until(lambda: "c" in link.refused)
        link.send(EndSession("s"), add("d", [1], 1))
        link.until(lambda: "d" in link.ends and link.snapshot.pages_held == 0)


def test_pixels_that_arrived_are_not_copied_again():
    (message,) = Frames(Add).feed(frame(Add("x", [1], SamplingParams(), 0, [], [], SentVision.of(make_vision()))))
    frames = {id(grid.patches.obj) for grid in message.vision.grids}
    assert len(frames) == 1, "all arrays are views of one frame"
    patches = message.vision.vision().grids[0].patches
    assert np.shares_memory(patches, np.frombuffer(message.vision.grids[0].patches, np.uint8))
    assert patches.flags.writeable, "or torch would warn"


def test_an_array_with_gaps_is_sent_whole():
    grid = make_vision(1).grids[0]
    spread = Grid(np.repeat(grid.patches, 2, axis=0)[::2], grid.height, grid.width, 2)
    assert not spread.patches.flags.c_contiguous
    assert SentGrid.of(spread).grid().name == grid.name


def test_pixels_larger_than_the_socket_reach_the_engine_while_others_run():
    right, seen = make_vision(8, side=64), []  # 34 MB

    class Blind(Engine):
        """The tokens of this world are known without the pictures."""

        def add(self, request, checker=None) -> None:
            seen.append(request)
            super().add(replace(request, vision=None), checker)

    with working(kind=Blind) as (link, _):
        link.send(add("text", [1, 2, 3], 60))
        message = Add("a", [1, 2], SamplingParams(max_tokens=5), SEED, [], [("b", 7)], SentVision.of(right))
        sender = Thread(target=link.send, args=(message, add("behind", [3], 2)))
        sender.start()
        link.until(lambda: len(link.ends) == 4)
        sender.join()
        assert link.tokens["a"] == expected_output([1, 2], SEED, 5)
        assert link.tokens["b"] == expected_output([1, 2], 7, 5)
    requests = {request.id: request for request in seen}
    assert_same(requests["a"].vision, right)
    assert requests["b"].vision is requests["a"].vision, "the choices of a request share their pixels"
    assert requests["text"].vision is None


def test_a_frame_in_pieces_delays_the_others_no_longer_than_agreed():
    """The sender stalls in the middle of a frame; the clock moves only when it is read."""
    ours, theirs = socket_pair()
    world = World(Fixed(0), agreement=0.5)
    clock = count(step=0.004)
    with ours, theirs:
        worker = Worker(Served(Engine(world.scheduler, world.executor), None, None), theirs, lambda: next(clock))
        whole = frame(add("a", [1, 2, 3], 5))
        ours.sendall(whole[:9])
        assert worker._receive(0), "returns although the frame is not complete"
        assert not worker._engine.has_work
        ours.sendall(whole[9:])
        assert worker._receive(0)
        assert worker._engine.has_work


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1), st.data())
def test_frames_survive_any_cut(prompts, data):
    messages = [Add(str(i), list(prompt), SamplingParams(), 0, []) for i, prompt in enumerate(prompts)]
    stream = b"".join(map(frame, messages))
    cuts = sorted({0, len(stream), *data.draw(st.lists(st.integers(0, len(stream)), max_size=8))})
    frames = Frames(Add)
    assert [m for a, b in pairwise(cuts) for m in frames.feed(stream[a:b])] == messages
