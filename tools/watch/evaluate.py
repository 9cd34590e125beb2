"""How often faser-watch is right, by kind of question, beside chance and beside the language model without eyes.

    python -m tools.watch.evaluate MODEL FOLDER --windows 1000
    python -m tools.watch.evaluate code CODED.xz --windows 40
    python -m tools.watch.evaluate MODEL FOLDER --coded CODED.xz

Three sets: scenes with new seeds, through the likeness of a codec; scenes of held-out sprites, backgrounds and
phrasings; and held-out scenes through x264 itself, which `code` makes where PyAV is installed. An answer is right if
greedy decoding gives it and its end, and nothing else. Without eyes the language model may choose among the possible
answers of the kind, which helps it. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.errors import ConfigError
from tools.commands import run_command
from tools.distill import load_target, pick_device
from tools.watch.codec import degrade, random_steps, x264
from tools.watch.export import read_eyes
from tools.watch.questions import QUESTIONS
from tools.watch.reader import Branches, Prompts, Reader
from tools.watch.scenes import Plan, SceneSettings, plan_scene, render
from tools.watch.tally import Tally
from tools.watch.vit import Eyes, patches_of
from tools.watch.windows import (
    EVALUATION,
    KIND_NAMES,
    Batch,
    Windows,
    WindowSettings,
    evaluation_keys,
    load,
)

QUALITIES = (20, 26, 32)  # crf of x264, in turn


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def see(eyes: Eyes, frames: Tensor) -> Tensor:
    """Frames [windows, frames, side, side, 3] to tokens [windows, tokens, hidden]."""
    side = frames.shape[2] // eyes.config.patch_size
    tokens = eyes(patches_of(frames, eyes.config), side, side)
    return tokens.reshape(len(frames), -1, tokens.shape[-1])


@torch.inference_mode()
def judge(reader: Reader, batch: Batch, seen: Tensor) -> Tensor:
    """[windows, questions] whether greedy decoding gives the answer and then ends."""
    branches = Branches(batch["ids"], batch["answer_at"])
    logits = reader.answer_logits(seen, branches)
    return (logits.argmax(-1) == reader.right_ids(branches)).all(-1)


@torch.inference_mode()
def guess(reader: Reader, batch: Batch) -> Tensor:
    """[windows, questions] whether the model without eyes finds the answer among those possible for the kind."""
    branches = Branches(batch["ids"], batch["answer_at"])
    nothing = reader.model.embedding.new_zeros(len(batch["ids"]), 0, reader.model.config.hidden_size)
    logits = reader.answer_logits(nothing, branches)[:, :, 0]
    allowed = torch.full((len(KIND_NAMES), logits.shape[-1]), -torch.inf, device=logits.device)
    for index, kind in enumerate(KIND_NAMES):
        allowed[index, [reader.prompts.answer_ids[answer] for answer in QUESTIONS[kind][1]]] = 0
    return (logits + allowed[batch["kind"]]).argmax(-1) == reader.right_ids(branches)[..., 0]


def evaluate_set(reader: Reader, eyes: Eyes, batches: Iterator[Batch], coded: bool) -> dict[str, dict[str, float]]:
    """By kind and over all: accuracy, chance and accuracy without eyes. coded: the frames have been through a codec."""
    sighted, blind = Tally(), Tally()
    generator = torch.Generator(reader.model.device).manual_seed(0)
    for batch in batches:
        batch = {name: tensor.to(reader.model.device) for name, tensor in batch.items()}
        frames = batch["frames"]
        frames = frames if coded else degrade(frames, random_steps(len(frames), generator))
        answer = reader.right_ids(Branches(batch["ids"], batch["answer_at"]))[..., 0]
        sighted.add(batch["kind"], answer, judge(reader, batch, see(eyes, frames)))
        blind.add(batch["kind"], answer, guess(reader, batch))
    without = blind.table()
    return {kind: row | {"without eyes": without[kind]["accuracy"]} for kind, row in sighted.table().items()}


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'kind':16}{'questions':>10}{'accuracy':>10}{'chance':>10}{'without eyes':>14}")
    for kind, row in table.items():
        print(
            f"{kind:16}{row['questions']:10.0f}{row['accuracy']:10.3f}{row['chance']:10.3f}{row['without eyes']:14.3f}",
            flush=True,
        )


# ── scenes through x264, made ahead ──────────────────────────────────────────────────────────────────────────────────


def write_coded(path: Path, scene: SceneSettings, num_windows: int) -> None:
    """Frames of held-out scenes after x264. Each frame is stored as its difference to the one before, which is mostly
    zeros, and compressed. Scenes and questions follow from the seeds."""
    frames = [
        x264(render(plan_scene(scene, EVALUATION + i)), QUALITIES[i % len(QUALITIES)]) for i in range(num_windows)
    ]
    stored = np.stack(frames)  # [windows, frames, side, side, 3]
    stored[:, 1:] -= stored[:, :-1].copy()  # modulo 256
    header = np.array([num_windows, scene.num_frames, scene.side, scene.max_things], dtype=np.int64)
    path.write_bytes(lzma.compress(header.tobytes() + stored.tobytes(), preset=6))


def read_coded(path: Path) -> tuple[SceneSettings, NDArray[np.uint8]]:
    """The inverse of `write_coded`: settings, and frames [windows, frames, side, side, 3]."""
    try:
        data = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise ConfigError(
            f"{path}: {error}; expected a file that `python -m tools.watch.evaluate code` wrote"
        ) from error
    num_windows, num_frames, side, things = np.frombuffer(data[:32], dtype=np.int64).tolist()
    stored = np.frombuffer(data[32:], dtype=np.uint8).reshape(num_windows, num_frames, side, side, 3)
    frames = np.cumsum(stored, axis=1, dtype=np.uint8)
    return SceneSettings(side=side, num_frames=num_frames, max_things=things, held_out=True), frames


@dataclass(frozen=True, eq=False)
class Stored:
    """Draws nothing: gives the stored frames of a scene."""

    frames: NDArray[np.uint8]  # [windows, frames, side, side, 3]

    def __call__(self, plan: Plan) -> NDArray[np.uint8]:
        return self.frames[plan.seed - EVALUATION]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    model, tokenizer = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    eyes = read_eyes(Path(args.folder)).to(device)
    reader = Reader(model, Prompts(tokenizer))
    report = {}
    for title, windows, num_windows, num_frames, coded in sets(args, reader.prompts, eyes.config.factor):
        keys = evaluation_keys(num_windows, args.batch, num_frames)
        report[title] = evaluate_set(reader, eyes, load(windows, keys, args.workers, False), coded)
        print_table(title, report[title])
    print(json.dumps(report))


def sets(args: argparse.Namespace, prompts: Prompts, factor: int) -> Iterator[tuple[str, Windows, int, int, bool]]:
    """Title, windows, how many, frames of each, and whether a codec has already been there."""
    seen = SceneSettings(side=args.side, num_frames=args.frames, max_things=args.things)
    settings = WindowSettings(scene=seen, cells=args.side // factor, questions=args.questions, kinds=args.kinds)
    yield "new scenes", Windows(settings, prompts), args.windows, args.frames, False
    unseen = replace(settings, scene=replace(seen, held_out=True), held_out_words=True)
    yield "held-out sprites, backgrounds and words", Windows(unseen, prompts), args.windows, args.frames, False
    if args.coded:
        scene, frames = read_coded(Path(args.coded))
        stored = Windows(
            replace(unseen, scene=scene, cells=scene.side // factor),
            prompts,
            Stored(frames),
        )
        yield "held out, through x264", stored, len(frames), scene.num_frames, True


def code(args: argparse.Namespace) -> None:
    path = Path(args.path)
    scene = SceneSettings(side=args.side, num_frames=args.frames, max_things=args.things, held_out=True)
    write_coded(path, scene, args.windows)
    print(f"{path}: {args.windows} windows, {path.stat().st_size / 1e6:.1f} MB")


def parser_for(name: str, summary: str | None, windows: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=windows, help=f"scenes of a set ({windows})")
    parser.add_argument("--side", type=int, default=224, help="pixels of a frame's side (224)")
    parser.add_argument("--frames", type=int, default=16, help="of a window (16)")
    parser.add_argument("--things", type=int, default=8, help="most things in a scene (8)")
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    parser = parser_for("python -m tools.watch.evaluate", __doc__, 1000)
    parser.add_argument("model", help="the language model: GGUF file or Hugging Face folder")
    parser.add_argument("folder", help="packed eyes")
    parser.add_argument("--coded", help="scenes through x264, from `code`")
    parser.add_argument("--questions", type=int, default=6, help="a window (6)")
    parser.add_argument(
        "--kinds", type=lambda text: tuple(text.split(",")), default=KIND_NAMES, help="of questions (all)"
    )
    parser.add_argument("--batch", type=int, default=32, help="windows at once (32)")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw scenes (0: this one)")
    parser.add_argument("--device", default="auto")
    return parser


def code_parser() -> argparse.ArgumentParser:
    parser = parser_for("python -m tools.watch.evaluate code", write_coded.__doc__, 40)
    parser.add_argument("path", help="new file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command({"code": (code, code_parser)}, (evaluate, evaluate_parser), arguments)


if __name__ == "__main__":
    sys.exit(main())
