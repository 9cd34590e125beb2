"""What does one long prompt cost everybody else, and what does bounding the seconds of a step cost?

Two parts, over one engine:

  beside  Streams write. A long prompt arrives, then short prompts at even distances until the long one is read. Gaps
          between two tokens of a stream while the long prompt is read (p50, p99, max); TTFT of the short prompts,
          counted from when they were due; TTFT and tokens per second of the long one. The same with and without the
          bound (`--max-step-ms`), from one engine.
  mixed   A closed loop of requests with mixed prompts and outputs: where one ends, the next begins. Tokens per second,
          prompts and outputs together, with the bound and without, by turns. `lost` is the share of throughput that
          the bound costs: the median over the pairs.

On a CPU the model is the default one. With --device cuda it has random bfloat16 weights of an 8B shape, made in memory,
with a 32,768-token prompt beside 32 streams. --tiny is a model of two layers, to try the script.

    .venv/bin/python -m benchmarks.long_prompt [--device cpu|cuda] [--tiny] [--parts beside,mixed] [--bounds on,off]
        [--max-step-ms MS] [--long N] [--policy off] [--repeats 3]

It runs on checkouts without the bound, too: then there is only `off`. Targets: on a CPU no gap far above 0.3 s, on a
GPU TPOT p99 of about 60 ms; at most 2 % lost. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from faser.build import Draft, build_engine, load_pair
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.request import Request, SamplingParams
from tools.inflate import SHAPES, Shape

HAS_BOUND = any(each.name == "max_step_ms" for each in fields(EngineOptions))
KV_BYTES = 80 * 2**30  # steps without a bound run eagerly, and need more of a GPU's memory than is kept free
WARM_STEPS = 10  # of the streams, before anything counts
TINY = Shape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128)


@dataclass(frozen=True)
class Load:
    """Sizes that suit a machine: tokens, requests and seconds."""

    max_model_len: int
    max_running: int
    vocabulary: int
    streams: int
    stream_prompt: int
    long: int
    short: int
    most_shorts: int
    every: float  # seconds between two short prompts
    mixed: int  # requests of the closed loop
    mixed_open: int  # of these, at any time
    mixed_prompt: tuple[int, int]  # from, to
    mixed_output: tuple[int, int]


LOADS = {
    "cpu": Load(8192, 32, 49_152, 1, 32, 4096, 48, 12, 2.0, 10, 5, (32, 384), (32, 96)),
    "cuda": Load(40_960, 128, 49_152, 32, 256, 32_768, 128, 40, 0.05, 192, 64, (128, 1024), (64, 512)),
    "tiny": Load(1024, 8, 250, 2, 16, 600, 24, 6, 0.005, 12, 4, (8, 200), (4, 12)),
}


@dataclass
class Seen:
    """When a request was due, and when its tokens came."""

    num_prompt: int
    due: float
    at: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.at[0] - self.due


class Player:
    """Adds requests to an engine and keeps when their tokens come."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.engine = engine
        self.seen: dict[str, Seen] = {}
        self._random = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._number = 0

    def add(self, num_prompt: int, max_tokens: int, due: float | None = None) -> str:
        self._number += 1
        name = str(self._number)
        prompt = tuple(self._random.integers(3, self._vocabulary, num_prompt).tolist())
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(Request(id=name, prompt_token_ids=prompt, params=params, seed=self._number))
        self.seen[name] = Seen(num_prompt, time.perf_counter() if due is None else due)
        return name

    def step(self) -> int:
        """One step; returns how many requests ended."""
        progress = self.engine.step()
        now = time.perf_counter()
        for item in progress:
            if item.token_ids:
                self.seen[item.request_id].at.append(now)
        return sum(item.finish is not None for item in progress)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def cancel_all(self) -> None:
        for name in self.seen:
            self.engine.cancel(name)
        self.drain()


# ── a long prompt beside streams and short prompts ───────────────────────────────────────────────────────────────────


