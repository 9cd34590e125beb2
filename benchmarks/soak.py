"""Does the server hold under a mixed load? 1,000 requests, 64 at a time, good and bad, and none may be lost.

The load is drawn from a seed: completions and chat, streamed and whole, greedy and sampled, several choices, stop
strings, log-probabilities, JSON answers, capped drafts; between them clients that leave before, in and after their
body, broken bodies, wrong types, unknown fields, prompts and bodies that are too large, models that are not there.
The KV memory is small, so that requests are preempted and every page has been touched when the warm-up is over.
Afterwards:
    answers   every request got the answer of its kind: 200 and a finish_reason, an OpenAI error of the right status and
              code, or it was left by us. Anything else is listed
    books     no page is held and nothing runs or waits; the server's counts of ended and refused requests are ours
    memory    what the processes hold does not grow: a line through the samples after the warm-up rises by less than
              the bound. Legitimate growth (pages, arenas, caches of compiled grammars) comes in the warm-up
    output    all texts equal those of a second server with --policy off, asked for whole answers; a text we left half
              read is the beginning of its own

    .venv/bin/python -m benchmarks.soak [--requests 1000] [--concurrency 64] [--seed 0] [--url URL [--reference URL]]

With --url the memory of that server is not looked at, since its processes are not known. The exit status is 1 if
anything failed. A table, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.lib.http_client import Server, read_metrics, read_texts, resident_bytes
from faser.bench.client import ClientConnection, HttpAnswer, events, request_head

MAX_MODEL_LEN = 512
# Small pages: a request is admitted with one spare page and outgrows it.
FLAGS = ("--kv-memory", "0.06", "--page-size", "4", "--max-model-len", str(MAX_MODEL_LEN), "--max-body-size", "1",
         "--log-level", "warning")  # fmt: skip
MIB = 2**20
WARM_UP = 0.3  # share of the requests
BOUND_MIB = {"http": 8, "engine": 32}  # most growth of memory after the warm-up
ANSWER_SECONDS = 600
REST_SECONDS = 60
SAMPLE_SECONDS = 0.5

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LEAVING = ("leaves mid-stream", "leaves before a token", "leaves mid-body")


# ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Item:
    """One request and its expected result."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    raw: bytes | None = None  # sent instead of the body
    status: int = 200
    code: str | None = None  # of the expected error
    leave_after: int = 0  # events after which the client leaves the stream
    delay: float = 0.0  # seconds before leaving
    farewell: bool = True  # close, or abort

    @property
    def data(self) -> bytes:
        return self.raw if self.raw is not None else json.dumps(self.body).encode()

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


