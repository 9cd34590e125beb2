"""Faults as clients and operators meet them: the promises of "When something breaks" in docs/server.md.

tests/test_faults.py has those within an engine; test_operations.py those of stopped, killed and hung engines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import faser
from faser.server.worker import is_device_lost
from tests.faults import _device_error, _lack_of_memory
from tests.server.running import PATIENCE, ROOT, START, eventually, running
from tests.server.test_operations import HEALTH, is_idle, raw_request


@pytest.fixture
def faulty(chat_folder, tmp_path):
    """Starts servers whose engines, whenever they start, arm the plan that `plan` was last given."""
    file = tmp_path / "faults"

    def plan(text: str) -> None:
        file.write_text(text)

    def start(text: str, *flags: str, factory: str = "tests.faults:paced", **more):
        plan(text)
        return running(chat_folder, tmp_path, *flags, factory=factory, environment={"FASER_FAULTS": str(file)}, **more)

    start.plan = plan
    return start


STEP = "tests.server.paced_engine:PacedExecutor.execute"


def test_an_error_of_the_device_ends_the_engine_at_once_and_it_is_started_again(faulty):
    with faulty(f"{STEP}:2:triton") as server:
        faulty.plan("")
        status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9})
        assert (status, answer["error"]["code"]) == (503, "engine_failed")
        assert "illegal memory access" not in json.dumps(answer), "no details to clients"
        eventually(lambda: server.get("/health") == (200, {**HEALTH, "engine_restarts": 1}), "a new engine is up")
        assert server.complete(prompt="a", max_tokens=9)["usage"]["completion_tokens"] == 9
        assert "the device failed, and nothing that it holds can be trusted" in server.log
        assert "illegal memory access" in server.log


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (_device_error(), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (_lack_of_memory(), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("the size of tensor a must match the size of tensor b"), False),
    ],
)
def test_which_errors_mean_that_the_device_is_lost(error, lost):
    assert is_device_lost(error) == lost


def test_an_engine_killed_while_it_is_started_again_ends_the_server_with_a_line(faulty):
    with faulty("") as server:
        faulty.plan("start:1:kill")
        os.kill(server.engine_id, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 1
        (line,) = [line for line in server.log.splitlines() if line.startswith("faser: ")]
        assert "signal 9, SIGKILL" in line


def test_an_engine_killed_in_the_middle_of_a_move_of_the_draft_comes_back_with_the_draft(faulty):
    memory = "tests.server.paced_engine:Memory"
    with faulty(f"{memory}.offload:1:kill", factory="tests.faults:moving") as server:
        faulty.plan(f"{memory}.load:1:kill")
        status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert (status, answer["error"]["code"]) == (503, "engine_failed"), "the draft left in the first step"
        eventually(lambda: server.get("/health")[0] == 200, "a new engine is up")
        faulty.plan("")
        status, _ = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert status in (200, 503), "the draft comes back while the request runs, or behind it"
        eventually(lambda: server.get("/health")[1]["engine_restarts"] == 2, "it was killed while the draft came back")
        eventually(lambda: server.get("/health")[0] == 200, "a new engine is up")
        assert server.complete(prompt="a", max_tokens=3)["usage"]["completion_tokens"] == 3
        eventually(lambda: server.metric("faser:draft_moves_total") == 2, "the draft left and came back")
        assert server.metric("faser:draft_resident") == 1


# What a clock that jumps by a day at every look, and a client that reads nothing for half a second, do.
SETUP = """
import itertools, time
days, now = itertools.cycle([86400, -86400, 0]), time.time
time.time = lambda: now() + next(days)
from faser.server import http
http.UNREAD_SECONDS = 0.5
"""


def test_a_client_that_stops_reading_is_disconnected_and_a_clock_that_jumps_changes_nothing(faulty):
    """12,000 tokens are to come, and the client reads none. Each event has the name of the model.

    A long name, because the system keeps up to 4 MiB of what a client does not read.
    """
    flags = ("--rate-limit", "1000", "--served-model-name", "long" * 1000)
    with faulty("", *flags, factory="tests.faults:rapid", setup=SETUP) as server:
        body = {"prompt": "the fox", "max_tokens": 3000, "n": 4, "stream": True, "ignore_eos": True}
        with raw_request(server, json.dumps(body).encode(), receive_bytes=4096):
            eventually(lambda: server.metric("vllm:num_requests_running") == 4, "it runs")
            assert server.complete(prompt="a", max_tokens=20)["usage"]["completion_tokens"] == 20
            eventually(lambda: is_idle(server), "its requests have ended")
            assert server.get("/dashboard/data")[1]["requests"]["cancelled"] == 4, "before all their tokens were made"
        assert server.get("/health") == (200, HEALTH)
        assert server.stop() == 0
        assert "Traceback" not in server.log


# Times of day that clients are told, never durations.
KNOWS_THE_TIME_OF_DAY = {
    "server/answers.py", "server/app.py", "server/sessions/session.py",  # when an answer, a model, a session was made
    "server/dashboard/__init__.py",  # the axis of its charts
    "text/chat.py",  # strftime_now of templates
    "bench/report/figures.py", "bench/command.py",  # when it was measured
    "traffic/traces.py",  # times in recorded traces
    "vllm/metrics.py", "vllm/dashboard.py", "vllm/scheduling.py",  # times that two processes compare
}  # fmt: skip


def test_durations_are_measured_by_clocks_that_do_not_jump():
    package = Path(faser.__file__).parent
    told = re.compile(r"from time import .*\btime\b|\btime\.time\b|from datetime import|import datetime")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if told.search(path.read_text())}
    assert found == KNOWS_THE_TIME_OF_DAY


def test_a_full_disk_under_the_log_does_not_end_the_server(chat_folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "tests.faults:paced", "--model", str(chat_folder), "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FASER_FAULTS": os.devnull}
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full, env=env, cwd=ROOT)
    try:
        eventually(lambda: is_up(port), "it serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def is_up(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False
