"""vLLM's engine in this process, made by the peer's own script (vllm_trace.py).

At the top this module imports the standard library alone: nothing of FASER may be loaded in vLLM's process.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.lib.journal import Figures

VLLM_GPU_MEMORY = 0.85  # share of the GPU's memory


class VllmEngine:
    """vLLM's engine, driven on one event loop. The draft length is fixed when it starts."""

    def __init__(
        self,
        script: Path,
        folder: Path,
        length: int,
        *,
        max_running: int,
        max_model_len: int,
        batch_tokens: int | None = None,
    ) -> None:
        """`folder` holds both models in the folders target and draft."""
        self.trace = import_file(script)
        if batch_tokens is not None:
            limit_batch_tokens(batch_tokens)
        self.length = length
        self._runner = asyncio.Runner()
        # the fields that make_engine of vllm_trace.py reads
        arguments = argparse.Namespace(
            model=str(folder / "target"),
            draft=str(folder / "draft") if length else None,
            num_draft=length,
            draft_table=None,
            acceptance=None,
            dummy_weights=False,
            max_model_len=max_model_len,
            max_num_seqs=max_running,
            gpu_memory=VLLM_GPU_MEMORY,
        )
        self.engine = self.run(self._make(arguments))

    async def _make(self, arguments: argparse.Namespace) -> Any:
        return self.trace.make_engine(arguments)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def play(self, workload: list[Figures], seconds: float) -> list[Figures]:
        """A record for each request, as the script makes them. Raises TimeoutError after `seconds`."""
        played: list[Figures] = self.run(asyncio.wait_for(self.trace.play(self.engine, workload, 0.0), seconds))
        return played

    def shutdown(self) -> None:
        """Without this the interpreter's exit waits for the engine's process."""
        self.engine.shutdown()


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_batch_tokens(number: int) -> None:
    """Set vLLM's prompt chunk size; driven in-process, vLLM chooses one by itself."""
    from vllm.engine import arg_utils

    arg_utils.AsyncEngineArgs = functools.partial(arg_utils.AsyncEngineArgs, max_num_batched_tokens=number)


def vllm_settings(engine: Any) -> Figures:
    """The settings vLLM chose by itself, as far as it exposes them."""
    config = getattr(engine, "vllm_config", None)
    wanted = {
        "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "async_scheduling"),
        "compilation_config": ("cudagraph_mode", "max_cudagraph_capture_size"),
        "cache_config": ("enable_prefix_caching", "num_gpu_blocks"),
    }
    found = {name: getattr(getattr(config, part, None), name, None) for part, names in wanted.items() for name in names}
    return {name: str(value) for name, value in found.items()}
