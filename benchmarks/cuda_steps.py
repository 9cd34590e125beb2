"""Where does a step's time go on the GPU: which kernels, how much waiting for the host?

A closed batch of requests decodes with random weights of real shapes, which cost what trained ones do; how often drafts
are accepted is a parameter, not a result. Only steps in which every request decodes are counted. The floor is the bytes
of the weights and of the KV over the memory bandwidth, or the FLOPs over what the tensor cores do, whichever is more.

    python3 -m benchmarks.cuda_steps [--batches 1,16,64,256] [--lengths 0,4] [--acceptance 0.79] [--kernels]
        [--target llama-8b] [--draft llama-1b] [--prompt 128] [--output 128] [--waiting]

--kernels lists the kernels of some steps by their time; --waiting turns planning ahead off. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from benchmarks.lib.table_report import step_floor_ms
from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.device import make_device
from tools.inflate import SHAPES

VOCABULARY = 49152
PROFILED_STEPS = 8


def make_model(name: str, seed: int, max_positions: int) -> Transformer:
    config = ModelConfig(
        family="llama", vocab_size=VOCABULARY, norm_eps=1e-5, max_positions=max_positions, eos_token_ids=(2,),
        dtype="bfloat16", **asdict(SHAPES[name]),
    )  # fmt: skip
    return Transformer.random(config, seed, torch.bfloat16, device="cuda")


def add_batch(
    engine: Engine, batch: int, prompt: int, output: int, prompts: Sequence[tuple[int, ...]] | None = None
) -> None:
    """With `prompts`, or with random prompts of `prompt` tokens."""
    random = np.random.default_rng(batch)
    for i in range(batch):
        tokens = tuple(random.integers(100, 4000, prompt).tolist()) if prompts is None else prompts[i]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_token_ids=tokens, params=params, seed=i))


def run_batch(
    engine: Engine,
    batch: int,
    prompt: int,
    output: int,
    profiler: Any = None,
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> dict[str, float]:
    """Measured from when all requests have their first token until the first of them ends."""
    add_batch(engine, batch, prompt, output, prompts)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {item.request_id for item in engine.step()}
    engine.step()
    before, started, emitted, ended = replace(engine.stats), time.perf_counter(), 0, False
    if profiler is not None:
        profiler.start()
    while not ended and engine.has_work and (profiler is None or engine.stats.steps - before.steps < PROFILED_STEPS):
        progress = engine.step()
        emitted += sum(len(item.token_ids) for item in progress)
        ended = any(item.finish is not None for item in progress)
    seconds, after = time.perf_counter() - started, replace(engine.stats)
    if profiler is not None:
        torch.cuda.synchronize()
        profiler.stop()
    while engine.has_work:
        engine.step()
    steps = max(1, after.steps - before.steps)
    draft, verify, plan = (
        1e3 * (getattr(after, name) - getattr(before, name)) / steps
        for name in ("draft_seconds", "verify_seconds", "plan_seconds")
    )
    step = 1e3 * seconds / steps
    return {
        "ms_per_token": 1e3 * seconds * batch / emitted, "step_ms": step, "draft_ms": draft, "verify_ms": verify,
        "gap": 1 - (draft + verify) / step, "plan_ms": plan, "tokens_per_step": emitted / steps / batch,
    }  # fmt: skip


def list_kernels(engine: Engine, batch: int, prompt: int, output: int) -> dict[str, float]:
    """Milliseconds per step, by kernel."""
    activity = torch.profiler.ProfilerActivity.CUDA
    profiler = torch.profiler.profile(activities=[activity])
    run_batch(engine, batch, prompt, output, profiler)
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:70]] += event.time_range.elapsed_us()
            calls[event.name[:70]] += 1
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, last = 0.0, 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    span = last - spans[0][0] if spans else 0.0
    print(f"  GPU busy {busy / 1e3 / PROFILED_STEPS:.3f} of {span / 1e3 / PROFILED_STEPS:.3f} ms a step")
    for name, each in total.most_common(16):
        print(f"  {each / 1e3 / PROFILED_STEPS:7.3f} ms {calls[name] / PROFILED_STEPS:6.1f} times  {name}")
    return {name: each / 1e3 / PROFILED_STEPS for name, each in total.most_common(16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--lengths", default="0,4")
    parser.add_argument("--acceptance", type=float, default=0.79)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--draft", default="llama-1b", choices=SHAPES)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--waiting", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how the engine divides the memory
    batches, lengths = ([int(each) for each in text.split(",")] for text in (args.batches, args.lengths))

    target, draft = (make_model(name, seed, 4096) for seed, name in enumerate((args.target, args.draft)))
    models = {
        "target": asdict(SHAPES[args.target]), "draft": asdict(SHAPES[args.draft]), "vocabulary": VOCABULARY,
        "prompt": args.prompt, "output": args.output,
    }  # fmt: skip
    device: Any = make_device("cuda")
    device.runs_ahead = not args.waiting
    options = EngineOptions(policy=f"fixed:{max(lengths)}", acceptance=args.acceptance, prefix_caching=False)
    started = time.perf_counter()
    engine = build_engine(target, draft, options, device=device)
    print(f"engine built in {time.perf_counter() - started:.1f} s, graphs included", flush=True)
    results = []
    print("batch length  ms/token  step ms  floor  draft  verify   gap  plan  tokens/step")
    for batch in batches:
        for length in lengths:
            engine.scheduler.drafts.policy = Fixed(length)
            run_batch(engine, batch, args.prompt, 32)
            found = run_batch(engine, batch, args.prompt, args.output)
            found["floor_ms"] = step_floor_ms(models, batch, length)
            print(
                f"{batch:5} {length:6} {found['ms_per_token']:9.3f} {found['step_ms']:8.3f} {found['floor_ms']:6.2f} "
                f"{found['draft_ms']:6.3f} {found['verify_ms']:7.3f} {100 * found['gap']:4.1f}% "
                f"{found['plan_ms']:5.2f} {found['tokens_per_step']:8.2f}",
                flush=True,
            )
            kernels = list_kernels(engine, batch, args.prompt, args.output) if args.kernels else {}
            rounded = {name: round(value, 4) for name, value in found.items()}
            results.append({"batch": batch, "length": length, **rounded, "kernels": kernels})
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"results": results, "used_gib": round((total - free) / 2**30, 1)}))


if __name__ == "__main__":
    main()
