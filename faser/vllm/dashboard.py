"""/faser: FASER's dashboard on vLLM's server. VLLM_PLUGINS must name `faser`: vLLM adds no routes unasked.

The page is that of FASER's own server. Its data come from the scheduler's status file, and from what the stat logger
(faser/vllm/metrics.py) saw of requests in this process. Imports nothing of vLLM.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any

from faser.machine import faser_version
from faser.vllm.config import FaserConfig
from faser.vllm.status import EngineStatus, status_path

HISTORY_SECONDS = 600
WINDOW_SECONDS = 60.0  # of shares and percentiles
ENDS = {"stop": "stop", "length": "length", "abort": "cancelled", "error": "failed", "repetition": "stop"}


class ServedRequests:
    """What became of requests, as vLLM's HTTP process sees it."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.first_token: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, seconds)
        self.per_token: deque[tuple[float, float]] = deque(maxlen=4096)

    def add(self, iteration: Any, now: float) -> None:
        """Take in vLLM's IterationStats."""
        self.first_token.extend((now, seconds) for seconds in iteration.time_to_first_tokens_iter)
        for finished in iteration.finished_requests:
            self.ends[ENDS.get(str(finished.finish_reason), "failed")] += 1
            if finished.mean_time_per_output_token > 0:
                self.per_token.append((now, finished.mean_time_per_output_token))


@cache
def served_by(instance_id: str) -> ServedRequests:
    """The one of this process, for the stat logger and the dashboard."""
    return ServedRequests()


class EngineHistory:
    """The status of an engine once a second, and all that the page shows of it."""

    def __init__(self, vllm_config: Any, path: Path, served: ServedRequests, now: float) -> None:
        self._config, self._path, self._served, self._started = vllm_config, path, served, now
        self._points: deque[tuple[float, EngineStatus]] = deque([(now, EngineStatus())], maxlen=HISTORY_SECONDS + 1)

    def tick(self, now: float) -> None:
        """Once a second."""
        self._points.append((now, EngineStatus.load(self._path) or EngineStatus()))

    def data(self, now: float) -> dict[str, Any]:
        points = list(self._points)
        rows = [_row(was, after) for was, after in pairwise([points[0], *points])]
        status, before = points[-1][1], self._before(now - WINDOW_SECONDS)
        verified = _gain(before.verified_per_position, status.verified_per_position)
        accepted = _gain(before.accepted_per_position, status.accepted_per_position)
        positions = sum(count > 0 for count in verified)  # counts never grow with the position
        lengths = _gain(self._before(now - 3.0).lengths, status.lengths)
        ends = self._served.ends
        return {
            "server": self._server(status, now),
            "now": self._now(status, rows[-1], now),
            "history": {name: [row[name] for row in rows] for name in rows[0]},
            "lengths": lengths if any(lengths) else [],
            "positions": {"verified": verified[:positions], "accepted": accepted[:positions]},
            "contexts": None,  # not counted here
            "drafted": {"minute": _fates(before, status), "total": _fates(EngineStatus(), status)},
            "exits": "",
            "residency": "",
            "draft_failure": f"The policy failed in {status.failures} steps; see the log." if status.failures else "",
            "requests": {"finished": ends["stop"] + ends["length"], "refused": 0}
            | {name: ends[name] for name in ("stop", "length", "cancelled", "failed")},
        }

    def _before(self, when: float) -> EngineStatus:
        return next((status for at, status in reversed(self._points) if at <= when), self._points[0][1])

    def _server(self, status: EngineStatus, now: float) -> dict[str, Any]:
        model, speculative = self._config.model_config, self._config.speculative_config
        return {
            "model": model.model,
            "draft": speculative.model or speculative.method,
            "policy": status.policy,
            "device": str(self._config.device_config.device_type),
            "dtype": str(model.dtype).removeprefix("torch."),
            "version": faser_version(),
            "uptime_seconds": now - self._started,
            "state": "ready",
            "max_running": self._config.scheduler_config.max_num_seqs,
            "sees": False,  # sessions of video are FASER's own server's
        }

    def _now(self, status: EngineStatus, last: dict[str, Any], now: float) -> dict[str, Any]:
        ttft_p50, ttft_p99 = _percentiles(self._served.first_token, now)
        tpot_p50, tpot_p99 = _percentiles(self._served.per_token, now)
        return {
            "running": status.running, "waiting": status.waiting, "kv_used": status.kv_used, "kv_tokens": 0,
            "kv_gained": None, "draft_kv_used": None, "prefix_hit_rate": None,
            "speculating": status.running > 0 and status.last_drafting > 0,
            "output_rate": last["output_rate"], "step_ms": last["step_ms"], "predicted_ms": last["predicted_ms"],
            "ttft_p50": ttft_p50, "ttft_p99": ttft_p99, "tpot_p50": tpot_p50, "tpot_p99": tpot_p99,
            "speculation": describe(status, now),
        }  # fmt: skip


