"""Limits of a running server: requests, tokens and streams of one key, connections, and answers that nobody reads."""

from __future__ import annotations

import json
import re
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from faser.server import http
from tests.server.running import eventually
from tests.server.test_operations import FOREVER, open_stream

KEYS = ("--api-key", "one", "--api-key", "two")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_over_its_rate_gets_429_and_when_to_try_again_and_others_do_not(paced):
    with paced(*KEYS, "--rate-limit", "2", "--open-metrics") as server:
        for body in ({"prompt": "a", "max_tokens": 1}, b"no JSON"):
            assert server.post("/v1/completions", body, bearer("one"))[0] in (200, 400)
        with openai.OpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError, match="2 requests a minute") as refused:
                client.chat.completions.create(model="paced", messages=[{"role": "user", "content": "a"}])
            assert refused.value.code == "requests_per_minute"
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer("two"))[0] == 200
        assert server.get("/v1/models", bearer("one"))[0] == 200, "only requests for answers count"
        assert re.search(r"requests_refused_total\{.*status=\"429\".*\} 1.0", server.get("/metrics")[1])


def test_no_header_gives_a_client_another_address(paced):
    with paced("--rate-limit", "2") as server:
        body = {"prompt": "a", "max_tokens": 1}
        answers = [server.post("/v1/completions", body, {"X-Forwarded-For": f"9.9.9.{i}"})[0] for i in range(3)]
    assert answers == [200, 200, 429]


def test_tokens_of_prompts_and_answers_count_also_where_the_client_left(paced):
    with paced("--token-limit", "20") as server:
        status, _ = server.post("/v1/completions", {"prompt": [100] * 10, "max_tokens": 5})
        assert status == 200
        stream = open_stream(server)  # 5 are left: the prompt of 3 or 4 fits, and its tokens go on
        stream.close()
        eventually(lambda: server.metric("vllm:num_requests_running") == 0, "the client's leaving is noticed")
        status, answer = server.post("/v1/completions", {"prompt": [100] * 30, "max_tokens": 1})
        if status == 200:  # it was let in with what was left, and overdrew
            status, answer = server.post("/v1/completions", {"prompt": [100], "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (429, "tokens_per_minute")
        assert answer["error"]["type"] == "invalid_request_error"


def test_streams_of_one_key_leave_room_for_the_other(paced):
    limits = ("--max-running", "2", "--max-waiting", "2", "--open-metrics")
    with paced(*KEYS, *limits) as server, ExitStack() as streams:
        body = {**FOREVER, "n": 3, "stream": True}
        status, answer = server.post("/v1/completions", {**body, "n": 4}, bearer("one"))
        assert (status, "a key may have 3 at a time" in answer["error"]["message"]) == (400, True)
        with socket.create_connection(address(server)) as connection:
            connection.sendall(request(body, "one"))
            eventually(
                lambda: server.metric("vllm:num_requests_running") == 2, "three choices of the first run or wait"
            )
            status, answer = server.post("/v1/completions", FOREVER, bearer("one"))
            assert (status, answer["error"]["code"]) == (429, "too_many_streams")
            streams.enter_context(second := socket.create_connection(address(server)))
            second.sendall(request({**FOREVER, "stream": True}, "two"))
            eventually(lambda: server.metric("vllm:num_requests_waiting") == 2, "the second key's request waits")
        eventually(lambda: server.metric("vllm:num_requests_waiting") == 0, "the first key's are given back")
        second.close()
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer("one"))[0] == 200


def test_a_connection_too_many_is_answered_503_and_closed(paced):
    with paced("--max-connections", "3") as server, ExitStack() as opened:
        eventually(lambda: server.get("/health")[0] == 200, "it serves")
        held = [opened.enter_context(socket.create_connection(address(server))) for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        further = opened.enter_context(socket.create_connection(address(server)))
        assert further.recv(1000).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
        assert further.recv(1000) == b""
        held[0].close()
        eventually(lambda: server.get("/health")[0] == 200, "there is room again")


def test_no_more_connections_are_taken_than_the_process_has_descriptors(monkeypatch):
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (256, 4096))
    assert http.usable_connections(4096) == 192
    assert http.usable_connections(100) == 100
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (http.resource.RLIM_INFINITY,) * 2)
    assert http.usable_connections(4096) == 4096


class Loop:
    """Keeps what is to be called later."""

    def __init__(self) -> None:
        self.later = []

    def call_later(self, seconds, call, *arguments):
        timer = SimpleNamespace(seconds=seconds, call=lambda: call(*arguments), is_cancelled=False)
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        self.later.append(timer)
        return timer


class Transport:
    def __init__(self) -> None:
        self.is_aborted = False
        self.unread = 10**6

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _):
        return None

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        """Would wait for the client."""


async def nothing(scope, receive, send) -> None:
    """An application without an answer."""


def test_a_client_that_reads_nothing_is_disconnected_and_one_that_reads_slowly_is_not():
    loop, transport, config = Loop(), Transport(), uvicorn.Config(nothing, lifespan="off", log_config=None)
    config.load()
    protocol = http.HttpProtocol(config, ServerState(), {}, loop, max_connections=1)
    protocol.connection_made(transport)
    protocol.pause_writing()
    slow = loop.later[-1]
    protocol.resume_writing()
    assert slow.is_cancelled
    protocol.pause_writing()
    slowly = loop.later[-1]
    transport.unread -= http.MIN_READ_BYTES
    slowly.call()
    never = loop.later[-1]
    assert never is not slowly
    transport.unread -= http.MIN_READ_BYTES - 1
    assert (never.seconds, never.is_cancelled, transport.is_aborted) == (http.UNREAD_SECONDS, False, False)
    never.call()
    assert transport.is_aborted
    protocol.connection_lost(None)
    assert never.is_cancelled


def address(server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def request(body: dict[str, object], key: str) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
