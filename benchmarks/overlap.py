"""Does it pay to draft on while the drafts before are verified?

A closed batch decodes with random weights of real shapes, which cost what trained ones do, and drafts are accepted with
given chances whatever they say (on a CPU as they are). For every batch and chance: the best fixed length without
overlap, the best chunk with it, and `faser` without and with `auto`; milliseconds per token, how often a chunk held,
how much of the drafting was hidden. Before them what the profile says of both at a time: of the shorter of drafting and
verification, the share that is not hidden.

    python3 -m benchmarks.overlap [--target llama-8b] [--draft llama-1b] [--batches 1,4,16,64]
        [--acceptance 0.6,0.75,0.9,0.95] [--lengths 1,2,3,4,6] [--output 128] [--budget-seconds 500]
    python3 -m benchmarks.overlap --tiny --device cpu      # tiny models: does it all run?

The last line is one JSON document; it is also $OUT/overlap-TARGET-DRAFT.json (else there is none).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.cuda_steps import make_model, run_batch
from faser.config import EngineOptions
from faser.engine import Engine
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.policy import Fixed, Policy, make_policy
from faser.policy.overlap import Overlap
from faser.profile import ProfiledCost
from faser.runtime.build import build_engine
from faser.runtime.device import make_device
from tools.inflate import SHAPES

PROMPT = 128
TINY = ModelConfig(
    family="llama", vocab_size=4096, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, norm_eps=1e-5, max_positions=256, eos_token_ids=(2,), dtype="float32",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    acceptance: float | None  # of each draft; None: as they are
    batch: int
    policy: str
    overlap: str
    ms_per_token: float
    tokens_per_step: float
    step_ms: float
    hit_rate: float  # of the chunks drafted beside a verification
    hidden_ms: float  # of a step's drafting


def measure(engine: Engine, policy: Policy, overlap: str, acceptance: float | None, batch: int, output: int) -> Line:
    engine.scheduler.policy = policy
    engine.scheduler.overlap = None if overlap == "off" else Overlap(overlap)
    run_batch(engine, batch, PROMPT, max(16, output // 4))
    before = replace(engine.stats)
    found = run_batch(engine, batch, PROMPT, output)
    stats = engine.stats
    return Line(
        acceptance,
        batch,
        policy.name,
        overlap,
        found["ms_per_token"],
        found["tokens_per_step"],
        found["step_ms"],
        (stats.hits - before.hits) / max(1, stats.chunks - before.chunks),
        1e3 * (stats.hidden_seconds - before.hidden_seconds) / max(1, stats.steps - before.steps),
    )


def play(engine: Engine, args: argparse.Namespace) -> Iterator[Line]:
    for acceptance in args.acceptance:
        if acceptance is not None:
            engine.executor._acceptance.fill_(acceptance)  # type: ignore[attr-defined]
        for batch in args.batches:
            kinds = [(Fixed(length), "off") for length in args.lengths] + [(Fixed(c), "on") for c in args.lengths]
            kinds += [(make_policy("faser"), "off"), (make_policy("faser"), "auto")]
            for policy, overlap in kinds:
                if time.time() > args.until:
                    print("no time left for the rest", flush=True)
                    return
                yield measure(engine, policy, overlap, acceptance, batch, args.output)


def render(lines: Sequence[Line]) -> str:
    """Best against best."""
    text = [
        "accepted  batch   without: best, faser   with: best (hits, hidden ms), auto      best / best   auto / faser"
    ]
    for acceptance, batch in dict.fromkeys((line.acceptance, line.batch) for line in lines):
        some = [line for line in lines if (line.acceptance, line.batch) == (acceptance, batch)]
        apart, together = (
            min((line for line in some if line.overlap == kind and line.policy != "faser"), key=_ms, default=None)
            for kind in ("off", "on")
        )
        plain, auto = (next((x for x in some if x.policy == "faser" and x.overlap == o), None) for o in ("off", "auto"))
        if apart is None or together is None or plain is None or auto is None:
            continue
        chance = "–" if acceptance is None else f"{acceptance:g}"
        text.append(
            f"{chance:>8}  {batch:5}   {apart.ms_per_token:6.3f} {apart.policy}, "
            f"{plain.ms_per_token:6.3f}   {together.ms_per_token:6.3f} {together.policy} "
            f"({100 * together.hit_rate:.0f} %, {together.hidden_ms:.2f}), {auto.ms_per_token:6.3f}   "
            f"{apart.ms_per_token / together.ms_per_token:10.3f}   {plain.ms_per_token / auto.ms_per_token:10.3f}"
        )
    return "\n".join(text)


def _ms(line: Line) -> float:
    return line.ms_per_token


def build(args: argparse.Namespace) -> Engine:
    device = make_device(args.device)
    if args.tiny:
        target, draft = (Transformer.random(TINY, seed, std=0.3) for seed in (0, 0))
    else:
        target, draft = (make_model(name, seed, 4096) for seed, name in enumerate((args.target, args.draft)))
    options = EngineOptions(
        policy="faser",
        acceptance=args.acceptance[0],
        prefix_caching=False,
        max_running=max(args.batches),
        num_pages=200 if args.tiny else None,
        early_exit="off",
    )
    return build_engine(target, draft, options, device=device)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--draft", default="llama-1b", choices=SHAPES)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 3, 4, 6])
    parser.add_argument("--acceptance", default="0.6,0.75,0.9,0.95")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--budget-seconds", type=float, default=500.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(given)
    args.until = time.time() + args.budget_seconds
    args.acceptance = [float(each) for each in args.acceptance.split(",")] if args.device == "cuda" else [None]
    if args.tiny:
        args.batches, args.lengths, args.output = [1, 2], [1, 3], 32
    engine = build(args)
    share = engine.cost.profile.overlap_share if isinstance(engine.cost, ProfiledCost) else None
    if share is not None:
        shares = zip(share.rows, share.seconds, strict=True)
        print("share not hidden, by requests: " + ", ".join(f"{rows}: {each:.2f}" for rows, each in shares), flush=True)
    lines = []
    for line in play(engine, args):
        lines.append(line)
        print(
            f"{line.acceptance}  {line.batch:3} {line.policy:8} {line.overlap:4} {line.ms_per_token:7.3f} ms/token  "
            f"{line.tokens_per_step:.2f} tokens in {line.step_ms:.2f} ms, hits {100 * line.hit_rate:.0f} %",
            flush=True,
        )
    print(render(lines))
    shown = None if share is None else asdict(share)
    document = json.dumps(
        {"target": args.target, "draft": args.draft, "share": shown, "lines": list(map(asdict, lines))}
    )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / f"overlap-{args.target}-{args.draft}.json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