def play_beside(engine: Engine, load: Load) -> dict[str, Any]:
    player = Player(engine, load.vocabulary)
    room = load.max_model_len - load.stream_prompt
    streams = [player.add(load.stream_prompt, room) for _ in range(load.streams)]
    while any(not player.seen[name].at for name in streams):
        player.step()
    before = time.perf_counter()
    for _ in range(WARM_STEPS):
        player.step()
    began = time.perf_counter()
    long = player.add(load.long, 1)
    shorts: list[str] = []
    dues = deque(began + (i + 1) * load.every for i in range(load.most_shorts))
    while not player.seen[long].at or any(not player.seen[name].at for name in shorts):
        player.step()
        now, read = time.perf_counter(), player.seen[long].at
        while dues and dues[0] < (read[0] if read else now):  # also those of a step that read the rest of the prompt
            shorts.append(player.add(load.short, 4, dues.popleft()))
    figures = _beside_figures(player, streams, long, shorts, began)
    figures["alone_gap_ms"] = round(1e3 * (began - before) / WARM_STEPS, 1)
    player.cancel_all()
    return figures


def _beside_figures(
    player: Player, streams: Sequence[str], long: str, shorts: Sequence[str], began: float
) -> dict[str, Any]:
    ended = player.seen[long].at[0]
    gaps = [gap for name in streams for gap in _gaps(player.seen[name].at, began, ended)]
    waits = [player.seen[name].ttft for name in shorts]
    ttft = player.seen[long].ttft
    return {
        "gaps": len(gaps),
        "gap_ms": _spread(gaps),
        "shorts": len(shorts),
        "short_ttft_ms": _spread(waits) if waits else None,
        "long_ttft_s": round(ttft, 3),
        "long_tokens_per_s": round(player.seen[long].num_prompt / ttft, 1),
    }


def _gaps(at: Sequence[float], began: float, ended: float) -> list[float]:
    """Between two tokens, where the second came after `began` and no later than `ended`."""
    return [after - before for before, after in itertools.pairwise(at) if began < after <= ended]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99, most = np.percentile(seconds, [50, 99, 100]).tolist()
    return {"p50": round(1e3 * p50, 1), "p99": round(1e3 * p99, 1), "max": round(1e3 * most, 1)}


# ── throughput ───────────────────────────────────────────────────────────────────────────────────────────────────────


def play_mixed(engine: Engine, load: Load, turn: int) -> float:
    """Tokens per second, prompts and outputs."""
    player, random = Player(engine, load.vocabulary), np.random.default_rng(turn)
    prompts = random.integers(*load.mixed_prompt, load.mixed, endpoint=True).tolist()
    outputs = random.integers(*load.mixed_output, load.mixed, endpoint=True).tolist()
    rest = deque(zip(prompts, outputs, strict=True))
    started, ended = time.perf_counter(), load.mixed_open
    while rest or engine.has_work:
        for _ in range(min(ended, len(rest))):
            player.add(*rest.popleft())
        ended = player.step()
    return float((sum(prompts) + sum(outputs)) / (time.perf_counter() - started))


def compare_mixed(bounds: Bounds, load: Load, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in bounds.names}
    for turn in range(repeats):
        for name in bounds.names if turn % 2 == 0 else bounds.names[::-1]:
            rates[name].append(play_mixed(bounds.engine_with(name), load, turn))
    figures: dict[str, Any] = {name: [round(rate, 1) for rate in each] for name, each in rates.items()}
    if len(rates) == 2:
        ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
        figures["lost"] = round(1 - statistics.median(ratios), 4)
    return figures


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Bounds:
    """One engine, with the bound or without. A checkout that has none is only ever without."""

    def __init__(self, engine: Engine, asked: Sequence[str]) -> None:
        self._engine = engine
        self._pace = engine.scheduler.drafts.pace if HAS_BOUND else None
        self.names = [name for name in asked if name == "off" or self._pace is not None]
        self.bound_ms = None if self._pace is None else 1e3 * self._pace.max_seconds

    def engine_with(self, name: str) -> Engine:
        if HAS_BOUND:
            self._engine.scheduler.drafts.pace = self._pace if name == "on" else None
        return self._engine


