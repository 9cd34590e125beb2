"""What does a window of a video cost: encoded whole, encoded once, pruned, and with KV taken over?

Several streams ask about windows of 16 frames, four frames apart, in one batch; answers have ten tokens. Weights and
pixels are random: the figures are of cost alone. The arms take turns, window by window, on one engine:

  whole    every window encodes and computes all of its frames
  once     a frame that an earlier window encoded is not encoded again; the honest baseline
  pruned   once, and of seven grids in eight only a share of the groups is kept (--kept)
  reuse    once, and the KV of frames that stay is taken over, but for one grid in eight
  all      pruned and reuse

`whole` and `once` answer with the same tokens, or the run fails. Milliseconds are medians over rounds, in each of which
every stream asks once. FLOPs are those of matrix products. The floor is FLOPs over 790 TFLOP/s, an H200's.

    python3 -m benchmarks.watch --shape watch --size 224            # a CPU
    python3 -m benchmarks.watch --shape qwen2.5-vl-3b --streams 1 4 16 32 --device cuda

Aim on an H200: `once` at least 1.4 times as fast as `whole`, the encoder within 1.3 times its floor, and `all` 3.3
times as fast as `whole` with a tenth of its FLOPs. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.media.media import Media
from faser.media.placement import place_media
from faser.media.sliding import PlacedPrompt, SlidingPrompts
from faser.models.allocation import Allocator
from faser.models.config import ModelConfig, Rope
from faser.models.transformer import Transformer, empty_layer
from faser.models.vision.config import VisionConfig
from faser.models.vision.encoder import VisionEncoder
from faser.request import Request, SamplingParams
from faser.vision import Grid, VisionSettings

H200_FLOPS = 790e12
ANCHOR_GRIDS = 8


@dataclass(frozen=True)
class Arm:
    name: str
    keeps_encoded: bool = True
    prunes: bool = False
    reuses: bool = False


ARMS = (
    Arm("whole", keeps_encoded=False),
    Arm("once"),
    Arm("pruned", prunes=True),
    Arm("reuse", reuses=True),
    Arm("all", prunes=True, reuses=True),
)
QWEN_EYES: dict[str, Any] = {
    "kind": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "num_heads": 16, "mlp_size": 3420, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "activation": "silu", "image_token_id": 151655,
    "video_token_id": 151656, "window_size": 112, "full_attention_layers": (7, 15, 23, 31), "tokens_per_second": 2.0,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "family": "qwen2", "head_dim": 128, "norm_eps": 1e-6, "max_positions": 32768, "qkv_bias": True,
    "rope": Rope(1e6, sections=(16, 24, 24)),
}  # fmt: skip
SHAPES = {
    "qwen2.5-vl-3b": ModelConfig(
        **QWEN, vocab_size=151936, hidden_size=2048, num_layers=36, num_heads=16, num_kv_heads=2,
        intermediate_size=11008, tie_embeddings=True, vision=VisionConfig(**QWEN_EYES, output_size=2048),
    ),
    "qwen2.5-vl-7b": ModelConfig(
        **QWEN, vocab_size=152064, hidden_size=3584, num_layers=28, num_heads=28, num_kv_heads=4,
        intermediate_size=18944, vision=VisionConfig(**QWEN_EYES, output_size=3584),
    ),
    "watch": ModelConfig(
        family="llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        intermediate_size=1536, norm_eps=1e-5, max_positions=8192, tie_embeddings=True,
        vision=VisionConfig(
            kind="qwen2_vl", depth=12, hidden_size=384, num_heads=6, mlp_size=1536, output_size=576, patch_size=14,
            temporal_patch_size=2, merge_size=2, activation="quick_gelu", image_token_id=1, video_token_id=2,
            has_spatial_positions=False,
        ),
    ),
    "tiny": ModelConfig(
        family="llama", vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=48, norm_eps=1e-5, max_positions=512, tie_embeddings=True,
        vision=VisionConfig(
            kind="qwen2_vl", depth=2, hidden_size=16, num_heads=2, mlp_size=24, output_size=32, patch_size=4,
            temporal_patch_size=2, merge_size=2, activation="quick_gelu", image_token_id=1, video_token_id=2,
            has_spatial_positions=False,
        ),
    ),
}  # fmt: skip
NUM_TEXT = 64  # tokens of the question


@dataclass(frozen=True)
class Round:
    """What all streams' windows of one moment took."""

    total: float  # seconds
    encode: float  # seconds
    patches: int  # encoded
    rows: int  # computed by the target


