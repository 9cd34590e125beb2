"""What does pruning cost in answers? Arms at equal windows, on scenes whose truth is known.

A window of every scene is asked about in every way ("arm"), greedily, and an answer is right if it is the right word or
digit and its end, and nothing else. Scenes and questions come from tools/watch, held out from training; x264 encodes
them at three qualities. benchmarks/lib/watch_arms.py says what each rule keeps.

  dense               every patch, everything computed for this window
  once                every patch, encoded for an earlier window; must answer as dense does
  codec 1, codec 0.25 pruned by motion vectors, at tau 1 and 0.25 pixels
  random, difference  other groups, as many of each grid as codec 1
  fewer               fewer frames, whole, with about the tokens of codec 1
  after               tokens pruned behind the encoder (as vLLM's EVS), as many as codec 1
  RULE reuse          KV of frames that stay is taken over from the windows before; whole grids (anchors) are not
  RULE reuse bare     the same without anchors

The table has, for each arm, the share of tokens kept, the share of prompt tokens taken over, accuracy, the mean error
of counts, and agreement with dense; then pairs: how many answers an arm alone has right, how many the other, and the
exact two-sided p of McNemar's test. Chance is the share of the most common answer of a kind.

    python3 -m benchmarks.watch_quality --tiny --windows 36                         # random weights: tests the harness
    python3 -m benchmarks.watch_quality FOLDER --windows 2000 --device cuda --workers 14
    python3 -m benchmarks.watch_quality --shares --windows 48       # what the codec keeps of the scenes; no model runs

Aim: codec 1 within 2 points of dense and at least 5 above random; reuse with anchors within 3. The last line is one
JSON document. On a CPU the run fails where `once` and `dense` differ; on a GPU the number of differing answers is a
figure, because another batch may flip a near-tie there. Scenes are the same in every run; x264's bytes are not quite.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import comb
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from benchmarks.lib.watch_arms import CODEC, QUALITIES, SLIGHT, SelectingEncoder, Stream, StreamSettings, make_stream
from faser.arrays import BoolArray
from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.media.media import Media
from faser.media.placement import place_media
from faser.media.sliding import PlacedPrompt, SlidingPrompts
from faser.models.config import ModelConfig
from faser.models.source import open_target
from faser.models.transformer import Transformer
from faser.models.vision.config import VisionConfig
from faser.request import FinishReason, Request, SamplingParams
from faser.vision import VisionSettings
from tools.watch.questions import DIGITS, QUESTIONS, Question
from tools.watch.reader import Encodes, Prompts
from tools.watch.scenes import SceneSettings
from tools.watch.windows import EVALUATION

ANSWER_TOKENS = 2  # a word or a digit, and its end
COUNTS = tuple(kind for kind, (_, answers, _) in QUESTIONS.items() if answers == DIGITS)
STREAM_RULES = ("all", CODEC, SLIGHT, "random", "difference")  # whose windows share grids, so that KV can be taken over


@dataclass(frozen=True)
class Arm:
    name: str
    rule: str
    keeps_encoded: bool = False
    reuses: bool = False
    has_anchors: bool = True


def arms() -> tuple[Arm, ...]:
    plain = [Arm("dense", "all"), Arm("once", "all", keeps_encoded=True)]
    plain += [Arm(rule, rule) for rule in (CODEC, SLIGHT, "random", "difference", "fewer", "after")]
    reusing = []
    for rule in STREAM_RULES:
        name = "once" if rule == "all" else rule
        reusing += [
            Arm(f"{name} reuse", rule, reuses=True),
            Arm(f"{name} reuse bare", rule, reuses=True, has_anchors=False),
        ]
    return (*plain, *reusing)


ARMS = arms()
PAIRS = tuple((arm.name, "dense") for arm in ARMS[1:]) + tuple(
    (CODEC, other) for other in ("random", "difference", "fewer", "after")
)


@dataclass(frozen=True)
class Said:
    """The answer to one question."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    taken_over: int  # of these
    video_tokens: int
    video_groups: int  # tokens of the whole window


# ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Asker:
    """Asks one engine about streams, in the ways of all arms."""

    def __init__(self, engine: Engine, encoder: SelectingEncoder, prompts: Prompts, settings: VisionSettings) -> None:
        self.prompts = prompts
        self.settings = settings
        self._engine, self._encoder = engine, encoder
        self._num_asked = 0

    def ask(self, arm: Arm, streams: Sequence[Stream]) -> list[list[Said]]:
        """By stream and question, about the last window."""
        assert self._engine.scheduler.vision is not None
        self._engine.scheduler.vision.grids.clear()  # no arm finds what another has encoded
        if arm.reuses:
            return self._ask_sliding(arm, streams)
        if arm.keeps_encoded:
            before = [stream.window(arm.rule, stream.num_windows - 2)[0] for stream in streams]
            self._run(
                [[self._prompt(media, stream.questions[0])] for media, stream in zip(before, streams, strict=True)]
            )
        with torch.inference_mode():
            media = [self._last(arm, stream) for stream in streams]
        asked = [
            [self._prompt(each, question) for question in stream.questions]
            for each, stream in zip(media, streams, strict=True)
        ]
        return _by_stream(self._run(asked), media, streams)

    def _last(self, arm: Arm, stream: Stream) -> Media:
        if arm.rule == "fewer":
            return stream.fewer()
        return (
            stream.after(self._encoder) if arm.rule == "after" else stream.window(arm.rule, stream.num_windows - 1)[0]
        )

    def _ask_sliding(self, arm: Arm, streams: Sequence[Stream]) -> list[list[Said]]:
        """All windows of each stream, in order. A question has a session of its own."""
        sessions: list[list[SlidingPrompts]] = []
        limit = self._engine.scheduler.limits.vision
        assert limit is not None
        for stream in streams:
            names = [f"{self._num_asked + i}" for i in range(len(stream.questions))]
            self._num_asked += len(names)
            sessions.append([
                SlidingPrompts(self._ids(question), self.settings, name, limit.max_positions)
                for question, name in zip(stream.questions, names, strict=True)
            ])  # fmt: skip
        answers: list[list[tuple[tuple[int, ...], int, int]]] = []
        media: list[Media] = []
        for number in range(streams[0].num_windows):
            shown = [stream.window(arm.rule, number) for stream in streams]
            media = [each for each, _ in shown]
            asked = [[sliding.next(each, self._anchors(arm, flags), ANSWER_TOKENS) for sliding in group]
                     for (each, flags), group in zip(shown, sessions, strict=True)]  # fmt: skip
            answers = self._run(asked)
        for name in {prompt.session for group in asked for prompt in group}:
            assert name is not None
            self._engine.scheduler.retained.drop(name)
        return _by_stream(answers, media, streams)

    def _anchors(self, arm: Arm, is_whole: BoolArray) -> BoolArray:
        return is_whole if arm.has_anchors else np.zeros_like(is_whole)

    def _ids(self, question: Question) -> list[int]:
        ids, answer_at = self.prompts.encode(question)
        return [*self.prompts.beginning, self.settings.video_token_id, *ids[:answer_at]]

    def _prompt(self, media: Media, question: Question) -> PlacedPrompt:
        return PlacedPrompt(*place_media(self._ids(question), [media], self.settings))

    def _run(self, prompts: Sequence[Sequence[PlacedPrompt]]) -> list[list[tuple[tuple[int, ...], int, int]]]:
        """Tokens, prompt tokens and tokens taken over, of all prompts in one batch."""
        engine, params = self._engine, SamplingParams(max_tokens=ANSWER_TOKENS)
        tokens: dict[str, list[int]] = {}
        reused: dict[str, int] = {}
        for i, group in enumerate(prompts):
            for j, prompt in enumerate(group):
                tokens[f"{i} {j}"] = []
                engine.add(
                    Request(
                        id=f"{i} {j}", prompt_token_ids=tuple(prompt.token_ids), params=params, seed=0,
                        stop_ids=(self.prompts.end,), vision=prompt.vision, session=prompt.session, reuse=prompt.reuse,
                    )
                )  # fmt: skip
        while engine.has_work:
            for item in engine.step():
                tokens[item.request_id] += item.token_ids
                if item.finish is not None:
                    assert item.finish.reason is not FinishReason.FAILED, item.finish.error
                    reused[item.request_id] = item.finish.stats.reused
        return [
            [(tuple(tokens[f"{i} {j}"]), len(p.token_ids), reused[f"{i} {j}"]) for j, p in enumerate(group)]
            for i, group in enumerate(prompts)
        ]


