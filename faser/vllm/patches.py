"""Every change to vLLM's own functions, in one place: `apply` makes them, once a process.

A patch wraps one method and calls it. Without `additional_config["faser"]` the wrapper only calls. vLLM itself decides
by VLLM_PLUGINS whether plugins are loaded at all, and thereby whether `apply` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from faser.errors import InvalidRequest
from faser.vllm.config import FaserConfig, check, max_draft_of
from faser.vllm.lengths import log
from faser.vllm.versions import ADAPTERS, Adapter, adapter_for

Method = Callable[..., Any]
MAX_GRAPH_ROWS = 2048  # of the target: beyond it the device is busy enough to hide launches
ASYNC_EXECUTORS = (None, "uni", "mp")  # executors that can schedule asynchronously
FULL_HEADS = range(65, 129)  # head sizes of targets that graphs FULL are right for (`allow_full_graphs`)


@dataclass(frozen=True)
class MethodPatch:
    """A method of vLLM and what becomes of it."""

    module: str
    owner: str
    name: str
    wrap: Callable[[Method], Method]

    @property
    def place(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}"


# ── what each wrapper does ───────────────────────────────────────────────────────────────────────────────────────────


def one_flag(create_engine_config: Method) -> Method:
    """Choose scheduler, worker, asynchronous scheduling and graphs where the user did not, and say so."""

    @wraps(create_engine_config)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = FaserConfig.find(self.additional_config)
        adapter = None if config is None else usable_adapter()
        if config is None or adapter is None:
            return create_engine_config(self, *args, **kwargs)
        chosen = choose_before(self, adapter)
        vllm_config = create_engine_config(self, *args, **kwargs)
        check(config, vllm_config)
        chosen += choose_classes(vllm_config, adapter)
        log.info("FASER in vLLM %s: %s", adapter.version, "; ".join(chosen) or "everything was set by the user")
        return vllm_config

    return create


def graphs_for_drafts(set_cudagraph_sizes: Method) -> Method:
    """Capture graphs for as many rows as the largest batch verifies, in a mode that is right for the target."""

    @wraps(set_cudagraph_sizes)
    def set_sizes(self: Any) -> Any:
        compilation, speculative = self.compilation_config, self.speculative_config
        adapter = None if FaserConfig.find(self.additional_config) is None else usable_adapter(quiet=True)
        if adapter is not None and adapter.graph_mode and has_graphs() and speculative is not None:
            allow_full_graphs(compilation, speculative.target_model_config.get_head_size())
        is_set = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
        if adapter is not None and adapter.extends_graphs and has_graphs() and speculative is not None and not is_set:
            scheduler = self.scheduler_config
            rows = scheduler.max_num_seqs * (1 + speculative.num_speculative_tokens)
            sizes = graph_sizes(min(rows, scheduler.max_num_batched_tokens, MAX_GRAPH_ROWS))
            compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
        return set_cudagraph_sizes(self)

    return set_sizes


def checks_max_draft(validate_params: Method) -> Method:
    """Refuse a request whose `max_draft` is no number, before it reaches the engine."""

    @wraps(validate_params)
    def validate(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if FaserConfig.find(self.vllm_config.additional_config) is not None:
            try:
                max_draft_of(extra_args_of(params))
            except InvalidRequest as error:  # vLLM answers its own error with 400
                raise import_module("vllm.exceptions").VLLMValidationError(str(error)) from None
        return validate_params(self, params, *args, **kwargs)

    return validate


PATCHES = (
    MethodPatch("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", one_flag),
    MethodPatch("vllm.config.vllm", "VllmConfig", "_set_cudagraph_sizes", graphs_for_drafts),
    MethodPatch("vllm.v1.engine.input_processor", "InputProcessor", "_validate_params", checks_max_draft),
)
_applied: set[str] = set()  # places, in this process


def apply(patches: tuple[MethodPatch, ...] = PATCHES) -> None:
    """Make the patches. Those that were made before in this process are left alone."""
    for patch in patches:
        if patch.place not in _applied:
            owner = getattr(import_module(patch.module), patch.owner)
            setattr(owner, patch.name, patch.wrap(getattr(owner, patch.name)))
            _applied.add(patch.place)


# ── their parts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def usable_adapter(quiet: bool = False) -> Adapter | None:
    """The adapter for this vLLM on this platform. None: a warning says why, and vLLM serves as it would without us."""
    version, platform = import_module("vllm").__version__, import_module("vllm.platforms").current_platform
    adapter, reason = adapter_for(version), None
    if adapter is None:
        reason = f"vLLM {version} is none of the versions it knows, {' and '.join(ADAPTERS)}"
    elif not (platform.is_cuda() or platform.is_cpu()):
        reason = f"it does not know the platform {platform.device_name}"
    if reason is not None and not quiet:
        log.warning("FASER changes nothing: %s. vLLM serves without it.", reason)
    return adapter if reason is None else None


def choose_before(engine_args: Any, adapter: Adapter) -> list[str]:
    """Set what vLLM must know while it makes its configuration; what was set, in words."""
    chosen = []
    speculative = engine_args.speculative_config or {}
    drafts_by_model = speculative.get("method") in (None, "draft_model") and speculative.get("model") is not None
    if (
        adapter.asks_for_async
        and drafts_by_model
        and engine_args.async_scheduling is None
        and engine_args.distributed_executor_backend in ASYNC_EXECUTORS
        and not speculative.get("disable_padded_drafter_batch")
    ):
        engine_args.async_scheduling = True
        chosen.append("asynchronous scheduling where the platform has it")
    compilation = engine_args.compilation_config
    if adapter.graph_mode and has_graphs() and compilation.cudagraph_mode is None and not engine_args.enforce_eager:
        modes = import_module("vllm.config").CUDAGraphMode
        compilation.cudagraph_mode = modes[adapter.graph_mode]
        chosen.append(f"CUDA graphs {adapter.graph_mode}, for lengths that differ")
    return chosen


def allow_full_graphs(compilation: Any, head_size: int) -> None:
    """Replace the mode FULL where FlashAttention 3 would compute wrong attention in its graphs.

    A graph for mixed batches is captured as causal, with the work list of causal attention. Where every request has one
    row, the list of a step is made as for attention that is not causal, and has another layout; heads of FULL_HEADS are
    excepted (flash-attention of vLLM, hopper/flash_api: mha_fwd_get_scheduler_metadata).
    """
    modes = import_module("vllm.config").CUDAGraphMode
    if compilation.cudagraph_mode is modes.FULL and head_size not in FULL_HEADS:
        compilation.cudagraph_mode = modes.FULL_AND_PIECEWISE
        log.warning(
            "FASER: CUDA graphs FULL_AND_PIECEWISE and not FULL, which is wrong with FlashAttention 3 for heads of %d "
            "dimensions. Batches of different lengths run slower.", head_size,
        )  # fmt: skip


def choose_classes(vllm_config: Any, adapter: Adapter) -> list[str]:
    """Set scheduler and worker class where the user left vLLM's own; what was set, in words."""
    chosen = []
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = adapter.ahead if scheduler.async_scheduling else adapter.after
        chosen.append(f"scheduler {scheduler.scheduler_cls}")
    ours = adapter.workers.get(parallel.worker_cls)
    if ours is not None:
        parallel.worker_cls = ours
        chosen.append(f"worker {ours}")
    return chosen


def graph_sizes(max_rows: int) -> list[int]:
    """Row counts of CUDA graphs: vLLM's own steps up to 512 rows, then every 64."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_rows, 64)]
    return [*(size for size in steps if size < max_rows), max_rows]


def extra_args_of(params: Any) -> Any:
    """Of sampling parameters; None for parameters of pooling models, which have no drafts."""
    sampling = import_module("vllm.sampling_params").SamplingParams
    return params.extra_args if isinstance(params, sampling) else None


def has_graphs() -> bool:
    """Whether the platform runs CUDA graphs."""
    return bool(import_module("vllm.platforms").current_platform.is_cuda())
