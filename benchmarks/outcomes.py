"""How often is the token that the target says instead among the draft's next best? The default pair, as it is.

Requests draft on beside the verification and have their frontier drafted anew where they missed (`lead`). With m
guesses for each token that may be the last, branches behind them are drafted, too, and a miss is only where none of
them is right. By m: of the chunks, those that held, and of the rest those that a branch was there for (`adopted`). The
mechanism is the engine's own; what it costs is measured on a GPU (benchmarks/overlap.py).

    .venv/bin/python -m benchmarks.outcomes [--count 12] [--tokens 64] [--length 3] [--outcomes 0,1,2,4]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.cpu_speculation import chat_prompts
from faser.build import build_engine, load_pair
from faser.config import EngineOptions
from faser.policy import Fixed
from faser.policy.overlap import Overlap
from faser.request import Request, SamplingParams

PROMPTS = "faser/traffic/data/specbench.jsonl.xz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--outcomes", default="0,1,2,4")
    args = parser.parse_args()
    pair = load_pair(None, None, EngineOptions())
    assert pair.tokenizer is not None
    prompts = [pair.tokenizer.encode(text)[:256] for text in chat_prompts(PROMPTS, args.count)]
    lines = []
    for temperature in (0.0, 1.0):
        for outcomes in map(int, args.outcomes.split(",")):
            options = EngineOptions(policy=Fixed(args.length), overlap="on", max_running=args.count)
            engine = build_engine(pair.target, pair.draft, options, pair.tokenizer)
            engine.scheduler.overlap = Overlap("on", leads=True, outcomes=outcomes)
            for i, prompt in enumerate(prompts):
                params = SamplingParams(temperature=temperature, max_tokens=args.tokens, ignore_eos=True)
                engine.add(Request(id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=i))
            while engine.has_work:
                engine.step()
            stats = engine.stats
            held, missed = stats.hits - stats.adopted, stats.chunks - stats.hits + stats.adopted
            line = {
                "temperature": temperature,
                "outcomes": outcomes,
                "accepted": stats.accepted / stats.verified,
                "held": held / stats.chunks,
                "adopted": stats.adopted / missed,
                "hits": stats.hits / stats.chunks,
            }
            lines.append(line)
            print(", ".join(f"{name} {value:.3g}" for name, value in line.items()), flush=True)
    print(json.dumps({"length": args.length, "lines": lines}))


if __name__ == "__main__":
    main()
