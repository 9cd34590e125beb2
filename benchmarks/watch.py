"""What does a window of a video cost, and what does it gain to encode each frame once?

Several streams ask about windows of 16 frames, four frames apart, in one batch; answers have ten tokens. Weights and
pixels are random: the figures are of cost alone. Two arms take turns, window by window, on one engine:

  whole   every window encodes all of its frames
  once    a frame that an earlier window encoded is not encoded again

Both answer with the same tokens, or the run fails. Milliseconds are medians over windows, of a round in which every
stream asks once. The floor of the encoder is that of its matrix products: FLOPs over 790 TFLOP/s on an H200.

    python3 -m benchmarks.watch --shape watch --size 224            # a CPU
    python3 -m benchmarks.watch --shape qwen2.5-vl-3b --streams 1 4 16 32 --device cuda

Aim on an H200: `once` at least 1.4 times as fast as `whole`; the encoder within 1.3 times its floor.
The last line is one JSON document.
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
from faser.models.config import ModelConfig, Rope
from faser.models.transformer import Transformer
from faser.models.vision.config import VisionConfig
from faser.models.vision.encoder import VisionEncoder
from faser.request import Request, SamplingParams
from faser.vision import Grid, Vision

H200_FLOPS = 790e12
ARMS = ("whole", "once")
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
    """What all streams' windows of one moment took, in seconds."""

    total: float
    encode: float
    grids: int


class Video:
    """The grids of one stream, made when they are asked for."""

    def __init__(self, config: VisionConfig, size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._config, self._side = config, size // config.patch_size
        self._grids: list[Grid] = []

    def window(self, first: int, count: int) -> list[Grid]:
        config, side = self._config, self._side
        while len(self._grids) < first + count:
            shape = (side**2, config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
            pixels = self._random.integers(0, 256, shape, dtype=np.uint8)
            self._grids.append(Grid(pixels, side, side, config.merge_size))
        return self._grids[first : first + count]


def make_request(name: str, grids: Sequence[Grid], config: ModelConfig, num_answer: int) -> Request:
    """A window between two halves of a question, at the positions of M-RoPE where the model has these."""
    assert config.vision is not None
    half, num_seen = NUM_TEXT // 2, sum(grid.num_tokens for grid in grids)
    token_ids = [3] * half + [config.vision.video_token_id] * num_seen + [4] * half
    starts = half + np.cumsum([0, *(grid.num_tokens for grid in grids[:-1])])
    positions = spatial_positions(grids, half, len(token_ids)) if config.rope.sections else None
    params = SamplingParams(max_tokens=num_answer, ignore_eos=True)
    vision = Vision(tuple(grids), starts, positions)
    return Request(id=name, prompt_token_ids=token_ids, params=params, seed=0, vision=vision)


def spatial_positions(grids: Sequence[Grid], before: int, total: int) -> np.ndarray:
    columns = grids[0].width // grids[0].merge_size
    seen = [
        np.stack([np.full(grid.num_tokens, 2 * i), *np.divmod(grid.groups, columns)], axis=1)
        for i, grid in enumerate(grids)
    ]
    part = before + np.concatenate(seen)
    behind = total - before - len(part)
    text = [
        np.repeat(np.arange(first, first + n)[:, None], 3, 1) for first, n in ((0, before), (part.max() + 1, behind))
    ]
    return np.concatenate([text[0], part, text[1]])


def run_round(engine: Engine, requests: Sequence[Request]) -> tuple[Round, dict[str, list[int]]]:
    before, tokens = (engine.stats.encode_seconds, engine.stats.grids_encoded), {}
    started = perf_counter()
    for request in requests:
        engine.add(request)
        tokens[request.id] = []
    while engine.has_work:
        for item in engine.step():
            assert item.finish is None or item.finish.error is None, item.finish
            tokens[item.request_id] += item.token_ids
    total = perf_counter() - started
    return Round(total, engine.stats.encode_seconds - before[0], engine.stats.grids_encoded - before[1]), tokens


def measure(engine: Engine, config: ModelConfig, num_streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both arms, in turns, over the same windows."""
    assert config.vision is not None
    per_window, stride = (n // config.vision.temporal_patch_size for n in (args.window, args.stride))
    videos = [Video(config.vision, args.size, 1000 * num_streams + i) for i in range(num_streams)]
    rounds: dict[str, list[Round]] = {arm: [] for arm in ARMS}
    planner = engine.scheduler.vision
    assert planner is not None
    for number in range(args.rounds + 1):
        said = {}
        for arm in ARMS:
            windows = [video.window(number * stride, per_window) for video in videos]
            requests = [make_request(f"{arm} {i}", w, config, args.answer) for i, w in enumerate(windows)]
            if arm == "whole":
                kept = [video.window(number * stride, per_window - stride) for video in videos]
                planner.grids.clear()
            one, tokens = run_round(engine, requests)
            said[arm] = list(tokens.values())
            if arm == "whole":  # what the other arm would have kept from its last window, and nothing else
                planner.grids.clear()
                run_round(engine, [make_request(f"k{i}", k, config, 1) for i, k in enumerate(kept)] if number else [])
            if number:  # the first round warms up
                rounds[arm].append(one)
        assert said["whole"] == said["once"], "encode-once changed an answer"
    return figures(rounds, num_streams, engine, config, args)


def figures(
    rounds: dict[str, list[Round]], num_streams: int, engine: Engine, config: ModelConfig, args: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {"streams": num_streams}
    for arm, each in rounds.items():
        found[arm] = {
            "window_ms": round(1e3 * median(r.total for r in each), 2),
            "encode_ms": round(1e3 * median(r.encode for r in each), 2),
            "grids": median(r.grids for r in each),
        }
        if args.device == "cuda":
            assert config.vision is not None
            patches = found[arm]["grids"] * (args.size // config.vision.patch_size) ** 2
            floor = patches * flops_per_patch(config.vision) / H200_FLOPS
            found[arm]["encode_floor_ms"] = round(1e3 * floor, 2)
    found["gain"] = round(median(a.total / b.total for a, b in zip(*rounds.values(), strict=True)), 3)
    return found


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
        max_batch_tokens=max(1024, most, 4096 if args.device == "cuda" else 0), max_model_len=num_tokens,
        num_pages=most * -(-num_tokens // 16) + most,
        vision_memory=2 * most * num_tokens * config.hidden_size * model.dtype.itemsize,
    )  # fmt: skip
    engine = build_engine(model, None, options)
    results = [measure(engine, config, streams, args) for streams in args.streams]
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.shape} (cost only), {args.size} px, window {args.window}, stride {args.stride}, {name}")
    print(f"{'streams':>8}{'whole ms':>10}{'encoder':>9}{'once ms':>10}{'encoder':>9}{'gain':>7}")
    for r in results:
        whole, once = r["whole"], r["once"]
        print(
            f"{r['streams']:8}{whole['window_ms']:10}{whole['encode_ms']:9}{once['window_ms']:10}{once['encode_ms']:9}"
            f"{r['gain']:7}"
        )
    found = {"shape": args.shape, "size": args.size, "device": name, "results": results}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
