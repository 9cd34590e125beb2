"""Is `faser` as good as the best fixed length where the target is quantised? Closed loops in the simulator.

No quantised target has been profiled. The profiles here are arithmetic on the shipped one of an H200 with an 8B and a
1B, whose draft stays in bfloat16. A step waits for the weights at few rows, so fewer bytes take a constant off it:

  fp8    1.62 ms less at all rows: 2.1 ms with one request instead of 3.7
  int4   2.32 ms less with one row (1.4 ms), falling to nothing at 64 rows, where codes are turned into bfloat16 no
         faster than bfloat16 weights are read; steps with prompts as in bfloat16

    python3 -m benchmarks.quantised_policies [--sizes 1,4,16,64,128,256] [--acceptance 0.6,0.75,0.9] [--targets …]

A score is the tokens per second of `faser` over those of the best fixed length, and over those of `off`; the aim is
0.98 and 1. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.sim_error import simulate
from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.sim.replica import load_profile

BASE = "h200-8b-1b"
FIXED = tuple(f"fixed:{length}" for length in range(1, 8))
FP8_LESS, INT4_LESS, INT4_ROWS = 1.62e-3, 2.32e-3, 64
LENGTHS = ("--prompt-len", "128", "--output-len", "64..192")


def lighter(curve: Curve, less: Callable[[int], float]) -> Curve:
    """The curve with `less(rows)` seconds taken off."""
    seconds = tuple(each - less(rows) for rows, each in zip(curve.rows, curve.seconds, strict=True))
    return replace(curve, seconds=seconds)


def as_fp8(base: Profile) -> Profile:
    verify, prompts = (lighter(each, lambda rows: FP8_LESS) for each in (base.verify, base.prompts))
    return replace(base, about={**base.about, "model": "8B in FP8 (arithmetic)"}, verify=verify, prompts=prompts)


def as_int4(base: Profile) -> Profile:
    verify = lighter(base.verify, lambda rows: INT4_LESS * max(0.0, 1 - (rows - 1) / (INT4_ROWS - 1)))
    return replace(base, about={**base.about, "model": "8B in int4 (arithmetic)"}, verify=verify)


TARGETS: dict[str, Callable[[Profile], Profile]] = {"bf16": lambda base: base, "fp8": as_fp8, "int4": as_int4}


def play(profile: Path, size: int, acceptance: str) -> dict[str, float]:
    """Tokens per second of each policy with `size` requests at all times."""
    traffic = "--concurrency", str(size), "--requests", str(40 + 6 * size), *LENGTHS
    how = "--profile", str(profile), "--acceptance", f"{acceptance}:0.05"
    found = simulate(traffic, ("off", *FIXED, "faser"), how)
    return {name: summary["output_tokens_per_s"] for name, summary in found.items()}


def cell(target: str, profile: Path, size: int, acceptance: str) -> dict[str, Any]:
    rates = play(profile, size, acceptance)
    best = max(FIXED, key=rates.__getitem__)
    return {
        "target": target, "size": size, "acceptance": float(acceptance), "best_fixed": best,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "gain": round(rates["faser"] / rates["off"], 4), "of_best_fixed": round(rates["faser"] / rates[best], 4),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16,64,128,256")
    parser.add_argument("--acceptance", default="0.6,0.75,0.9")
    parser.add_argument("--targets", default=",".join(TARGETS))
    args = parser.parse_args(arguments)
    cells = []
    print("target  accepted  requests  best fixed  of best fixed  of off", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for target in args.targets.split(","):
            profile = Path(folder) / f"{target}.json"
            TARGETS[target](load_profile(BASE)).save(profile)
            for acceptance in args.acceptance.split(","):
                for size in map(int, args.sizes.split(",")):
                    cells.append(found := cell(target, profile, size, acceptance))
                    print(f"{target:6} {acceptance:>9} {size:9} {found['best_fixed']:>11} "
                          f"{found['of_best_fixed']:14.3f} {found['gain']:7.3f}", flush=True)  # fmt: skip
    worst = {name: min(each[name] for each in cells) for name in ("of_best_fixed", "gain")}
    print(json.dumps({"benchmark": "quantised policies", "base": BASE, "worst": worst, "cells": cells}))


if __name__ == "__main__":
    main()
