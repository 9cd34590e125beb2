"""Is plain decoding on a CPU as fast as `transformers` generate, before any speculation?

A random model of SmolLM2-135M's shape in float32, greedy, policy off. Both systems read the same checkpoint and must
give the same tokens.

  batch 1   one request
  batch 8   eight requests with unequal prompts and outputs; `transformers` pads the batch on the left and runs it
            until the longest output is done, as it must. Only the tokens asked for count, for both.
  padded 8  the same prompts with equal outputs, where static batching wastes nothing but prompt padding

Runs alternate, so that a slow moment of the machine hits both; ratios are medians over the repeats. Also prints the
share of a step spent outside the model's forward, and the floor: the weights' bytes over the measured read bandwidth.

    .venv/bin/python benchmarks/cpu_decode.py [--repeats 5]

Targets: batch 1 at least 1.0x, batch 8 at least 1.3x, under 5 % outside the forward at batch 8.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from faser import LLM, SamplingParams

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    name: str
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(len(self.prompt_lengths))
        return [torch.randint(3, 49_000, (n,), generator=generator).tolist() for n in self.prompt_lengths]


CASES = (
    Case("batch 1", (64,), (96,)),
    Case("batch 8", (24, 160, 48, 96, 12, 200, 64, 128), (96, 32, 64, 16, 80, 24, 48, 40)),
    Case("padded 8", (24, 160, 48, 96, 12, 200, 64, 128), (48,) * 8),
)


def run_faser(llm: LLM, case: Case) -> list[list[int]]:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in case.output_lengths]
    return [output.token_ids for output in llm.generate(case.prompts(), params)]


def run_transformers(model: LlamaForCausalLM, case: Case) -> list[list[int]]:
    prompts, longest = case.prompts(), max(case.prompt_lengths)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(case.output_lengths), do_sample=False, pad_token_id=0
        )
    return [out[i, longest : longest + n].tolist() for i, n in enumerate(case.output_lengths)]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    tokens = run()
    return time.perf_counter() - started, tokens


def read_bandwidth() -> float:
    """Bytes per second at which this machine reads memory far larger than its caches: the best of ten passes."""
    block = torch.zeros(128 * 2**20)
    return block.numel() * 4 / min(timed(lambda: block.sum().tolist())[0] for _ in range(10))


def measure(case: Case, llm: LLM, model: LlamaForCausalLM, repeats: int) -> dict[str, Any]:
    ours, theirs, ratios, same = [], [], [], True
    run_faser(llm, case), run_transformers(model, case)
    before = (llm.stats.step_seconds, llm.stats.forward_seconds)
    num_tokens = sum(case.output_lengths)
    for _ in range(repeats):
        our_seconds, our_tokens = timed(lambda: run_faser(llm, case))
        their_seconds, their_tokens = timed(lambda: run_transformers(model, case))
        same &= our_tokens == their_tokens
        ours.append(num_tokens / our_seconds)
        theirs.append(num_tokens / their_seconds)
        ratios.append(their_seconds / our_seconds)
    step_seconds, forward_seconds = llm.stats.step_seconds - before[0], llm.stats.forward_seconds - before[1]
    return {
        "case": case.name,
        "faser_tokens_per_s": round(statistics.median(ours), 1),
        "transformers_tokens_per_s": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "outside_forward": round(1 - forward_seconds / step_seconds, 4),
        "same_tokens": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    # Random weights write one token over and over at the default scale; a wider one gives texts that differ.
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.05)).eval()
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(str(Path(folder)), policy="off", prefix_caching=False)
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    floor = num_bytes / read_bandwidth()
    results = [measure(case, llm, model, args.repeats) for case in CASES]
    print(
        f"{torch.get_num_threads()} threads; weights {num_bytes / 2**20:.0f} MiB, floor of a step {1e3 * floor:.1f} ms"
    )
    print(f"{'':10}{'FASER':>10}{'transformers':>14}{'ratio':>8}{'spread':>15}{'outside forward':>17}  same tokens")
    for r in results:
        print(
            f"{r['case']:10}{r['faser_tokens_per_s']:10}{r['transformers_tokens_per_s']:14}{r['ratio']:8}"
            f"{r['ratio_min']:8}–{r['ratio_max']:<6}{100 * r['outside_forward']:15.1f} %  {r['same_tokens']}"
        )
    print(json.dumps({"floor_ms": round(1e3 * floor, 2), "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
