"""The server as its operators meet it: load, signals, crashes, keys and limits."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

import openai
import pytest

from tests.server.paced_engine import HANGS
from tests.server.running import eventually, running

FOREVER = {"model": "paced", "prompt": "the fox", "max_tokens": 3000}  # a minute at 20 ms a token


def open_stream(server, **fields):
    """A stream whose first token has arrived. The answer is left open."""
    body = json.dumps({**FOREVER, "stream": True, **fields}).encode()
    response = urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body), timeout=60)
    assert response.readline().startswith(b"data: ")
    return response


@contextmanager
def raw_request(server, body: bytes, length: int | None = None, receive_bytes: int | None = None):
    """A request on a socket of its own, sent but not read. `receive_bytes`: what the system keeps of an answer."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect((host, int(port)))
        length = len(body) if length is None else length
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


def is_idle(server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names)


def pasted(server, key: str | None = None, environment: dict[str, str] | None = None) -> list[str]:
    """What the two announced examples print, pasted one after the other; `key` takes the place of YOUR_KEY."""
    lines = server.log.splitlines()
    export = next((line for line in lines if "|| export " in line), "")
    shell = next(line for line in lines if line.startswith("curl "))
    start = lines.index("from openai import OpenAI")
    python = shlex.join([sys.executable, "-c", "\n".join(lines[start : start + 3])])
    if key is not None:
        assert "'YOUR_KEY'" in export
        export = export.replace("'YOUR_KEY'", shlex.quote(key))
    base = {name: value for name, value in os.environ.items() if name != "FASER_API_KEY"}
    outputs = []
    for example in (shell, python):
        command = ["bash", "-c", f"{export}\n{example}"]
        run = subprocess.run(command, capture_output=True, text=True, env={**base, **(environment or {})})
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    return outputs


def test_the_announced_examples_work_when_pasted(server):
    shell, python = pasted(server)
    assert json.loads(shell)["choices"][0]["message"]["content"]
    assert python.strip()
    for what in ("draft    ngram (as asked)", "policy   fixed:3 (as asked)", "device   cpu", "dtype    float32", "KV "):
        assert what in server.log


def test_the_examples_work_with_a_key_and_without_a_chat_template(paced):
    with paced(environment={"FASER_API_KEY": "it's secret"}) as server:
        for given in ({"key": "it's secret"}, {"environment": {"FASER_API_KEY": "it's secret"}}):
            shell, python = pasted(server, **given)
            assert json.loads(shell)["usage"]["completion_tokens"] == 64
            assert python.strip()
        assert "secret" not in server.log


def test_a_key_of_the_command_line_is_not_printed(paced):
    with paced("--api-key", "hidden") as server:
        assert json.loads(pasted(server, key="hidden")[0])["choices"]
        assert "hidden" not in server.log


# ── clients that leave ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_leaves_frees_its_pages(paced):
    with paced() as server:
        stream = open_stream(server)
        assert server.metric("vllm:num_requests_running") == 1, "no later than its first token"
        eventually(lambda: server.metric("vllm:kv_cache_usage_perc") > 0, "it holds pages")
        stream.close()
        eventually(lambda: is_idle(server), "its pages are free")
        assert server.metric("vllm:request_success_total") == 1
        assert server.get("/dashboard/data")[1]["requests"]["cancelled"] == 1
        # and one that never asked for a stream, and one that left in the middle of its body
        with raw_request(server, json.dumps(FOREVER).encode()):
            eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        eventually(lambda: is_idle(server), "its pages are free")
        with raw_request(server, b'{"prompt"', length=1000):
            pass
        assert server.complete(prompt="a", max_tokens=1)["choices"]
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_a_client_that_pipelines_and_leaves_is_noticed_too(paced):
    with paced() as server:
        body = json.dumps(FOREVER).encode()
        one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(one * 2)
            eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the first runs")
        eventually(lambda: is_idle(server), "its pages are free")