def _by_stream(
    answers: Sequence[Sequence[tuple[tuple[int, ...], int, int]]], media: Sequence[Media], streams: Sequence[Stream]
) -> list[list[Said]]:
    whole = [stream.size * stream.grids["all"][0].num_groups for stream in streams]
    return [
        [Said(*answer, video_tokens=each.num_tokens, video_groups=groups) for answer in group]
        for group, each, groups in zip(answers, media, whole, strict=True)
    ]


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def mcnemar(only_one: int, only_other: int) -> float:
    """The exact two-sided p of so uneven a split of the pairs in which one alone is right, were both as good."""
    number = only_one + only_other
    tail = sum(comb(number, k) for k in range(min(only_one, only_other) + 1))
    return min(1.0, 2 * tail / 2**number)


@dataclass
class Figures:
    """What all arms said, question by question."""

    prompts: Prompts
    questions: list[Question] = field(default_factory=list)
    said: dict[str, list[Said]] = field(default_factory=dict)

    def add(self, streams: Iterable[Stream], said: dict[str, list[list[Said]]]) -> None:
        self.questions += [question for stream in streams for question in stream.questions]
        for arm, answers in said.items():
            self.said.setdefault(arm, []).extend(answer for group in answers for answer in group)

    def is_right(self, arm: str) -> list[bool]:
        right = [(self.prompts.answer_ids[question.answer], self.prompts.end) for question in self.questions]
        return [said.token_ids == ids for said, ids in zip(self.said[arm], right, strict=True)]

    def differing(self, arm: str, other: str) -> int:
        pairs = zip(self.said[arm], self.said[other], strict=True)
        return sum(one.token_ids != two.token_ids for one, two in pairs)

    def chance(self) -> dict[str, float]:
        """By kind, and over all: the share that always gives the most common answer of the kind."""
        counts = {kind: Counter(q.answer for q in self.questions if q.kind == kind) for kind in self.kinds}
        best = {kind: max(each.values()) for kind, each in counts.items()}
        by_kind = {kind: best[kind] / counts[kind].total() for kind in self.kinds}
        return {**by_kind, "all": sum(best.values()) / len(self.questions)}

    @property
    def kinds(self) -> list[str]:
        return sorted({question.kind for question in self.questions})

    def accuracy(self, arm: str) -> dict[str, float]:
        right = self.is_right(arm)
        of_kind = {
            kind: [r for r, q in zip(right, self.questions, strict=True) if q.kind == kind] for kind in self.kinds
        }
        return {**{kind: float(np.mean(each)) for kind, each in of_kind.items()}, "all": float(np.mean(right))}

    def count_error(self, arm: str) -> tuple[float | None, int]:
        """Mean difference of counts, over answers that begin with a digit; and how many do not."""
        digits = {self.prompts.answer_ids[digit]: int(digit) for digit in DIGITS}
        asked = [(q, s) for q, s in zip(self.questions, self.said[arm], strict=True) if q.kind in COUNTS]
        errors = [abs(digits[s.token_ids[0]] - int(q.answer)) for q, s in asked if s.token_ids[0] in digits]
        return float(np.mean(errors)) if errors else None, len(asked) - len(errors)

    def pair(self, arm: str, other: str) -> dict[str, float]:
        right, theirs = self.is_right(arm), self.is_right(other)
        alone = sum(one and not two for one, two in zip(right, theirs, strict=True))
        other_alone = sum(two and not one for one, two in zip(right, theirs, strict=True))
        points = 100 * (alone - other_alone) / len(right)
        return {"alone": alone, "other_alone": other_alone, "points": points, "p": mcnemar(alone, other_alone)}

    def arm(self, name: str) -> dict[str, Any]:
        said = self.said[name]
        error, no_number = self.count_error(name)
        return {
            "kept": sum(each.video_tokens for each in said) / sum(each.video_groups for each in said),
            "taken_over": sum(each.taken_over for each in said) / sum(each.prompt_tokens for each in said),
            "accuracy": self.accuracy(name),
            "count_error": error,
            "no_number": no_number,
            "agreement": 1 - self.differing(name, "dense") / len(said),
        }

    def document(self) -> dict[str, Any]:
        return {
            "questions": len(self.questions),
            "chance": self.chance(),
            "arms": {arm.name: self.arm(arm.name) for arm in ARMS},
            "pairs": [{"arm": one, "other": other, **self.pair(one, other)} for one, other in PAIRS],
            "once_differs": self.differing("once", "dense"),
        }


