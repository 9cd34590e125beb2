"""What a device must offer: its sizes, and an executor over models in its memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from faser.engine.engine import Executor
from faser.engine.prompt_pace import Pacing
from faser.engine.residency import DraftMemory
from faser.errors import ConfigError
from faser.limits import Limits
from faser.machine import DEVICES
from faser.models.config import ModelConfig
from faser.models.heads import DraftHead
from faser.models.transformer import Transformer
from faser.runtime.kv_cache import KvFormat
from faser.runtime.sampling import Sampler

DraftModel = Transformer | DraftHead


@dataclass(frozen=True)
class Parts:
    """What an executor is made of, on any device."""

    target: Transformer
    draft: DraftModel | None
    looks_up: bool  # drafts are also, or only, found in the contexts of their requests
    limits: Limits
    page_size: int
    max_length: int  # most tokens that a request drafts in one step
    usual_length: int  # longest draft that the policy asks for; a GPU captures graphs for it
    history: torch.Tensor  # int64 [max_running, max_model_len] in host memory: the tokens of every slot
    sampler: Sampler  # reads the history
    num_pages: int | None  # of the target, if the user chose; the draft has as many, or what its windows need
    kv_memory: int | None  # bytes of both models' pages, if the user chose; with neither the device chooses
    target_kv: KvFormat  # how the target's keys and values are stored; a draft's are as it computes them
    offload: str  # auto, on or off: the draft's memory can be given to the target's pages (draft_memory.py)
    acceptance: float | tuple[float, ...] | None  # as in EngineOptions: for measuring

    @property
    def models(self) -> list[DraftModel]:
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def kv_shapes(self) -> list[tuple[ModelConfig, torch.dtype]]:
        """Of each model, what the size of a KV page follows from."""
        dtypes = (self.target_kv.dtype, *(model.dtype for model in self.models[1:]))
        return [(model.config, dtype) for model, dtype in zip(self.models, dtypes, strict=True)]

    @property
    def head(self) -> DraftHead | None:
        return self.draft if isinstance(self.draft, DraftHead) else None

    @property
    def most_pages(self) -> int:
        """Pages that all slots can use together."""
        return self.limits.max_running * -(-self.limits.max_model_len // self.page_size)


@dataclass(frozen=True)
class Speeds:
    """Rough speed of a kind of hardware, for a profile before anything is measured."""

    bytes_per_second: float
    flops_per_second: float
    layer_seconds: float  # overhead of one layer of any size
    host_seconds: float  # of a step, outside both models
    stop_seconds: float | None  # of one confidence check of a draft; None: unknown


@dataclass(frozen=True)
class Profiling:
    """How a kind of hardware is profiled (faser/runtime/profiling/profiler.py)."""

    seconds: float  # of start-up that profiling may take
    graph_rows: tuple[int, ...]  # rows that steps without prompts are rounded up to; empty: no rounding
    mixed_rows: tuple[int, ...]  # rows that steps with prompts and catch-ups are rounded up to; more are not rounded
    most_rows: int  # of a measured step that only decodes
    most_context: int  # tokens of all requests of a measured step together
    most_prompt_rows: int  # of a measured step with prompts, and of a measured catch-up
    has_lanes: bool = True  # drafting can run beside a verification in less than the sum of both


class DeviceExecutor(Executor, Protocol):
    """An executor on a device."""

    @property
    def draft_memory(self) -> DraftMemory | None:
        """None where the draft cannot leave the device."""


class Device(Protocol):
    """Memory and kernels of one kind of hardware."""

    name: str
    max_running: int  # requests in one batch, if the user did not choose
    max_batch_tokens: int  # rows in one step, if the user did not choose
    pacing: Pacing  # seconds of a step, and prompt rows of the first steps
    profiling: Profiling
    speeds: Speeds

    @property
    def exit_depths(self) -> tuple[float, ...]:
        """Shares of the target's layers after which its executor may drop drafts."""

    @property
    def splits(self) -> tuple[int, ...]:
        """Ways to share the device between drafting and verification; empty: it cannot be shared.

        Each is the number of SMs that drafting has to itself; 0: both models share all SMs.
        """

    @property
    def memory(self) -> int:
        """Bytes of the whole device."""

    def require_rounded_kv(self) -> None:
        """Raise ConfigError if the device cannot store keys and values as 8-bit floats."""

    def default_kv_memory(self) -> int | None:
        """Bytes of KV pages if the user did not choose; None: what the models leave free."""

    def make_executor(self, parts: Parts) -> tuple[DeviceExecutor, int]:
        """An executor, and the number of KV pages of the target (of the draft: `Limits.draft_pages`)."""


def make_device(name: str) -> Device:
    """The device of this name; auto is a GPU if one can be used, else the CPU."""
    assert name in DEVICES, name
    obstacle = _cuda_obstacle()
    if name == "cpu" or (name == "auto" and obstacle is not None):
        from faser.runtime.cpu.device import CpuDevice

        return CpuDevice()
    if obstacle is not None:
        raise ConfigError(f"device='cuda': {obstacle}; use --device cpu")
    from faser.runtime.cuda.device import CudaDevice

    return CudaDevice()


def why_device(name: str) -> str:
    """Why `make_device` chose what it chose, for people."""
    if name != "auto":
        return "as asked"
    obstacle = _cuda_obstacle()
    return f"no GPU: {obstacle}" if obstacle is not None else torch.cuda.get_device_name()


def _cuda_obstacle() -> str | None:
    """Why a GPU cannot be used; None if it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    if find_spec("triton") is None:
        return "the package triton is missing (`pip install triton`)"
    return None
