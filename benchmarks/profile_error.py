"""Is a profile made in under 20 seconds right about batches it was not made from, to 7.5 %?

Random weights of real shapes cost what trained ones do. The engine is built as `faser serve` builds it, and what its
start-up measures is printed, with how far it is off and how long it took.

    python3 -m benchmarks.profile_error [--target llama-8b] [--draft llama-1b] [--policy faser] [--budget 12]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.cuda_steps import make_model
from faser.build import LoadedPair, measure_profile
from faser.cli.profile import TARGET_ERROR, render
from faser.config import EngineOptions
from tools.inflate import SHAPES

MOST_SECONDS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--draft", default="llama-1b", choices=SHAPES)
    parser.add_argument("--policy", default="faser")
    parser.add_argument("--budget", type=float)
    args = parser.parse_args()
    target, draft = (make_model(name, seed, 4096) for seed, name in enumerate((args.target, args.draft)))
    started = time.perf_counter()
    options = EngineOptions(policy=args.policy, device="cuda")
    found, seconds = measure_profile(LoadedPair(target, draft, None), options, args.budget)
    total = time.perf_counter() - started
    print(render(found))
    print(f"\nmeasured in {seconds:.1f} s (at most {MOST_SECONDS:g}); {total:.1f} s with buffers, pages and graphs")
    is_met = seconds < MOST_SECONDS and all(found.errors.get(name, 1.0) <= TARGET_ERROR for name in ("verify", "draft"))
    print("met" if is_met else "NOT MET")
    print(json.dumps({"seconds": seconds, "met": is_met, **found.to_dict()}))


if __name__ == "__main__":
    main()
