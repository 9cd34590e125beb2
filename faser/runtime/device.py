"""What a device must offer: sizes that suit it, and an executor over models that are in its memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from faser.engine.engine import Executor
from faser.engine.prompt_pace import Pacing
from faser.errors import ConfigError
from faser.limits import Limits
from faser.machine import DEVICES
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.runtime.sampling import Sampler


@dataclass(frozen=True)
class Parts:
    """What an executor is made of, whatever the device."""

    target: Transformer
    draft: Transformer | None
    uses_ngrams: bool
    limits: Limits
    page_size: int
    max_length: int  # the most tokens a request drafts in one step
    usual_length: int  # what the policy will ask for, as far as it says: to be prepared for
    history: torch.Tensor  # int64 [max_running, max_model_len] in host memory: the tokens of every slot
    sampler: Sampler  # reads it
    num_pages: int | None  # of each model, as the user asked, or
    kv_memory: int | None  # bytes for both; neither: the device's choice
    acceptance: float | None  # accept drafts with this probability, whatever they say: for measuring

    @property
    def models(self) -> list[Transformer]:
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def most_pages(self) -> int:
        """More could never be used."""
        return self.limits.max_running * -(-self.limits.max_model_len // self.page_size)


@dataclass(frozen=True)
class Speeds:
    """Roughly how fast a kind of hardware is, for a profile before anything was measured."""

    bytes_per_second: float
    flops_per_second: float
    layer_seconds: float  # overhead of one layer, whatever its size
    host_seconds: float  # of a step, outside both models
    stop_seconds: float | None  # of one confidence check of a draft; None: unknown


@dataclass(frozen=True)
class Profiling:
    """How a kind of hardware is profiled (faser/runtime/profiling/profiler.py)."""

    seconds: float  # of start-up that may be spent on it
    graph_rows: tuple[int, ...]  # rows that steps without prompts are rounded up to; none where each number is its own
    mixed_rows: tuple[int, ...]  # likewise of steps with prompts, and of a draft that catches up; more are not rounded
    most_rows: int  # of a measured step that only decodes
    most_context: int  # of all its requests together
    most_prompt_rows: int  # of a measured step with prompts, and of a draft that catches up
    has_lanes: bool = True  # drafting beside a verification takes other than the sum of both


class Device(Protocol):
    """Memory and kernels of one kind of hardware."""

    @property
    def name(self) -> str: ...

    @property
    def max_running(self) -> int:
        """Requests in one batch, where the user did not say."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Rows in one step, likewise."""
        ...

    @property
    def pacing(self) -> Pacing:
        """How long a step may take, and how many prompt rows to begin with."""
        ...

    @property
    def profiling(self) -> Profiling: ...

    @property
    def speeds(self) -> Speeds: ...

    @property
    def exit_depths(self) -> tuple[float, ...]:
        """Shares of the target's layers after which its executor may drop drafts."""
        ...

    @property
    def splits(self) -> tuple[int, ...]:
        """How it can be shared by a draft that goes on while the drafts before are verified; none: it cannot.

        By the SMs that drafting has to itself, 0 where both share all there is.
        """
        ...

    @property
    def memory(self) -> int:
        """Bytes of the whole device."""
        ...

    def require_heads(self, role: str, config: ModelConfig) -> None:
        """Raise ConfigError if the device's attention cannot compute the heads of a model (`role`: target or draft)."""
        ...

    def default_kv_memory(self) -> int | None:
        """Bytes to give to KV pages where the user did not say; None: what the models leave free."""
        ...

    def make_executor(self, parts: Parts) -> tuple[Executor, int]:
        """An executor, and how many KV pages each of its models has."""
        ...


def make_device(name: str) -> Device:
    """The device by a name EngineOptions let pass; auto is a GPU that can be used, else the CPU."""
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
    """The reason for the choice, for people."""
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
