"""`vllm serve` with the flag, over HTTP: engine, worker and server are three processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    def __init__(self, pair: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        speculative = {"method": "draft_model", "model": str(pair / "draft"), "num_speculative_tokens": 4}
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair / "target"),
            "--served-model-name", "tiny", "--port", self.url.rpartition(":")[2], "--dtype", "float32",
            "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager", "--block-size", "32",
            "--speculative-config", json.dumps(speculative),
            "--additional-config", json.dumps({"faser": {"policy": "fixed:3"}}),
        ]  # fmt: skip
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {"VLLM_PLUGINS": "faser", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | settings)

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
            except OSError:
                time.sleep(1)
            else:
                return
        raise AssertionError(self.log.read_text()[-5000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def metrics(self) -> dict[str, float]:
        """Values by name; of those with more labels than the model and the engine, one."""
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, value in lines}

    def complete(self, **given) -> dict:
        body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 40, "temperature": 0, **given}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    server = Server(pair, tmp_path_factory.mktemp("log") / "server.log")
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


def test_the_server_answers_and_counts_drafts_under_vllm_s_names_and_ours(server):
    limited = server.complete(vllm_xargs={"max_draft": 0}, ignore_eos=True)
    free = server.complete(ignore_eos=True)
    assert limited["choices"][0]["text"] == free["choices"][0]["text"]
    found, end = server.metrics(), time.monotonic() + 40  # figures of the last steps are published within ten seconds
    while not found.get("faser:spec_decode_num_verified_tokens_total") and time.monotonic() < end:
        time.sleep(1)
        found = server.metrics()
    assert found["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert found["faser:steps_total"] > 0
    assert found["faser:spec_decode_num_verified_tokens_total"] > 0
    assert found["faser:policy_failures_total"] == 0


def test_a_wrong_max_draft_is_answered_with_400_and_the_reason(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete(vllm_xargs={"max_draft": "two"})
    assert refused.value.code == 400
    assert "max_draft: expected a whole number from 0 on" in refused.value.read().decode()
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_the_dashboard_is_served(server):
    assert "<html" in server.get("/faser")
    server.complete(max_tokens=20, ignore_eos=True)
    time.sleep(2.5)
    data = json.loads(server.get("/faser/data"))
    assert data["server"]["policy"] == "fixed:3"
    assert data["drafted"]["total"]["accepted"] > 0
    assert data["requests"]["finished"] > 0


def test_the_log_says_what_was_set_and_which_costs_are_used(server):
    log = server.log.read_text()
    assert "FASER in vLLM" in log
    assert "FASER: policy fixed:3, at most 4 drafted tokens a request" in log
    assert "FASER: costs were measured by the worker" in log
