"""/metrics: the figures as Prometheus text. Names are vLLM's where vLLM has one; docs/metrics.md defines each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from faser.policy.acceptance import CONTEXT_BOUNDS
from faser.request import FinishReason
from faser.server.engine_client import EngineClient
from faser.server.figures import Figures, Histogram
from faser.server.messages import DraftResidency, Exits, Snapshot

NO_EXITS = Exits({}, 0, 0, 0, 0.0, 0.0)
NO_MOVES = DraftResidency(True, 0.0, 0, 0, 0.0, None)


class PrometheusText:
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
            labels = ["model_name", "num_gpu_blocks", "block_size"]
            cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=labels)
            cache.add_metric([model, str(about.num_pages), str(about.page_size)], 1)
            yield cache
            settings = {name: getattr(about, name) or "" for name in ("policy", "device", "dtype", "draft")}
            info = InfoMetricFamily("faser:build", "What runs")
            info.add_metric([], {"version": version("faser"), **settings, "model_name": model})
            yield info

    def _of_requests(self, model: str) -> Iterator[Metric]:
        figures = self._figures
        yield _counter("vllm:prompt_tokens", "Prompt tokens of requests that ended", figures.prompt_tokens, model)
        yield _counter("vllm:generation_tokens", "Output tokens", figures.output_tokens, model)
        ends = {reason.value: figures.ends[reason.value] for reason in FinishReason}
        yield _counters("vllm:request_success", "Requests that ended, by reason", "finished_reason", ends, model)
        refused = {status: figures.refused[status] for status in sorted({400, 503, *figures.refused})}
        about_refused = "Requests answered with an error, by HTTP status"
        yield _counters("faser:requests_refused", about_refused, "status", refused, model)
        for name, help_, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token", figures.first_token),
            ("vllm:inter_token_latency_seconds", "Time between tokens", figures.between_tokens),
            ("vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens", figures.per_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to end", figures.request_seconds),
            ("vllm:request_prompt_tokens", "Prompt sizes", figures.prompt_sizes),
            ("vllm:request_generation_tokens", "Output sizes", figures.output_sizes),
        ):
            yield _histogram(name, help_, histogram.buckets(), model)
        for name, help_, value in (
            ("vllm:num_requests_running", "Requests in the batch", self._engine.num_running),
            ("vllm:num_requests_waiting", "Open requests that are not in the batch", self._engine.num_waiting),
            ("faser:engine_up", "Whether the engine is ready", self._engine.state == "ready"),
            ("faser:video_sessions", "Open video sessions", figures.open_sessions),
        ):
            yield _gauge(name, help_, value, model)
        for name, help_, value in (
            ("faser:video_windows_answered", "Windows of video sessions that were answered", figures.windows_answered),
            ("faser:video_windows_skipped", "Windows of video sessions that were skipped because newer ones came",
             figures.windows_skipped),
            ("faser:video_frames_decoded", "Frames that video sessions decoded", figures.session_frames),
        ):  # fmt: skip
            yield _counter(name, help_, value, model)
        yield _counter("faser:engine_restarts", "Times that the engine was restarted", self._engine.num_restarts, model)

    def _of_engine(self, now: Snapshot, model: str) -> Iterator[Metric]:
        exits, residency = now.exits or NO_EXITS, now.residency or NO_MOVES
        for name, help_, value in (
            ("vllm:kv_cache_usage_perc", "Share of the target's KV pages in use, 0 to 1", now.kv_used),
            ("faser:kv_pages", "KV pages of the target; more while the draft is away", now.num_pages),
            ("faser:draft_kv_cache_usage", "Share of the draft's KV pages in use, 0 to 1", now.draft_kv_used or 0.0),
            ("faser:draft_resident", "Whether a draft model's weights are on the device",
             now.draft_pages_held is not None and residency.is_resident),
            ("faser:draft_misfit", "Whether the draft does not fit its target, or a head reads the wrong layers",
             bool(now.misfit)),
            ("faser:draft_pages_gained", "Of kv_pages, those in the memory of a draft that is away",
             residency.pages_gained),
            ("faser:draft_last_move_seconds", "Seconds of the latest move of the draft out of the device or back",
             residency.last_move_seconds),
            ("faser:early_exit_predicted_seconds", "Seconds that early exits saved, by the profile",
             exits.predicted_seconds),
            ("faser:early_exit_measured_seconds", "Seconds that early exits saved, by the clock against the profile",
             exits.measured_seconds),
            ("faser:lanes", "Parts of the device's SMs that the last step ran on; 1: undivided", now.lanes),
        ):  # fmt: skip
            yield _gauge(name, help_, value, model)
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
             "pruned, in trials", exits.trial_false),
            ("faser:early_exit_trial_pruned_tokens", "Tokens that the rule of early exit would have pruned in trials",
             exits.trial_pruned),
            ("faser:overlap_chunks", "Times that a request drafted while its earlier drafts were verified", now.chunks),
            ("faser:overlap_hits", "Of overlap_chunks, those whose drafts were kept: all earlier drafts accepted and "
             "the next token right", now.hits),
            ("faser:early_exit_trials", "Steps that ran all layers to check the rule of early exit",
             exits.trials),
            ("faser:speculation_off_seconds", "Seconds of steps in which requests decoded and none drafted",
             now.off_seconds),
            ("faser:draft_away_seconds", "Seconds in which the draft was away from the device",
             residency.away_seconds),
            ("faser:draft_moves", "Times that the draft left the device or came back", residency.moves),
            ("faser:steps", "Steps", now.steps),
            ("faser:step_failures", "Steps that failed", now.step_failures),
            ("faser:step_seconds", "Seconds in steps", now.step_seconds),
            ("faser:predicted_step_seconds", "Seconds in steps, as the cost model predicted before each step",
             now.predicted_seconds),
            ("faser:plan_seconds", "Of step_seconds, planning", now.plan_seconds),
            ("faser:draft_seconds", "Of step_seconds, in the draft", now.draft_seconds),
            ("faser:verify_seconds", "Of step_seconds, in the target", now.verify_seconds),
            ("faser:encode_seconds", "Of step_seconds, in the vision encoder", now.encode_seconds),
            ("faser:grids_encoded", "Pictures, and groups of video frames, that the vision encoder computed",
             now.grids_encoded),
            ("faser:grids_found", "The same that a request needed and found encoded", now.grids_found),
            ("faser:tokens_reused", "Prompt tokens whose KV was taken from a kept context", now.tokens_reused),
        ):  # fmt: skip
            yield _counter(name, help_, value, model)
        accepted, pruned = dict(enumerate(now.accepted_per_position)), dict(sorted(exits.pruned.items()))
        yield _counters("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by position in the draft",
                        "position", accepted, model)  # fmt: skip
        for what, lookup, total in (("draft", now.looked_up, now.drafted),
                                    ("accepted", now.lookup_accepted, now.accepted)):  # fmt: skip
            yield _counters(f"faser:spec_decode_guesser_{what}_tokens", f"{what.capitalize()} tokens, by what guessed "
                            "them: prompt lookup, or a draft model or head", "guesser",
                            {"lookup": lookup, "draft": total - lookup}, model)  # fmt: skip
        yield _counters("faser:early_exit_pruned_tokens", "Tokens pruned by early exit, by the layer after which they "
                        "were dropped", "layer", pruned, model)  # fmt: skip
        bounds = [*map(str, CONTEXT_BOUNDS.tolist()), "+Inf"]
        for what, help_, counts in zip(
            ("steps", "drafted_tokens", "verified_tokens", "accepted_tokens"),
            ("Times that a request decoded", "Drafted tokens", "Drafted tokens that the target verified",
             "Drafted tokens that the target accepted"),
            now.by_context or [[0] * len(bounds)] * 4,
            strict=True,
        ):  # fmt: skip
            yield _counters(f"faser:context_{what}", f"{help_}, by the most tokens of its context", "context",
                            dict(zip(bounds, counts, strict=True)), model)  # fmt: skip
        lengths = Histogram(range(max(9, len(now.lengths))))
        for length, times in enumerate(now.lengths):
            lengths.add(length, times)
        yield _histogram("faser:draft_length", "Tokens drafted by a request in a step", lengths.buckets(), model)


def _gauge(name: str, help_: str, value: float, model: str) -> Metric:
    metric = GaugeMetricFamily(name, help_, labels=["model_name"])
    metric.add_metric([model], float(value))
    return metric


def _counter(name: str, help_: str, value: float, model: str) -> Metric:
    metric = CounterMetricFamily(name, help_, labels=["model_name"])
    metric.add_metric([model], value)
    return metric


def _counters(name: str, help_: str, label: str, values: Mapping[Any, float], model: str) -> Metric:
    """Several totals of one name, told apart by a label."""
    metric = CounterMetricFamily(name, help_, labels=["model_name", label])
    for key, value in values.items():
        metric.add_metric([model, str(key)], value)
    return metric


def _histogram(name: str, help_: str, buckets: tuple[list[tuple[str, float]], float], model: str) -> Metric:
    metric = HistogramMetricFamily(name, help_, labels=["model_name"])
    metric.add_metric([model], *buckets)
    return metric
