"""What the log says of an engine: what it is doing, and for how long."""

from __future__ import annotations

import logging
import os

import pytest

from faser.config import ServerOptions
from faser.engine.activity import Activity
from faser.engine.engine import Engine
from faser.policy import Fixed
from faser.server import engine_client
from faser.server.engine_client import EngineClient, State
from faser.server.figures import Figures
from faser.server.watchdog import SIZE, SLOW_SECONDS, Note, Watchdog
from tests.engine.test_engine import make_request
from tests.oracle import World


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watchdog():
    found = Watchdog()
    yield found
    found.close()


def note_of(watchdog: Watchdog, clock: Clock) -> Note:
    """As the engine's process has it, in a mapping of its own."""
    note = Note.at(watchdog.descriptor)
    note._clock = clock
    return note


def test_the_other_process_sees_what_a_step_does(watchdog):
    world = World(Fixed(2), agreement=1.0, max_batch_tokens=16)
    engine, clock, seen = Engine(world.scheduler, world.executor), Clock(), []
    note, execute = note_of(watchdog, clock), world.executor.execute

    def look(plan):
        seen.append(watchdog.doing)
        return execute(plan)

    world.executor.execute = look
    engine.on_activity = note.enter
    world.add(make_request("a", [1, 2, 3], 20))
    world.add(make_request("b", [1] * 30, 20))
    engine.step()
    engine.step()
    first, second = seen
    assert (first.activity, first.step, first.requests, first.rows) == (Activity.EXECUTING, 1, 2, 16)
    assert (first.prompts, first.drafts, first.expected) == (1, 0, None)
    assert (second.step, second.drafts) == (2, 2)
    clock.now += 12.34
    assert first.text(clock.now) == "executing a step for 12.3 s (step 1: 2 requests, 16 rows, 1 unfinished prompts)"
    assert watchdog.doing.text(100.0).startswith(
        "committing a step for 0.0 s (the last executed was step 2: 2 requests"
    )


def test_everything_an_engine_does_has_a_name():
    note = Note(bytearray(SIZE), Clock())
    for activity in Activity:
        note.enter(activity)
        assert note.read().text(107.0) == f"{activity.text} for 7.0 s"


def test_what_takes_long_is_said_once_and_waiting_for_requests_is_not(watchdog):
    clock = Clock()
    note = note_of(watchdog, clock)
    note.enter(Activity.PLANNING)
    assert watchdog.take_warning(clock.now + SLOW_SECONDS) is None
    assert watchdog.take_warning(clock.now + SLOW_SECONDS + 1) == "planning a step for 11.0 s"
    assert watchdog.take_warning(clock.now + SLOW_SECONDS + 2) is None
    clock.now += 100
    note.enter(Activity.SENDING)
    assert watchdog.take_warning(clock.now + 60) == "sending to the HTTP process for 60.0 s"
    note.enter(Activity.WAITING)
    assert watchdog.take_warning(clock.now + 1000) is None


def test_the_server_says_which_step_is_slow_while_it_runs(watchdog, monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(engine_client, "monotonic", clock)
    client = EngineClient(ServerOptions(), Figures())
    client._watchdog, client.state = watchdog, State.READY
    note_of(watchdog, clock).enter(Activity.COMMITTING)
    with caplog.at_level(logging.WARNING, "faser.server"):
        for _ in range(30):
            clock.now += 1
            client.check_alive()
    assert [record.getMessage() for record in caplog.records] == ["the engine is slow: committing a step for 11.0 s"]


def test_a_watchdog_leaves_no_descriptor_behind():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        Watchdog().close()
    assert not before or len(os.listdir("/proc/self/fd")) == before
