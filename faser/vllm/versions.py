"""Which versions of vLLM FASER knows, what it puts in their places, and which of their methods it relies on.

Plain names: vLLM is imported by nobody here. The contract tests compare HOOKS with the vLLM that is installed, and with
the scheduler of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """One version of vLLM. Classes are given by the names under which vLLM imports them."""

    version: str  # major.minor
    ahead: str  # scheduler class with asynchronous scheduling
    after: str  # scheduler class without
    workers: Mapping[str, str] = field(default_factory=dict)  # by vLLM's own worker class: FASER's
    asks_for_async: bool = False  # vLLM schedules synchronously for draft models unless it is asked
    graph_mode: str | None = None  # of CUDA graphs, where lengths differ; None: vLLM's own choice is good
    extends_graphs: bool = False  # vLLM's sizes of CUDA graphs end at 512 rows


_WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")
ADAPTERS = {
    adapter.version: adapter
    for adapter in (
        Adapter(
            "0.26",
            ahead="faser.vllm.v026.AheadScheduler026",
            after="faser.vllm.v026.AfterScheduler026",
            workers=dict.fromkeys(_WORKERS, "faser.vllm.worker_v026.DraftWorker026"),
            asks_for_async=True,
            graph_mode="FULL",
            extends_graphs=True,
        ),
        Adapter(
            "0.32",
            ahead="faser.vllm.v032.AheadScheduler032",
            after="faser.vllm.v032.AfterScheduler032",
            workers=dict.fromkeys(_WORKERS, "faser.vllm.worker_v032.DraftWorker032"),
        ),
    )
}


def adapter_for(version: str) -> Adapter | None:
    """The adapter of a version such as 0.26.0 or 0.32.0+cpu; None: FASER does not know it."""
    return ADAPTERS.get(".".join(version.split(".")[:2]))


def skips_draft(vllm_config: Any) -> bool:
    """Whether the worker leaves the draft out where nobody drafts, and lets it catch up later: FASER's workers do."""
    ours = {worker for adapter in ADAPTERS.values() for worker in adapter.workers.values()}
    is_ours = vllm_config.parallel_config.worker_cls in ours
    return is_ours and vllm_config.speculative_config.method == "draft_model"


@dataclass(frozen=True)
class Hook:
    """A method of vLLM that FASER overrides, wraps or calls, with the parameters it relies on."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]


_SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
HOOKS = (
    Hook("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", ("self", "usage_context", "headless")),
    Hook("vllm.config.vllm", "VllmConfig", "_set_cudagraph_sizes", ("self",)),
    Hook("vllm.v1.engine.input_processor", "InputProcessor", "_validate_params", ("self", "params", "supported_tasks")),
    Hook(*_SCHEDULER, "_update_after_schedule", ("self", "scheduler_output")),
    Hook(*_SCHEDULER, "update_from_output", ("self", "scheduler_output", "model_runner_output")),
    Hook(*_SCHEDULER, "update_draft_token_ids", ("self", "draft_token_ids")),
    Hook(*_SCHEDULER, "get_request_counts", ("self",)),
    Hook(*_SCHEDULER, "shutdown", ("self",)),
    Hook(
        "vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "_update_after_schedule", ("self", "scheduler_output")
    ),
)
# Attributes of vLLM's objects, by class, that FASER reads or sets.
ATTRIBUTES = {
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "requests", "vllm_config", "num_spec_tokens", "max_num_running_reqs", "kv_cache_manager", "dynamic_sd_lookup",
    ),
    "vllm.v1.request.Request": (
        "is_prefill_chunk", "num_tokens", "num_prompt_tokens", "num_output_placeholders", "max_tokens",
        "sampling_params", "spec_token_ids",
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
        "finished_req_ids", "num_spec_tokens_to_schedule",
    ),
    "vllm.v1.core.sched.output.NewRequestData": ("req_id",),
    "vllm.v1.core.sched.output.CachedRequestData": ("resumed_req_ids",),
    "vllm.v1.outputs.ModelRunnerOutput": ("sampled_token_ids", "req_id_to_index"),
    "vllm.v1.outputs.DraftTokenIds": ("req_ids", "draft_token_ids"),
    "vllm.engine.arg_utils.EngineArgs": (
        "additional_config", "async_scheduling", "scheduler_cls", "worker_cls", "speculative_config",
        "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "distributed_executor_backend",
    ),
    "vllm.config.vllm.VllmConfig": (
        "additional_config", "instance_id", "speculative_config", "scheduler_config", "parallel_config",
        "compilation_config", "lora_config", "model_config",
    ),
    "vllm.config.scheduler.SchedulerConfig": (
        "async_scheduling", "max_num_seqs", "max_num_batched_tokens", "scheduler_cls",
    ),
    "vllm.config.parallel.ParallelConfig": (
        "worker_cls", "pipeline_parallel_size", "data_parallel_index", "distributed_executor_backend",
    ),
    "vllm.config.speculative.SpeculativeConfig": (
        "method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "draft_model_config",
        "target_model_config",
    ),
    "vllm.config.compilation.CompilationConfig": (
        "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    ),
    "vllm.sampling_params.SamplingParams": ("extra_args",),
}  # fmt: skip
