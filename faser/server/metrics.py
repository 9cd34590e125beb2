"""/metrics: the figures as Prometheus text. Names are vLLM's where vLLM has one; docs/metrics.md defines each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from faser.request import FinishReason
from faser.server.engine_client import EngineClient
from faser.server.figures import Figures
from faser.server.messages import Snapshot


class PrometheusText:
    """/metrics."""

    def __init__(self, figures: Figures, engine: EngineClient) -> None:
        self._figures = figures
        self._engine = engine
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        about = self._engine.about
        model = about.model if about is not None else ""
        yield from self._of_requests(model)
        if self._figures.latest is not None:
            yield from self._of_engine(self._figures.latest, model)
        if about is not None:
            sizes = {"num_gpu_blocks": str(about.num_pages), "block_size": str(about.page_size)}
            yield _metric(GaugeMetricFamily, "vllm:cache_config_info", "The KV cache", 1, model, sizes)
            settings = {
                "version": version("faser"),
                "policy": about.policy,
                "device": about.device,
                "dtype": about.dtype,
            }
            info = InfoMetricFamily("faser:build", "What runs")
            info.add_metric([], {**settings, "model_name": model, "draft": about.draft or ""})
            yield info

    def _of_requests(self, model: str) -> Iterator[Metric]:
        figures = self._figures
        yield _counter("vllm:prompt_tokens", "Prompt tokens of requests that ended", figures.prompt_tokens, model)
        yield _counter("vllm:generation_tokens", "Output tokens", figures.output_tokens, model)
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason in FinishReason:
            ends.add_metric([model, reason.value], figures.ends[reason.value])
        yield ends
        refused = CounterMetricFamily(
            "faser:requests_refused", "Requests answered with an error, by HTTP status", labels=["model_name", "status"]
        )
        for status in sorted({400, 503, *figures.refused}):
            refused.add_metric([model, str(status)], figures.refused[status])
        yield refused
        for name, help_, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token", figures.first_token),
            ("vllm:inter_token_latency_seconds", "Time between tokens", figures.between_tokens),
            ("vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens", figures.per_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to end", figures.request_seconds),
            ("vllm:request_prompt_tokens", "Prompt sizes", figures.prompt_sizes),
            ("vllm:request_generation_tokens", "Output sizes", figures.output_sizes),
        ):
            buckets, total = histogram.buckets()
            yield _histogram(name, help_, buckets, total, model)
        for name, help_, value in (
            ("vllm:num_requests_running", "Requests in the batch", self._engine.num_running),
            ("vllm:num_requests_waiting", "Open requests that are not in the batch", self._engine.num_waiting),
            ("faser:engine_up", "Whether the engine is ready", self._engine.state == "ready"),
        ):
            yield _metric(GaugeMetricFamily, name, help_, float(value), model)
        yield _counter("faser:engine_restarts", "Times that the engine was restarted", self._engine.num_restarts, model)

    def _of_engine(self, now: Snapshot, model: str) -> Iterator[Metric]:
        about = self._engine.about
        num_pages = about.num_pages if about is not None else 1
        for name, help_, value in (
            ("vllm:kv_cache_usage_perc", "Share of the target's KV pages in use, 0 to 1", now.pages_held / num_pages),
            ("faser:draft_kv_cache_usage", "Share of the draft's KV pages in use, 0 to 1",
             (now.draft_pages_held or 0) / num_pages),
            ("faser:draft_resident", "Whether a draft model's weights are on the device",
             now.draft_pages_held is not None),
            ("faser:early_exit_predicted_seconds", "Seconds that early exits saved, by the profile",
             now.exits.predicted_seconds if now.exits else 0.0),
            ("faser:early_exit_measured_seconds", "Seconds that early exits saved, by the clock against the profile",
             now.exits.measured_seconds if now.exits else 0.0),
            ("faser:lanes", "Parts of the device's SMs that the last step ran on; 1: undivided", now.lanes),
        ):  # fmt: skip
            yield _metric(GaugeMetricFamily, name, help_, float(value), model)
        for name, help_, value in (
            ("vllm:num_preemptions", "Requests sent back to the queue because KV pages ran out", now.preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache", now.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", now.prefix_hits),
            ("vllm:spec_decode_num_drafts", "Times a request drafted", sum(now.lengths[1:])),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens", now.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that the target accepted", now.accepted),
            ("faser:spec_decode_num_verified_tokens", "Drafted tokens that the target verified", now.verified),
            ("faser:spec_decode_num_pruned_tokens", "Drafted tokens dropped before the target's last layer",
             now.drafted - now.verified),
            ("faser:spec_decode_num_false_pruned_tokens", "Accepted tokens that the rule of early exit would have "
             "pruned, in trials", now.exits.trial_false if now.exits else 0),
            ("faser:early_exit_trial_pruned_tokens", "Tokens that the rule of early exit would have pruned in trials",
             now.exits.trial_pruned if now.exits else 0),
            ("faser:overlap_chunks", "Drafts of a request made while its drafts before were verified", now.chunks),
            ("faser:overlap_hits", "Of these, the ones that held: all before them accepted, and the next token right; "
             "or a branch was there instead", now.hits),
            ("faser:overlap_adopted", "Of the hits, the branches", now.adopted),
            ("faser:early_exit_trials", "Steps that ran to the end to see what the early exit would do",
             now.exits.trials if now.exits else 0),
            ("faser:speculation_off_seconds", "Seconds of steps in which requests decoded and none drafted",
             now.off_seconds),
            ("faser:steps", "Steps", now.steps),
            ("faser:step_failures", "Steps that failed", now.step_failures),
            ("faser:step_seconds", "Seconds in steps", now.step_seconds),
            ("faser:predicted_step_seconds", "Seconds in steps, as the cost model predicted before each step",
             now.predicted_seconds),
            ("faser:plan_seconds", "Of step_seconds, planning", now.plan_seconds),
            ("faser:draft_seconds", "Of step_seconds, in the draft", now.draft_seconds),
            ("faser:verify_seconds", "Of step_seconds, in the target", now.verify_seconds),
        ):  # fmt: skip
            yield _counter(name, help_, value, model)
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by position in the draft",
            labels=["model_name", "position"],
        )  # fmt: skip
        for position, accepted in enumerate(now.accepted_per_position):
            positions.add_metric([model, str(position)], accepted)
        yield positions
        layers = CounterMetricFamily(
            "faser:early_exit_pruned_tokens", "Tokens pruned by early exit, by the layer after which they were dropped",
            labels=["model_name", "layer"],
        )  # fmt: skip
        for layer, pruned in sorted((now.exits.pruned if now.exits else {}).items()):
            layers.add_metric([model, str(layer)], pruned)
        yield layers
        yield _lengths(now.lengths, model)


def _counter(name: str, help_: str, value: float, model: str) -> Metric:
    return _metric(CounterMetricFamily, name, help_, value, model)


def _metric(
    family: Callable[..., Any], name: str, help_: str, value: float, model: str, labels: dict[str, str] | None = None
) -> Metric:
    metric: Any = family(name, help_, labels=["model_name", *(labels or {})])
    metric.add_metric([model, *(labels or {}).values()], value)
    return metric  # type: ignore[no-any-return]


def _histogram(name: str, help_: str, buckets: list[tuple[str, float]], total: float, model: str) -> Metric:
    metric = HistogramMetricFamily(name, help_, labels=["model_name"])
    metric.add_metric([model], buckets, total)
    return metric


def _lengths(lengths: Sequence[int], model: str) -> Metric:
    """Draft lengths as a histogram with a bucket for each length."""
    counts = [*lengths, *[0] * (9 - len(lengths))]
    bounds = [*map(str, map(float, range(len(counts)))), "+Inf"]
    total = sum(length * times for length, times in enumerate(lengths))
    buckets = list(zip(bounds, map(float, accumulate([*counts, 0])), strict=True))
    return _histogram("faser:draft_length", "Tokens drafted by a request in a step", buckets, float(total), model)
