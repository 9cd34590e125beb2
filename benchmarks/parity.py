"""Does a GPU give the tokens of the CPU, and does speculation change none of them?

In exact arithmetic the answers are yes. Floating-point sums depend on the order they are made in, and that on the
kernels and on how many rows a step has; so a token may change where the best two scores nearly tie, and nowhere else.
The default pair writes 128 tokens for each of many Spec-Bench chats, and every first difference between two texts is
shown with its gap: how far apart the scores of the two tokens are, teacher-forced on what the texts have in common
through a plain torch forward. Behind a first difference the texts have different prefixes and are not compared.

  float32   GPU without speculation and at length 4, each against the CPU without; greedy
  bfloat16  GPU at length 4 against GPU without: greedy, and at temperature 1 with the same seeds, where the score is
            logit + noise, the same noise in both

What a near-tie is. In bfloat16 a number has 8 significant bits: a score of 16 to 32, as the best ones are, is known to
0.125. Each of the two scores may be one such unit off in each of the two runs, 0.5 in all. In float32 the same count
gives 8e-6, and thirty layers of sums add some; 1e-3 is still far below what products in TF32 would do (1e-2). The
margin, between the best and the second best score anywhere, is printed for comparison.

    python3 -m benchmarks.parity --target TARGET.gguf --prompts specbench.jsonl.xz [--python-path DIR]
        [--sections float32,bfloat16] [--count 64 or 200] [--tokens 128]
    python3 -m benchmarks.parity --prompts specbench.jsonl.xz --device cpu --count 4 --tokens 16     # does it run?

The last line is one JSON document. The exit status is 1 where a gap is larger than a near-tie can be.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.build import LoadedPair, build_engine, load_pair
from faser.config import DEFAULT_DRAFT, EngineOptions
from faser.engine.engine import Engine
from faser.models.source import default_target
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.sampling import gumbel
from faser.text.tokenizer import Tokenizer
from tools.distill import chat_prompt, hidden_of, read_jsonl

LENGTH = 4
COUNTS = {"float32": 64, "bfloat16": 200}  # prompts
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}
MOST_PROMPT = 256  # tokens; longer chats are left out
MARGIN_PROMPTS = 16  # prompts whose score margins are computed
KV_BYTES = 4 << 30
MAX_RUNNING = {"cpu": 64, "cuda": 32}

Texts = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """The first position at which two texts differ."""

    prompt: int
    position: int  # in the output
    token_ids: tuple[int, int]
    gap: float  # between the scores of the two tokens


@dataclass(frozen=True)
class Comparison:
    name: str
    count: int  # prompts
    bound: float
    margin: float  # median of best - second best score
    differences: tuple[Difference, ...]

    @property
    def largest(self) -> float:
        return max((each.gap for each in self.differences), default=0.0)

    @property
    def holds(self) -> bool:
        return self.largest <= self.bound


@dataclass(frozen=True)
class Scores:
    """Scores of a model on a given text. At a temperature of 0 a score is a logit."""

    model: Transformer
    head: Tensor  # [vocabulary, hidden] in float32, so that scores are not rounded again
    temperature: float

    @torch.inference_mode()
    def at(self, prompt: Sequence[int], text: Sequence[int], seed: int, positions: Sequence[int]) -> Tensor:
        """Scores of every token at these output positions: [positions, vocabulary]."""
        tokens = torch.tensor([[*prompt, *text]], device=self.model.device)
        where = np.asarray(positions) + len(prompt)
        scores = F.linear(hidden_of(self.model, tokens)[0, where - 1].float(), self.head)
        if not self.temperature:
            return scores
        noise = gumbel(np.full(len(where), seed, np.uint64), where, scores.shape[1])
        return scores / self.temperature + torch.from_numpy(noise).to(scores.device)


# ── the texts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(args: argparse.Namespace, dtype: str, device: str) -> LoadedPair:
    options = EngineOptions(device=device, dtype=dtype, max_model_len=MOST_PROMPT + args.tokens)
    return load_pair(str(args.target or default_target()), str(args.draft), options)


def make_engine(pair: LoadedPair, max_model_len: int, device: str) -> Engine:
    """An engine prepared for the longest drafts; its policy is changed between texts."""
    options = EngineOptions(
        policy=f"fixed:{LENGTH}",
        device=device,
        max_running=MAX_RUNNING[device],
        max_model_len=max_model_len,
        kv_memory=KV_BYTES,
        prefix_caching=False,
    )
    return build_engine(pair.target, pair.draft, options)


def read_prompts(path: Path, tokenizer: Tokenizer, count: int) -> Texts:
    """Evenly spaced over the file, which is sorted by category."""
    rows: list[Any] = read_jsonl(str(path))
    prompts = [tokenizer.encode(chat_prompt(row["turns"][0])) for row in rows]
    prompts = [prompt for prompt in prompts if len(prompt) <= MOST_PROMPT]
    if len(prompts) < count:
        raise SystemExit(f"{path} has {len(prompts)} chats of up to {MOST_PROMPT} tokens; give --count {len(prompts)}")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def write(engine: Engine, length: int, prompts: Texts, tokens: int, temperature: float = 0.0) -> Texts:
    """One text per prompt, end tokens ignored, in a batch that changes."""
    engine.scheduler.drafts.policy = Fixed(length)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    texts: Texts = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=i))
    while engine.has_work:
        for item in engine.step():
            texts[int(item.request_id)] += item.token_ids
    if any(len(text) != tokens for text in texts):
        raise RuntimeError(f"a request got {min(map(len, texts))} of {tokens} tokens")
    return texts


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(name: str, dtype: str, scores: Scores, prompts: Texts, right: Texts, other: Texts) -> Comparison:
    differences = []
    for i, (left, text) in enumerate(zip(right, other, strict=True)):
        position = next((t for t, (a, b) in enumerate(zip(left, text, strict=True)) if a != b), None)
        if position is not None:
            both = left[position], text[position]
            row = scores.at(prompts[i], left[:position], i, [position])[0]
            differences.append(Difference(i, position, both, abs(float(row[both[0]] - row[both[1]]))))
    margins = find_margins(scores, prompts, right)
    return Comparison(name, len(prompts), NEAR_TIE[dtype], statistics.median(margins), tuple(differences))


def find_margins(scores: Scores, prompts: Texts, texts: Texts) -> list[float]:
    """Best - second best score, at every position of some texts."""
    margins: list[float] = []
    for i in range(min(MARGIN_PROMPTS, len(prompts))):
        best = scores.at(prompts[i], texts[i][:-1], i, range(len(texts[i]))).topk(2).values
        margins += (best[:, 0] - best[:, 1]).tolist()
    return margins


def compare_float32(args: argparse.Namespace) -> list[Comparison]:
    on_cpu = load(args, "float32", "cpu")
    assert on_cpu.tokenizer is not None, "a GGUF file has one"
    prompts = read_prompts(args.prompts, on_cpu.tokenizer, args.count or COUNTS["float32"])
    right = write(make_engine(on_cpu, MOST_PROMPT + args.tokens, "cpu"), 0, prompts, args.tokens)
    tell(args, "float32, CPU")
    pair = load(args, "float32", args.device)
    engine = make_engine(pair, MOST_PROMPT + args.tokens, args.device)
    scores = Scores(pair.target, pair.target.head.float(), 0.0)
    found = []
    for length in (0, LENGTH):
        texts = write(engine, length, prompts, args.tokens)
        name = f"float32: {args.device} at length {length}, CPU"
        found.append(compare(name, "float32", scores, prompts, right, texts))
        tell(args, name)
    return found


def compare_bfloat16(args: argparse.Namespace) -> list[Comparison]:
    pair = load(args, "bfloat16", args.device)
    assert pair.tokenizer is not None, "a GGUF file has one"
    prompts = read_prompts(args.prompts, pair.tokenizer, args.count or COUNTS["bfloat16"])
    engine = make_engine(pair, MOST_PROMPT + args.tokens, args.device)
    found = []
    for temperature in (0.0, 1.0):
        right, texts = (write(engine, length, prompts, args.tokens, temperature) for length in (0, LENGTH))
        scores = Scores(pair.target, pair.target.head.float(), temperature)
        name = f"bfloat16, temperature {temperature:g}: length {LENGTH}, off"
        found.append(compare(name, "bfloat16", scores, prompts, right, texts))
        tell(args, name)
    return found


# ── telling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tell(args: argparse.Namespace, done: str) -> None:
    print(f"{time.perf_counter() - args.started:6.1f} s  {done}", flush=True)


def show(found: Sequence[Comparison]) -> None:
    for each in found:
        for one in each.differences:
            left, right = one.token_ids
            print(f"{each.name}: prompt {one.prompt}, position {one.position}: {left} or {right}, gap {one.gap:.2g}")
    print(f"\n{'compared':48} {'equal':>9} {'largest gap':>12} {'near-tie':>9} {'margin':>7}")
    for each in found:
        equal = f"{each.count - len(each.differences)}/{each.count}"
        verdict = "" if each.holds else "  TOO LARGE"
        print(f"{each.name:48} {equal:>9} {each.largest:12.2g} {each.bound:9.2g} {each.margin:7.2f}{verdict}")


def as_json(args: argparse.Namespace, found: Sequence[Comparison]) -> str:
    shown = [asdict(each) | {"largest_gap": each.largest, "holds": each.holds} for each in found]
    about = {"benchmark": "parity", "device": args.device, "tokens": args.tokens, "length": LENGTH}
    return json.dumps(about | {"seconds": round(time.perf_counter() - args.started, 1), "compared": shown})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="TARGET.gguf", help="the default model, where installed")
    add("--draft", type=Path, metavar="DRAFT.gguf", default=DEFAULT_DRAFT, help="the default draft")
    add("--prompts", type=Path, required=True, help="JSONL with `turns`, plain or .xz")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--sections", default="float32,bfloat16", help="one or both")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--count", type=int, help=f"prompts ({COUNTS['float32']} in float32, {COUNTS['bfloat16']} in bfloat16)")
    add("--tokens", type=int, default=128, help="of each text (128)")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    args.started = time.perf_counter()
    if args.python_path is not None:
        sys.path.insert(0, str(args.python_path))
    sections = {"float32": compare_float32, "bfloat16": compare_bfloat16}
    found: list[Comparison] = []
    for name in args.sections.split(","):
        found += sections[name](args)
        gc.collect()  # the engine and its pages
    show(found)
    print(as_json(args, found), flush=True)
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
