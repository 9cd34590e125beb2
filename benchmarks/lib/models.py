"""The models and prompts of the runs on a GPU, written once into the folder of a run.

SmolLM2 and its draft inside the shapes of an 8B and a 1B (tools/inflate.py): real acceptance at real cost. torch and
FASER are imported inside functions, for vLLM's process reads constants of this module.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.journal import read_json
from benchmarks.lib.processes import ROOT

if TYPE_CHECKING:
    from faser.models.transformer import Transformer
    from faser.text.tokenizer import Tokenizer

DRAFT = ROOT / "faser" / "drafts" / "smollm2-135m-16.gguf"
SPECBENCH = ROOT / "faser" / "traffic" / "data" / "specbench.jsonl.xz"
LEAST_REQUESTS = 6  # measured for a figure

Prompt = list[int]
MakePrompts = Callable[[int, int], list[Prompt]]  # (how many, tokens of each)


@dataclass(frozen=True)
class Sizes:
    """What `table` measures. Tokens, requests."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)  # of FASER's drafts
    vllm_lengths: tuple[int, ...] = (2, 4)  # each takes a start of vLLM
    first_length: int = 4  # FASER starts with the graphs of this length
    prompt: int = 128
    output: int = 256
    prefill: tuple[int, int] = (16, 2048)  # prompts, tokens of each
    max_model_len: int = 4096

    @property
    def max_running(self) -> int:
        return max(*self.batches, self.prefill[0])

    @property
    def num_requests(self) -> int:
        return max(batch * num_groups(batch) for batch in self.batches)


TINY = Sizes((1, 2), (1, 2), first_length=2, prompt=16, output=8, prefill=(2, 32), max_model_len=128)


def num_groups(batch: int) -> int:
    """Closed batches of a size that are measured."""
    return max(-(-LEAST_REQUESTS // batch), 2 if batch <= 64 else 1)


def ensure_models(args: argparse.Namespace) -> None:
    """The two model folders and the requests; models.json is written last, when all are complete."""
    about_path, sizes = args.folder / "models.json", args.sizes
    if about_path.is_file():
        found = read_json(about_path)
        if found["tiny"] != args.tiny or found["requests"] < sizes.num_requests:
            raise ValueError(f"{args.folder} holds other models or fewer requests; give another --folder")
        return
    from tools.inflate import Shape, write_folder

    target, draft, prompts = (make_tiny_models if args.tiny else make_models)(args)
    for name, some in (("requests", prompts(sizes.num_requests, sizes.prompt)), ("prefill", prompts(*sizes.prefill))):
        (args.folder / f"{name}.json").write_text(json.dumps(some), encoding="utf-8")
    about = {"tiny": args.tiny, "requests": sizes.num_requests, "vocabulary": target.config.vocab_size}
    about |= {name: getattr(sizes, name) for name in ("prompt", "output", "prefill")}
    for name, model in (("target", target), ("draft", draft)):
        shutil.rmtree(args.folder / name, ignore_errors=True)
        write_folder(model, args.folder / name)
        about[name] = {part: getattr(model.config, part) for part in Shape.__dataclass_fields__}
    about_path.write_text(json.dumps(about), encoding="utf-8")


def make_models(args: argparse.Namespace) -> tuple[Any, Any, MakePrompts]:
    (target, draft), tokenizer = inflated_pair(args.target, args.draft, ("llama-8b", "llama-1b"), args.device)
    return target, draft, specbench_prompts(tokenizer)


def specbench_prompts(tokenizer: Tokenizer, categories: Collection[str] | None = None) -> MakePrompts:
    """Chats over the first turns of Spec-Bench, of some categories or of all."""
    from tools.distill import SYSTEM, read_jsonl

    rows: list[Any] = read_jsonl(str(SPECBENCH))
    questions = [str(row["turns"][0]) for row in rows if categories is None or row["category"] in categories]
    random.Random(0).shuffle(questions)  # the file is sorted by category
    around = (f"{SYSTEM}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    return functools.partial(chat_prompts, tokenizer.encode, around, questions)


def inflated_pair(
    target: Path | None, draft: Path, shapes: tuple[str, str], device: str
) -> tuple[tuple[Transformer, Transformer], Tokenizer]:
    """A small target (None: the default model) and its draft inside two shapes, in bfloat16, rounded once."""
    import torch

    from faser.models.draft import apply_patch, read_patch
    from faser.models.source import default_target
    from tools.distill import load_target
    from tools.inflate import SHAPES, inflate

    small, tokenizer = load_target(str(target or default_target()), torch.float32, device)
    both = small, apply_patch(small, read_patch(draft, small.config))
    first, second = (
        inflate(model, SHAPES[shape], dtype=torch.bfloat16, device=device)
        for model, shape in zip(both, shapes, strict=True)
    )
    return (first, second), tokenizer


def make_tiny_models(args: argparse.Namespace) -> tuple[Any, Any, MakePrompts]:
    """A random model in two small shapes. Noise on the draft's weights: it agrees often, not always."""
    import torch

    from faser.models.config import ModelConfig
    from faser.models.transformer import Transformer
    from tools.inflate import Shape, inflate

    base = Shape(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=48, num_kv_heads=2, head_dim=32)
    config = ModelConfig(
        family="llama", vocab_size=64, norm_eps=1e-5, max_positions=256, eos_token_ids=(2,), dtype="float32",
        **asdict(base),
    )  # fmt: skip
    small, noisy = (Transformer.random(config, 0, std=0.3) for _ in range(2))
    for weight in noisy.weights():
        weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    target = inflate(small, replace(base, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=4))
    draft = inflate(noisy, replace(base, intermediate_size=64))

    return target, draft, make_random_prompts(config.vocab_size)


def make_random_prompts(vocab_size: int, seed: int = 0) -> MakePrompts:
    def prompts(count: int, size: int) -> list[Prompt]:
        drawn = random.Random(seed)
        return [[drawn.randrange(3, vocab_size) for _ in range(size)] for _ in range(count)]

    return prompts


def chat_prompts(
    encode: Callable[[str], list[int]], around: tuple[str, str], questions: Sequence[str], count: int, size: int
) -> list[Prompt]:
    """Prompt i ends with question i. A long question loses its beginning; before a short one stand the questions
    that precede it."""
    head, tail = map(encode, around)
    room = size - len(head) - len(tail)
    # every question twice, so that each has others before it
    bodies = 2 * [encode(question + "\n\n") for question in questions]
    text, ends = list(itertools.chain(*bodies)), list(itertools.accumulate(map(len, bodies)))[len(questions) :]
    if ends[0] < room:
        raise ValueError(f"the texts have {len(text) // 2} tokens in all, a prompt has room for {room}")
    return [head + text[end - room : end] + tail for end in itertools.islice(itertools.cycle(ends), count)]
