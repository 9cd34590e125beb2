"""How fast does FASER decode on a GPU, beside the floor of the hardware?

A decoding step reads every weight once, so it takes at least their bytes over the memory bandwidth, plus the KV it
attends to; above about 200 rows it takes the FLOPs over what the tensor cores do. Random weights of the real shapes
cost what trained ones do; how often drafts are accepted is then a parameter (--acceptance), not a result.

    python3 -m benchmarks.h200 [--batches 1,4,16,64,128,256] [--lengths 0,2,4] [--acceptance 0.7] [--prompt 128]
        [--output 256] [--target llama-8b] [--draft llama-1b]

For each batch size and draft length: milliseconds per output token (TPOT: mean over requests of (last - first token) /
(tokens - 1)), the floor of a step, the share of the step in which the GPU computed, and TTFT. Length 0 is no
speculation. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace

import numpy as np
import torch

from faser.config import EngineOptions
from faser.engine import Engine
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.runtime.build import build_engine
from faser.types import Request, SamplingParams
from tools.inflate import SHAPES

BANDWIDTH, FLOPS = 4.3e12, 790e12
VOCABULARY = 49152


def make_model(name: str, seed: int, max_positions: int) -> Transformer:
    shape = SHAPES[name]
    config = ModelConfig(
        family="llama", vocab_size=VOCABULARY, norm_eps=1e-5, max_positions=max_positions, eos_token_ids=(2,),
        dtype="bfloat16", **asdict(shape),
    )  # fmt: skip
    return Transformer.random(config, seed, torch.bfloat16, device="cuda")


def floor_ms(model: Transformer, rows: int, context_tokens: int) -> float:
    """Of one forward: bytes, or FLOPs where those take longer."""
    config = model.config
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize * context_tokens
    num_weights = (model.num_bytes - model.embedding.numel() * 2) / 2
    return 1e3 * max((2 * num_weights + kv) / BANDWIDTH, 2 * num_weights * rows / FLOPS)


def run_batch(engine: Engine, batch: int, prompt: int, output: int, seed: int) -> dict[str, float]:
    """A closed batch: all requests at once. Warm graphs are the caller's business."""
    random = np.random.default_rng(seed)
    requests = [
        Request(
            id=str(i),
            prompt_token_ids=tuple(random.integers(100, 4000, prompt).tolist()),
            params=SamplingParams(max_tokens=output, ignore_eos=True),
            seed=i,
        )
        for i in range(batch)
    ]
    before = replace(engine.stats)
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    first, last, count = {}, {}, dict.fromkeys((r.id for r in requests), 0)
    while engine.has_work:
        progress = engine.step()
        now = time.perf_counter()
        for item in progress:
            first.setdefault(item.request_id, now)
            last[item.request_id] = now
            count[item.request_id] += len(item.token_ids)
    stats = engine.stats
    steps = stats.steps - before.steps
    return {
        "tpot_ms": 1e3 * statistics.fmean((last[i] - first[i]) / (count[i] - 1) for i in count),
        "ttft_ms": 1e3 * statistics.fmean(first[i] - started for i in count),
        "steps": steps,
        "step_ms": 1e3 * (stats.step_seconds - before.step_seconds) / steps,
        "draft_ms": 1e3 * (stats.draft_seconds - before.draft_seconds) / steps,
        "verify_ms": 1e3 * (stats.verify_seconds - before.verify_seconds) / steps,
        "plan_ms": 1e3 * (stats.plan_seconds - before.plan_seconds) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16,64,128,256")
    parser.add_argument("--lengths", default="0,2,4")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--draft", default="llama-1b", choices=SHAPES)
    parser.add_argument("--prefill", default="16x2048", help="requests x prompt tokens, for time to first token")
    args = parser.parse_args()

    positions = 4096
    target, draft = (make_model(name, seed, positions) for seed, name in enumerate((args.target, args.draft)))
    most = max(map(int, args.lengths.split(",")))
    options = EngineOptions(policy=f"fixed:{most}", acceptance=args.acceptance, prefix_caching=False)
    started = time.perf_counter()
    engine = build_engine(target, draft, options)
    print(f"engine built in {time.perf_counter() - started:.1f} s, graphs included")
    results = []
    print(
        f"{'batch':>5} {'length':>6} {'TPOT ms':>8} {'floor':>6} {'step ms':>8} {'draft':>7} {'verify':>7} {'GPU':>5}"
    )
    for batch in map(int, args.batches.split(",")):
        for length in map(int, args.lengths.split(",")):
            engine.scheduler.policy = Fixed(length)
            run_batch(engine, batch, args.prompt, 24, seed=1)
            found = run_batch(engine, batch, args.prompt, args.output, seed=2)
            context = batch * (args.prompt + args.output // 2)
            found["floor_ms"] = floor_ms(target, batch * (length + 1), context) + length * floor_ms(
                draft, batch, context
            )
            busy = (found["draft_ms"] + found["verify_ms"]) / found["step_ms"]
            results.append({"batch": batch, "length": length, **{k: round(v, 3) for k, v in found.items()}})
            print(
                f"{batch:5} {length:6} {found['tpot_ms']:8.2f} {found['floor_ms']:6.2f} {found['step_ms']:8.2f} "
                f"{found['draft_ms']:7.2f} {found['verify_ms']:7.2f} {100 * busy:4.0f}%",
                flush=True,
            )
    number, tokens = map(int, args.prefill.split("x"))
    engine.scheduler.policy = Fixed(0)
    run_batch(engine, number, tokens, 2, seed=3)
    prefill = run_batch(engine, number, tokens, 2, seed=4)
    print(f"prefill {number} x {tokens}: time to first token {prefill['ttft_ms']:.0f} ms")
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"results": results, "prefill_ttft_ms": prefill["ttft_ms"], "used_gib": (total - free) / 2**30}))


if __name__ == "__main__":
    main()