class Load:
    """Random items."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._texts = read_texts()
        self._makers: dict[str, tuple[int, Callable[[int], Item]]] = {
            "completes": (72, self._good),
            LEAVING[0]: (6, self._leaves_stream),
            LEAVING[1]: (4, self._leaves_early),
            LEAVING[2]: (3, self._leaves_body),
            "broken JSON": (3, self._broken),
            "wrong type": (3, self._wrong_type),
            "unknown field": (3, self._unknown_field),
            "prompt too long": (3, self._too_long),
            "body too large": (1, self._too_large),
            "wrong model": (2, self._wrong_model),
        }

    def draw(self, count: int) -> list[Item]:
        kinds = list(self._makers)
        weights = [self._makers[kind][0] for kind in kinds]
        drawn = self._random.choices(kinds, weights, k=count)
        return [replace(self._makers[kind][1](number), kind=kind) for number, kind in enumerate(drawn)]

    # ── good ones ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _good(self, number: int) -> Item:
        chance = self._random.random
        path = self._random.choice((COMPLETIONS, CHAT))
        body: dict[str, Any] = {"max_tokens": self._random.randint(4, 48), **self._sampling()}
        body |= self._prompt(path)
        if chance() < 0.6:
            body["stream"] = True
            if chance() < 0.5:
                body["stream_options"] = {"include_usage": True}
        if chance() < 0.1:
            body["n"] = 2
        if chance() < 0.2:
            body["max_draft"] = self._random.choice((0, 1, 2))
        if chance() < 0.15:
            body |= {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
        if chance() < 0.08:
            body["response_format"] = {"type": "json_object"}
        elif chance() < 0.2:
            body["stop"] = self._random.choice((["\n"], [" the", "."], ["and", "zebra"], ","))
        return Item(number, "", path, body)

    def _sampling(self) -> dict[str, Any]:
        """Greedy, or sampled with a seed, so that a second run can be compared."""
        if self._random.random() < 0.5:
            return {"temperature": 0}
        sampled: dict[str, Any] = {"temperature": self._random.choice((0.5, 1.0, 1.3))}
        sampled["seed"] = self._random.getrandbits(31)
        if self._random.random() < 0.3:
            sampled["top_p"] = 0.9
        if self._random.random() < 0.2:
            sampled["top_k"] = 40
        if self._random.random() < 0.1:
            sampled["frequency_penalty"] = 0.5
        return sampled

    def _prompt(self, path: str) -> dict[str, Any]:
        text = self._text()
        if path == CHAT:
            return {"messages": [{"role": "user", "content": text}]}
        if self._random.random() < 0.1:
            return {"prompt": [self._random.randint(100, 900) for _ in range(self._random.randint(4, 64))]}
        return {"prompt": text}

    def _text(self) -> str:
        """About 4 to 200 tokens, short prompts more often."""
        words = self._random.choice(self._texts).split()
        return " ".join(words[: round(math.exp(self._random.uniform(math.log(3), math.log(130))))])

    # ── those that leave ─────────────────────────────────────────────────────────────────────────────────────────────

    def _leaves_stream(self, number: int) -> Item:
        item = self._good(number)
        body = {**item.body, "stream": True, "max_tokens": 48}
        return replace(item, body=body, leave_after=self._random.randint(1, 8), farewell=self._random.random() < 0.5)

    def _leaves_early(self, number: int) -> Item:
        return replace(self._good(number), delay=self._random.uniform(0, 0.3), farewell=self._random.random() < 0.7)

    def _leaves_body(self, number: int) -> Item:
        return replace(self._good(number), delay=self._random.uniform(0, 0.1), farewell=self._random.random() < 0.5)

    # ── bad ones ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _broken(self, number: int) -> Item:
        item = self._good(number)
        broken = (item.data[:-2], b"", b"[1, 2]", b'{"prompt": }', b"\xff\xfe" + item.data, b"null", b"[" * 5000)
        return replace(item, raw=self._random.choice(broken), status=400, code="invalid_json")

    def _wrong_type(self, number: int) -> Item:
        wrong = (
            {"max_tokens": "ten"}, {"max_tokens": 0}, {"temperature": 5}, {"temperature": "hot"}, {"n": 0}, {"n": 1.5},
            {"stream": "yes"}, {"stop": 3}, {"seed": "a"}, {"top_p": 0}, {"logit_bias": {"1": "x"}},
        )  # fmt: skip
        item = self._good(number)
        return replace(item, body={**item.body, **self._random.choice(wrong)}, status=400, code="invalid_value")

    def _unknown_field(self, number: int) -> Item:
        field_, code = self._random.choice(
            ((("max_token", 3), "unknown_field"), (("best_of", 4), "unsupported_field"),
             (("stream_options", {"usage": True}), "unknown_field"), (("x" * 300, None), "unknown_field"))
        )  # fmt: skip
        item = self._good(number)
        return replace(item, body={**item.body, field_[0]: field_[1]}, status=400, code=code)

    def _too_long(self, number: int) -> Item:
        """Too long by itself, or with its output."""
        item = replace(self._good(number), status=400, code="context_length_exceeded")
        long = "word " * self._random.choice((MAX_MODEL_LEN, 5 * MAX_MODEL_LEN, 100 * MAX_MODEL_LEN))
        prompts = ({"prompt": [7] * MAX_MODEL_LEN}, {"prompt": long}, {"prompt": "Hello", "max_tokens": MAX_MODEL_LEN})
        chats = ({"messages": [{"role": "user", "content": long}]}, {"max_tokens": MAX_MODEL_LEN})
        chosen = self._random.choice(prompts if item.path == COMPLETIONS else chats)
        return replace(item, body={**item.body, **chosen})

    def _too_large(self, number: int) -> Item:
        item = self._good(number)
        return replace(item, body={**item.body, "user": "x" * (3 * MIB)}, status=413, code="body_too_large")

    def _wrong_model(self, number: int) -> Item:
        item = self._good(number)
        return replace(item, body={**item.body, "model": "gpt-4o"}, status=404, code="model_not_found")


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)  # if log-probabilities were requested

    def take(self, choice: dict[str, Any]) -> None:
        """Add a choice of an answer or of an event."""
        said = choice.get("message") or choice.get("delta") or choice
        self.text += said.get("content") or said.get("text") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        logprobs = choice.get("logprobs") or {}
        self.tokens += logprobs.get("tokens") or [token["token"] for token in logprobs.get("content") or ()]


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
    if body.get("logprobs") and not choice.tokens and choice.finish_reason == "length":
        return "no log-probabilities"
    return None


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Samples:
    """Memory of the processes, by the number of requests that ended."""

    pids: dict[str, int]
    at: list[int] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=dict)  # MiB

    def add(self, num_done: int) -> None:
        self.at.append(num_done)
        for name, pid in self.pids.items():
            self.held.setdefault(name, []).append(resident_bytes(pid) / MIB)

    def growth(self, name: str, num_requests: int) -> dict[str, float]:
        """Growth in MiB after the warm-up, by least squares."""
        first = next((i for i, at in enumerate(self.at) if at >= WARM_UP * num_requests), 0)
        at, held = self.at[first:], self.held[name][first:]
        slope = _slope(at, held)
        return {
            "after_warm_up_mib": round(held[0], 1),
            "at_end_mib": round(held[-1], 1),
            "growth_mib": round(slope * (at[-1] - at[0]), 2),
            "mib_per_1000_requests": round(1000 * slope, 2),
            "bound_mib": BOUND_MIB[name],
        }


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


async def run_load(url: str, items: Sequence[Item], concurrency: int, samples: Samples) -> list[Outcome]:
    waiting, outcomes = list(reversed(items)), []

    async def work() -> None:
        client = Client(url)
        while waiting:
            outcomes.append(await client.run(waiting.pop()))
        client.close()

    async def watch() -> None:
        while True:
            samples.add(len(outcomes))
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(work() for _ in range(concurrency)))
    watcher.cancel()
    with suppress(asyncio.CancelledError):
        await watcher
    samples.add(len(outcomes))
    return sorted(outcomes, key=lambda outcome: outcome.item.number)


async def metrics(url: str) -> dict[str, float]:
    connection = await ClientConnection.open(url)
    answer = await connection.ask("/metrics")
    connection.close()
    return read_metrics(answer.body.decode())


async def metrics_at_rest(url: str) -> dict[str, float]:
    """The metrics when no request runs, or after a timeout the last ones read."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        found = await metrics(url)
        busy = found.get("vllm:num_requests_running", 0) + found.get("vllm:num_requests_waiting", 0)
        if not busy or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_books(before: dict[str, float], after: dict[str, float], outcomes: Sequence[Outcome]) -> list[str]:
    """The server's counts against ours. A request that the client left may count as any end, or as none."""

    def counted(name: str) -> int:
        return round(after.get(name, 0) - before.get(name, 0))

    ends = Counter(choice.finish_reason for o in outcomes if o.completed for choice in o.choices)
    left = sum(o.item.num_choices for o in outcomes if o.left and o.item.kind != LEAVING[2])
    refused = Counter(o.status for o in outcomes if o.status is not None and o.status != 200)
    by_reason = {
        reason: counted(f'vllm:request_success_total{{finished_reason="{reason}"}}')
        for reason in ("stop", "length", "cancelled", "failed")
    }
    finished = by_reason["stop"] + by_reason["length"]
    ours = ends["stop"] + ends["length"]
    found = [
        f"{name} is {after.get(name)}, not 0"
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
                     "faser:draft_kv_cache_usage")
        if after.get(name) != 0
    ]  # fmt: skip
    if any(by_reason[reason] < ends[reason] for reason in ("stop", "length")):
        found.append(f"the server ended {by_reason}, we saw {dict(ends)}")
    if not ours <= finished + by_reason["cancelled"] <= ours + left or by_reason["cancelled"] > left:
        found.append(f"the server ended {by_reason}; we saw {ours} end and left {left}")
    if by_reason["failed"] or counted("faser:step_failures_total") or counted("faser:engine_restarts_total"):
        found.append("requests or steps failed, or the engine was started again")
    for status in sorted({400, 404, 413, 500, 503, *refused}):
        said = counted(f'faser:requests_refused_total{{status="{status}"}}')
        if said != refused[status]:
            found.append(f"the server refused {said} with {status}, we saw {refused[status]}")
    return found