def test_endless_headers_are_refused(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 500) for i in range(200))
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_hung_engine_is_killed_and_its_requests_get_an_error(paced):
    with paced("--engine-timeout", "1") as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", FOREVER)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        os.kill(server.engine_id, signal.SIGSTOP)
        status, answer = waiting.result()
        assert (status, answer["error"]["code"]) == (503, "engine_failed")
        eventually(lambda: server.get("/health")[0] == 200, "a new engine is up")
        assert server.complete(prompt="a", max_tokens=2)["choices"]
        ends = server.get("/dashboard/data")[1]["requests"]
        assert (ends["failed"], ends["cancelled"]) == (1, 0)
        assert "it hung and was killed; if its steps are long, raise --engine-timeout" in server.log


def test_the_log_says_what_a_hung_engine_was_doing(paced):
    with paced("--engine-timeout", "1") as server:
        status, answer = server.post("/v1/completions", {"prompt": [HANGS]})
        assert (status, answer["error"]["code"]) == (503, "engine_failed")
        eventually(lambda: server.get("/health")[0] == 200, "a new engine is up")
        said = (
            r"silent for \d+ s \(1 requests in the batch, 0 waiting\); it was executing a step for \d+\.\d s \(step 1: "
        )
        assert re.search(said + r"1 requests, 1 rows\); its stack follows", server.log)
        assert "the engine is gone; it was executing a step" in server.log
        assert re.search(r'File ".*paced_engine\.py", line \d+ in execute', server.log)


def test_an_engine_that_is_stopped_and_continued_loses_nothing(paced):
    with paced() as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.complete, prompt="the fox", max_tokens=20)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        engine = server.engine_id
        os.kill(engine, signal.SIGSTOP)
        assert server.get("/health")[0] == 200, "the server answers while its engine stands still"
        os.kill(engine, signal.SIGCONT)
        assert waiting.result()["usage"]["completion_tokens"] == 20
        assert server.engine_id == engine


def test_a_client_that_closes_its_sending_side_ends_its_request(paced):
    with paced() as server, raw_request(server, json.dumps(FOREVER).encode()) as connection:
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: is_idle(server), "its pages are free")


