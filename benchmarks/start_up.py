"""How long does an engine take to start, by what is known of the machine?

Random weights of an 8B and a 1B (or a tiny pair) are made in memory. Then an engine with the default policy is built:
with an empty cache (a quick profile, and what idle moments add to it), with the profile that was kept, and with all of
it measured at start. Compiled kernels are warm after the first start, as in every start but the first.

    python -m benchmarks.start_up [--device cuda] [--tiny]

Prints a line for each, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from dataclasses import replace
from time import perf_counter

from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.models.transformer import Transformer
from faser.runtime.device import make_device

KV_BYTES = 8 * 2**30


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    target, draft = make_tiny() if args.tiny else make_large()
    options = EngineOptions(policy="faser", max_model_len=None if args.tiny else 4096, kv_memory=KV_BYTES)
    figures: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FASER_CACHE"] = cache
        for name, profiling in (("first start", "none"), ("quick", "quick"), ("kept", "quick"), ("full", "full")):
            if name == "full":
                os.environ["FASER_CACHE"] = f"{cache}/empty"
            started = perf_counter()
            engine = build_engine(target, draft, replace(options, profiling=profiling), device=make_device(args.device))
            figures[name] = perf_counter() - started
            figures[f"{name}: accuracy"] = engine.cost.profile.accuracy
            print(f"{name}: {figures[name]:.2f} s, profile {engine.cost.profile.kind}", flush=True)
            if name == "quick":
                figures |= use_idle_moments(engine)
            engine.close()
            del engine
            gc.collect()  # a GPU has no room for two
    print(json.dumps({"benchmark": "start_up", "device": args.device, **figures}))
    return 0


def use_idle_moments(engine: Engine) -> dict[str, float | str]:
    seconds = []
    more = True
    while more:
        started = perf_counter()
        more = engine.use_idle_moment()
        seconds.append(perf_counter() - started)
    profile = engine.cost.profile
    print(
        f"idle moments: {len(seconds)}, {sum(seconds):.1f} s in all, {1e3 * max(seconds):.0f} ms the longest; "
        f"profile {profile.kind}, {profile.accuracy}",
        flush=True,
    )
    return {"idle moments": len(seconds), "idle seconds": sum(seconds), "longest": max(seconds)}


def make_large() -> tuple[Transformer, Transformer]:
    from benchmarks.cuda_steps import make_model

    return make_model("llama-8b", 0, 4096), make_model("llama-1b", 1, 4096)


def make_tiny() -> tuple[Transformer, Transformer]:
    from benchmarks.overlap import TINY

    return Transformer.random(TINY, 0, std=0.3), Transformer.random(TINY, 0, std=0.3)


if __name__ == "__main__":
    sys.exit(main())
