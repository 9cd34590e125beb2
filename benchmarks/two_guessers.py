"""How much of prompt lookup and of a draft is accepted, each alone and both together? The default pair, greedy.

`copies` are long texts of Spec-Bench followed by their own beginning: the model goes on copying. `questions` are chat
prompts of Spec-Bench as they are. Every setting must give the tokens of policy off; computed in float32, because the
order of sums in packed weights depends on the batch. Nothing is timed: the figures are the same on every machine.

    .venv/bin/python benchmarks/two_guessers.py [--lengths 4,7] [--batch 4] [--count 8] [--max-tokens 96]

Prints a line for every setting, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.cpu_speculation import SYSTEM, chat_prompts
from faser import LLM, SamplingParams
from faser.config import BESIDE, DEFAULT_DRAFT, NGRAM, NO_DRAFT
from faser.engine.stats import EngineStats
from faser.traffic.prompts import SHIPPED

DRAFTS = {"draft": str(DEFAULT_DRAFT), "lookup": NGRAM, "both": f"{DEFAULT_DRAFT}{BESIDE}"}
TEXT, BEGINNING = 800, 120  # characters of a text, and of its beginning that is repeated
AMONG = 5  # prompts for each one that is copied, of which the longest are taken


def copying(prompt: str) -> str:
    """The text of a prompt, twice; the second time it breaks off."""
    text = prompt.removeprefix(SYSTEM).split("\n", 1)[1].split("<|im_end|>")[0][:TEXT]
    return f"{text}\n\n{text[:BEGINNING]}"


def generate(prompts: list[str], draft: str, policy: str, args: argparse.Namespace) -> tuple[Any, EngineStats]:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    sizes = {"max_running": args.batch, "max_model_len": 2048, "max_step_ms": 0.0, "prefix_caching": False}
    with LLM(None, draft, policy=policy, quantised="off", **sizes) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)], llm.stats


def measure(kind: str, prompts: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    plain, _ = generate(prompts, NO_DRAFT, "off", args)
    results = []
    for length in args.lengths:
        for name, draft in DRAFTS.items():
            tokens, stats = generate(prompts, draft, f"fixed:{length}", args)
            results.append({"kind": kind, "length": length, "guesser": name, **figures(stats, tokens == plain)})
            print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    return results


def figures(stats: EngineStats, is_same: bool) -> dict[str, Any]:
    own, own_accepted = stats.drafted - stats.looked_up, stats.accepted - stats.lookup_accepted
    return {
        "tokens_per_step": round(stats.emitted / (stats.emitted - stats.accepted), 2),  # of a request
        "drafted": own,
        "acceptance": round(own_accepted / own, 3) if own else None,
        "looked_up": stats.looked_up,
        "lookup_acceptance": round(stats.lookup_accepted / stats.looked_up, 3) if stats.looked_up else None,
        "same_tokens": is_same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda text: [int(k) for k in text.split(",")], default=[4, 7])
    parser.add_argument("--batch", type=int, default=4, help="requests at a time")
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    questions = chat_prompts(SHIPPED["specbench"], args.count)
    longest = sorted(chat_prompts(SHIPPED["specbench"], AMONG * args.count), key=len)[-args.count :]
    copies = [copying(prompt) for prompt in longest]
    results = measure("copies", copies, args) + measure("questions", questions, args)
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
