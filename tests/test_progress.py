"""Progress without a terminal: which stages are logged, and when."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from threading import Event

import pytest

from faser import progress
from faser.progress import progress_bar

NEVER = 1e6  # seconds


class Lines(logging.Handler):
    """Messages, and a way to wait for one: they come from another thread."""

    def __init__(self):
        super().__init__()
        self.messages, self.arrived = [], Event()

    def emit(self, record):
        self.messages.append(record.getMessage())
        self.arrived.set()

    def until(self, number):
        while len(self.messages) < number:
            assert self.arrived.wait(60), self.messages
            self.arrived.clear()


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    handler, level = Lines(), progress.log.level
    progress.log.addHandler(handler)
    progress.log.setLevel(logging.INFO)
    yield handler
    progress.log.removeHandler(handler)
    progress.log.setLevel(level)


def set_seconds(monkeypatch, long, repeat):
    monkeypatch.setattr(progress, "LONG_SECONDS", long)
    monkeypatch.setattr(progress, "REPEAT_SECONDS", repeat)


def test_a_long_stage_is_logged_when_it_begins_and_when_it_ends(lines, monkeypatch):
    set_seconds(monkeypatch, 0, NEVER)
    with progress_bar("loading the target"):
        lines.until(1)
    begin, end = lines.messages
    assert begin == "loading the target"
    assert end.startswith("loading the target: done after ")
    assert end.endswith(" s")


def test_a_stage_that_goes_on_is_logged_with_its_percentage(lines, monkeypatch):
    set_seconds(monkeypatch, 0, 0.001)
    with progress_bar("profiling") as update:
        lines.until(2)
        update(30, 40)
        lines.until(len(lines.messages) + 2)
    assert lines.messages[1].startswith("profiling: so far, ")
    assert lines.messages[-2].startswith("profiling: 75 % so far, ")


def test_a_stage_that_fails_says_so(lines, monkeypatch):
    set_seconds(monkeypatch, 0, NEVER)

    def fail():
        with progress_bar("warming up"):
            lines.until(1)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert lines.messages[-1].startswith("warming up: failed after ")


def test_a_short_stage_is_not_logged(lines, monkeypatch):
    set_seconds(monkeypatch, NEVER, NEVER)
    with progress_bar("loading the draft") as update:
        update(1, 1)
    assert lines.messages == []


def test_a_library_s_user_who_configured_no_logging_sees_nothing_and_pays_for_no_thread(lines, monkeypatch):
    set_seconds(monkeypatch, 0, 0)
    monkeypatch.setattr(progress, "Thread", None)
    progress.log.setLevel(logging.WARNING)
    with progress_bar("loading the target") as update:
        update(1, 2)
    progress.log.setLevel(logging.INFO)
    with progress_bar("generating", logs=False) as update:
        update(1, 2)
    assert lines.messages == []


def test_the_start_of_an_engine_has_a_stage_for_all_that_takes_long(lines, monkeypatch, folder):
    from faser.server.load import load
    from faser.server.messages import Start

    stages = []

    @contextmanager
    def record(description):
        stages.append(description)
        yield lambda done, total: None

    monkeypatch.setattr(progress, "_lines", record)
    served = load(Start(str(folder), str(folder), {"num_pages": 64, "policy": "faser"}, None, None, "info"))
    served.engine.close()
    assert stages == ["loading the target", "loading the draft", "profiling", "warming up"]
