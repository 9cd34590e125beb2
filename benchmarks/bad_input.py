"""Does any body, header or path bring the server down? 100,000 mutated requests over every endpoint.

Each request is made from a seed and its number alone: a good one, in which values are replaced by hostile ones, fields
are lost, doubled and added, bytes are flipped, cut and repeated, and sometimes the method, the path and the headers are
wrong. `--number N` makes and shows one of them again. Afterwards:
    answers   no 5xx, none without JSON where JSON is expected, none that never came
    time      no answer later than the bound: what the open requests can ask for, as measured on this machine before
    memory    of both processes, from the end of the warm-up (30 %) to the end: less than the bound of soak.py
    books     nothing runs, waits or holds a page

    .venv/bin/python -m benchmarks.bad_input [--requests 100000] [--concurrency 4] [--seed 0] [--url URL | --model M]

With fewer than 50,000 requests the growth of memory still has much of the warm-up in it. `--model` takes a model that
sees too: then pictures and sessions get further than a refusal.

The exit status is 1 if anything failed. A table, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import local
from typing import Any
from urllib.parse import quote, urlsplit

from benchmarks.lib.http_client import Server, resident_bytes
from benchmarks.soak import BOUND_MIB, MIB, REST_SECONDS, WARM_UP

FLAGS = ("--log-level", "warning", "--max-body-size", "1")
ANSWER_SECONDS = 120  # after which an answer counts as lost
BASE_SECONDS = 10.0  # of the bound: a grammar may compile for 5 s, and other programs use the machine
MAX_CHOICES = 4  # of a good request
EXPECTED_5XX = (501, 503)  # a package is missing; a queue is full

COMPLETIONS, CHAT, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/video/sessions"
CHUNK = f"{SESSIONS}/x/chunk"
GETS = ("/v1/models", "/v1/models/x", "/health", "/metrics", "/dashboard", "/dashboard/data", "/openapi.json", "/",
        f"{SESSIONS}/x", f"{SESSIONS}/x/events")  # fmt: skip

# One pixel, as PNG.
PICTURE = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DEEP = json.loads("[" * 90 + "]" * 90)
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"}, {"allOf": [{"type": "string"}] * 300}, {"multipleOf": 1e-300}, {"multipleOf": 10**9},
    {"pattern": "(" * 500}, {"pattern": "(a+)+$"}, {"pattern": "(a{1,999}){1,999}"}, {"enum": list(range(3000))},
    {"minLength": 2**31}, {"maxItems": 10**9, "minItems": 10**8}, {"properties": {str(i): {} for i in range(900)}},
    {"type": "object", "required": ["a"] * 500}, {"anyOf": [{"const": i} for i in range(900)]}, {"type": "x"},
    {"additionalProperties": {"$ref": "#"}}, {"patternProperties": {".*": {"$ref": "#/nowhere"}}}, True, DEEP,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 2**31, 2**63, 2**64, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    " ", "\0", "\ud800", "\ufdd0", "a", "1", "true", "a" * 5000, "é" * 500, "<|im_end|>\n<|im_start|>system\n" * 20,
    "</s><s>", "{{ 7 * 7 }}", "{% for i in range(9) %}", "file:///etc/passwd", "data:image/png;base64,AAAA",
    "http://127.0.0.1/", [], {}, [[]], [None], ["a"] * 200, [0] * 900, {"a": 1}, {"type": "text"}, DEEP, *SCHEMAS,
)  # fmt: skip
NAMES = (
    "tools", "functions", "best_of", "suffix", "metadata", "audio", "guided_regex", "role", "", "\0", "__class__", "n",
    "a" * 500, "logprobs", "stream", "response_format", "mm_processor_kwargs", "structured_outputs",
)  # fmt: skip


# ── the requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    number: int
    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def make_case(seed: int, number: int) -> Case:
    """The request of this number."""
    chance = random.Random(f"{seed}/{number}")
    if chance.random() < 0.06:
        return Case(number, _method(chance, "GET"), _path(chance, chance.choice(GETS)), b"")
    if chance.random() < 0.04:
        return Case(number, "POST", _path(chance, CHUNK), chance.randbytes(300), {"Content-Type": "video/mp4"})
    path, make = chance.choice((*2 * ((COMPLETIONS, _completion), (CHAT, _chat)), (SESSIONS, _session)))
    body: Any = make(chance)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        body = _changed(chance, body)
    data = json.dumps(body, ensure_ascii=chance.random() < 0.7).encode(errors="surrogatepass")
    if chance.random() < 0.3:
        data = _damaged(chance, data)
    is_odd = chance.random() < 0.05
    headers = _headers(chance) if is_odd else {"Content-Type": "application/json"}
    method, path = (_method(chance, "POST"), _path(chance, path)) if is_odd else ("POST", path)
    return Case(number, method, path, data, headers)


def _completion(chance: random.Random) -> dict[str, Any]:
    prompt = chance.choice(("the quick fox", ["a", "b"], [5, 6, 7], [[5, 6], [7]], "<s>", "x" * 300))
    return {"prompt": prompt, "logprobs": chance.choice((None, 0, 3)), **_common(chance)}


def _chat(chance: random.Random) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user"][chance.randint(0, 3) :]
    messages: list[dict[str, Any]] = [{"role": role, "content": chance.choice(_CONTENTS)} for role in roles]
    options = chance.choice((None, None, {"max_pixels": 50_000, "fps": 1}))
    further = {"logprobs": chance.choice((None, False, True)), "mm_processor_kwargs": options}
    return {"messages": messages, **further, **_common(chance)}


_CONTENTS: tuple[Any, ...] = (
    "the quick brown fox", "", "Größe, 東京", "<|im_end|>", [{"type": "text", "text": "hello"}],
    [{"type": "image_url", "image_url": {"url": PICTURE}}],
    [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}}],
)  # fmt: skip


def _session(chance: random.Random) -> dict[str, Any]:
    return {"prompt": "What moves?", "window": 8, "stride": chance.choice((2, 4)), "fps": 2, "max_tokens": 4}


def _common(chance: random.Random) -> dict[str, Any]:
    """Some of the fields that both kinds of request have."""
    every: dict[str, Any] = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["x", "\n"], "n": MAX_CHOICES,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"70": 5},
        "min_tokens": 2, "stop_token_ids": [70], "ignore_eos": True, "max_draft": 2, "user": "me", "model": None,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}}},
        "structured_outputs": {"regex": "[a-z]{2,5}"},
    }  # fmt: skip
    chosen = chance.sample(sorted(every), chance.randint(0, 5))
    return {
        "max_tokens": chance.randint(1, 6),
        "stream": chance.random() < 0.3,
        **{name: every[name] for name in chosen},
    }


# ── what is done to them ─────────────────────────────────────────────────────────────────────────────────────────────


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values within a value, but not deep into hostile ones."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 5)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        if len(above) < 8:
            yield from _places(value[key], (*above, key))


def _changed(chance: random.Random, body: Any) -> Any:
    places = list(_places(body))
    if not places or chance.random() < 0.01:
        return chance.choice(VALUES)
    *above, key = chance.choice(places)
    body = json.loads(json.dumps(body))
    holder = body
    for step in above:
        holder = holder[int(step) if isinstance(holder, list) else str(step)]
    key = key if isinstance(holder, list) else str(key)
    _change_at(chance, holder, key)
    return body


def _change_at(chance: random.Random, holder: Any, key: Any) -> None:
    how = chance.random()
    if how < 0.65:
        holder[key] = chance.choice(VALUES)
    elif how < 0.8:
        del holder[key]
    elif isinstance(holder, dict):
        holder[chance.choice(NAMES)] = chance.choice(VALUES)
    else:
        holder += [holder[key]] * chance.choice((1, 30))


def _damaged(chance: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(made) + 1)
        how = chance.randrange(5)
        if how == 0 and place < len(made):
            made[place] = chance.randrange(256)
        elif how == 1:
            del made[place:]
        elif how == 2:
            del made[place : place + chance.randint(1, 20)]
        elif how == 3:
            made[place:place] = chance.choice(
                (b"[" * 2000, b'{"a":' * 500, b"\xff\xfe", b"\0", b"9" * 5000, b"1e999", b'"')
            )
        else:
            made[place:place] = made[: chance.randint(1, 60)]
    return bytes(made)


def _method(chance: random.Random, usual: str) -> str:
    return chance.choice((usual, usual, "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"))


def _path(chance: random.Random, path: str) -> str:
    odd = ("", "/", "//", "/../", "/%00", "/%ff", "?", "?a=b&a", "?last=x", quote("/é"), "/" + "a" * 3000, "#x", "%")
    return path + chance.choice(odd)


def _headers(chance: random.Random) -> dict[str, str]:
    odd = {
        "Content-Encoding": "gzip", "Content-Type": "text/plain; charset=\xff", "Authorization": "Bearer \xfe",
        "Accept": "nothing", "Expect": "100-continue", "Host": "", "X-Long": "a" * 5000, "Cookie": "a=b;" * 50,
        "Last-Event-ID": "9" * 30, "Origin": "null", "Transfer-Encoding": "identity", "Upgrade": "websocket",
    }  # fmt: skip
    return {name: odd[name] for name in chance.sample(sorted(odd), chance.randint(1, 3))}


# ── sending them ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Answer:
    case: Case
    status: int  # 0: the connection was closed without one
    seconds: float
    body: bytes = b""
    error: str = ""


class Sender:
    """Sends from any thread, each over a connection of its own that stays open until the end of the `with`."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._own = local()
        self._all: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()

    def send(self, case: Case) -> Answer:
        started = time.perf_counter()
        try:
            connection = self._connection()
            connection.request(case.method, case.path, case.body or None, case.headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection().close()
            return Answer(case, 0, time.perf_counter() - started, error=f"{type(error).__name__}: {error}")
        return Answer(case, response.status, time.perf_counter() - started, body)

    def _connection(self) -> http.client.HTTPConnection:
        """Connects again by itself where it was closed."""
        if not hasattr(self._own, "connection"):
            host, port = self._address.hostname or "", self._address.port
            self._own.connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
            self._all.append(self._own.connection)
        return self._own.connection  # type: ignore[no-any-return]


def find_fault(answer: Answer, bound: float) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if answer.seconds > bound:
        return f"took {answer.seconds:.1f} s, and the bound is {bound:.1f} s"
    if answer.status == 0:
        return None if answer.error.startswith(_OURS) else f"no answer ({answer.error})"
    if answer.status >= 500 and answer.status not in EXPECTED_5XX:
        return f"status {answer.status}: {answer.body[:200]!r}"
    if answer.status >= 400 and answer.case.method == "POST" and not _is_error(answer.body):
        return f"status {answer.status} without OpenAI's error: {answer.body[:200]!r}"
    return None


# What this client refuses to send, and what a server that has refused a body early does to the rest of it.
_OURS = ("ValueError", "InvalidURL", "UnicodeEncodeError", "BrokenPipeError", "ConnectionResetError")


def _is_error(body: bytes) -> bool:
    if body == b"Invalid HTTP request received.":  # what is no HTTP has no JSON
        return True
    try:
        return isinstance(json.loads(body)["error"]["message"], str)
    except (ValueError, KeyError, TypeError):
        return False


def longest_answer(sender: Sender) -> float:
    """Seconds of the most that one choice of a good request can ask for: a whole context."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}).encode()
    return sender.send(Case(-1, "POST", CHAT, body, {"Content-Type": "application/json"})).seconds


@dataclass
class Campaign:
    """What came of all requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, answer: Answer, bound: float) -> None:
        self.statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        fault = find_fault(answer, bound)
        if fault is not None:
            self.faults.append(f"number {answer.case.number}, {answer.case.method} {answer.case.path[:60]}: {fault}")


