"""Train faser-watch: small eyes in front of a frozen language model, on drawn scenes, on one GPU in minutes.

    python -m tools.train_watch MODEL FOLDER --minutes 23 --pause 9
    python -m tools.train_watch MODEL FOLDER --minutes 23 --pause 9 --resume
    python -m tools.train_watch export FOLDER FULL --model MODEL
    python -m tools.watch.evaluate MODEL FOLDER --windows 1000

MODEL is SmolLM2-135M-Instruct, as a GGUF file or a Hugging Face folder. FOLDER gets the eyes, packed into about 11 MB;
faser loads that with the default language model behind it. `export` makes FULL, a folder with both in floats. The state
of the training is kept in FOLDER.training, every minute; --resume goes on from there. --pause ends a call early, for
machines that end it anyway.

The language model stays as it is, because shipping its changed weights would take too much room. Learning to see
through a frozen model alone is slow: the only signal is one answer token per question, and it must travel through 30
layers that never saw a picture. So the training has three stages, as shares of its time:

1. Dense. The language model does not run. Every token of every grid is told what is in its place: which kind of thing,
   how it moves, whether a thing's centre is there, where the place is, and how many things there are in all. That is
   some hundred labels per grid instead of one per question, so the eyes learn to see in minutes. At the same time each
   token is pulled towards the embeddings of the words for its place ("car", "left", "3"), so that the language model
   meets inputs near those it knows.
2. Answers. Questions about a window, through the frozen model; the loss is on the answer and its end. The dense loss
   stays, with a small weight.
3. Rounded answers. The same, with the weights rounded to four bits in the forward (the backward is straight-through),
   so that the packed eyes are the trained ones.

Frames pass a likeness of a codec (tools/watch/codec.py) before the eyes see them. FOLDER gets the moving average of the
weights. Knows nothing of the engine; faser/models/vision/ serves the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from faser.errors import ConfigError
from faser.models.config import DTYPES
from faser.models.transformer import Transformer
from tools.commands import run_command
from tools.distill import ShareDone, load_target, pick_device, rate_share, run_layer, share_of_minutes
from tools.reports import TrainingReport
from tools.watch.codec import degrade, random_steps
from tools.watch.dense import Probe, labels_by_target, probe_accuracy, probe_loss, word_loss, word_table
from tools.watch.export import write_eyes, write_full
from tools.watch.pack import bits_of, rounded
from tools.watch.reader import Branches, Encodes, Prompts, Reader
from tools.watch.scenes import SceneSettings
from tools.watch.tally import Tally
from tools.watch.vit import Eyes, EyesConfig, begin, patches_of
from tools.watch.windows import KIND_NAMES, Batch, Windows, WindowSettings, load, training_keys

_DENSE_BESIDE_ANSWERS = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that decides how the eyes are trained, but for how long. A training goes on only with those it began."""

    side: int = 224  # pixels
    frames: tuple[int, ...] = (8, 16)  # of a window; steps take turns
    things: int = 8  # at most
    depth: int = 12
    width: int = 384
    heads: int = 6
    batch: int = 64  # windows a step
    questions: int = 6  # a window
    kinds: tuple[str, ...] = KIND_NAMES  # of questions
    dense: float = 0.35  # share of the time of the first stage
    rounded: float = 0.2  # share of the last stage
    words: float = 1.0  # weight of the pull towards words
    rate: float = 8e-4
    decay: float = 0.05  # of the weights
    average: float = 0.999  # of the moving average
    clip: float = 1.0  # norm of the gradient
    seed: int = 0

    def eyes(self, hidden_size: int) -> EyesConfig:
        return EyesConfig(depth=self.depth, embed_dim=self.width, num_heads=self.heads, hidden_size=hidden_size)

    def windows(self, cells: int) -> WindowSettings:
        scene = SceneSettings(side=self.side, num_frames=self.frames[0], max_things=self.things)
        return WindowSettings(scene=scene, cells=cells, questions=self.questions, kinds=self.kinds)


@dataclass(frozen=True, eq=False)
class Judged:
    """What one step found. Without answers in the first stage."""

    loss: Tensor
    probes: dict[str, float]  # accuracy by target; empty: not looked at in this step
    kind: Tensor | None = None  # [windows, questions] of the questions
    answer: Tensor | None = None  # [windows, questions] token ids
    is_right: Tensor | None = None  # [windows, questions]


