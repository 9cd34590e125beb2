"""Do the GPU kernels read and write only their own memory? The tools of compute-sanitizer, one process each.

  memcheck   accesses outside an allocation, or misaligned
  initcheck  reads of memory that nobody wrote
  racecheck  shared memory that two threads use without a barrier between them
  synccheck  barriers that not every thread reaches

Four runs under each tool, after one without (`plain`), which fills Triton's cache and shows what fails anyway:

  kernels  a selection of the GPU tests of tests/runtime/cuda, without graphs
  eager    an engine with tiny random models in float32 and bfloat16: prompts in chunks, drafts, refusals, preemption,
           temperatures and filters, drafting beside verification; every forward kernel by kernel
  graphs   the same engine as it is, with CUDA graphs
  lanes    only the steps that draft beside verification, on parts of the device, in bfloat16

torch's allocator divides large blocks, so that a kernel can leave its tensor unnoticed; for memcheck and initcheck it
is switched off. Graphs cannot be captured without it, hence `eager`.

    python3 -m benchmarks.sanitize [--sanitizer PATH/compute-sanitizer] [--tools plain,memcheck,initcheck,racecheck,
        synccheck] [--runs kernels,eager,graphs,lanes] [--seconds 90]
    python3 -m benchmarks.sanitize --engine graphs --device cpu      # in this process, without a sanitizer

The output of each process goes to $OUT (else a folder in /tmp) as sanitize-RUN-TOOL.log. One that takes longer than
--seconds is ended; its findings until then count. The last line is one JSON document; the exit status is 1 if errors
were found or a process did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("plain", "memcheck", "initcheck", "racecheck", "synccheck")
RUNS = ("kernels", "eager", "graphs", "lanes")
ENGINES = RUNS[1:]
UNCACHED_TOOLS = ("memcheck", "initcheck")
# Padding after every allocation, so that a kernel that leaves one does not reach the next. Failing driver calls and
# copies of partly written buffers are torch's own.
TOOL_FLAGS = {
    "memcheck": ["--padding", "1024", "--report-api-errors", "no"],
    "initcheck": ["--check-api-memory-access", "no"],
}
KERNELS = ("attention", "linear", "rows", "sampling", "verifier")
KERNEL_FILES = [f"tests/runtime/cuda/test_{name}.py" for name in KERNELS]
# without graphs and large sizes; one dtype
KERNEL_TESTS = "not captured and not graph and not real_shapes and not common_sizes and not cuda-float"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


@dataclass(frozen=True)
class Finding:
    """The result of one process."""

    run: str
    tool: str
    seconds: float
    status: int | None  # None: ended for taking too long
    errors: int | None  # the sanitizer's count; None: it printed no summary
    reports: int  # error blocks in its output, with or without a summary

    @property
    def is_clean(self) -> bool:
        finished = self.status == 0 and (self.tool == "plain" or self.errors is not None)
        return finished and not self.errors and not self.reports


def sanitize(args: argparse.Namespace, run: str, tool: str) -> Finding:
    log, started = args.out / f"sanitize-{run}-{tool}.log", time.perf_counter()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if tool in UNCACHED_TOOLS and run in ("kernels", "eager"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(args.sanitizer, run, tool),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            status: int | None = process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return read_log(log.read_text(errors="replace"), run, tool, time.perf_counter() - started, status)


def command(sanitizer: str, run: str, tool: str) -> list[str]:
    python = [sys.executable, "-m"]
    if run == "kernels":
        quiet = ["-p", "no:cacheprovider", "-W", "default"]
        work = [*python, "pytest", *quiet, "-m", "gpu", "-k", KERNEL_TESTS, *KERNEL_FILES]
    else:
        work = [*python, "benchmarks.sanitize", "--engine", run]
    if tool == "plain":
        return work
    # without the compilers that Triton starts
    common = ["--target-processes", "application-only", "--print-limit", "20"]
    return [sanitizer, "--tool", tool, *TOOL_FLAGS.get(tool, []), *common, *work]


def read_log(text: str, run: str, tool: str, seconds: float, status: int | None) -> Finding:
    found = SUMMARY.findall(text)
    reports = len(
        re.findall(r"^=+ (?:Invalid|Misaligned|Uninitialized|Error: |Warning: Race|Barrier error)", text, re.M)
    )
    return Finding(run, tool, round(seconds, 1), status, int(found[-1]) if found else None, reports)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run_engine(device: str, run: str) -> None:
    """Two dtypes; without drafts, with them, and with drafting beside verification and leads."""
    import torch

    from faser.models.transformer import Transformer

    everything = (0, False), (3, False), (3, True)
    for dtype in (torch.float32, torch.bfloat16) if run != "lanes" else (torch.bfloat16,):
        target, draft = (Transformer.random(tiny_config(), 0, dtype, 0.3, device) for _ in range(2))
        for weight in draft.weights():
            weight += 0.03 * torch.randn_like(weight)
        for length, overlaps in everything if run != "lanes" else everything[-1:]:
            if run != "eager":
                preemptions = serve(target, draft, length, device, overlaps)
            else:
                with patch("faser.runtime.cuda.model.capture", lambda run, device, stream: run):
                    preemptions = serve(target, draft, length, device, overlaps)
            print(f"{dtype}, length {length}{', overlapping' * overlaps}: {preemptions} preemptions", flush=True)
            assert preemptions, "the pages sufficed: nothing was preempted"


def tiny_config() -> Any:
    from faser.models.config import ModelConfig

    return ModelConfig(
        family="llama", vocab_size=320, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, norm_eps=1e-5, max_positions=128, eos_token_ids=(2,), tie_embeddings=True,
    )  # fmt: skip


def serve(target: Any, draft: Any, length: int, device: str, overlaps: bool) -> int:
    """More requests than can run at once, and too few pages. Returns the number of preemptions."""
    from faser.build import build_engine
    from faser.config import EngineOptions
    from faser.policy.overlap import Overlap
    from faser.request import Request, SamplingParams

    options = EngineOptions(
        policy=f"fixed:{length}", device=device, max_running=5, max_batch_tokens=64 if overlaps else 24,
        page_size=4, num_pages=36,
        overlap="on" if overlaps else "off",
    )  # fmt: skip
    engine = build_engine(target, draft, options)
    if overlaps:
        sms = 32 if device == "cuda" else 0  # a multiple of 8 that any GPU with green contexts has
        engine.scheduler.overlap = Overlap("on", leads=True, draft_sms=sms)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3},
    ]  # fmt: skip
    emitted = 0
    for i in range(10):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **ways[i % len(ways)])
        prompt = tuple((7 * i + j) % 300 + 3 for j in range(4 + 3 * i))
        engine.add(Request(id=str(i), prompt_token_ids=prompt, params=params, seed=i))
    while engine.has_work:
        emitted += sum(len(item.token_ids) for item in engine.step())
    assert emitted == 10 * 24, f"{emitted} tokens"
    stats = engine.stats
    assert not overlaps or 0 < stats.hits < stats.chunks, (stats.hits, stats.chunks)
    engine.close()
    return engine.scheduler.num_preemptions


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def some_of(names: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(names)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {','.join(names)}")
        return text.split(",")

    return parse


def parse_args(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    found = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    add("--sanitizer", default=found, help="path of compute-sanitizer (where it is found)")
    add("--tools", type=some_of(TOOLS), default=list(TOOLS), help="some of them, separated by commas (all)")
    add("--runs", type=some_of(RUNS), default=list(RUNS), help="some of them, separated by commas (all)")
    add("--seconds", type=float, default=90.0, help="for each process (90)")
    add("--engine", choices=ENGINES, help="run the engine here and now")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of --engine")
    args = parser.parse_args(given)
    args.out = Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "faser-sanitize")
    if args.sanitizer is None and args.engine is None:
        parser.error("no compute-sanitizer on the PATH; give --sanitizer (pip's nvidia-cuda-sanitizer-api has it)")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(given)
    if args.engine is not None:
        run_engine(args.device, args.engine)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    findings = []
    for tool in args.tools:
        for run in args.runs:
            found = sanitize(args, run, tool)
            findings.append(found)
            told = "no summary" if found.errors is None else f"ERROR SUMMARY: {found.errors} errors"
            ended = "took too long" if found.status is None else f"status {found.status}"
            print(f"{run:8} {tool:10} {found.seconds:6.1f} s  {ended}  {found.reports} reports  {told}", flush=True)
    shown = [asdict(each) | {"clean": each.is_clean} for each in findings]
    print(json.dumps({"benchmark": "sanitize", "sanitizer": args.sanitizer, "found": shown}), flush=True)
    return 0 if all(each.is_clean for each in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
