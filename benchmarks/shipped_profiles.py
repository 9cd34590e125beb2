"""Measure the profiles of an H200 that ship with the simulator (faser/sim/profiles/).

Random weights of each pair of shapes are made in memory, and an engine measures the whole profile at its start. Minutes
of traffic take a little longer than such a quiet profile says; the factors below are what an engine's own corrections
found on the Azure trace (docs/simulator.md), and the profile of the pair they were found with is multiplied by them.

    python3 -m benchmarks.shipped_profiles [--pairs h200-8b-1b,h200-32b-0.6b] [--folder DIR]

Writes DIR/NAME.json ($OUT where it is set), prints how far predictions are off, then one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from benchmarks.cuda_steps import make_model
from faser.build import build_engine
from faser.config import EngineOptions
from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.runtime.device import make_device

PAIRS = {"h200-8b-1b": ("llama-8b", "llama-1b"), "h200-32b-0.6b": ("qwen-32b", "qwen-0.6b")}
# `kv_tokens`: what an H200 has room for beside the weights
ABOUT: dict[str, dict[str, object]] = {
    "h200-8b-1b": {"model": "8B", "draft": "1B", "kv_tokens": 790_000},
    "h200-32b-0.6b": {"model": "32B", "draft": "0.6B", "kv_tokens": 200_000},
}
TRAFFIC_FACTORS = {
    "h200-8b-1b": {"verify": 1.01, "prompts": 1.02, "first_draft": 1.03, "next_draft": 1.03, "catch_up": 1.2}
}
MAX_MODEL_LEN = 4096


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    os.environ["FASER_CACHE"] = str(args.folder / "cache")
    figures = {}
    for name in args.pairs.split(","):
        started = perf_counter()
        profile = measure(name)
        profile.save(args.folder / f"{name}.json")
        figures[name] = {"seconds": perf_counter() - started, "errors": profile.errors}
        print(f"{name}: {profile.accuracy}, {figures[name]['seconds']:.0f} s with the models", flush=True)
        gc.collect()  # a GPU has no room for two pairs
    print(json.dumps({"benchmark": "shipped_profiles", "figures": figures}))
    return 0


def measure(name: str) -> Profile:
    target, draft = (make_model(shape, seed, MAX_MODEL_LEN) for seed, shape in enumerate(PAIRS[name]))
    options = EngineOptions(policy="faser", profiling="full", overlap="off", max_model_len=MAX_MODEL_LEN)
    engine = build_engine(target, draft, options, device=make_device("cuda"))
    try:
        profile: Profile = engine.cost.profile  # type: ignore[union-attr]
    finally:
        engine.close()
    factors = TRAFFIC_FACTORS.get(name, {})
    curves = {curve: scaled(getattr(profile, curve), factor) for curve, factor in factors.items()}
    source = "benchmarks/shipped_profiles.py on an H200" + (f", times {factors} (docs/simulator.md)" if factors else "")
    shapes = {f"{role}_shape": profile.about[role] for role in ("target", "draft")}
    sizes = {size: profile.about[size] for size in ("max_running", "max_batch_tokens", "torch")}
    about = {"device": "NVIDIA H200", "dtype": "bfloat16", **ABOUT[name], "source": source, **shapes, **sizes}
    return replace(profile, about=about, besides=(), await_seconds=0.0, **curves)


def scaled(curve: Curve, factor: float) -> Curve:
    seconds, per_token = (tuple(factor * each for each in values) for values in (curve.seconds, curve.per_token))
    return replace(curve, seconds=seconds, per_token=per_token)


if __name__ == "__main__":
    sys.exit(main())