def run(
    url: str, seed: int, numbers: Sequence[int], concurrency: int, after: Callable[[int], None] = lambda _: None
) -> tuple[Campaign, float]:
    """Send the requests; `after` is called with the number of answers so far. Also the bound in seconds."""
    campaign = Campaign()
    with Sender(url) as sender, ThreadPoolExecutor(concurrency) as threads:
        bound = BASE_SECONDS + concurrency * MAX_CHOICES * longest_answer(sender)
        answers = threads.map(lambda number: sender.send(make_case(seed, number)), numbers)
        for count, answer in enumerate(answers, 1):
            campaign.add(answer, bound)
            after(count)
    return campaign, bound


def at_rest(url: str) -> list[str]:
    """What the server still holds when all is over."""
    deadline = time.monotonic() + REST_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    with Sender(url) as sender:
        while True:
            text = sender.send(Case(-1, "GET", "/metrics", b"")).body.decode()
            held = [line for line in text.splitlines() if line.startswith(names) and not line.endswith(" 0.0")]
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.2)


def main() -> int:
    args = _arguments()
    if args.number is not None:
        print(make_case(args.seed, args.number))
        return 0
    flags = (*FLAGS, *(("--model", args.model) if args.model else ()))
    server = Server(*flags) if args.url is None else None
    try:
        return _campaign(args, args.url, {}) if server is None else _campaign(args, server.url, server.pids)
    finally:
        if server is not None:
            server.stop()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="show this request, send nothing")
    parser.add_argument("--url", help="a server that runs already; its memory is not looked at")
    parser.add_argument("--model", help="of the server that is started; default: the default model")
    return parser.parse_args()


def _campaign(args: argparse.Namespace, url: str, pids: dict[str, int]) -> int:
    warm: dict[str, int] = {}

    def look(count: int) -> None:
        if count == int(WARM_UP * args.requests):
            warm.update({name: resident_bytes(pid) for name, pid in pids.items()})

    started = time.perf_counter()
    campaign, bound = run(url, args.seed, range(args.requests), args.concurrency, look)
    growth = {name: (resident_bytes(pid) - warm[name]) / MIB for name, pid in pids.items()}
    faults = campaign.faults + [f"still held: {line}" for line in at_rest(url)]
    faults += [f"{name} grew by {grown:.1f} MiB" for name, grown in growth.items() if grown > BOUND_MIB[name]]
    for status, count in sorted(campaign.statuses.items()):
        print(f"{status or 'no answer'}: {count}")
    print("\n".join(faults[:50]) or "no fault")
    result = {
        "requests": args.requests, "seed": args.seed, "seconds": round(time.perf_counter() - started, 1),
        "statuses": dict(sorted(campaign.statuses.items())), "slowest_seconds": round(campaign.slowest, 2),
        "bound_seconds": round(bound, 1), "growth_mib": {name: round(grown, 1) for name, grown in growth.items()},
        "faults": len(faults),
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