def test_an_engine_can_be_started_again_behind_a_thousand_connections(paced):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("needs 4096 file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with paced() as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(1100)]
        try:
            os.kill(server.engine_id, signal.SIGKILL)
            eventually(lambda: server.get("/health") == (200, {**HEALTH, "engine_restarts": 1}), "a new engine is up")
        finally:
            for connection in idle:
                connection.close()


# ── a full house ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_answers_503_and_when_to_try_again(paced):
    with paced("--max-running", "1", "--max-waiting", "1") as server:
        stream = open_stream(server)
        with raw_request(server, json.dumps(FOREVER).encode()):
            eventually(lambda: server.metric("vllm:num_requests_waiting") == 1, "the second waits")
            with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
                with pytest.raises(openai.InternalServerError) as refused:
                    client.completions.create(model="paced", prompt="a")
                assert refused.value.status_code == 503
                assert int(refused.value.response.headers["retry-after"]) >= 1
                assert refused.value.code == "queue_full"
        stream.close()
        eventually(lambda: is_idle(server), "room again")
        assert server.complete(prompt="a", max_tokens=1)["choices"]
        assert server.metric("faser:requests_refused_total") == 1
        status, answer = server.post("/v1/completions", {"prompt": "a", "n": 3})
        assert (status, answer["error"]["param"]) == (400, "n"), "what can never fit is not told to try again"
        assert answer["error"]["message"] == (
            "1 prompt × n=3 are 3 choices in one request; the server holds 2 at a time (1 running, 1 waiting): lower n"
        )
        status, answer = server.post("/v1/completions", {"prompt": ["a"] * 128})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert answer["error"]["message"] == (
            "128 prompts × n=1 are 128 choices in one request; the server holds 2 at a time (1 running, 1 waiting): "
            "send at most 2 prompts in one request"
        )


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_sigterm_open_requests_finish_new_ones_are_refused_and_the_exit_status_is_0(paced):
    with paced() as server, ThreadPoolExecutor(16) as pool:
        engine_id = server.engine_id
        running_one = pool.submit(server.complete, prompt="a", max_tokens=100)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/health") == (503, {**HEALTH, "status": "draining"}), "it drains")
        status, answer = server.post("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert "takes no new requests; send them to another server" in answer["error"]["message"]
        assert running_one.result()["usage"]["completion_tokens"] == 100
        assert server.process.wait(60) == 0
        eventually(lambda: not os.path.exists(f"/proc/{engine_id}"), "the engine is gone too")


HEALTH = {"status": "ready", "engine_restarts": 0, "error": None, "draft_failure": None}


def test_requests_open_after_the_grace_period_end_with_an_error_and_the_exit_status_is_0(paced):
    with paced("--grace", "0.2") as server:
        stream = open_stream(server)
        assert server.stop() == 0
        *_, last = [line for line in stream.read().split(b"\n\n") if line]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "shutting_down"
        assert "shut down before this request had ended; send it again" in error["message"]


def test_a_second_signal_ends_the_grace(paced):
    with paced("--grace", "1000") as server, open_stream(server):
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: server.get("/health")[0] == 503, "it drains")
        assert server.stop() == 0


def test_an_engine_does_not_outlive_a_server_that_was_killed(paced):
    with paced() as server:
        engine_id = server.engine_id
        server.process.kill()
        eventually(lambda: not os.path.exists(f"/proc/{engine_id}"), "the engine is gone")


# ── an engine that dies ──────────────────────────────────────────────────────────────────────────────────────────────


def test_if_the_engine_dies_every_open_request_gets_an_error_and_the_engine_is_started_again(paced):
    with paced() as server, ThreadPoolExecutor(16) as pool:
        stream = open_stream(server)
        waiting = [pool.submit(server.post, "/v1/completions", FOREVER) for _ in range(8)]
        eventually(lambda: server.metric("vllm:num_requests_running") == 9, "all run")
        os.kill(server.engine_id, signal.SIGKILL)
        killed = monotonic()
        answers = [one.result() for one in waiting]
        assert monotonic() - killed < 10  # in truth a fraction of a second; a hang is what this excludes
        assert {status for status, _ in answers} == {503}
        assert {answer["error"]["code"] for _, answer in answers} == {"engine_failed"}
        *_, last = [line for line in stream.read().split(b"\n\n") if line]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
        eventually(lambda: server.get("/health") == (200, {**HEALTH, "engine_restarts": 1}), "a new engine is up")
        assert server.complete(prompt="a", max_tokens=3)["usage"]["completion_tokens"] == 3
        assert server.stop() == 0


def test_health_says_that_the_draft_could_not_come_back_and_stays_good(paced):
    reason = "it could not be loaded (out of memory)"
    with paced(factory="tests.server.paced_engine:make_stranded") as server:
        eventually(lambda: server.get("/health") == (200, {**HEALTH, "draft_failure": reason}), "health says so")
        assert server.complete(prompt="the fox", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert server.metric("faser:draft_moves_total") == 1
        assert reason in server.get("/dashboard/data")[1]["draft_failure"]


def test_health_says_when_the_engine_is_down(paced):
    with paced() as server:
        os.kill(server.engine_id, signal.SIGKILL)
        seen = set()
        eventually(lambda: seen.add(server.get("/health")[1]["status"]) or "restarting" in seen, "health says so")
        status, answer = server.post("/v1/completions", {"prompt": "a"})
        assert status in (200, 503), answer


def test_an_engine_failure_can_end_the_server_with_a_status(paced):
    with paced("--on-engine-failure", "exit") as server:
        os.kill(server.engine_id, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "faser: the engine process ended (signal 9, SIGKILL): the machine ran out of memory, or" in server.log


def test_an_engine_that_keeps_dying_is_given_up(paced):
    with paced() as server:
        for _ in range(3):
            eventually(lambda: server.process.poll() is not None or server.get("/health")[0] == 200, "it is up")
            server.post("/v1/completions", {"prompt": "&"})  # kills the engine that takes it in
        assert server.process.wait(60) == 1
        assert "3 times within a minute" in server.log


def test_an_engine_killed_while_it_starts_is_one_line_with_a_remedy(paced):
    with paced(factory="tests.server.paced_engine:die", wait=False) as server:
        assert server.process.wait(60) == 1
    (line,) = [line for line in server.log.splitlines() if line.startswith("faser: ")]
    assert re.search(r"used up to \d+\.\d GiB, and the machine has \d+\.\d GiB", line)
    assert "--kv-memory" in line
    assert "Traceback" not in server.log


def test_a_step_that_fails_fails_its_requests_and_no_others(paced):
    with paced() as server:
        status, answer = server.post("/v1/completions", {"prompt": "%"})
        assert status == 500
        assert "secret" not in json.dumps(answer), "no details to clients"
        assert "secret details" in server.log
        assert server.complete(prompt="a", max_tokens=2)["choices"]
        assert server.get("/health") == (200, HEALTH)
        assert server.metric("faser:step_failures_total") == 1


def test_a_model_that_cannot_be_loaded_is_one_readable_line(folder, tmp_path):
    with running(tmp_path / "nowhere", tmp_path, wait=False) as server:
        assert server.process.wait(60) == 1
    lines = server.log.strip().splitlines()
    assert lines[-1].startswith("faser: ")
    assert "nowhere" in lines[-1]
    assert "Traceback" not in server.log


def test_a_taken_port_is_one_readable_line(chat_folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with running(chat_folder, tmp_path, "--port", str(taken.getsockname()[1]), wait=False) as server:
            assert server.process.wait(60) == 1
    assert "give another --port" in server.log
    assert "Traceback" not in server.log


# ── keys and limits ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_limits_and_cors_are_enforced(paced):
    flags = ("--api-key", "secret", "--max-body-size", "0.001", "--max-prompt-tokens", "8")
    environment = {"FASER_API_KEY": "other"}
    with paced(*flags, "--cors-origin", "https://example.org", environment=environment) as server:
        body = {"model": "paced", "prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            status, answer = server.post("/v1/completions", body, headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/v1/models", "/metrics", "/dashboard/data", "/openapi.json", "/docs", "/health/x"):
            assert server.get(path)[0] == 401, path
            assert server.get(path, {"Authorization": "Bearer wrong"})[0] == 401, path
        for path in ("/metrics", "/dashboard/data", "/openapi.json"):
            assert server.get(path, {"Authorization": "Bearer other"})[0] == 200, path
        assert server.get("/health")[0] == 200, "probes need no key"
        for path in ("/dashboard", "/dashboard/", "/dashboard/video", "/"):
            assert server.get(path)[0] == 200, "the page asks for the key"
        for key in ("secret", "other"):
            assert server.post("/v1/completions", body, {"Authorization": f"Bearer {key}"})[0] == 200

        key = {"Authorization": "Bearer secret"}
        status, answer = server.post("/v1/completions", {**body, "user": "x" * 2000}, key)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        status, answer = server.post("/v1/completions", {**body, "prompt": [70] * 9}, key)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

        request = urllib.request.Request(server.url + "/health", headers={"Origin": "https://example.org"})
        with urllib.request.urlopen(request) as response:
            assert response.headers["access-control-allow-origin"] == "https://example.org"


def test_metrics_can_be_left_open_beside_a_key(paced):
    with paced("--api-key", "secret", "--open-metrics") as server:
        assert server.get("/metrics")[0] == 200
        assert server.get("/dashboard/data")[0] == 401


def test_the_root_leads_to_the_dashboard(server):
    with urllib.request.urlopen(server.url) as response:
        assert response.url == f"{server.url}/dashboard"
        assert response.headers["content-type"].startswith("text/html")


def test_cors_is_off_by_default(server):
    request = urllib.request.Request(server.url + "/health", headers={"Origin": "https://example.org"})
    with urllib.request.urlopen(request) as response:
        assert response.headers["access-control-allow-origin"] is None


def test_nobody_hangs_when_everything_happens_at_once(server):
    """Many threads, half of which leave early: all answers arrive, and nothing is held at the end."""
    errors: list[str] = []

    def one(number: int) -> None:
        body = {"prompt": "the fox " * (number % 7 + 1), "max_tokens": 40, "seed": number, "ignore_eos": True}
        if number % 2:
            with raw_request(server, json.dumps({**body, "stream": True}).encode()) as connection:
                connection.recv(200 * (number % 3))
        elif server.complete(**body)["usage"]["completion_tokens"] != 40:
            errors.append(f"{number} was cut short")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    eventually(lambda: is_idle(server), "nothing is held")
