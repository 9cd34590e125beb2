"""The dashboard's data under vLLM, from the scheduler's status file."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.testclient import TestClient

from faser.errors import ConfigError
from faser.vllm.dashboard import EngineHistory, FaserEndpoint, ServedRequests
from faser.vllm.status import EngineStatus, status_path
from tests.vllm.fakes import make_config


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def zeros(*first: int) -> list[int]:
    return [*first, *[0] * (33 - len(first))]


STATUS = EngineStatus(
    policy="faser", steps=100, drafting_steps=90, step_seconds=2.0, predicted_seconds=1.9, emitted=500, verified=300,
    accepted=200, lengths=zeros(10, 0, 0, 100), verified_per_position=zeros(100, 100, 100),
    accepted_per_position=zeros(90, 70, 40), running=4, kv_used=0.25, last_decoding=4, last_drafting=3, last_drafted=9,
)  # fmt: skip


def make_history() -> EngineHistory:
    return EngineHistory(make_config(), status_path("test", 0), ServedRequests(), 1000.0)


def test_before_the_first_step_there_is_nothing_to_show():
    data = make_history().data(1000.0)
    assert data["now"]["speculation"] == "nothing has run yet"
    assert data["history"]["output_rate"] == [0.0]


def test_rates_are_those_of_the_last_second():
    history = make_history()
    history.tick(1000.0)
    STATUS.save(status_path("test", 0))
    history.tick(1001.0)
    replace(STATUS, steps=150, step_seconds=3.0, emitted=700).save(status_path("test", 0))
    history.tick(1003.0)
    data = history.data(1003.0)
    assert data["history"]["output_rate"][-2:] == [500.0, 100.0]
    assert data["now"]["step_ms"] == pytest.approx(20.0)
    assert data["now"]["speculation"] == "last step: 3.0 tokens on average for 3 of 4 requests"
    assert data["now"]["speculating"] is True
    assert data["positions"] == {"verified": [100, 100, 100], "accepted": [90, 70, 40]}
    assert data["drafted"]["total"] == {"accepted": 200, "rejected": 100, "pruned": 0}


def test_a_failed_policy_is_shown():
    replace(STATUS, failures=7).save(status_path("test", 0))
    history = make_history()
    history.tick(1001.0)
    assert history.data(1001.0)["draft_failure"] == "The policy failed in 7 steps; see the log."


def test_requests_are_counted_by_how_they_ended():
    served = ServedRequests()
    ended = [
        SimpleNamespace(finish_reason=each, mean_time_per_output_token=0.02) for each in ("stop", "length", "abort")
    ]
    served.add(SimpleNamespace(time_to_first_tokens_iter=[0.1, 0.3], finished_requests=ended), 1000.0)
    data = EngineHistory(make_config(), status_path("test", 0), served, 1000.0).data(1001.0)
    assert data["requests"] == {"finished": 2, "refused": 0, "stop": 1, "length": 1, "cancelled": 1, "failed": 0}
    assert data["now"]["ttft_p50"] == 0.3
    assert data["now"]["tpot_p99"] == 0.02


def test_a_status_of_another_version_is_refused():
    path = status_path("test", 0)
    STATUS.save(path)
    assert EngineStatus.load(path) == STATUS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    with pytest.raises(ConfigError, match="another version"):
        EngineStatus.load(path)


class App(Starlette):
    """FastAPI's method that the plugin uses."""

    def add_api_route(self, path, endpoint, *, methods, include_in_schema, response_model):
        async def call(request):
            return await endpoint()

        self.add_route(path, call, methods=methods, include_in_schema=include_in_schema)


def test_the_page_and_its_data_are_routes_of_vllm_s_server():
    STATUS.save(status_path("test", 0))
    app, plugin = App(), FaserEndpoint()
    plugin.attach_router(app)
    client = TestClient(app)
    assert client.get("/faser/data").status_code == 404

    async def start() -> None:
        await plugin.init_state(SimpleNamespace(vllm_config=make_config()), None, None)
        await asyncio.sleep(0)
        plugin._ticking.cancel()

    asyncio.run(start())
    page = client.get("/faser").text
    assert "/data`" in page
    data = client.get("/faser/data").json()
    assert data["server"]["policy"] == "faser"
    asked = set(re.findall(r"\bnow\.([a-z_]+)", page)) | set(re.findall(r"\bserver\.([a-z_]+)", page))
    assert asked <= set(data["now"]) | set(data["server"])


def test_without_an_engine_or_the_flag_the_dashboard_has_no_data():
    plugin = FaserEndpoint()
    for client in (None, SimpleNamespace(vllm_config=make_config(None))):
        asyncio.run(plugin.init_state(client, None, None))
    assert plugin._history is None
