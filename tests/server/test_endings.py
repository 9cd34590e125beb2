"""How the end of an engine process is told."""

from __future__ import annotations

import signal

import pytest

from faser import machine
from faser.server import endings


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (1, "exit status 1", "the log above"),
        (-9, "signal 9, SIGKILL", "ran out of memory"),
        (-signal.SIGSEGV, "signal 11, SIGSEGV", "PYTHONFAULTHANDLER=1"),
        (-signal.SIGILL, "signal 4, SIGILL", "torch built for this processor"),
        (-signal.SIGBUS, "signal 7, SIGBUS", "check the model's files"),
        (-signal.SIGTERM, "signal 15, SIGTERM", "another process sent the signal"),
        (-60, "signal 60", "another process sent the signal"),
    ],
)
def test_every_end_has_a_name_and_a_remedy(code, status, says):
    assert endings.status(code) == status
    assert says in endings.advice(code)


def test_out_of_memory_is_told_with_numbers_and_flags():
    text = endings.out_of_memory(used=14 * 2**30, has=16 * 2**30)
    assert "used up to 14.0 GiB, and the machine has 16.0 GiB" in text
    for remedy in ("smaller model", "--dtype bfloat16", "--kv-memory", "--max-model-len"):
        assert remedy in text


@pytest.mark.parametrize(("text", "expected"), [("4096\n", 4096), ("max\n", None), (None, None)])
def test_a_container_s_limit_counts_as_the_machine_s_memory(tmp_path, monkeypatch, text, expected):
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "_LIMITS", (str(tmp_path / "nowhere"), str(file)))
    found = machine.memory_bytes()
    assert found == expected if expected is not None else found > 2**20
