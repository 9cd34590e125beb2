"""Shared by the HTTP benchmarks: a server process, its CPU time and memory, and a client for many streams.

`flood` is for server_overhead.py: many concurrent streams at little cost, since the client shares the machine with the
server. It counts events and parses only the last one, which holds the number of tokens. It runs in its own process:
`python -m benchmarks.lib.http_client` reads one JSON document from standard input and prints another.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from faser.bench.client import ClientConnection, HttpAnswer, request_head
from faser.traffic import prompts

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180
STOP_SECONDS = 60
FLOOD_SECONDS = 600
STUB_STEP_SECONDS = "STUB_STEP_SECONDS"  # the environment variable that paces stub_engine.py

# Plain prose, for an engine that has no model to write it.
SENTENCES = (
    "The lighthouse keeper counted the ships that passed before dawn and wrote each name into a heavy ledger.",
    "A compiler translates a program into another language, usually one that a machine can execute directly.",
    "In the spring the river floods the lower fields, and the farmers wait until the water has gone before they sow.",
    "Write a short letter to a friend who has moved to another city and ask how the new work is going.",
    "If a train leaves at nine and travels eighty kilometres in an hour, when does it arrive in the next town?",
    "The committee agreed to postpone the vote, because three of its seven members had not read the report.",
    "Explain to a child why the moon seems to change its shape during a month, and why it always shows one face.",
    "Bread needs flour, water, salt and time; everything else is a matter of taste and of patience.",
    "Summarise the following: the price of copper rose for the fifth week, while demand in most countries fell.",
    "She opened the old piano, pressed a single key, and listened until the note had faded completely.",
    "List three reasons why a small team may finish a project sooner than a large one, and one why it may not.",
    "Photosynthesis stores the energy of light in sugar, from carbon dioxide and water, and releases oxygen.",
)


def read_texts() -> list[str]:
    """The prompts of Spec-Bench."""
    return [text for texts in prompts.read_texts("specbench").values() for text in texts]


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────

# `faser serve` with an engine factory, which is no flag of the command.
_WITH_FACTORY = """
import sys
from dataclasses import replace
from faser.cli import arguments
from faser.cli import main as cli
from faser.server.run import serve
options = arguments.server_options(cli.make_parser().parse_args(["serve", *sys.argv[2:]]))
sys.exit(serve(replace(options, engine_factory=sys.argv[1])))
"""


class Server:
    """`faser serve` on a free port, from its announcement to its end. Its output goes to a file."""

    def __init__(self, *flags: str, factory: str | None = None, environment: dict[str, str] | None = None) -> None:
        start = ["-m", "faser.cli.main", "serve"] if factory is None else ["-c", _WITH_FACTORY, factory]
        self._log = tempfile.NamedTemporaryFile("w+", prefix="faser-server-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *start, "--port", "0", *flags],
            cwd=ROOT,  # where `benchmarks` can be imported from, by the engine's process too
            env={**os.environ, **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = self._wait()
        self.pids = {"http": self.process.pid, "engine": child_of(self.process.pid)}

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _wait(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"^FASER serves .* at (http://\S+)", self.log(), re.MULTILINE)
            if found is not None:
                return found.group(1)
            time.sleep(0.1)
        self.process.kill()
        raise SystemExit(f"the server did not start:\n{self.log()}")


@contextmanager
def running(*flags: str, factory: str | None = None, environment: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(*flags, factory=factory, environment=environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def child_of(pid: int) -> int:
    """The child of process `pid`: of a server, its engine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(_stat(int(folder.name))[1] or 0) == pid:
            return int(folder.name)
    raise SystemExit(f"process {pid} has no child")


def cpu_seconds(pid: int) -> float:
    """User and system time, of all threads."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def mapped_bytes(pid: int) -> dict[str, int]:
    """Resident memory by what is mapped: the C library's heap, anonymous memory, files, devices and shared memory."""
    found = {"heap": 0, "anonymous": 0, "files": 0, "devices and shared": 0}
    kind = "anonymous"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a mapping: address, rights, offset, device, inode, name
            kind = _kind_of(words[5] if len(words) > 5 else "")
        elif words[0] == "Rss:":
            found[kind] += 1024 * int(words[1])
    return found


