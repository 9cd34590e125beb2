"""A real server in a process of its own, for tests: start it, find its port and its engine, read its log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds; only a broken server takes as long

# Flags cover all but the factory of the engine, which tests and benchmarks alone replace.
START = """
import sys
from dataclasses import replace
from faser.cli import main as cli
from faser.server import run
serve = run.serve
run.serve = lambda options: serve(replace(options, engine_factory=sys.argv[1]))
sys.exit(cli.main(["serve", *sys.argv[2:]]))
"""


class Running:
    """One server."""

    def __init__(self, process: subprocess.Popen[str], url: str, model: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.model = model
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine_id(self) -> int:
        """The process of its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [int(child) for child in children if b"faser.server.worker" in _command(child)]
        return found

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and body, as JSON where it is."""
        return self._send(urllib.request.Request(self.url + path, headers=headers or {}))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send(urllib.request.Request(self.url + path, data, headers or {}))

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer = self.post("/v1/completions", {"model": self.model, **fields})
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = self.get("/metrics")
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def _command(process_id: str | int) -> bytes:
    return Path(f"/proc/{process_id}/cmdline").read_bytes()


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens in another process."""
    deadline = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < deadline, f"never happened: {what}"
        sleep(0.01)


@contextmanager
def running(
    folder: Path,
    tmp_path: Path,
    *flags: str,
    factory: str = "faser.server.load:load",
    wait: bool = True,
    environment: dict[str, str] | None = None,
    setup: str = "",
) -> Iterator[Running]:
    """A server of the model in `folder` on a free port; killed at the end if it still runs.

    `setup`: Python that runs in the server's process first.
    """
    log = tmp_path / f"server-{len(list(tmp_path.iterdir()))}.log"
    command = [sys.executable, "-c", setup + START, factory, "--port", "0", "--model", str(folder), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=env, cwd=ROOT)
    try:
        url, model = _await_announcement(process, log) if wait else ("", "")
        yield Running(process, url, model, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _await_announcement(process: subprocess.Popen[str], log: Path) -> tuple[str, str]:
    found: list[Sequence[str]] = []

    def announced() -> bool:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()}"
        found.extend(re.findall(r"^FASER serves (\S+) at (\S+)", log.read_text(), re.MULTILINE))
        return bool(found)

    eventually(announced, "the server announces itself")
    model, url = found[0]
    return url, model