def make_random(shape: Shape, load: Load, dtype: torch.dtype, device: str) -> Transformer:
    config = ModelConfig(
        family="llama", vocab_size=load.vocabulary, norm_eps=1e-5, max_positions=load.max_model_len,
        eos_token_ids=(2,), dtype=str(dtype).removeprefix("torch."), **asdict(shape),
    )  # fmt: skip
    return Transformer.random(config, 0, dtype, device=device)


def make_engine(args: argparse.Namespace, load: Load) -> Engine:
    given: dict[str, Any] = {"max_step_ms": args.max_step_ms} if HAS_BOUND else {}
    options = EngineOptions(
        policy=args.policy, device=args.device, max_running=load.max_running, max_model_len=load.max_model_len,
        prefix_caching=False, kv_memory=KV_BYTES if args.device == "cuda" else None, **given,
    )  # fmt: skip
    target, draft = make_models(args, load, options)
    return build_engine(target, draft, options)


def make_models(args: argparse.Namespace, load: Load, options: EngineOptions) -> tuple[Transformer, Draft]:
    if args.tiny:
        return make_random(TINY, load, torch.float32, args.device), None
    if args.device == "cuda":
        return make_random(SHAPES["llama-8b"], load, torch.bfloat16, "cuda"), None
    pair = load_pair(None, None, options)
    return pair.target, None if args.policy == "off" else pair.draft


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", default="beside,mixed")
    parser.add_argument("--bounds", default="on,off")
    parser.add_argument("--max-step-ms", type=float, help="default: the device's")
    parser.add_argument("--long", type=int, help="tokens of the long prompt")
    parser.add_argument("--policy", default="off", help="another one needs the default pair")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of the mixed load")
    args = parser.parse_args(given)
    for name, known in (("parts", {"beside", "mixed"}), ("bounds", {"on", "off"})):
        asked = getattr(args, name).split(",")
        if not set(asked) <= known:
            parser.error(f"--{name} {getattr(args, name)}: expected some of {', '.join(sorted(known))}")
        setattr(args, name, asked)
    if args.policy != "off" and (args.tiny or args.device == "cuda"):
        parser.error(f"--policy {args.policy}: only the default pair has a draft; leave out --tiny and --device cuda")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse(given)
    load = LOADS["tiny" if args.tiny else args.device]
    if args.long is not None:
        load = Load(**{**asdict(load), "long": args.long})
    started = time.perf_counter()
    engine = make_engine(args, load)
    bounds = Bounds(engine, args.bounds)
    said: dict[str, Any] = {
        "benchmark": "long_prompt", "device": args.device, "tiny": args.tiny, "policy": args.policy,
        "bound_ms": bounds.bound_ms, "load": asdict(load),
        "start_s": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    print(f"engine ready after {said['start_s']} s", flush=True)
    warm(engine, load)
    if "beside" in args.parts:
        said["beside"] = {}
        for name in bounds.names:
            said["beside"][name] = play_beside(bounds.engine_with(name), load)
            print(f"beside, bound {name}: {json.dumps(said['beside'][name])}", flush=True)
    if "mixed" in args.parts:
        said["mixed"] = compare_mixed(bounds, load, args.repeats)
        print(f"mixed: {json.dumps(said['mixed'])}", flush=True)
    engine.close()
    print(json.dumps(said))
    return 0


def warm(engine: Engine, load: Load) -> None:
    """What runs for the first time is slow: kernels are compiled and memory is touched."""
    player = Player(engine, load.vocabulary)
    for _ in range(2):
        player.add(load.mixed_prompt[1], 4)
    player.drain()


if __name__ == "__main__":
    raise SystemExit(main())