def check_output(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> list[str]:
    """Speculation must not change a text: equal if read to the end, a prefix if the client left."""
    reference = {outcome.item.number: outcome for outcome in plain}
    found = []
    for outcome in outcomes:
        other = reference.get(outcome.item.number)
        if other is None or not other.completed:
            continue
        for index, (ours, theirs) in enumerate(zip(outcome.choices, other.choices, strict=True)):
            same = theirs.text.startswith(ours.text) if outcome.left else ours == theirs
            if not same:
                found.append(
                    f"request {outcome.item.number}, choice {index}: {ours} with speculation, {theirs} without; "
                    f"{outcome.item.path} {json.dumps(outcome.item.body)}"
                )
    return found


def comparable(outcomes: Sequence[Outcome]) -> list[Item]:
    """Items with a text to compare, as requests without streaming."""
    return [
        replace(o.item, kind="completes", leave_after=0, body={k: v for k, v in o.item.body.items() if k not in STREAM})
        for o in outcomes
        if o.fault is None and (o.completed or (o.left and o.item.kind == LEAVING[0]))
    ]


STREAM = ("stream", "stream_options")


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """One server under one load."""

    outcomes: list[Outcome]
    seconds: float
    samples: Samples
    books: list[str]
    after: dict[str, float]
    end: list[str] = field(default_factory=list)  # faults of the server's exit


def soak(url: str | None, flags: Sequence[str], items: Sequence[Item], concurrency: int) -> Run:
    """Against the server at `url`, or one started here."""
    server = Server(*flags) if url is None else None
    target = server.url if server is not None else url
    assert target is not None
    try:
        run = asyncio.run(_soak(target, items, concurrency, server.pids if server is not None else {}))
    finally:
        status = server.stop() if server is not None else 0
    if server is not None:
        if status:
            run.end.append(f"the server's exit status is {status}")
        run.end += [line for line in server.log().splitlines() if "ERROR" in line or "Traceback" in line]
    return run


async def _soak(url: str, items: Sequence[Item], concurrency: int, pids: dict[str, int]) -> Run:
    before, samples, started = await metrics(url), Samples(pids), time.perf_counter()
    outcomes = await run_load(url, items, concurrency, samples)
    seconds = time.perf_counter() - started
    after = await metrics_at_rest(url)
    return Run(outcomes, seconds, samples, check_books(before, after, outcomes), after)


def show_kinds(outcomes: Sequence[Outcome]) -> None:
    print(f"{'kind':24}{'sent':>6}{'as expected':>13}{'left by us':>12}{'faults':>8}")
    for kind in dict.fromkeys(outcome.item.kind for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.item.kind == kind]
        left, faults = sum(o.left for o in these), sum(o.fault is not None for o in these)
        print(f"{kind:24}{len(these):6}{len(these) - left - faults:13}{left:12}{faults:8}")


def show_list(title: str, lines: Sequence[str], most: int = 20) -> None:
    print(f"{title}: {'none' if not lines else len(lines)}")
    for line in lines[:most]:
        print(f"    {line[:2000]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    parser.add_argument("--policy", help="of the server under test; default: its own default")
    parser.add_argument("--url", help="a server that runs; default: one is started")
    parser.add_argument("--reference", metavar="URL", help="one with --policy off that runs; default: one is started")
    args = parser.parse_args()
    items = Load(args.seed).draw(args.requests)
    flags = (*FLAGS, "--policy", args.policy) if args.policy else FLAGS
    run = soak(args.url, flags, items, args.concurrency)
    show_kinds(run.outcomes)
    plain = soak(args.reference, (*FLAGS, "--policy", "off"), comparable(run.outcomes), args.concurrency)
    return report(args, run, plain)


def report(args: argparse.Namespace, run: Run, plain: Run) -> int:
    memory = {name: run.samples.growth(name, args.requests) for name in run.samples.held}
    kinds = Counter(outcome.item.kind for outcome in run.outcomes if outcome.fault is not None)
    faults = {
        "answers": [f"{o.item.kind} {o.item.number}: {o.fault}" for o in run.outcomes if o.fault is not None],
        "books": run.books,
        "memory": [f"{name} grew by {g['growth_mib']} MiB" for name, g in memory.items()
                   if g["growth_mib"] > g["bound_mib"]],
        "output": check_output(run.outcomes, plain.outcomes),
        "how the server ended": run.end,
        "without speculation": [f"{o.item.number}: {o.fault}" for o in plain.outcomes if o.fault] + plain.books
                               + plain.end,
    }  # fmt: skip
    if len(run.outcomes) != args.requests:
        faults["answers"].append(f"{args.requests - len(run.outcomes)} requests were lost")
    for title, lines in faults.items():
        show_list(title, lines)
    for name, growth in memory.items():
        print(f"memory of {name}: {growth}")
    tokens = round(run.after.get("vllm:generation_tokens_total", 0))
    preemptions = round(run.after.get("vllm:num_preemptions_total", 0))
    print(f"{run.seconds:.0f} s speculating ({tokens} tokens, {preemptions} preemptions), off {plain.seconds:.0f} s")
    failed = any(faults.values())
    document = {
        "requests": args.requests, "concurrency": args.concurrency, "seed": args.seed, "failed": failed,
        "kinds": Counter(outcome.item.kind for outcome in run.outcomes), "faults_by_kind": kinds,
        "faults": {title: len(lines) for title, lines in faults.items()},
        "compared": len(plain.outcomes), "memory": memory, "tokens": tokens,
        "preemptions": preemptions, "seconds": round(run.seconds, 1),
        "seconds_off": round(plain.seconds, 1),
    }  # fmt: skip
    print(json.dumps(document))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
