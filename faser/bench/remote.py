"""Plays a workload through a server of the OpenAI API, with streamed completions of token ids.

Every request ends in a record: one that is refused, dropped or too slow is lost, with the reason. Tokens are counted by
the server's `usage`, never by events. A server does not show its steps: runs have no phases and no moments.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from faser.bench.client import ClientConnection, HttpAnswer, events, request_head
from faser.errors import ConfigError, RemoteError
from faser.traffic.document import Item, Record, Run, Workload
from faser.traffic.play import Stopped, Update, never, no_update, seconds_of

CONNECT_SECONDS = 10.0
CLOSING_SECONDS = 5.0  # for open requests when a run is interrupted
TICK_SECONDS = 0.1  # between two looks at `stopped`
_FAILURES = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)  # of a connection or of a malformed answer


@dataclass
class Remote:
    """A server by its address. `connect` asks for its model."""

    url: str  # http://host:port, with or without /v1
    api_key: str | None = None
    request_timeout: float = 600.0
    temperature: float = 0.0
    model: str = ""
    max_model_len: int | None = None  # if the server reports it
    takes_ignore_eos: bool = True  # until the server refuses it

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"{self.url}: expected an address like http://127.0.0.1:8000")
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.name = parts.netloc.rpartition("@")[2]  # its host

    def connect(self) -> None:
        """Raises RemoteError if nothing answers, or not with the OpenAI API."""
        try:
            answer = asyncio.run(asyncio.wait_for(self._ask("/v1/models"), CONNECT_SECONDS))
        except TimeoutError:
            raise RemoteError(f"{self.url} does not answer within {CONNECT_SECONDS:g} s; is the server up?") from None
        except _FAILURES as error:
            raise RemoteError(f"{self.url} cannot be reached ({_reason(error)}); is the server up?") from None
        try:
            served = json.loads(answer.body)["data"][0]
            self.model = self.model or str(served["id"])
            self.max_model_len = served.get("max_model_len")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise RemoteError(
                f"{self.url} answers {answer.status} to /v1/models and names no model: {_shown(answer.body)}; "
                "expected a server of the OpenAI API"
            ) from None

    async def _ask(self, path: str) -> HttpAnswer:
        connection = await ClientConnection.open(self.url)
        try:
            connection.write(self._head("GET", path, 0))
            return await connection.answer()
        finally:
            connection.close()

    def _head(self, method: str, path: str, size: int) -> bytes:
        headers = {"Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return request_head(method, self._base + path, size, headers, self.name)

    def body_of(self, index: int, item: Item) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(item.prompt_token_ids),
            "max_tokens": item.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature:
            body["seed"] = index
        if self.takes_ignore_eos:
            body["ignore_eos"] = True
        return body

    async def complete(self, index: int, item: Item, seen: _Seen, now: Callable[[], float]) -> None:
        """One request; fills `seen` while the answer arrives. Raises RemoteError, or one of _FAILURES."""
        sent_ignore_eos = self.takes_ignore_eos
        body = json.dumps(self.body_of(index, item)).encode()
        connection = await ClientConnection.open(self.url)
        try:
            connection.write(self._head("POST", "/v1/completions", len(body)) + body)
            status, headers = await connection.head()
            if status == 200:
                await _read_stream(connection, headers, seen, now)
                return
            text = b"".join([part async for part in connection.parts(headers)])
        finally:
            connection.abort()
        if status == 400 and sent_ignore_eos and b"ignore_eos" in text:
            self.takes_ignore_eos = False
            await self.complete(index, item, seen, now)
            return
        raise RemoteError(f"status {status}: {_message(text)}")


@dataclass
class _Seen:
    """A request so far."""

    arrival: float
    first: float | None = None
    end: float | None = None
    num_tokens: int = 0
    drafted: int | None = None
    accepted: int | None = None
    error: str | None = None

    def read_usage(self, usage: dict[str, Any]) -> None:
        self.num_tokens = int(usage["completion_tokens"])
        details = usage.get("completion_tokens_details") or {}
        accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
        if accepted is not None and rejected is not None:
            self.accepted, self.drafted = accepted, accepted + rejected

    def record(self, index: int, item: Item) -> Record:
        return Record(
            index=index,
            category=item.category,
            num_prompt=len(item.prompt_token_ids),
            arrival=self.arrival,
            first=self.first,
            end=self.end if self.error is None else None,
            num_tokens=self.num_tokens,
            error=self.error,
            drafted=self.drafted,
            accepted=self.accepted,
        )


async def _read_stream(
    connection: ClientConnection, headers: dict[str, str], seen: _Seen, now: Callable[[], float]
) -> None:
    last = None
    async for event in events(connection.parts(headers)):
        if event == b"[DONE]":
            break
        if seen.first is None or b'"usage"' in event or b'"error"' in event:
            message = json.loads(event)
            if message.get("error"):
                raise RemoteError(f"the answer broke off: {_message(event)}")
            if message.get("usage"):
                seen.read_usage(message["usage"])
            if not message.get("choices"):
                continue
        last = now()
        seen.first = last if seen.first is None else seen.first
    if last is None:
        raise RemoteError("the answer held no token")
    if not seen.num_tokens:
        raise RemoteError("the answer held no usage, so that its tokens cannot be counted")
    seen.end = last


def play_remote(
    remote: Remote,
    workload: Workload,
    system: str,
    *,
    stopped: Stopped = never,
    update: Update = no_update,
) -> Run:
    """One run. It ends with its last request, or early, as partial, when `stopped` returns true."""
    return asyncio.run(_RemotePlay(remote, workload).run(system, stopped, update))


class _RemotePlay:
    def __init__(self, remote: Remote, workload: Workload) -> None:
        self._remote = remote
        self._workload = workload
        self._waiting: Iterator[tuple[int, Item]] = iter(enumerate(workload.items))
        self._seen: dict[int, _Seen] = {}
        self._num_ended = 0
        self._started = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def run(self, system: str, stopped: Stopped, update: Update) -> Run:
        if self._workload.concurrency is not None:
            pending = {asyncio.create_task(self._send_in_turn()) for _ in range(self._workload.concurrency)}
        else:
            pending = {asyncio.create_task(self._send_when_due(index, item)) for index, item in self._waiting}
        partial = False
        while pending and not partial:
            done, pending = await asyncio.wait(pending, timeout=TICK_SECONDS)
            for task in done:
                task.result()
            update(self._num_ended)
            partial = stopped()
        wall = self._now()
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=CLOSING_SECONDS)
        items = self._workload.items
        records = tuple(seen.record(index, items[index]) for index, seen in sorted(self._seen.items()))
        return Run(system, records, seconds_of(records, wall), partial=partial)

    async def _send_when_due(self, index: int, item: Item) -> None:
        await asyncio.sleep(max(0.0, item.arrival - self._now()))
        await self._send(index, item, item.arrival)

    async def _send_in_turn(self) -> None:
        for index, item in self._waiting:
            await self._send(index, item, self._now())

    async def _send(self, index: int, item: Item, arrival: float) -> None:
        seen = self._seen[index] = _Seen(arrival)
        timeout = self._remote.request_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._remote.complete(index, item, seen, self._now)
        except TimeoutError:
            seen.error = f"no end within {timeout:g} s"
        except RemoteError as error:
            seen.error = str(error)
        except _FAILURES as error:
            seen.error = _reason(error)
        self._num_ended += 1


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError):  # asyncio.IncompleteReadError among them
        return "the connection was closed before the answer ended"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return str(error)


def _message(body: bytes) -> str:
    """The message of OpenAI's error object, or the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return _shown(body)


def _shown(body: bytes) -> str:
    return body[:200].decode(errors="replace")