def print_tables(found: dict[str, Any]) -> None:
    print(f"{'arm':24}{'kept':>7}{'taken':>7}{'right':>8}{'count error':>13}{'as dense':>10}")
    for name, arm in found["arms"].items():
        error = "–" if arm["count_error"] is None else f"{arm['count_error']:.2f}"
        print(f"{name:24}{arm['kept']:7.3f}{arm['taken_over']:7.3f}{arm['accuracy']['all']:8.3f}{error:>13}"
              f"{arm['agreement']:10.3f}")  # fmt: skip
    print(f"{'chance':24}{found['chance']['all']:22.3f}\n")
    kinds = [kind for kind in found["chance"] if kind != "all"]
    print(f"{'right':24}" + "".join(f"{kind:>14}" for kind in kinds))
    for name, arm in [*found["arms"].items(), ("chance", {"accuracy": found["chance"]})]:
        print(f"{name:24}" + "".join(f"{arm['accuracy'][kind]:14.3f}" for kind in kinds))
    print(f"\n{'arm':24}{'beside':14}{'points':>8}{'alone':>7}{'other':>7}{'p':>9}")
    for pair in found["pairs"]:
        print(f"{pair['arm']:24}{pair['other']:14}{pair['points']:8.1f}{pair['alone']:7}{pair['other_alone']:7}"
              f"{pair['p']:9.4f}")  # fmt: skip


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Words:
    """Stands for the tokenizer of the tiny model: a token a word; answers and the end have ids of their own."""

    def __init__(self) -> None:
        answers = dict.fromkeys(answer for _, answers, _ in QUESTIONS.values() for answer in answers)
        self._known = {word: 3 + index for index, word in enumerate(["<|im_end|>", *answers])}

    def encode(self, text: str) -> Sequence[int]:
        words = text.replace("<|im_end|>", " <|im_end|> ").split()
        first = 3 + len(self._known)
        return [self._known.get(word, first + sum(word.encode()) % (TINY.vocab_size - first)) for word in words]


TINY = ModelConfig(
    family="llama", vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, norm_eps=1e-5, max_positions=512, tie_embeddings=True,
    vision=VisionConfig(
        kind="qwen2_vl", depth=2, hidden_size=16, num_heads=2, mlp_size=24, output_size=32, patch_size=14,
        temporal_patch_size=2, merge_size=2, activation="quick_gelu", image_token_id=1, video_token_id=2,
        has_spatial_positions=False,
    ),
)  # fmt: skip
TINY_VISION = VisionSettings(
    patch_size=14, merge_size=2, frames_per_grid=2, min_pixels=1, max_pixels=10**8, video_min_pixels=1,
    video_max_pixels=10**8, image_token_id=1, video_token_id=2, has_spatial_positions=False,
)  # fmt: skip


def load(args: argparse.Namespace) -> tuple[Transformer, Encodes, VisionSettings]:
    if args.tiny:
        return Transformer.random(TINY, 0, std=0.3, device=args.device), Words(), TINY_VISION
    source = open_target(args.model)
    settings, tokenizer = source.vision_settings(), source.tokenizer()
    if settings is None or tokenizer is None:
        raise SystemExit(f"{args.model}: cannot see, or has no tokenizer; expected a folder of tools/train_watch.py")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return source.load(dtype, source.config.max_positions, lambda done, total: None, args.device), tokenizer, settings


