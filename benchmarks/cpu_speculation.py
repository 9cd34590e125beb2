"""Does speculation pay on a CPU? The default model with a draft at its best fixed length against no draft.

Chat prompts of Spec-Bench, batch 1 and 4, one process; runs of all settings alternate, ratios are of medians. The draft
is a patch, the folder of a draft head, or ngram. A verification of k + 1 rows costs more than one row on a CPU, and so
does a draft: k small forwards, or one of a block. Both are printed in plain steps, so that the ratio can be computed
from them:

    ratio = tokens per step / (verification of k + 1 rows + draft), all in plain steps

    .venv/bin/python benchmarks/cpu_speculation.py [--prompts FILE] [--draft DRAFT] [--lengths 1,2,3,4]
        [--policies faser] [--temperature 0] [--repeats 3]

The last line is one JSON document, with the best ratio of each batch beside its aim. Every setting must give the tokens
of policy off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from faser import LLM, SamplingParams
from faser.config import DEFAULT_DRAFT, NO_DRAFT
from faser.engine.stats import EngineStats
from faser.traffic.prompts import SHIPPED
from faser.traffic.traces import open_text

AIM = 1.3  # times no draft
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def chat_prompts(path: Path, count: int) -> list[str]:
    """Evenly spaced over the file, so that every category is present."""
    with open_text(path) as file:
        questions = [json.loads(line)["turns"][0] for line in file]
    short = [q for q in questions if len(q) < 1200]
    chosen = short[:: max(1, len(short) // count)][:count]
    return [f"{SYSTEM}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in chosen]


class Setting:
    """One policy, its engine and its measurements."""

    def __init__(self, name: str, draft: str | None, batch: int) -> None:
        self.name = name
        self.llm = LLM(None, draft, policy=name, max_running=batch, max_model_len=2048, prefix_caching=False)
        self.rates: list[float] = []
        self.tokens: list[list[int]] = []

    def run(self, prompts: list[str], params: SamplingParams) -> None:
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        self.tokens = [output.token_ids for output in outputs]
        self.rates.append(sum(map(len, self.tokens)) / (time.perf_counter() - started))

    def summary(self, plain: Setting) -> dict[str, Any]:
        stats, base = self.llm.stats, plain.llm.stats
        plain_step = base.verify_seconds / base.steps
        return {
            "policy": self.name,
            "tokens_per_s": round(statistics.median(self.rates), 2),
            "ratio": round(statistics.median(self.rates) / statistics.median(plain.rates), 3),
            "tokens_per_step": round(stats.emitted / stats.steps, 3),
            "acceptance": round(stats.acceptance, 3),
            "verify_in_plain_steps": round(stats.verify_seconds / stats.steps / plain_step, 3),
            "draft_in_plain_steps": round(stats.draft_seconds / stats.steps / plain_step, 3),
            "same_tokens": self.tokens == plain.tokens,
        }


def measure(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = chat_prompts(args.prompts, args.count)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    names = [*(f"fixed:{k}" for k in args.lengths), *args.policies]
    settings = [Setting("off", NO_DRAFT, batch), *(Setting(name, args.draft, batch) for name in names)]
    for setting in settings:
        setting.llm.generate(prompts[:1], SamplingParams(max_tokens=8))
        setting.llm.engine.stats = EngineStats()
    for _ in range(args.repeats):
        for setting in settings:
            setting.run(prompts, params)
    results = [{"batch": batch, **setting.summary(settings[0])} for setting in settings]
    for r in results:
        print(
            f"batch {batch}  {r['policy']:8} {r['tokens_per_s']:7.1f} tok/s  {r['ratio']:.2f}x  "
            f"{r['tokens_per_step']:.2f} tokens/step  accepted {r['acceptance']:.2f}  in plain steps: verify "
            f"{r['verify_in_plain_steps']:.2f}, draft {r['draft_in_plain_steps']:.2f}  same tokens {r['same_tokens']}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=SHIPPED["specbench"], help="JSONL with `turns` (Spec-Bench)")
    parser.add_argument("--draft", default=str(DEFAULT_DRAFT), help="a draft patch, a head's folder, or ngram")
    parser.add_argument("--lengths", type=lambda text: [int(k) for k in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--policies", type=lambda text: text.split(","), default=[], help="besides, such as faser")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 4])
    parser.add_argument("--count", type=int, default=12, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results = [line for batch in args.batches for line in measure(batch, args)]
    drafting = [line for line in results if line["policy"] != "off"]
    best = {batch: max(line["ratio"] for line in drafting if line["batch"] == batch) for batch in args.batches}
    print(json.dumps({"draft": Path(args.draft).name, "best_ratio": best, "aim": AIM, "results": results}))


if __name__ == "__main__":
    main()
