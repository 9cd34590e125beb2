"""The heads and prompts of benchmarks/heads.py, and the published acceptance of such heads.

Trained heads of the small target are put inside the shape of the 8B, as the models are (models.py). Heads of published
shapes have random weights. torch and FASER are imported inside functions, for vLLM's process reads this module too.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.journal import atomic_write, read_json
from benchmarks.lib.models import MakePrompts, make_random_prompts, specbench_prompts

if TYPE_CHECKING:
    from faser.models.config import ModelConfig
    from faser.models.heads import DraftHead, HeadConfig
    from faser.models.transformer import Transformer

HEADS = ("eagle3", "block")
TEXTS = ("specbench", "code")  # prompts of all categories, and of CODE alone
CODE = ("coding",)  # ten questions of MT-Bench: the only category of Spec-Bench that asks for code
SHAPE = "llama-8b"


# ── trained heads ────────────────────────────────────────────────────────────────────────────────────────────────────


def ensure_heads(args: argparse.Namespace) -> None:
    """The folders `eagle3` and `block` beside the target's, from the small heads that were given; kept while these
    stay the same."""
    for kind, source in {"eagle3": args.eagle3, "block": args.block}.items():
        about, folder = args.folder / f"{kind}.json", args.folder / kind
        if source is None and not args.tiny:
            continue
        mark = {"source": "tiny" if source is None else fingerprint(source)}
        if about.is_file() and read_json(about) == mark:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if source is None:
            write_tiny_head(kind, args.folder / "target", folder)
        else:
            write_inflated_head(args, source, folder)
        atomic_write(about, json.dumps(mark))


def fingerprint(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".pt"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def write_inflated_head(args: argparse.Namespace, head: Path, folder: Path) -> None:
    from faser.models.source import default_target
    from tools.heads import inflate

    target = str(args.target or default_target())
    if inflate.main([target, str(head), SHAPE, str(folder), "--device", args.device]):
        raise RuntimeError(f"{head} could not be inflated; the log says why")


def write_tiny_head(kind: str, target: Path, folder: Path) -> None:
    from faser.models.heads import write_head
    from tools.inflate import load_source

    small = load_source(target)
    config = eagle3_config(small.config, 40) if kind == "eagle3" else dspark_config(small.config, 1, None, 4)
    write_head(random_head(config, small, std=0.3), folder)


# ── heads of published shapes ────────────────────────────────────────────────────────────────────────────────────────


def eagle3_config(target: ModelConfig, num_tokens: int | None) -> HeadConfig:
    """One layer of the target's shape; `num_tokens`: of its output, None: all."""
    from faser.models.heads import EAGLE3, HeadConfig

    layers = replace(target, num_layers=1, tie_embeddings=False, eos_token_ids=())
    return HeadConfig(
        kind=EAGLE3,
        layers=layers,
        target_hidden_size=target.hidden_size,
        feature_layers=spread_layers(target.num_layers, 3),
        draft_vocab_size=num_tokens,
    )


def dspark_config(target: ModelConfig, num_layers: int, num_tokens: int | None, markov_rank: int) -> HeadConfig:
    """Blocks of seven, with a confidence head."""
    from faser.models.heads import BLOCK, HeadConfig

    layers = replace(target, family="qwen3", qk_norm=True, tie_embeddings=False, eos_token_ids=())
    return HeadConfig(
        kind=BLOCK,
        layers=replace(layers, num_layers=num_layers),
        target_hidden_size=target.hidden_size,
        feature_layers=spread_layers(target.num_layers, 5),
        draft_vocab_size=num_tokens,
        num_drafts=7,
        mask_token_id=3,
        anchor_predicts=True,
        markov_rank=markov_rank,
        confidence=True,
        confidence_with_markov=True,
    )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Ascending layer numbers; fewer where there are not as many layers. Their cost does not depend on which."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)}))


def random_head(config: HeadConfig, target: Transformer, std: float = 0.02) -> DraftHead:
    from faser.models.heads import EAGLE3, BlockHead, Eagle3Head

    kind = Eagle3Head if config.kind == EAGLE3 else BlockHead
    return kind.random(config, target, seed=2, dtype=target.dtype, std=std)


