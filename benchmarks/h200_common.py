"""What the commands on an H200 share: processes one after the other, the journal they write, models, vLLM's engine.

Knows how a process is started, watched and ended in time, how a small pair is put inside large shapes, and how the
peer's script makes an engine. Knows nothing of what is measured. At the top it imports the standard library alone: it
is also loaded inside vLLM's process, where nothing of FASER may be.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.h200_report import Figures, describe, read_journal, rounded

if TYPE_CHECKING:
    from faser.models.transformer import Transformer
    from faser.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
DRAFT = ROOT / "faser" / "drafts" / "smollm2-135m-16.gguf"
GRACE_SECONDS = 8.0  # for a process to notice that its time is over
VLLM_GPU_MEMORY = 0.85


def inflated_pair(
    target: Path | None, draft: Path, shapes: tuple[str, str], device: str
) -> tuple[tuple[Transformer, Transformer], Tokenizer]:
    """A small target (None: the default model) and its draft inside two shapes, in bfloat16, rounded once."""
    import torch

    from faser.models.draft import apply_patch, read_patch
    from faser.models.source import default_target
    from tools.distill import load_target
    from tools.inflate import SHAPES, inflate

    small, tokenizer = load_target(str(target or default_target()), torch.float32, device)
    both = small, apply_patch(small, read_patch(draft, small.config))
    first, second = (
        inflate(model, SHAPES[shape], dtype=torch.bfloat16, device=device)
        for model, shape in zip(both, shapes, strict=True)
    )
    return (first, second), tokenizer


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def shared_parser(description: str | None) -> argparse.ArgumentParser:
    """With the flags that every command has, and those it tells its own processes with."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model, where installed)")
    add("--draft", type=Path, default=DRAFT, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--vllm-bundle", type=Path, help="vLLM, unpacked; without it FASER is measured alone")
    add("--vllm-trace", type=Path, help="the peer's vllm_trace.py")
    add("--batch-tokens", type=int, help="rows of a step, both systems (the choice of each)")
    add("--budget-seconds", type=float, default=560.0, help="for everything (560)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny random models and sizes: does it all run?")
    for hidden, kind in {"--until": float, "--spawned": float, "--session": float, "--only-length": int}.items():
        add(hidden, type=kind, help=argparse.SUPPRESS)
    return parser


def refuse_missing(parser: argparse.ArgumentParser, args: argparse.Namespace, *further: Path | None) -> None:
    """Files that are not there, and half of what vLLM takes."""
    for path in (args.target, args.draft, args.python_path, args.vllm_bundle, args.vllm_trace, *further):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    if (args.vllm_bundle is None) != (args.vllm_trace is None):
        parser.error("vLLM takes --vllm-bundle and --vllm-trace together")


# ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Journal:
    """Lines that several processes append to, one at a time. `session` tells apart the runs of the command."""

    path: Path
    session: float

    def add(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "session": self.session, **rounded(fields)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def attempt(self, section: str, engine: str, work: Callable[[], None]) -> None:
        """Do it; note what it raises, so that others go on."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.add("failed", section=section, engine=engine, why=why[:300])


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """A process to run: a module and its flags. Seconds."""

    name: str
    module: str
    flags: tuple[str, ...]
    least: float  # with less left it is not started
    most: float  # a hung one is ended
    environment: Mapping[str, str] = field(default_factory=dict)


def python_path(first: Path | None = None) -> str:
    return os.pathsep.join(str(path) for path in (first, ROOT, os.environ.get("PYTHONPATH")) if path)


def vllm_environment(bundle: Path, folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": python_path(bundle),
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "TRITON_CACHE_DIR": str(folder / "vllm-cache" / "triton"),
    }


@dataclass
class Command:
    """Runs jobs, shows what they write to the journal, and says when there is something new."""

    journal: Journal
    log: Path  # of what the processes print
    device: str
    news: Callable[[], None]  # keeps copies up to date, should this process be killed
    shown: int = 0  # lines of the journal

    def run(self, job: Job, until: float) -> bool:
        """Whether it ended well. `until` is on the clock of time.time()."""
        started = time.time()
        left = until - started
        if left < job.least:
            self.fail(job, f"{left:.0f} s left, it would take more; raise --budget-seconds or ask for less")
            return False
        print(f"── {job.name} ({left:.0f} s left)", flush=True)
        status = self.run_process(job, min(until, started + job.most))
        if status != 0:
            self.fail(job, "took too long and was ended" if status is None else f"ended with status {status}")
            print(self.log.read_bytes()[-3000:].decode(errors="replace"), flush=True)
        print(f"   {job.name}: {time.time() - started:.0f} s", flush=True)
        wait_for_gpu(self.device)
        return status == 0

    def run_process(self, job: Job, until: float) -> int | None:
        """Its exit status; None where it took too long. It is ended with its children: vLLM's engine is one."""
        own = {"until": until, "spawned": time.time(), "session": self.journal.session}
        flags = [*job.flags, *(f"--{name}={value}" for name, value in own.items())]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()} | dict(job.environment)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", job.module, *flags],
                env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            try:
                while time.time() < until + GRACE_SECONDS:
                    with suppress(subprocess.TimeoutExpired):
                        return process.wait(0.5)
                    self.update()
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.update()

    def fail(self, job: Job, why: str) -> None:
        self.journal.add("failed", section="all", engine=job.name, why=why)
        self.update()

    def update(self) -> None:
        records = read_journal(self.journal.path)
        for record in records[self.shown :]:
            print(f"   {describe(record)}", flush=True)
        if len(records) > self.shown:
            self.shown = len(records)
            self.news()


def wait_for_gpu(device: str, seconds: float = 20.0, most_mib: float = 3000.0) -> None:
    """Until the last process's memory is free again, as far as anybody says."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    until = time.time() + seconds
    while device == "cuda" and time.time() < until:
        try:
            used = float(subprocess.run(query, capture_output=True, timeout=10, check=True).stdout.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return
        if used < most_mib:
            return
        time.sleep(0.5)


# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class VllmEngine:
    """vLLM's engine, made by the peer's own script and driven on one event loop. It drafts what it was started for."""

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
        """`folder` holds both models."""
        self.trace = import_file(script)
        if batch_tokens is not None:
            limit_batch_tokens(batch_tokens)
        self.length = length
        self._runner = asyncio.Runner()
        # those that make_engine of vllm_trace.py reads
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
        """A record for each request, as the script makes them. Raises TimeoutError after so many seconds."""
        played: list[Figures] = self.run(asyncio.wait_for(self.trace.play(self.engine, workload, 0.0), seconds))
        return played

    def shutdown(self) -> None:
        """Else the exit waits for its process."""
        self.engine.shutdown()


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_batch_tokens(number: int) -> None:
    """Another size of vLLM's prompt chunks than it takes by itself when driven in-process."""
    from vllm.engine import arg_utils

    arg_utils.AsyncEngineArgs = functools.partial(arg_utils.AsyncEngineArgs, max_num_batched_tokens=number)


def vllm_settings(engine: Any) -> Figures:
    """As far as it tells them: what it chose by itself."""
    config = getattr(engine, "vllm_config", None)
    wanted = {
        "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "async_scheduling"),
        "compilation_config": ("cudagraph_mode", "max_cudagraph_capture_size"),
        "cache_config": ("enable_prefix_caching", "num_gpu_blocks"),
    }
    found = {name: getattr(getattr(config, part, None), name, None) for part, names in wanted.items() for name in names}
    return {name: str(value) for name, value in found.items()}
