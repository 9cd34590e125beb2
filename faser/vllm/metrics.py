"""FASER's metrics on vLLM's /metrics, beside vLLM's own: a stat logger that reads the scheduler's status file.

vLLM counts drafts and accepted tokens itself, under its own names (vllm:spec_decode_…). docs/vllm.md lists these here.
"""

from __future__ import annotations

from functools import cache
from time import time
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from faser.vllm.config import FaserConfig
from faser.vllm.dashboard import served_by
from faser.vllm.status import EngineStatus, status_path

READ_SECONDS = 1.0
COUNTERS = {  # by field of EngineStatus
    "steps": ("faser:steps", "Steps"),
    "drafting_steps": ("faser:drafting_steps", "Steps at whose end the draft ran for somebody"),
    "step_seconds": ("faser:step_seconds", "Seconds in steps"),
    "predicted_seconds": ("faser:predicted_step_seconds", "Seconds in steps, as predicted before each"),
    "planning_seconds": ("faser:plan_seconds", "Seconds in planning lengths"),
    "verified": ("faser:spec_decode_num_verified_tokens", "Drafted tokens that the target verified"),
    "failures": ("faser:policy_failures", "Times that the policy failed"),
}
LABELS = ("model_name", "engine")


@cache
def collectors() -> tuple[dict[str, Counter], Counter, Gauge, Gauge]:
    """Made once a process: Prometheus refuses a second one of the same name."""
    counters = {name: Counter(metric, about, LABELS) for name, (metric, about) in COUNTERS.items()}
    by_length = Counter("faser:requests_by_draft_length", "Steps of decoding requests, by length", (*LABELS, "length"))
    about_drafting = "Requests that draft at the end of the last step"
    drafting = Gauge("faser:requests_drafting", about_drafting, LABELS, multiprocess_mode="mostrecent")
    about_measured = "Whether lengths are planned with measured costs"
    measured = Gauge("faser:costs_measured", about_measured, LABELS, multiprocess_mode="mostrecent")
    return counters, by_length, drafting, measured


class FaserMetrics(StatLoggerBase):  # type: ignore[misc]
    """One engine. Does nothing where FASER is not in use."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._is_used = FaserConfig.find(vllm_config.additional_config) is not None
        self._path = status_path(vllm_config.instance_id, engine_index)
        self._served = served_by(vllm_config.instance_id)
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._seen = EngineStatus()
        self._read_at = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        now = time()
        if not self._is_used:
            return
        if iteration_stats is not None:
            self._served.add(iteration_stats, now)
        if now - self._read_at >= READ_SECONDS:
            self._read_at = now
            self._publish()

    def log(self) -> None:
        """Every ten seconds, also while the engine is idle: the figures of its last steps arrive."""
        if self._is_used:
            self._publish()

    def log_engine_initialized(self) -> None:
        """Nothing: the scheduler has said what it does."""

    def _publish(self) -> None:
        status = EngineStatus.load(self._path)
        if status is None:
            return
        counters, by_length, drafting, measured = collectors()
        seen, self._seen = vars(self._seen), status
        for name, counter in counters.items():
            counter.labels(*self._labels).inc(max(0, vars(status)[name] - seen[name]))
        for length, (was, is_now) in enumerate(zip(seen["lengths"], status.lengths, strict=True)):
            if is_now > was:
                by_length.labels(*self._labels, str(length)).inc(is_now - was)
        drafting.labels(*self._labels).set(status.last_drafting if status.running else 0)
        measured.labels(*self._labels).set(status.costs != "assumed")