class Video:
    """The grids of one stream, made when they are asked for; some arms see only a share of them."""

    def __init__(self, config: VisionConfig, size: int, share: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._config, self._side, self._share = config, size // config.patch_size, share
        self._grids: list[tuple[Grid, Grid]] = []  # whole, pruned

    def window(self, first: int, count: int, pruned: bool) -> tuple[Grid, ...]:
        while len(self._grids) < first + count:
            self._grids.append(self._make())
        return tuple(pair[pruned] for pair in self._grids[first : first + count])

    def _make(self) -> tuple[Grid, Grid]:
        config, side, group = self._config, self._side, self._config.merge_size**2
        shape = (side**2, config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        whole = Grid(self._random.integers(0, 256, shape, dtype=np.uint8), side, side, config.merge_size)
        if len(self._grids) % ANCHOR_GRIDS == 0:
            return whole, whole
        kept = np.sort(self._random.permutation(whole.num_groups)[: max(1, round(self._share * whole.num_groups))])
        patches = whole.patches.reshape(-1, group, *shape[1:])[kept].reshape(-1, *shape[1:])
        return whole, Grid(patches, side, side, config.merge_size, kept)


def settings_of(config: ModelConfig) -> VisionSettings:
    eyes = config.vision
    assert eyes is not None
    return VisionSettings(
        patch_size=eyes.patch_size, merge_size=eyes.merge_size, frames_per_grid=eyes.temporal_patch_size, min_pixels=1,
        max_pixels=10**8, video_min_pixels=1, video_max_pixels=10**8, image_token_id=eyes.image_token_id,
        video_token_id=eyes.video_token_id, has_spatial_positions=eyes.has_spatial_positions,
        positions_per_second=eyes.tokens_per_second,
    )  # fmt: skip


def run_round(engine: Engine, prompts: Sequence[PlacedPrompt], num_answer: int) -> tuple[Round, list[list[int]]]:
    """All prompts in one batch; what it took, and the tokens of each."""
    stats = engine.stats
    before = stats.encode_seconds, stats.patches_encoded, stats.context_rows
    params, tokens = SamplingParams(max_tokens=num_answer, ignore_eos=True), {str(i): [] for i in range(len(prompts))}
    started = perf_counter()
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add(
            Request(
                id=name, prompt_token_ids=prompt.token_ids, params=params, seed=0, vision=prompt.vision,
                session=prompt.session, reuse=prompt.reuse,
            )
        )  # fmt: skip
    while engine.has_work:
        for item in engine.step():
            assert item.finish is None or item.finish.error is None, item.finish
            tokens[item.request_id] += item.token_ids
    total = perf_counter() - started
    after = stats.encode_seconds, stats.patches_encoded, stats.context_rows
    return Round(total, *(new - old for new, old in zip(after, before, strict=True))), list(tokens.values())


class Streams:
    """All streams, under all arms."""

    def __init__(self, engine: Engine, config: ModelConfig, num_streams: int, args: argparse.Namespace) -> None:
        assert config.vision is not None
        self._engine, self._args = engine, args
        self._videos = [Video(config.vision, args.size, args.kept, 1000 * num_streams + i) for i in range(num_streams)]
        self._size, self._stride = (n // config.vision.temporal_patch_size for n in (args.window, args.stride))
        half = NUM_TEXT // 2
        self._ids, self._settings = [3] * half + [config.vision.video_token_id] + [4] * half, settings_of(config)
        self._prompts = {
            arm.name: [
                SlidingPrompts(self._ids, self._settings, f"{arm.name} {i}", config.max_positions)
                for i in range(num_streams)
            ]
            for arm in ARMS
        }

    def ask(self, arm: Arm, number: int) -> tuple[Round, list[list[int]]]:
        """Window `number` of every stream. Of what was encoded, only the arm's own window before is there."""
        planner, first = self._engine.scheduler.vision, number * self._stride
        assert planner is not None
        planner.grids.clear()
        stays = self._size - self._stride
        if arm.keeps_encoded and number:
            self._encode([video.window(first, stays, arm.prunes) for video in self._videos])
        is_anchor = (first + np.arange(self._size)) % ANCHOR_GRIDS == 0
        prompts = []
        for video, sliding in zip(self._videos, self._prompts[arm.name], strict=True):
            media = Media("video", video.window(first, self._size, arm.prunes), 1.0, self._args.window)
            prompt = sliding.next(media, is_anchor, self._args.answer)
            prompts.append(prompt if arm.reuses else prompt.exact)
        return run_round(self._engine, prompts, self._args.answer)

    def _encode(self, windows: Sequence[tuple[Grid, ...]]) -> None:
        """Have these grids encoded, outside of what is measured."""
        media = [Media("video", grids, 1.0, 2 * len(grids)) for grids in windows]
        run_round(self._engine, [PlacedPrompt(*place_media(self._ids, [each], self._settings)) for each in media], 1)


def measure(engine: Engine, config: ModelConfig, num_streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all arms, in turns, over the same windows."""
    streams = Streams(engine, config, num_streams, args)
    rounds: dict[str, list[Round]] = {arm.name: [] for arm in ARMS}
    for number in range(args.rounds + 1):
        said = {}
        for arm in ARMS:
            one, said[arm.name] = streams.ask(arm, number)
            if number:  # the first round warms up, and has nothing to take over
                rounds[arm.name].append(one)
        assert said["whole"] == said["once"], "encode-once changed an answer"
    return figures(rounds, num_streams, config)


def figures(rounds: dict[str, list[Round]], num_streams: int, config: ModelConfig) -> dict[str, Any]:
    assert config.vision is not None
    found: dict[str, Any] = {"streams": num_streams}
    per_patch, per_row = flops_per_patch(config.vision), flops_per_row(config)
    for arm, each in rounds.items():
        patches, rows = median(r.patches for r in each), median(r.rows for r in each)
        flops = patches * per_patch + rows * per_row
        found[arm] = {
            "window_ms": round(1e3 * median(r.total for r in each), 2),
            "encode_ms": round(1e3 * median(r.encode for r in each), 2),
            "encode_floor_ms": round(1e3 * patches * per_patch / H200_FLOPS, 3),
            "patches": patches,
            "rows": rows,
            "tflops": round(flops / 1e12, 3),
            "gain": round(median(a.total / b.total for a, b in zip(rounds["whole"], each, strict=True)), 3),
            "gain_over_once": round(median(a.total / b.total for a, b in zip(rounds["once"], each, strict=True)), 3),
        }
    return found


def flops_per_row(config: ModelConfig) -> int:
    """Of the matrix products of the target's layers, without attention and without the head."""
    layer = empty_layer(config, Allocator(torch.bfloat16, torch.device("meta")))
    return 2 * config.num_layers * sum(weight.numel() for weight in layer.tensors().values() if weight.dim() == 2)


def flops_per_patch(config: VisionConfig) -> int:
    """Of the matrix products of the encoder, without attention."""
    encoder = VisionEncoder(config, torch.bfloat16, "meta")
    merger = encoder.merger.inner.numel() + encoder.merger.out.numel()
    every = sum(weight.numel() for weight in encoder.weights() if weight.dim() == 2)
    return 2 * (every - merger) + 2 * merger // config.merge_size**2


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="watch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--size", type=int, default=448, help="pixels of a frame's side")
    parser.add_argument("--window", type=int, default=16, help="frames")
    parser.add_argument("--stride", type=int, default=4, help="frames")
    parser.add_argument("--answer", type=int, default=10, help="tokens")
    parser.add_argument("--kept", type=float, default=0.2, help="share of groups that pruned arms keep")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    config = SHAPES[args.shape]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = Transformer.random(config, 0, dtype=dtype, device=args.device)
    most = max(args.streams)
    groups = (args.size // 28 if config.vision.patch_size == 14 else args.size // 8) ** 2
    num_tokens = args.window // 2 * groups + NUM_TEXT + args.answer
    options = EngineOptions(
        policy="off", device=args.device, max_running=most, prefix_caching=False, max_step_ms=0,
        max_batch_tokens=max(1024, most, 4096 if args.device == "cuda" else 0),
        max_model_len=num_tokens + args.answer, num_pages=8 * most * -(-(num_tokens + args.answer) // 16),
        vision_memory=2 * most * num_tokens * config.hidden_size * model.dtype.itemsize,
    )  # fmt: skip
    engine = build_engine(model, None, options)
    results = [measure(engine, config, streams, args) for streams in args.streams]
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.shape} (cost only), {args.size} px, window {args.window}, stride {args.stride}, {name}")
    print(
        f"{'streams':>8}  {'arm':8}{'window ms':>10}{'encoder':>9}{'floor':>8}{'TFLOP':>8}{'gain':>7}{'over once':>11}"
    )
    for result in results:
        for arm in ARMS:
            r = result[arm.name]
            print(
                f"{result['streams']:8}  {arm.name:8}{r['window_ms']:10}{r['encode_ms']:9}{r['encode_floor_ms']:8}"
                f"{r['tflops']:8}{r['gain']:7}{r['gain_over_once']:11}"
            )
    found = {"shape": args.shape, "size": args.size, "kept": args.kept, "device": name, "results": results}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
