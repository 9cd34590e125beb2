"""The clients of benchmarks/soak.py: one request after another, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.soak_load import LEAVING, LEFT_SESSION, NUM_WINDOWS, Item
from faser.bench.client import ClientConnection, HttpAnswer, events, request_head

ANSWER_SECONDS = 600


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)  # if log-probabilities were requested
    gaps: list[float] = field(default_factory=list, compare=False)  # between the two best tokens; as `tokens`

    def take(self, choice: dict[str, Any]) -> None:
        """Add a choice of an answer or of an event."""
        said = choice.get("message") or choice.get("delta") or choice
        self.text += said.get("content") or said.get("text") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        logprobs = choice.get("logprobs") or {}
        content = logprobs.get("content") or ()
        self.tokens += logprobs.get("tokens") or [token["token"] for token in content]
        tops = [list(top.values()) for top in logprobs.get("top_logprobs") or ()]
        tops += [[each["logprob"] for each in token["top_logprobs"]] for token in content]
        self.gaps += [top[0] - top[1] for top in (sorted(top, reverse=True) for top in tops) if len(top) > 1]


@dataclass
class Outcome:
    """The result of an item. `fault` says what is wrong with it."""

    item: Item
    status: int | None = None
    choices: list[Choice] = field(default_factory=list)
    tokens: int | None = None  # from the usage
    left: bool = False
    fault: str | None = None

    @property
    def completed(self) -> bool:
        return self.status == 200 and not self.left and self.fault is None


class Client:
    """One of the concurrent clients."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: ClientConnection | None = None  # kept for the next request if the last one ended well

    async def run(self, item: Item) -> Outcome:
        outcome = Outcome(item, choices=[Choice() for _ in range(item.num_choices)])
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._exchange(item, outcome)
        except TimeoutError:
            outcome.fault = f"no answer within {ANSWER_SECONDS} s"
        except (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
            outcome.fault = f"{type(error).__name__}: {error}"
        if outcome.fault is None and not outcome.left:
            outcome.fault = find_fault(outcome)
        if outcome.left or outcome.fault is not None:
            self._drop(item.farewell)
        return outcome

    def close(self) -> None:
        self._drop(True)

    def _drop(self, farewell: bool) -> None:
        if self._connection is not None:
            self._connection.close() if farewell else self._connection.abort()
            self._connection = None

    async def _exchange(self, item: Item, outcome: Outcome) -> None:
        if self._connection is None:
            self._connection = await ClientConnection.open(self._url)
        connection, data = self._connection, item.data
        if item.kind == "body too large":
            await self._send_large(connection, item, outcome)
            return
        if item.is_session:
            await self._watch(connection, item, outcome)
            return
        whole = item.kind != LEAVING[2]
        connection.write(request_head("POST", item.path, len(data)) + (data if whole else data[: len(data) // 2]))
        await connection.drain()
        if item.kind in LEAVING[1:]:
            await asyncio.sleep(item.delay)
            outcome.left = True
            return
        outcome.status, headers = await connection.head()
        if headers["content-type"].startswith("text/event-stream"):
            await self._read_stream(connection, headers, outcome)
        else:
            _take_whole(outcome, b"".join([part async for part in connection.parts(headers)]))

    async def _read_stream(self, connection: ClientConnection, headers: dict[str, str], outcome: Outcome) -> None:
        num_events, done = 0, False
        async for event in events(connection.parts(headers)):
            await asyncio.sleep(outcome.item.pause)
            if done:
                raise ValueError("an event after [DONE]")
            done = event == b"[DONE]"
            if not done:
                _take_event(outcome, event)
                num_events += 1
            if num_events == outcome.item.leave_after and not done:
                outcome.left = True
                return
        if not done:
            raise ValueError("a stream without [DONE]")

    async def _watch(self, connection: ClientConnection, item: Item, outcome: Outcome) -> None:
        """A video session: create it, send its stream in three chunks, read the answers. Some are left on the way."""
        created = await connection.ask(item.path, item.data)
        outcome.status = created.status
        if created.status != 200:
            _take_whole(outcome, created.body)
            return
        path = f"{item.path}/{json.loads(created.body)['id']}"
        third = -(-len(item.stream) // 3)
        for part in range(3):
            if item.kind == LEFT_SESSION and part == item.leave_after:
                await self._leave_session(connection, path, outcome)
                return
            chunk = item.stream[part * third : (part + 1) * third]
            head = request_head("POST", f"{path}/chunk?last={str(part == 2).lower()}", len(chunk))
            connection.write(head.replace(b"application/json", b"video/mp2t") + chunk)
            answer = await connection.answer()
            if answer.status != 200:
                raise ValueError(f"a chunk was answered {answer.status}: {answer.body[:200]!r}")
        connection.write(request_head("GET", f"{path}/events", 0))
        _, headers = await connection.head()
        async for kind, event in _session_events(connection.parts(headers)):
            _take_session_event(outcome, kind, event)
            if kind == "end":
                break
        self._drop(True)

    async def _leave_session(self, connection: ClientConnection, path: str, outcome: Outcome) -> None:
        """Delete it, or say nothing: then it ends by itself."""
        outcome.left = True
        if outcome.item.farewell:
            connection.write(request_head("DELETE", path, 0))
            answer = await connection.answer()
            if answer.status != 200:
                raise ValueError(f"a deletion was answered {answer.status}: {answer.body[:200]!r}")

    async def _send_large(self, connection: ClientConnection, item: Item, outcome: Outcome) -> None:
        """Send with a content length or in chunks. The server may answer, and close, before everything is sent."""
        data, declared = item.data, item.number % 2 == 0
        head = request_head("POST", item.path, len(data) if declared else None)
        connection.write(head + (data if declared else _in_chunks(data)))
        answer: HttpAnswer = await connection.answer()
        outcome.status = answer.status
        _take_whole(outcome, answer.body)
        self._drop(False)


def _in_chunks(data: bytes, size: int = 65536) -> bytes:
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


async def _session_events(parts: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Kind and data of the events of a session, which have names and numbers too."""
    held = b""
    async for part in parts:
        *whole, held = (held + part).split(b"\n\n")
        for event in whole:
            fields = dict(line.partition(": ")[::2] for line in event.decode().splitlines() if not line.startswith(":"))
            if "data" in fields:
                yield fields["event"], json.loads(fields["data"])


def _take_session_event(outcome: Outcome, kind: str, event: dict[str, Any]) -> None:
    if kind == "window":
        choice = outcome.choices[event["number"]]
        choice.text, choice.finish_reason = event["text"], event["finish_reason"]
    elif kind == "error":
        raise ValueError(f"window {event['number']} failed: {event['message']}")
    elif event["reason"] != "complete" or event["windows_answered"] != NUM_WINDOWS:
        raise ValueError(f"the session ended as {event}")


def _take_event(outcome: Outcome, event: bytes) -> None:
    said = json.loads(event)
    if "error" in said:
        raise ValueError(f"the stream failed: {said['error']['message']}")
    for choice in said["choices"]:
        outcome.choices[choice["index"]].take(choice)
    if said.get("usage"):
        outcome.tokens = said["usage"]["completion_tokens"]


def _take_whole(outcome: Outcome, body: bytes) -> None:
    said = json.loads(body)
    if outcome.status == 200:
        for choice in said["choices"]:
            outcome.choices[choice["index"]].take(choice)
        outcome.tokens = said["usage"]["completion_tokens"]
        return
    error = said["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        outcome.fault = f"not OpenAI's error: {body[:200]!r}"
    elif (outcome.status, error["code"]) != (outcome.item.status, outcome.item.code):
        outcome.fault = f"answered {outcome.status} {error['code']}: {error['message'][:200]}"


def find_fault(outcome: Outcome) -> str | None:
    """What is wrong with an answer."""
    item = outcome.item
    if outcome.status != item.status:
        return f"answered {outcome.status}, expected {item.status}"
    if item.status != 200:
        return None
    limit = item.body["max_tokens"] * item.num_choices
    if outcome.tokens is not None and not 0 < outcome.tokens <= limit:
        return f"{outcome.tokens} tokens, at most {limit} were asked for"
    if item.body.get("stream_options") and outcome.tokens is None:
        return "no usage came"
    return next(filter(None, (_choice_fault(choice, item.body) for choice in outcome.choices)), None)


def _choice_fault(choice: Choice, body: dict[str, Any]) -> str | None:
    if choice.finish_reason not in ("stop", "length"):
        return f"finish_reason {choice.finish_reason!r}"
    stops = body.get("stop", [])
    if any(stop in choice.text for stop in ([stops] if isinstance(stops, str) else stops)):
        return f"a stop string is in the text: {choice.text!r}"
    if body.get("response_format") and choice.finish_reason == "stop":
        try:
            json.loads(choice.text)
        except ValueError:
            return f"not JSON: {choice.text!r}"
    expression = (body.get("structured_outputs") or {}).get("regex")
    if expression and choice.finish_reason == "stop" and not re.fullmatch(expression, choice.text):
        return f"does not match {expression}: {choice.text!r}"
    if body.get("logprobs") and not choice.tokens and choice.finish_reason == "length":
        return "no log-probabilities"
    return None
