"""Train a draft head for a target, on one GPU in minutes, on text that the target writes.

    python -m tools.distill write       MODEL DATA.npy --tokens 25e6
    python -m tools.train_head          MODEL DATA.npy FOLDER --kind eagle3 --minutes 12
    python -m tools.train_head          MODEL DATA.npy FOLDER --kind dspark --layers 2 --block 7 --minutes 12
    python -m tools.train_head evaluate MODEL FOLDER --prompts specbench.jsonl.xz

The target runs frozen beside the head, for its features and for its distributions, which are the labels. The state of
the training is kept in FOLDER.training, every minute; --resume goes on from there, also with more minutes than before.
FOLDER gets the head in the public format of its kind. MODEL is a Hugging Face folder or a GGUF file.

Knows nothing of the engine; faser/models/heads/ reads the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.models.config import DTYPES, ModelConfig, config_dict
from faser.models.heads import BLOCK, EAGLE3, DraftHead, HeadConfig
from faser.models.heads.config import read_head_config
from faser.models.heads.load import load_head, write_head
from faser.models.transformer import Transformer
from tools.commands import run_command
from tools.distill import (
    ShareDone,
    batches,
    chat_prompt,
    count_tokens,
    features_of,
    frequent_tokens,
    load_target,
    pick_device,
    rate_share,
    read_jsonl,
    share_of_minutes,
    write_answers,
)
from tools.heads.convert import serving_head
from tools.heads.loss import Judged, LossMix, backward, compare, decaying
from tools.heads.modules import BlockModule, Eagle3Module, HeadModule, all_anchors, random_anchors
from tools.heads.simulate import matches, tabulate
from tools.reports import TrainingReport

KINDS = ("eagle3", "dspark", "dflash")


# ---- what is trained ----


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that decides how a head is trained, but for how long. A training goes on only with the settings it began."""

    kind: str
    layers: int = 2  # of a block head
    block: int = 7  # drafts of a chain: tokens of a block, or steps of EAGLE-3's training-time test
    markov_rank: int = 64  # dspark
    short_vocabulary: int = 8192  # 0: the target's vocabulary and output matrix
    features: tuple[int, ...] = ()  # layers whose input is read; none: the kind's default
    begin: str = "target"  # weights to begin with: those of the target's last layers, or random ones
    batch: int = 64  # sequences a step
    anchors: int = 128  # chains a sequence; EAGLE-3 trains at all positions
    rate: float = 6e-4
    clip: float = 1.0  # norm of the gradient
    seed: int = 0


def plan_head(target: ModelConfig, counts: np.ndarray, settings: Settings) -> HeadConfig:
    """The head that is trained. counts [vocabulary]: how often each token occurs in the data."""
    is_eagle = settings.kind == "eagle3"
    layers = replace(
        target,
        family="llama" if is_eagle else "qwen3",
        num_layers=1 if is_eagle else settings.layers,
        tie_embeddings=False,
        qkv_bias=False,
        out_bias=False,
        qk_norm=not is_eagle,
    )
    short = settings.short_vocabulary
    config = HeadConfig(
        kind=EAGLE3 if is_eagle else BLOCK,
        layers=layers,
        target_hidden_size=target.hidden_size,
        feature_layers=settings.features or (None if is_eagle else spread_features(target.num_layers)),
        draft_vocab_size=short if 0 < short < target.vocab_size else None,
    )
    if not is_eagle:
        is_dspark = settings.kind == "dspark"
        config = replace(
            config,
            num_drafts=settings.block,
            mask_token_id=rarest_token(counts),
            anchor_predicts=is_dspark,
            markov_rank=settings.markov_rank if is_dspark else 0,
            confidence=is_dspark,
            confidence_with_markov=is_dspark and settings.markov_rank > 0,
        )
    config_dict(layers, "float32")  # refuses now what could not be written after the training
    return config.resolve(target, f"--kind {settings.kind}")