def make_asker(model: Transformer, tokenizer: Encodes, settings: VisionSettings, args: argparse.Namespace) -> Asker:
    assert model.vision is not None
    encoder = model.vision = SelectingEncoder.of(model.vision)
    prompts, factor = Prompts(tokenizer), settings.factor
    num_tokens = (args.side // factor) ** 2 * args.window // settings.frames_per_grid
    most = num_tokens + len(prompts.beginning) + prompts.length + ANSWER_TOKENS
    running = args.batch * args.questions
    options = EngineOptions(
        policy="off", device=args.device, max_running=running, prefix_caching=False, max_step_ms=0,
        max_batch_tokens=max(2048, running), max_model_len=most, num_pages=3 * running * -(-most // 16),
        vision_memory=2 * running * num_tokens * model.config.hidden_size * model.dtype.itemsize,
    )  # fmt: skip
    return Asker(build_engine(model, None, options), encoder, prompts, settings)


def make_streams(settings: StreamSettings, args: argparse.Namespace) -> Iterator[list[Stream]]:
    """Batches of streams; `workers` processes make them."""
    seeds = range(EVALUATION, EVALUATION + args.windows)
    make = partial(make_stream, settings=settings)
    batches = [seeds[start : start + args.batch] for start in range(0, len(seeds), args.batch)]
    if not args.workers:
        yield from ([make(seed) for seed in batch] for batch in batches)
        return
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        ahead = pool.map(make, batches[0])
        for batch in [*batches[1:], None]:
            streams = list(ahead)
            ahead = pool.map(make, batch) if batch is not None else iter(())
            yield streams


def stream_settings(args: argparse.Namespace, vision: VisionSettings) -> StreamSettings:
    num_frames = args.window + args.before * args.stride
    scene = SceneSettings(
        side=args.side, num_frames=num_frames, max_things=args.things, held_out=True, most_noise=args.noise
    )
    return StreamSettings(
        scene=scene, window=args.window, stride=args.stride, gop=args.gop, questions=args.questions, vision=vision
    )


def measure(args: argparse.Namespace) -> Figures:
    asker = make_asker(*load(args), args)
    figures = Figures(asker.prompts)
    for streams in make_streams(stream_settings(args, asker.settings), args):
        figures.add(streams, {arm.name: asker.ask(arm, streams) for arm in ARMS})
        print(f"{len(figures.questions)} questions", file=sys.stderr, flush=True)
    return figures


def shares(args: argparse.Namespace) -> dict[str, Any]:
    """Mean share of tokens that the judged windows keep under the codec's rules, by x264's quality."""
    kept: dict[str, dict[str, list[float]]] = {rule: {} for rule in (CODEC, SLIGHT)}
    number = EVALUATION
    for streams in make_streams(stream_settings(args, TINY_VISION), args):
        for stream in streams:
            for rule, by_quality in kept.items():
                media, _ = stream.window(rule, stream.num_windows - 1)
                by_quality.setdefault(f"crf {QUALITIES[number % len(QUALITIES)]}", []).append(media.kept_share)
            number += 1
    return {rule: {name: float(np.mean(each)) for name, each in sorted(of.items())} for rule, of in kept.items()}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="faser-watch: packed eyes, or a whole folder")
    parser.add_argument("--shares", action="store_true", help="no model: what the codec keeps of the scenes")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights instead")
    parser.add_argument(
        "--windows", type=int, default=2000, help="scenes, of each of which one window is judged (2000)"
    )
    parser.add_argument("--questions", type=int, default=2, help="about a window (2)")
    parser.add_argument("--window", type=int, default=16, help="frames (16)")
    parser.add_argument("--stride", type=int, default=4, help="frames (4)")
    parser.add_argument("--before", type=int, default=2, help="windows before the judged one (2)")
    parser.add_argument("--gop", type=int, default=16, help="frames from one I-frame to the next, at most (16)")
    parser.add_argument("--side", type=int, default=224, help="pixels of a frame (224)")
    parser.add_argument("--things", type=int, default=8, help="most things in a scene (8)")
    parser.add_argument("--noise", type=float, default=5.0, help="most levels of the cameras' noise, at least 0.5 (5)")
    parser.add_argument("--batch", type=int, default=32, help="streams at once (32)")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw scenes (0: this one)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.tiny + args.shares + (args.model is not None) != 1:
        parser().error("give a model, --tiny or --shares")
    if args.shares:
        kept = shares(args)
        for rule, by_quality in kept.items():
            print(f"{rule:12}" + "".join(f"{name:>8} {share:.3f}" for name, share in by_quality.items()))
        print(json.dumps({"benchmark": "watch_quality", "windows": args.windows, "noise": args.noise, "kept": kept}))
        return 0
    found = {"benchmark": "watch_quality", "model": args.model or "tiny, random weights", "windows": args.windows}
    found |= measure(args).document()
    print_tables(found)
    if args.tiny:
        print("\nrandom weights: these figures say that the harness works, and nothing of a model")
    print(json.dumps(found))
    return int(args.device == "cpu" and found["once_differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