def describe(status: EngineStatus, now: float) -> str:
    """What speculation does now, in words."""
    if not status.steps:
        return "nothing has run yet"
    if not status.running:
        return f"idle; policy {status.policy}"
    if not status.last_drafting:
        return f"speculation off for {now - status.last_lengths_changed:.0f} s; {status.last_decoding} decoding"
    mean = status.last_drafted / status.last_drafting
    return f"last step: {mean:.1f} tokens on average for {status.last_drafting} of {status.last_decoding} requests"


def _row(before: tuple[float, EngineStatus], after: tuple[float, EngineStatus]) -> dict[str, Any]:
    """One second of the charts."""
    (began, was), (ended, now) = before, after
    seconds, steps, decoded = ended - began, now.steps - was.steps, sum(now.lengths) - sum(was.lengths)
    return {
        "time": ended,
        "output_rate": (now.emitted - was.emitted) / seconds if seconds > 0 else 0.0,
        "running": now.running,
        "waiting": now.waiting,
        "kv_used": now.kv_used,
        "kv_gained": None,
        "step_ms": 1e3 * (now.step_seconds - was.step_seconds) / steps if steps > 0 else None,
        "predicted_ms": 1e3 * (now.predicted_seconds - was.predicted_seconds) / steps if steps > 0 else None,
        "accepted_rate": (now.accepted - was.accepted) / seconds if seconds > 0 else 0.0,
        "mean_length": (now.verified - was.verified) / decoded if decoded > 0 else None,
    }


def _gain(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [now - was for was, now in zip(before, after, strict=True)]


def _fates(before: EngineStatus, after: EngineStatus) -> dict[str, int]:
    accepted = after.accepted - before.accepted
    return {"accepted": accepted, "rejected": after.verified - before.verified - accepted, "pruned": 0}


def _percentiles(samples: Sequence[tuple[float, float]], now: float) -> tuple[float | None, float | None]:
    ordered = sorted(value for when, value in samples if when >= now - WINDOW_SECONDS)
    return (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]) if ordered else (None, None)


class FaserEndpoint:
    """vLLM's protocol EndpointPlugin: the page at /faser and its data at /faser/data."""

    name = "faser"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._history: EngineHistory | None = None
        self._ticking: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        from starlette.responses import HTMLResponse, JSONResponse

        page = (files("faser") / "server" / "dashboard" / "index.html").read_text(encoding="utf-8")

        async def show_page() -> HTMLResponse:
            return HTMLResponse(page)

        async def show_data() -> JSONResponse:
            if self._history is None:
                return JSONResponse({"error": "FASER is not in use: give additional_config['faser']"}, status_code=404)
            return JSONResponse(self._history.data(time()))

        app.add_api_route("/faser", show_page, methods=["GET"], include_in_schema=False, response_model=None)
        app.add_api_route("/faser/data", show_data, methods=["GET"], include_in_schema=False, response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None or FaserConfig.find(engine_client.vllm_config.additional_config) is None:
            return
        config = engine_client.vllm_config
        path = status_path(config.instance_id, config.parallel_config.data_parallel_index)
        self._history = EngineHistory(config, path, served_by(config.instance_id), time())
        self._ticking = asyncio.get_running_loop().create_task(self._tick(self._history))

    async def _tick(self, history: EngineHistory) -> None:
        while True:
            history.tick(time())
            await asyncio.sleep(1.0)