def spread_features(num_layers: int, num_features: int = 5) -> tuple[int, ...]:
    """Evenly spaced layers from 2 to num_layers - 2, as DFlash chooses them."""
    places = np.linspace(2, num_layers - 2, num_features).round().astype(int)
    return tuple(sorted({int(place) for place in places}))


def rarest_token(counts: np.ndarray) -> int:
    """The mask: of the tokens that occur least, the last."""
    return int(len(counts) - 1 - np.argmin(counts[::-1]))


def make_module(target: Transformer, data: np.ndarray, settings: Settings) -> HeadModule:
    counts = count_tokens(data, target.config.vocab_size)
    config = plan_head(target.config, counts, settings)
    vocabulary = None
    if config.draft_vocab_size is not None:
        vocabulary = frequent_tokens(counts, config.draft_vocab_size).to(target.device)
    torch.manual_seed(settings.seed)
    if config.kind == EAGLE3:
        module: HeadModule = Eagle3Module(config, target, settings.block, vocabulary)
    else:
        module = BlockModule(config, target, vocabulary)
    if settings.begin == "target":
        module.begin_as(target)
    return module


# ---- training ----


class Training:
    """A head in training: everything that a file must hold to go on exactly, and one step of it."""

    def __init__(self, target: Transformer, data: np.ndarray, settings: Settings, compiled: bool = False) -> None:
        self.target, self.data, self.settings = target, data, settings
        self.module = make_module(target, data, settings)
        compiler = partial(torch.compile, dynamic=False) if compiled else _as_it_is
        self._states, self._compare = compiler(self.module.states), compiler(compare)
        self.optimiser = torch.optim.AdamW(
            self.module.parameters(),
            lr=settings.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=target.device.type == "cuda",
        )
        self.num_steps = 0
        self.seconds = 0.0

    def step(self, tokens: Tensor, done: float) -> Judged:
        """One batch. tokens [sequences, tokens]; `done` is the share of the training that is over."""
        self.optimiser.param_groups[0]["lr"] = self.settings.rate * rate_share(self.num_steps, done)
        device = self.target.device
        with torch.no_grad():
            features, right = features_of(self.target, tokens, self._feature_layers())
        anchors = self._anchors(tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = self._states(tokens, features, anchors)
        judged = backward(self.module, self.target, tokens, right, states, anchors, self._mix(done), self._compare)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.num_steps += 1
        return judged

    def save(self, path: Path) -> None:
        """Write the state; the file is never half written."""
        state = {
            "settings": asdict(self.settings),
            "data": self.data.shape,
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
        }
        unfinished = path.with_name(path.name + ".new")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a file that `save` wrote with the same settings and data."""
        state: dict[str, Any] = torch.load(path, map_location=self.target.device, weights_only=True)
        ours = asdict(self.settings) | {"data": self.data.shape}
        theirs = state["settings"] | {"data": state["data"]}
        differing = [f"{name}={theirs[name]!r}" for name in ours if ours[name] != theirs[name]]
        if differing:
            raise ConfigError(f"{path} was begun with {', '.join(differing)}; give the same, or train without --resume")
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.num_steps, self.seconds = state["num_steps"], state["seconds"]

    def _feature_layers(self) -> tuple[int, ...]:
        layers = self.module.head_config.feature_layers
        assert layers is not None  # resolved
        return layers

    def _anchors(self, tokens: Tensor) -> Tensor:
        sizes = *tokens.shape, self.module.num_drafts
        if self.settings.kind == "eagle3":
            return all_anchors(*sizes, tokens.device)
        # A seed per step: a resumed training needs no state of a generator.
        generator = torch.Generator(tokens.device).manual_seed(self.settings.seed * 1_000_003 + self.num_steps)
        return random_anchors(*sizes, self.settings.anchors, generator)

    def _mix(self, done: float) -> LossMix:
        """EAGLE-3 goes from KL to total variation; block heads have nearly all total variation from the start."""
        if self.settings.kind == "eagle3":
            return LossMix(1 - 0.9 * done, decaying(self.settings.block, 0.8))
        return LossMix(0.1, decaying(self.settings.block, math.exp(-1 / 4)))


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def fit(training: Training, share_done: ShareDone, report: Callable[[Judged, float], None]) -> None:
    """Train until `share_done` is 1; report after each step."""
    settings, device = training.settings, training.target.device
    feed = batches(training.data, settings.batch, np.random.default_rng(settings.seed))
    for batch in itertools.islice(feed, training.num_steps, None):
        done = share_done(training.num_steps)
        if done >= 1:
            return
        report(training.step(torch.from_numpy(batch).to(device), done), done)


class Report(TrainingReport):
    """Loss and agreement with the target since the last line."""

    def __init__(self, training: Training, path: Path, minutes: float, clock: Callable[[], float]) -> None:
        super().__init__(training, path, minutes, clock)
        self._training = training
        self._judged: list[Judged] = []

    def __call__(self, judged: Judged, done: float) -> None:
        self._judged.append(judged)
        self.tick(done)

    def _forget(self) -> None:
        self._judged.clear()

    def _line(self, seconds: float, done: float) -> str:
        training = self._training
        num_tokens = len(self._judged) * training.settings.batch * training.data.shape[1]
        loss = torch.stack([judged.loss for judged in self._judged]).mean()
        greedy, overlap = (
            " ".join(f"{share:.3f}"[1:] if share < 1 else "1.00" for share in torch.stack(rows).mean(0).tolist())
            for rows in ([j.agreement for j in self._judged], [j.overlap for j in self._judged])
        )
        return (
            f"step {training.num_steps:6} loss {loss:.4f}  greedy {greedy}  temperature 1 {overlap}  "
            f"{num_tokens / seconds:,.0f} tokens/s  {self._minutes * (1 - done):.1f} minutes left"
        )


def train(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    target, _ = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    data = np.load(args.data, mmap_mode="r")
    folder, settings = Path(args.folder), settings_of(args)
    refuse(folder, target, data, settings, args.resume)
    training = Training(target, data, settings, args.compile)
    path = state_path(folder)
    if args.resume:
        training.restore(path)
    report = Report(training, path, args.minutes, time.perf_counter)
    fit(training, share_of_minutes(args.minutes, training.seconds), report)
    report.save()
    write_head(serving_head(training.module, target, getattr(torch, args.dtype)), folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB after {training.num_steps} steps; --resume with more --minutes goes on")


def state_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".training")


def settings_of(args: argparse.Namespace) -> Settings:
    given = {field.name: vars(args)[field.name] for field in fields(Settings) if field.name in vars(args)}
    return Settings(**given, clip=0.5 if args.kind == "eagle3" else 1.0)


def refuse(folder: Path, target: Transformer, data: np.ndarray, settings: Settings, resume: bool) -> None:
    """Everything that can be refused before the first step."""
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new or an empty folder; remove it or choose another")
    if resume and not state_path(folder).is_file():
        raise ConfigError(f"{state_path(folder)}: no such file; train without --resume")
    length = data.shape[1]
    if not settings.block + 1 < length < target.max_positions:
        raise ConfigError(
            f"sequences of {length} tokens: expected more than --block + 1 and fewer than the target's "
            f"{target.max_positions} positions"
        )
    if settings.kind != "eagle3" and not 1 <= settings.layers <= target.num_layers:
        raise ConfigError(f"--layers {settings.layers}: expected 1 to {target.num_layers}")


# ---- measuring ----


def evaluate(args: argparse.Namespace) -> None:
    """Acceptance by position and tokens per verification on prompts outside the training, by category."""
    device = pick_device(args.device)
    target, tokenizer = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    heads = {path: open_head(path, target, max(args.lengths)) for path in args.folders}
    rows = read_jsonl(args.prompts)[:: args.stride]
    prompts = [tokenizer.encode(chat_prompt(str(row["turns"][0])))[: args.most_prompt] for row in rows]  # type: ignore[index]
    categories, lengths = [str(row["category"]) for row in rows], sorted(args.lengths)
    report: dict[str, object] = {}
    for temperature in (0.0, 1.0):
        texts = write_answers(target, prompts, args.output, temperature)
        for path, head in heads.items():
            matched = [
                matches(head, target, text, len(prompt), lengths[-1], temperature, seed)
                for seed, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            ]
            table = tabulate(matched, categories, lengths)
            title = f"{Path(path).name} at temperature {temperature:g}"
            report[title] = table
            print_table(title, table, lengths)
    print(json.dumps(report))


def open_head(path: str, target: Transformer, length: int) -> DraftHead:
    """A head that drafts at least `length` tokens."""
    config = read_head_config(path)
    if config is None:
        raise ConfigError(f"{path} is no draft head; expected a folder whose config.json describes one")
    if config.kind == BLOCK and length > config.num_drafts:
        raise ConfigError(f"--lengths {length}: {path} drafts {config.num_drafts} tokens; expected no more")
    return load_head(path, config.resolve(target.config, path), target, target.dtype)


def print_table(title: str, table: dict[str, dict[str, Any]], lengths: Sequence[int]) -> None:
    print(
        f"\n{title}\n{'category':20}{'requests':>9}" + "".join(f"{f'length {k}':>10}" for k in lengths) + "  acceptance"
    )
    for name, line in table.items():
        tokens = "".join(f"{line[f'tokens_{k}']:10.3f}" for k in lengths)
        shares = " ".join(f"{share:.3f}" for share in line["acceptance"])
        print(f"{name:20}{line['requests']:9}{tokens}  {shares}", flush=True)


# ---- the command ----


def size_or_off(text: str) -> int:
    if text == "off":
        return 0
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of tokens or off")
    return size


def layer_numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split(",")}))


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings(kind="dspark")
    parser.add_argument("model", help="Hugging Face folder or GGUF file of the target")
    parser.add_argument("data", help="text that the target wrote (tools.distill write)")
    parser.add_argument("folder", help="new folder for the head")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--resume", action="store_true", help="go on from FOLDER.training")
    parser.add_argument("--layers", type=int, default=defaults.layers, help="of a block head (2)")
    parser.add_argument(
        "--block", type=int, default=defaults.block, help="tokens a block drafts, or EAGLE-3 learns (7)"
    )
    parser.add_argument("--markov-rank", type=int, default=defaults.markov_rank, help="dspark; 0: no Markov head (64)")
    parser.add_argument("--short-vocabulary", type=size_or_off, default=defaults.short_vocabulary, metavar="8192|off")
    parser.add_argument(
        "--features", type=layer_numbers, default=(), metavar="2,15,27", help="target layers whose input the head reads"
    )
    parser.add_argument("--begin", choices=("target", "random"), default=defaults.begin, help="weights to begin with")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="sequences a step (64)")
    parser.add_argument("--anchors", type=int, default=defaults.anchors, help="blocks a sequence (128)")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="learning rate (6e-4)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the written weights (bfloat16)")
    parser.add_argument("--compile", action="store_true", help="compile the head's layers and the loss")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_head evaluate", description=evaluate.__doc__)
    parser.add_argument("model", help="Hugging Face folder or GGUF file of the target")
    parser.add_argument("folders", nargs="+", help="heads, in any format that faser reads")
    parser.add_argument("--prompts", required=True, help="JSONL with `turns` and `category`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 7])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--most-prompt", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=1, help="use every n-th prompt")
    parser.add_argument("--device", default="auto")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({"evaluate": (evaluate, evaluate_parser)}, (train, train_parser), arguments)


if __name__ == "__main__":
    sys.exit(main())
