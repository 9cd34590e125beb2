"""How often is a draft right in a long context, if it sees all of it, or a window with the first tokens or without?

The default model continues long texts, greedily and at temperature 1. Then its draft is teacher-forced over the same
text, once for each window, with the noise of the target: the share of the output's tokens that the draft would have
proposed is its acceptance rate, the chance of a draft whose predecessors were accepted. A draft with a window computes
what it would in serving: the sinks, the last tokens before the output, and the output. Texts (--texts):

  document   an article continues                       (--document, a text file, .xz or not)
  retrieval  codes of towns stand before a long text, and behind it the question for them
  code       a file of this repository continues        (--code, a folder)
  chat       many turns of short questions and answers, and one more question (--chat, JSON lines of question, answer)

    python3 -m benchmarks.long_acceptance --document wikitext2-test.txt.xz --chat gsm8k-train.jsonl.xz [--code faser]
        [--contexts 2048,4096] [--windows 256,512,1024,2048] [--sinks 4] [--output 128] [--count 2]

Runs on a CPU. `--count` texts of each kind. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from faser import LLM, SamplingParams
from faser.build import load_pair
from faser.config import EngineOptions
from faser.limits import KeyWindow
from faser.models.transformer import Transformer
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.kv_cache import bytes_per_page, pages_over
from faser.runtime.sampling import gumbel
from faser.step import KeyStarts

TEMPERATURES = (0.0, 1.0)
PAGE_SIZE = 16
CHUNK = 512  # rows of a forward
SEED = 7
TOWNS = ["Lisbon", "Oslo", "Quito", "Cairo", "Osaka", "Perth", "Lima", "Turin", "Accra", "Dakar", "Hanoi", "Basel"]

Rate = dict[str, float]


def read_text(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Prompts:
    """Prompts of a given number of tokens."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm = llm
        self._document = read_text(Path(args.document))
        self._code = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(args.code).rglob("*.py")))
        self._turns = [json.loads(line) for line in read_text(Path(args.chat)).splitlines()]
        self._count = args.count

    def make(self, kind: str, number: int, size: int) -> list[int]:
        return getattr(self, f"_{kind}_prompt")(number, size)

    def _document_prompt(self, number: int, size: int) -> list[int]:
        return self._cut(self._document, number, size)

    def _code_prompt(self, number: int, size: int) -> list[int]:
        return self._cut(self._code, number, size)

    def _retrieval_prompt(self, number: int, size: int) -> list[int]:
        random = np.random.default_rng(number)
        towns = random.permutation(TOWNS)[:8]
        facts = "\n".join(f"The access code of {town} is {random.integers(10_000, 99_999)}." for town in towns)
        filler = self._document[len(self._document) * number // self._count :].split()
        ask = f"List the access code of each of these towns: {', '.join(towns)}. They were given at the beginning."

        def prompt(num_words: int) -> list[int]:
            return self._chat(f"{facts}\n\n{' '.join(filler[:num_words])}\n\n{ask}")

        return longest(prompt, size, size)

    def _chat_prompt(self, number: int, size: int) -> list[int]:
        first = number * 200

        def prompt(num_turns: int) -> list[int]:
            messages = []
            for turn in self._turns[first : first + num_turns]:
                messages += [{"role": "user", "content": turn["question"]}]
                messages += [{"role": "assistant", "content": turn["answer"]}]
            last = {"role": "user", "content": self._turns[first + num_turns]["question"]}
            return self._llm.chat_prompt([*messages, last])

        return longest(prompt, size, 199)

    def _cut(self, text: str, number: int, size: int) -> list[int]:
        begin = text.index("\n", len(text) * number // self._count)
        return self._encode(text[begin : begin + 12 * size])[:size]

    def _chat(self, text: str) -> list[int]:
        return self._llm.chat_prompt([{"role": "user", "content": text}])

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._llm._tokenizer
        assert tokenizer is not None
        return tokenizer.encode(text)


def longest(make: Callable[[int], list[int]], size: int, most: int) -> list[int]:
    """The longest prompt of at most `size` tokens, by bisection over its number of parts."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(make(middle)) <= size else (low, middle - 1)
    return make(low)


# ── the draft over a text ────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def draft_logits(
    model: Transformer, prompt: Sequence[int], outputs: Sequence[Sequence[int]], window: KeyWindow | None
) -> list[torch.Tensor]:
    """Of each output, logits [tokens of the output, vocabulary]."""
    begin, most = len(prompt), len(prompt) + max(map(len, outputs))
    num_pages = -(-most // PAGE_SIZE)
    memory = torch.zeros(num_pages * bytes_per_page(model.config, PAGE_SIZE, model.dtype), dtype=torch.uint8)
    pages = pages_over(memory, model.config, PAGE_SIZE, model.dtype)
    runner = ModelRunner(model, pages, 1, most, window=window)
    runner._table[0] = np.arange(num_pages)
    first = 0
    if window is not None and begin > window.span:
        first = begin - window.size
        if window.sinks:
            _run(runner, prompt[: window.sinks], 0)
        runner.begin_again(KeyStarts(np.array([0]), np.array([first])))
    for start in range(first, begin - 1, CHUNK):
        _run(runner, prompt[start : min(start + CHUNK, begin - 1)], start)
    found = []
    for output in outputs:
        hidden = _run(runner, [prompt[-1], *output[:-1]], begin - 1)
        found.append(runner.logits(hidden, np.arange(len(output))))
    return found


def _run(runner: ModelRunner, token_ids: Sequence[int], start: int) -> torch.Tensor:
    rows = Rows.of(np.array([0]), np.array([start]), np.array([len(token_ids)]))
    return runner.run(rows, runner.model.embed(torch.tensor(token_ids)))


def agreement(model: Transformer, logits: torch.Tensor, output: Sequence[int], begin: int, sampled: bool) -> float:
    """The share of the output that the draft would have proposed."""
    scores = logits.numpy()
    known = np.arange(scores.shape[1]) if model.vocabulary is None else model.vocabulary.numpy()
    if sampled:
        seeds = np.full(len(output), SEED, dtype=np.uint64)
        noise = gumbel(seeds, np.arange(len(output)) + begin, model.config.vocab_size)
        scores = scores + noise[:, known]
    return float((known[scores.argmax(axis=1)] == np.array(output)).mean())


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def windows_of(args: argparse.Namespace, context: int) -> dict[str, KeyWindow | None]:
    sizes = [size for size in args.windows if size + args.sinks < context]
    found: dict[str, KeyWindow | None] = {"whole": None}
    for size in sizes:
        found[f"{size}"] = KeyWindow(size)
        found[f"{args.sinks}+{size}"] = KeyWindow(size, args.sinks)
    return found


def measure(args: argparse.Namespace) -> dict[str, Rate]:
    """Acceptance rates, by text, context and temperature; then by window."""
    draft = load_pair(None, None, EngineOptions(device="cpu")).draft_model
    assert isinstance(draft, Transformer)
    sums: defaultdict[tuple[str, int, float], Rate] = defaultdict(lambda: defaultdict(float))
    with LLM(draft="none", policy="off", device="cpu", max_step_ms=0, max_model_len=max(args.contexts)) as llm:
        prompts = Prompts(llm, args)
        for context in args.contexts:
            for kind in args.texts:
                for number in range(args.count):
                    started = time.monotonic()
                    prompt = prompts.make(kind, number, context - args.output)
                    outputs = [llm.generate([prompt], params_of(t, args))[0].token_ids for t in TEMPERATURES]
                    for window_name, window in windows_of(args, context).items():
                        logits = draft_logits(draft, prompt, outputs, window)
                        for temperature, output, each in zip(TEMPERATURES, outputs, logits, strict=True):
                            rate = agreement(draft, each, output, len(prompt), temperature > 0)
                            sums[kind, context, temperature][window_name] += rate * len(output)
                    for temperature, output in zip(TEMPERATURES, outputs, strict=True):
                        sums[kind, context, temperature]["tokens"] += len(output)
                    print(f"{kind} {number}, {len(prompt)} tokens: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {
        f"{kind}, {context}, {'sampled' if temperature else 'greedy'}": {
            name: total if name == "tokens" else total / each["tokens"] for name, total in each.items()
        }
        for (kind, context, temperature), each in sums.items()
    }


def params_of(temperature: float, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=args.output, temperature=temperature, seed=SEED)


def table(found: dict[str, Rate]) -> str:
    columns = list(dict.fromkeys(name for rates in found.values() for name in rates))
    lines = [f"| text, context, temperature | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, rates in found.items():
        cells = [f"{rates[c]:.0f}" if c == "tokens" else f"{rates[c]:.3f}" if c in rates else "–" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", required=True)
    parser.add_argument("--chat", required=True)
    parser.add_argument("--code", default=str(Path(__file__).parent.parent / "faser"))
    parser.add_argument("--texts", type=lambda text: text.split(","), default=["document", "retrieval", "code", "chat"])
    parser.add_argument("--contexts", type=numbers, default=[2048, 4096])
    parser.add_argument("--windows", type=numbers, default=[256, 512, 1024, 2048])
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--count", type=int, default=2)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    found = measure(args)
    print(table(found))
    print(json.dumps({"benchmark": "long_acceptance", "arguments": vars(args), "rates": found}))


if __name__ == "__main__":
    main()