def _kind_of(name: str) -> str:
    if name == "[heap]":
        return "heap"
    if name.startswith(("/dev/", "/memfd:")):
        return "devices and shared"
    return "files" if name.startswith("/") else "anonymous"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "0", *["0"] * 40]


# ── one exchange at a time ───────────────────────────────────────────────────────────────────────────────────────────


def get(url: str, path: str) -> HttpAnswer:
    """Outside an event loop."""

    async def ask() -> HttpAnswer:
        connection = await ClientConnection.open(url)
        answer = await connection.ask(path)
        connection.close()
        return answer

    return asyncio.run(ask())


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text by name and labels, without the label model_name, which every value has."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")
            found[name] = float(value)
    return found


# ── many streams, cheaply ────────────────────────────────────────────────────────────────────────────────────────────

_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_TAIL = 1024  # bytes kept of a stream's end: enough for the event with the usage


@dataclass(frozen=True)
class FloodResult:
    """All streams together. `events` have text; `seconds` are from the first request to the last end."""

    requests: int
    tokens: int
    events: int
    seconds: float
    cpu_seconds: float
    bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run_flood(url: str, path: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> FloodResult:
    """Sends all bodies, at most `concurrency` at a time, from a process of its own. They must ask for the usage."""
    given = json.dumps({"url": url, "path": path, "bodies": list(bodies), "concurrency": concurrency})
    module = [sys.executable, "-m", "benchmarks.lib.http_client"]
    done = subprocess.run(module, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return FloodResult(**json.loads(done.stdout))


class _Streams:
    """The waiting requests, and totals over the ended ones."""

    def __init__(self, path: str, bodies: Sequence[dict[str, Any]], done: asyncio.Future[None]) -> None:
        encoded = [json.dumps(body).encode() for body in bodies]
        self._waiting = [request_head("POST", path, len(body)) + body for body in reversed(encoded)]
        self._num_open = len(bodies)
        self._done = done
        self.tokens = self.events = self.bytes = 0

    def next(self) -> bytes | None:
        return self._waiting.pop() if self._waiting else None

    def ended(self, num_events: int, num_bytes: int, tail: bytes) -> None:
        usage = re.search(rb'"completion_tokens":(\d+)', tail)
        if usage is None:
            self.fail(f"a stream without usage: {tail!r}")
            return
        self.tokens += int(usage.group(1))
        self.events += num_events - 1  # the last one is the usage
        self.bytes += num_bytes
        self._num_open -= 1
        if not self._num_open and not self._done.done():
            self._done.set_result(None)

    def fail(self, reason: str) -> None:
        if not self._done.done():
            self._done.set_exception(SystemExit(reason))


class _Reader(asyncio.Protocol):
    """One connection, one request after another."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._transport: asyncio.WriteTransport | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one by behaviour only
        self._send()

    def _send(self) -> None:
        request = self._streams.next()
        self._busy = request is not None
        self._events = self._bytes = 0
        self._tail = b""
        assert self._transport is not None
        if request is not None:
            self._transport.write(request)
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._bytes and not data.startswith(b"HTTP/1.1 200"):
            self._streams.fail(f"not 200: {data[:500]!r}")
        self._bytes += len(data)
        self._events += (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)
        self._tail = (self._tail + data)[-_TAIL:]
        if data.endswith(_END) or self._tail.endswith(_END):
            self._streams.ended(self._events, self._bytes, self._tail)
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._streams.fail(f"the server closed the connection ({exc})")


async def flood(url: str, path: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> FloodResult:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    done: asyncio.Future[None] = loop.create_future()
    streams = _Streams(path, bodies, done)
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(min(concurrency, len(bodies))):
        await loop.create_connection(lambda: _Reader(streams), parts.hostname, parts.port)
    await asyncio.wait_for(done, FLOOD_SECONDS)
    return FloodResult(
        requests=len(bodies),
        tokens=streams.tokens,
        events=streams.events,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu,
        bytes=streams.bytes,
    )


def main() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(flood(**json.load(sys.stdin)))
    print(json.dumps(vars(result)))


if __name__ == "__main__":
    main()