# ── published acceptance ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Published:
    """A head of Qwen3-8B at temperature 1 with seven drafts: `tokens` a verification, by text, bonus included.

    Only sums are published for this model. The profile over positions is that of Qwen3-4B on chat: EAGLE-3 begins at
    0.53 and rises to 0.74, DSpark stays level. All chances move by one constant, such that the sum is the published
    one.
    """

    tokens: dict[str, float]  # chat: MT-Bench, code: HumanEval
    profile: tuple[float, float]  # chances at the first and at the last position
    config: Callable[[ModelConfig], HeadConfig]

    def chances(self, text: str, length: int = 7) -> tuple[float, ...]:
        """By position: that a draft is accepted whose predecessors were."""
        first, last = self.profile
        profile = [first + (last - first) * index / (length - 1) for index in range(length)]
        low, high = -1.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            is_low = expected_tokens(moved(profile, middle)) < self.tokens[text]
            low, high = (middle, high) if is_low else (low, middle)
        return moved(profile, high)


def moved(profile: Sequence[float], shift: float) -> tuple[float, ...]:
    return tuple(min(1.0, max(0.0, chance + shift)) for chance in profile)


def expected_tokens(chances: Sequence[float]) -> float:
    """Of a verification: the bonus, and each draft that is accepted with all before it."""
    return 1.0 + sum(itertools.accumulate(chances, lambda all_before, chance: all_before * chance))


OUTPUT_TOKENS, MARKOV_RANK = 32_000, 256
PUBLISHED = {
    "eagle3": Published(
        {"chat": 2.66, "code": 4.33}, (0.53, 0.74), lambda target: eagle3_config(target, OUTPUT_TOKENS)
    ),
    # There are no sums of two layers. They beat DFlash's five, whose sums these are: a lower bound.
    "dspark2": Published(
        {"chat": 3.11, "code": 4.64}, (0.7, 0.7), lambda target: dspark_config(target, 2, OUTPUT_TOKENS, MARKOV_RANK)
    ),
    "dspark5": Published(
        {"chat": 3.72, "code": 5.52}, (0.7, 0.7), lambda target: dspark_config(target, 5, OUTPUT_TOKENS, MARKOV_RANK)
    ),
}


def published_pair(name: str, args: argparse.Namespace) -> tuple[Transformer, DraftHead]:
    """Random weights of an 8B and of a head; with --tiny, the tiny target and a head with few tokens."""
    if args.tiny:
        from tools.inflate import load_source

        target = load_source(args.folder / "target")
        config = replace(PUBLISHED[name].config(target.config), draft_vocab_size=40)
        return target, random_head(config, target, std=0.3)
    from benchmarks.cuda_steps import make_model

    target = make_model(SHAPE, 0, args.sizes.max_model_len)
    return target, random_head(PUBLISHED[name].config(target.config), target)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def ensure_prompts(args: argparse.Namespace) -> None:
    """Prompts of code, beside those of all categories that models.py writes."""
    path = args.folder / prompts_file("code")
    if not path.is_file():
        atomic_write(path, json.dumps(code_prompts(args)(args.sizes.num_requests, args.sizes.prompt)))


def code_prompts(args: argparse.Namespace) -> MakePrompts:
    if args.tiny:
        return make_random_prompts(read_json(args.folder / "models.json")["vocabulary"], seed=1)
    from faser.models.source import open_target

    tokenizer = open_target(None if args.target is None else str(args.target)).tokenizer()
    assert tokenizer is not None, "the target has no tokenizer"
    return specbench_prompts(tokenizer, CODE)


def prompts_file(text: str) -> str:
    return "requests.json" if text == "specbench" else f"{text}.json"


def loop_requests(folder: Path, text: str, number: int, output: int, temperature: float) -> list[dict[str, Any]]:
    """As both players take them. Prompts repeat where there are fewer."""
    prompts = itertools.islice(itertools.cycle(read_json(folder / prompts_file(text))), number)
    return [{"prompt_token_ids": each, "max_tokens": output, "temperature": temperature} for each in prompts]
