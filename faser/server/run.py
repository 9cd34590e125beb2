"""`faser serve`: the HTTP process from start to exit status.

Binds the port before anything is loaded, so that a port in use is reported at once. Answers 503 until the engine is
ready. After SIGTERM or SIGINT new requests are refused, open ones have the grace period to finish, and the exit status
is 0. A second signal ends the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import TextIO

import uvicorn

from faser.config import API_KEY_VARIABLE, ServerOptions
from faser.errors import ConfigError, EngineError
from faser.models.generation import describe
from faser.server.app import Api
from faser.server.engine_client import EngineClient
from faser.server.figures import Figures
from faser.server.http import HttpProtocol, usable_connections
from faser.server.messages import About

log = logging.getLogger("faser.server")

EXAMPLE_QUESTION = "Name the three primary colors."  # the default model, a small one, answers it well
_POLL_SECONDS = 0.05
_BACKLOG = 2048
_LAST_ANSWER_SECONDS = 2  # for answers that are being sent when the grace period ends


def serve(options: ServerOptions) -> int:
    """Serve until a signal. Raises EngineError if the engine fails for good."""
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = _bind(options.host, options.port)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_Server(options, listener).run())
    finally:
        _flush(sys.stderr)
    return 0


def _say(text: str) -> None:
    """Print what people should see. A full disk under the output does not end the server."""
    with contextlib.suppress(OSError):  # print flushes too
        print(text)
    _flush(sys.stdout)


def _flush(stream: TextIO) -> None:
    """Write what waits. Where the disk is full, give it up: at its exit Python would fail to write it again."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class _Server:
    def __init__(self, options: ServerOptions, listener: socket.socket) -> None:
        figures = Figures()
        self._options = options
        self._listener = listener
        self._engine = EngineClient(options, figures)
        self._api = Api(options, self._engine, figures)
        config = uvicorn.Config(
            self._api.app(),
            http=partial(HttpProtocol, max_connections=usable_connections(options.max_connections)),  # type: ignore[arg-type]
            lifespan="off",
            log_config=None,
            log_level="error",  # warnings are about requests that are no HTTP: clients could fill the log with them
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client could name any address, and without keys quotas count by address
            timeout_graceful_shutdown=_LAST_ANSWER_SECONDS,
            timeout_keep_alive=75,
            backlog=_BACKLOG,
        )
        self._http = _Http(config)
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        engine = asyncio.create_task(self._engine.run())
        helpers = [asyncio.create_task(self._announce()), asyncio.create_task(self._tick())]
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([engine, stop, http], return_when=asyncio.FIRST_COMPLETED)
        failure = self._engine.failure if engine.done() else None
        if failure is None:
            await self._drain()
        for task in (*helpers, stop):
            task.cancel()
        await self._engine.close()
        self._http.should_exit = True
        await asyncio.gather(http, engine)
        if failure is not None:
            raise EngineError(failure)

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()

    async def _drain(self) -> None:
        """Wait until open requests have finished, the grace period is over, or a second signal comes."""
        self._api.service.draining = True
        self._api.sessions.end_all("shutting_down")
        service, deadline = self._api.service, monotonic() + self._options.grace
        if service.num_open:
            log.info("stopping: %d requests have %g s to finish", service.num_open, self._options.grace)
        while service.num_open and monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(_POLL_SECONDS)
        if service.num_open:
            log.warning("stopping: %d requests did not finish in time", service.num_open)

    async def _announce(self) -> None:
        await self._engine.ready.wait()
        about = self._engine.about
        assert about is not None
        host, port = self._listener.getsockname()[:2]
        _say(announcement(about, self._options, host, port))
        # Objects of the start live as long as the process: exclude them from garbage collection, and collect rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._api.dashboard.tick()
            self._engine.check_alive()
            self._api.sessions.tick()


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: _Server handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); "
            "give another --port (0 takes a free one) or --host, or stop the program that uses it"
        ) from None
    listener.setblocking(False)
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def announcement(about: About, options: ServerOptions, host: str, port: int) -> str:
    """What is served, each choice with its reason, and two examples to paste."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url, why = f"http://{shown}:{port}", about.reasons
    sampling = describe({"temperature": 1.0, **about.sampling})
    kv = f"{about.kv_bytes / 2**30:.2f} GiB, {about.kv_tokens} tokens in {about.num_pages} pages of {about.page_size}"
    if about.kv_dtype not in ("", about.dtype):
        kv += f", those of the target in {about.kv_dtype}"
    lines = [
        f"FASER serves {about.model} at {url} (loaded in {about.load_seconds:.1f} s)",
        f"  draft    {about.draft or 'none'} ({why['draft']})",
        f"  policy   {about.policy} ({why['policy']})",
        f"  device   {about.device} ({why['device']})",
        f"  dtype    {about.dtype} ({why['dtype']})",
        f"  KV       {kv} ({why['kv']})",
        f"  limits   {about.max_tokens} tokens a request, {about.max_running} running, {options.max_waiting} waiting",
        f"  sampling {sampling} ({why.get('sampling', 'the default')}); a request's own fields come first",
        f"  look     {url}/dashboard  {url}/metrics",
        "",
        *_examples(about, options, url),
    ]
    return "\n".join(lines)


def _examples(about: About, options: ServerOptions, url: str) -> list[str]:
    """One for the shell and one for Python, which needs `pip install openai`. A key is never shown."""
    key, api_key, lines = "", '"none"', []
    if options.api_keys:
        key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'
        api_key = f'__import__("os").environ["{API_KEY_VARIABLE}"]'
        lines = [
            f"The examples need a key of this server: put it in place of YOUR_KEY, or set {API_KEY_VARIABLE} before.",
            "",
            f"[ \"${API_KEY_VARIABLE}\" ] || export {API_KEY_VARIABLE}='YOUR_KEY'",
        ]
    if about.chat_template is not None:
        path, method, found = "chat/completions", "chat.completions", "message.content"
        question: dict[str, object] = {"messages": [{"role": "user", "content": EXAMPLE_QUESTION}]}
    else:
        path, method, found = "completions", "completions", "text"
        question = {"prompt": "Once upon a time"}
    request = {"model": about.model, **question, "max_tokens": 64}
    arguments = ", ".join(f"{name}={value!r}" for name, value in request.items())
    return [
        *lines,
        f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(request))}",
        "",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key={api_key})',
        f"print(client.{method}.create({arguments}).choices[0].{found})",
        "",
    ]
