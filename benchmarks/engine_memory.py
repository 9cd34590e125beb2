"""What does an engine's process hold on to? Requests through one engine, and where its memory went, layer by layer.

The engine runs in this process, without HTTP, over tiny models: what grows is bookkeeping. After a warm-up it counts
    python    bytes that Python's allocator holds (tracemalloc), and the lines of code whose share grew
    malloc    bytes that the C library has given out, and those it keeps for later, over all arenas (mallinfo2)
    resident  memory of the process as the system sees it, by mapping: heap, anonymous, files
It says nothing of a GPU: pinned buffers, graphs and the driver's own memory are not there.

    .venv/bin/python -m benchmarks.engine_memory [--requests 10000] [--seed 0]

A table, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import tempfile
import tracemalloc
from pathlib import Path

from benchmarks.lib.http_client import mapped_bytes
from benchmarks.lib.soak_models import tiny_models
from faser.build import build_engine, load_pair
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.request import Request, SamplingParams

WARM_UP = 0.2  # share of the requests
OPEN = 48  # requests at a time
MIB = 2**20


class Mallinfo2(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def malloc_bytes() -> dict[str, int]:
    """Of the C library: given out, and kept for later."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return {}
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return {"malloc given out": info.uordblks + info.hblkhd, "malloc kept": info.fordblks}


def measure() -> dict[str, float]:
    """MiB by layer."""
    gc.collect()
    python = {"python": tracemalloc.get_traced_memory()[0]}
    found = {**python, **malloc_bytes(), **mapped_bytes(os.getpid())}
    return {name: round(size / MIB, 2) for name, size in found.items()}


def serve(engine: Engine, count: int, chance: random.Random, start: int) -> None:
    """Requests of all lengths, some with a common beginning; one in twenty is cancelled."""
    added, num_open = 0, 0
    while added < count or engine.has_work:
        while added < count and num_open < OPEN:
            prompt = [70 + chance.randrange(3)] * chance.randint(0, 40) + chance.choices(range(70, 300), k=30)
            params = SamplingParams(max_tokens=chance.randint(1, 60), temperature=chance.choice((0.0, 1.0)))
            name = str(start + added)
            engine.add(Request(id=name, prompt_token_ids=tuple(prompt), params=params, seed=added))
            added, num_open = added + 1, num_open + 1
            if chance.random() < 0.05:
                engine.cancel(str(start + chance.randrange(added)))
        num_open -= sum(item.finish is not None for item in engine.step())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faser-memory-") as folder:
        models = tiny_models(Path(folder))
        options = EngineOptions(offload="on", kv_memory=4 * MIB, max_model_len=512, profiling="none")
        pair = load_pair(models.target, f"{models.draft}+ngram", options)
        engine = build_engine(pair.target, pair.draft, options, pair.tokenizer)
    chance, warm_up = random.Random(args.seed), round(WARM_UP * args.requests)
    tracemalloc.start()
    serve(engine, warm_up, chance, 0)
    first, before = tracemalloc.take_snapshot(), measure()
    serve(engine, args.requests - warm_up, chance, warm_up)
    after, last = measure(), tracemalloc.take_snapshot()
    engine.scheduler.check()
    print(f"{'MiB':20}{'after ' + str(warm_up):>14}{'after ' + str(args.requests):>14}{'growth':>10}")
    for name, size in after.items():
        print(f"{name:20}{before.get(name, 0):14.2f}{size:14.2f}{size - before.get(name, 0):10.2f}")
    own = [each for each in last.compare_to(first, "lineno") if "tracemalloc" not in str(each.traceback)][:5]
    for each in own:
        print(f"{each.size_diff / 1024:10.1f} KiB more at {each.traceback}")
    print(json.dumps({"requests": args.requests, "warm_up": warm_up, "before": before, "after": after}))


if __name__ == "__main__":
    main()