class Watcher(torch.nn.Module):
    """Eyes and the probe, which are trained together."""

    def __init__(self, config: EyesConfig, seed: int) -> None:
        super().__init__()
        self.eyes = begin(Eyes(config), seed)
        torch.manual_seed(seed)
        self.probe = Probe(config.hidden_size)


class Training:
    """Eyes in training: everything that a file must hold to go on exactly, and one step of it."""

    def __init__(self, model: Transformer, tokenizer: Encodes, settings: Settings, compiled: bool = False) -> None:
        self.model, self.settings = model, settings
        self.config = settings.eyes(model.config.hidden_size)
        self.prompts = Prompts(tokenizer)
        self.module = Watcher(self.config, settings.seed).to(model.device)
        compiler: Any = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.reader = Reader(model, self.prompts, compiler(run_layer))
        self._see = compiler(self._look)
        self._table = word_table(self.prompts, model.embedding)
        self.average = {name: each.detach().clone() for name, each in self.module.eyes.named_parameters()}
        self.optimiser = torch.optim.AdamW(
            _groups(self.module, settings.decay),
            lr=settings.rate,
            betas=(0.9, 0.95),
            fused=model.device.type == "cuda",
        )
        self.num_steps = 0
        self.seconds = 0.0

    @property
    def cells(self) -> int:
        return self.settings.side // self.config.factor

    def windows(self) -> Windows:
        return Windows(self.settings.windows(self.cells), self.prompts)

    def stage(self, done: float) -> str:
        if done < self.settings.dense:
            return "dense"
        return "rounded" if done >= 1 - self.settings.rounded else "answers"

    def step(self, batch: Batch, done: float, with_probes: bool = False) -> Judged:
        """One batch; `done` is the share of the training that is over."""
        settings, stage = self.settings, self.stage(done)
        for group in self.optimiser.param_groups:
            group["lr"] = settings.rate * rate_share(self.num_steps, done)
        batch = {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in batch.items()}
        frames = degrade(batch["frames"], self._codec_steps(len(batch["frames"])))
        labels = labels_by_target(batch["labels"])
        with self._autocast():
            tokens = self._see(self._weights(stage == "rounded"), frames)  # [windows * grids, cells², hidden]
            logits = self.module.probe(tokens)
        dense = probe_loss(logits, labels)
        probes = probe_accuracy(logits, labels) if with_probes else {}
        if stage == "dense":
            judged = Judged(dense + settings.words * word_loss(tokens, labels, self._table), probes)
        else:
            judged = self._judge(tokens, batch, _DENSE_BESIDE_ANSWERS * dense, probes)
        self._descend(judged.loss)
        return judged

    def _judge(self, tokens: Tensor, batch: Batch, dense: Tensor, probes: dict[str, float]) -> Judged:
        seen = tokens.reshape(len(batch["ids"]), -1, tokens.shape[-1])
        branches = Branches(batch["ids"], batch["answer_at"])
        logits, right = self.reader.answer_logits(seen, branches), self.reader.right_ids(branches)
        loss = F.cross_entropy(logits.flatten(0, 2), right.flatten())
        is_right = (logits.argmax(-1) == right).all(-1)
        return Judged(loss + dense, probes, batch["kind"], right[..., 0], is_right)

    def _descend(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.num_steps += 1
        # Short at first, so that the beginning is soon forgotten.
        share = 1 - min(self.settings.average, (1 + self.num_steps) / (10 + self.num_steps))
        with torch.no_grad():
            for name, parameter in self.module.eyes.named_parameters():
                self.average[name].lerp_(parameter, share)

    def _look(self, weights: dict[str, Tensor], frames: Tensor) -> Tensor:
        patches, side = patches_of(frames, self.config), self.settings.side // self.config.patch_size
        return functional_call(self.module.eyes, weights, (patches, side, side))

    def _weights(self, is_rounded: bool) -> dict[str, Tensor]:
        named = dict(self.module.eyes.named_parameters())
        return {n: rounded(each, bits_of(n, each)) for n, each in named.items()} if is_rounded else named

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.model.dtype == torch.bfloat16)

    def _codec_steps(self, windows: int) -> Tensor:
        # A seed per step: a resumed training needs no state of a generator.
        seed = self.settings.seed * 1_000_003 + self.num_steps
        return random_steps(windows, torch.Generator(self.model.device).manual_seed(seed))

    def trained_eyes(self) -> Eyes:
        """With the moving average of the weights."""
        eyes = Eyes(self.config).to(self.model.device)
        eyes.load_state_dict(self.average)
        return eyes

    def save(self, path: Path) -> None:
        """Write the state; the file is never half written."""
        state = {
            "settings": asdict(self.settings),
            "module": self.module.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".new")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a file that `save` wrote with the same settings."""
        state: dict[str, Any] = torch.load(path, map_location=self.model.device, weights_only=True)
        ours, theirs = asdict(self.settings), state["settings"]
        differing = [f"{name}={theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)]
        if differing:
            raise ConfigError(f"{path} was begun with {', '.join(differing)}; give the same, or train without --resume")
        self.module.load_state_dict(state["module"])
        self.average = state["average"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.num_steps, self.seconds = state["num_steps"], state["seconds"]


def _groups(module: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices shrink, vectors do not."""
    matrices = [each for each in module.parameters() if each.dim() > 1]
    vectors = [each for each in module.parameters() if each.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def feed(training: Training, workers: int = 0) -> Iterator[Batch]:
    """Batches from the step that comes next."""
    settings = training.settings
    keys = training_keys(settings.batch, settings.frames, settings.seed, training.num_steps)
    return load(training.windows(), keys, workers, training.model.device.type == "cuda")


def fit(
    training: Training,
    share_done: ShareDone,
    report: Callable[[Judged, float], None],
    is_pausing: Callable[[], bool] = lambda: False,
    workers: int = 0,
) -> bool:
    """Train until `share_done` is 1 or a pause is wanted; report after each step. Returns whether it is done."""
    for batch in feed(training, workers):
        done = share_done(training.num_steps)
        if done >= 1:
            return True
        if is_pausing():
            return False
        report(training.step(batch, done, with_probes=training.num_steps % 50 == 0), done)
    raise AssertionError("the feed has no end")


class Report(TrainingReport):
    """Loss, probes and right answers since the last line."""

    def __init__(self, training: Training, path: Path, minutes: float, clock: Callable[[], float]) -> None:
        super().__init__(training, path, minutes, clock)
        self._training = training
        self._losses: list[Tensor] = []
        self._probes: dict[str, float] = {}
        self._tally = Tally()

    def __call__(self, judged: Judged, done: float) -> None:
        self._losses.append(judged.loss.detach())
        self._probes = judged.probes or self._probes
        if judged.kind is not None and judged.answer is not None and judged.is_right is not None:
            self._tally.add(judged.kind, judged.answer, judged.is_right)
        self.tick(done)

    def _forget(self) -> None:
        self._losses.clear()
        self._tally = Tally()

    def _line(self, seconds: float, done: float) -> str:
        training = self._training
        rate = len(self._losses) * training.settings.batch / seconds
        loss = torch.stack(self._losses).mean()
        found = self._tally.text() or "probes " + " ".join(f"{n} {share:.2f}" for n, share in self._probes.items())
        return (
            f"step {training.num_steps:6} {training.stage(done):8} loss {loss:.4f}  {found}  "
            f"{rate:,.0f} windows/s  {self._minutes * (1 - done):.1f} minutes left"
        )


def train(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    model, tokenizer = load_target(args.model, getattr(torch, args.dtype), device)
    folder, settings = Path(args.folder), settings_of(args)
    refuse(folder, model, settings, args.resume)
    training = Training(model, tokenizer, settings, args.compile)
    path = state_path(folder)
    if args.resume:
        training.restore(path)
    report = Report(training, path, args.minutes, time.perf_counter)
    pause_at = time.perf_counter() + 60 * args.pause
    share_done = share_of_minutes(args.minutes, training.seconds)
    is_done = fit(training, share_done, report, lambda: time.perf_counter() >= pause_at, args.workers)
    report.save()
    if not is_done:
        print(f"{path}: paused after {training.num_steps} steps, {training.seconds / 60:.1f} minutes; --resume goes on")
        return
    size = write_eyes(training.trained_eyes(), model, folder)
    print(f"{folder}: {size / 1e6:.1f} MB after {training.num_steps} steps; --resume with more --minutes goes on")


def state_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".training")


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(**{field.name: vars(args)[field.name] for field in fields(Settings) if field.name in vars(args)})


def refuse(folder: Path, model: Transformer, settings: Settings, resume: bool) -> None:
    """Everything that can be refused before the first step."""
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new or an empty folder; remove it or choose another")
    if resume and not state_path(folder).is_file():
        raise ConfigError(f"{state_path(folder)}: no such file; train without --resume")
    if settings.side % 56 or settings.side < 56:
        raise ConfigError(f"--side {settings.side}: expected a multiple of 56, whole tokens and whole codec blocks")
    if any(frames % 2 or frames < 4 for frames in settings.frames):
        raise ConfigError(f"--frames {settings.frames}: expected even numbers from 4 on; a grid is two frames")
    if settings.width % (4 * settings.heads):
        raise ConfigError(f"--width {settings.width}: expected a multiple of four times --heads {settings.heads}")
    num_tokens = (settings.side // 28) ** 2 * max(settings.frames) // 2
    if num_tokens + 128 > model.max_positions:
        raise ConfigError(f"a window has {num_tokens} tokens; the language model has {model.max_positions} positions")
    if not 0 <= settings.dense <= 1 - settings.rounded <= 1:
        raise ConfigError(f"--dense {settings.dense} --rounded {settings.rounded}: expected shares with a sum up to 1")


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def kind_names(text: str) -> tuple[str, ...]:
    names = tuple(sorted(text.split(",")))
    unknown = [name for name in names if name not in KIND_NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {', '.join(KIND_NAMES)}")
    return names


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings()
    parser.add_argument("model", help="SmolLM2-135M-Instruct: GGUF file or Hugging Face folder")
    parser.add_argument("folder", help="new folder for the packed eyes")
    parser.add_argument("--minutes", type=float, default=23, help="of the whole training (23)")
    parser.add_argument("--pause", type=float, default=float("inf"), help="minutes after which this call ends")
    parser.add_argument("--resume", action="store_true", help="go on from FOLDER.training")
    parser.add_argument("--side", type=int, default=defaults.side, help="pixels of a frame's side (224)")
    parser.add_argument("--frames", type=numbers, default=defaults.frames, help="of a window (8,16)")
    parser.add_argument("--things", type=int, default=defaults.things, help="most things in a scene (8)")
    parser.add_argument("--depth", type=int, default=defaults.depth, help="blocks (12)")
    parser.add_argument("--width", type=int, default=defaults.width, help="of the eyes (384)")
    parser.add_argument("--heads", type=int, default=defaults.heads, help="of the eyes (6)")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="windows a step (64)")
    parser.add_argument("--questions", type=int, default=defaults.questions, help="a window (6)")
    parser.add_argument("--kinds", type=kind_names, default=defaults.kinds, help="of questions, with commas (all)")
    parser.add_argument("--dense", type=float, default=defaults.dense, help="share of the first stage (0.35)")
    parser.add_argument("--rounded", type=float, default=defaults.rounded, help="share of the last stage (0.2)")
    parser.add_argument("--words", type=float, default=defaults.words, help="weight of the pull towards words (1)")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="learning rate (8e-4)")
    parser.add_argument("--average", type=float, default=defaults.average, help="of the moving average (0.999)")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw scenes (0: this one)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the language model (bfloat16)")
    parser.add_argument("--compile", action="store_true", help="compile the eyes and the layers of the language model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=defaults.seed, choices=range(256), metavar="0…255")
    return parser


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_watch export", description=write_full.__doc__)
    parser.add_argument("folder", help="packed eyes")
    parser.add_argument("full", help="new folder")
    parser.add_argument("--model", required=True, help="the language model: GGUF file or Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    return parser


def export(args: argparse.Namespace) -> None:
    model, tokenizer = load_target(args.model, getattr(torch, args.dtype), "cpu")
    write_full(Path(args.folder), model, tokenizer, Path(args.full))
    print(f"{args.full}: {sum(file.stat().st_size for file in Path(args.full).iterdir()) / 1e6:.0f} MB")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({"export": (export, export_parser)}, (train, train_parser), arguments)


if __name__ == "__main__":
    sys.exit(main())
