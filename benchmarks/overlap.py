"""Does it pay to draft on while the drafts before are verified?

A closed batch decodes with random weights of real shapes, which cost what trained ones do, and each draft is accepted
with a given probability (on a CPU, and with --natural, as the target decides). With --natural the default model and its
draft inside these shapes (tools/inflate.py) answer Spec-Bench prompts. For every batch and acceptance rate:

  off    the best fixed length without overlap
  ride   the longest length with overlap; after a miss a request gets one token in the next step while it drafts anew
  lead   the best fixed length with overlap; after a miss a request drafts again before the verification
  auto   `faser` without and with overlap where it is expected to pay, --repeats times by turns: medians, and each pair

The device is split as the profile finds best for the batch, or as --split says. Printed are milliseconds per token, the
share of frontiers that held, and the milliseconds that overlapping saved of a step with the same length; the document
also has the milliseconds per token that the profile predicts. First comes what the profile says of drafting and
verification at the same time, by split and requests: seconds of each alone on its part of the device, of both
together, and contention = (together - max(alone)) / min(alone).

    python3 -m benchmarks.overlap [--target llama-8b] [--draft llama-1b] [--batches 1,4,16,64]
        [--acceptance 0.6,0.75,0.9,0.95] [--lengths 1,3,5,7] [--output 128] [--repeats 3]
        [--split SMS] [--budget-seconds 500]
    python3 -m benchmarks.overlap --natural SMALL.gguf [--target …] [--draft …] [--batches …]
    python3 -m benchmarks.overlap --tiny --device cpu      # tiny models: does it all run?

The last line is one JSON document, with the profile; it is also $OUT/overlap-TARGET-DRAFT.json (else there is none).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cuda_steps import make_model, run_batch
from benchmarks.lib.models import DRAFT, inflated_pair
from faser.arrays import IntArray
from faser.bench.systems import load_vocabulary
from faser.build import build_engine
from faser.config import EngineOptions
from faser.cost.overlap import OverlapProfile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import Engine
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from faser.policy import BatchView, Fixed, Policy, make_policy
from faser.policy.overlap import Chunks, Overlap, lead_speed, plain_speed, ride_speed, worthwhile
from faser.runtime.device import make_device
from faser.traffic.workload import Load, WorkloadOptions, make_workload
from tools.inflate import SHAPES

PROMPT = 128
HIDDEN = 4  # drafts, for comparing splits
TINY = ModelConfig(
    family="llama", vocab_size=4096, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, norm_eps=1e-5, max_positions=256, eos_token_ids=(2,), dtype="float32",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    acceptance: float | None  # probability of each draft; None: the target decides
    batch: int
    policy: str
    overlap: str  # off, ride, lead or auto
    ms_per_token: float
    tokens_per_step: float
    step_ms: float
    hit_rate: float  # share of the frontiers drafted beside a verification that held
    split: int  # SMs of the drafting, in most of the steps that overlapped
    overlapped: float  # share of the steps that overlapped
    predicted_ms: float | None = None  # per token


class Watched(Overlap):
    """Counts the splits that were chosen."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.splits: Counter[int] = Counter()

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        found = super().chunks(view, lengths)
        if found is not None:
            self.splits[found.draft_sms] += 1
        return found


def measure(
    engine: Engine, policy: Policy, overlap: str, acceptance: float | None, batch: int, args: argparse.Namespace
) -> Line:
    output = args.output
    cost = fresh_cost(engine)  # learned factors of earlier lines are dropped
    if cost is not None:
        engine.cost = engine.scheduler.drafts.cost = cost
    split = best_split(cost, batch) if args.split is None else args.split
    worth = worthwhile(cost) if cost is not None else set()
    how = {
        "auto": lambda: Watched("auto", splits=worth) if worth else None,  # as an engine does at start
        "ride": lambda: Watched("on", draft_sms=split),
        "lead": lambda: Watched("on", leads=True, draft_sms=split),
    }
    chooser = how[overlap]() if overlap in how else None
    engine.scheduler.drafts.policy, engine.scheduler.overlap = policy, chooser
    run_batch(engine, batch, PROMPT, max(12, output // 2), prompts=args.prompts)
    before = replace(engine.stats)
    if chooser is not None:
        chooser.splits.clear()
    found = run_batch(engine, batch, PROMPT, output, prompts=args.prompts)
    stats = engine.stats
    splits = chooser.splits if chooser is not None else Counter[int]()
    return Line(
        acceptance,
        batch,
        policy.name,
        overlap,
        found["ms_per_token"],
        found["tokens_per_step"],
        found["step_ms"],
        (stats.hits - before.hits) / max(1, stats.chunks - before.chunks),
        splits.most_common(1)[0][0] if splits else 0,
        splits.total() / max(1, stats.steps - before.steps),
        predict(fresh_cost(engine), policy, overlap, acceptance, batch, split, args),
    )


def fresh_cost(engine: Engine) -> ProfiledCost | None:
    return ProfiledCost(engine.cost.profile) if isinstance(engine.cost, ProfiledCost) else None


def predict(
    cost: ProfiledCost | None,
    policy: Policy,
    overlap: str,
    acceptance: float | None,
    batch: int,
    split: int,
    args: argparse.Namespace,
) -> float | None:
    """Milliseconds per token; None unless the length is fixed and the acceptance rate is given."""
    if cost is None or acceptance is None or not isinstance(policy, Fixed):
        return None
    view, rates = BatchView.alike(batch, PROMPT + args.output // 2, cost), np.full(batch, acceptance)
    length = policy.length
    speed = {
        "off": lambda: plain_speed(view, rates, np.full(batch, length)),
        "ride": lambda: ride_speed(view, rates, length, split),
        "lead": lambda: lead_speed(view, rates, length, split),
    }
    return 1e3 * batch / speed[overlap]()


def best_split(cost: ProfiledCost | None, batch: int) -> int:
    """SMs of the drafting with which the most of HIDDEN drafts is hidden behind the verification."""
    if cost is None or not cost.overlap.splits:
        return 0
    context = batch * PROMPT
    verify = float(cost.verify(batch * (HIDDEN + 1), context))
    draft = float(cost.first_draft(batch, context)) + HIDDEN * float(cost.next_draft(batch, context))
    return max(cost.overlap.splits, key=lambda split: cost.overlap.hidden(draft, verify, batch, split))


def play(engine: Engine, args: argparse.Namespace) -> Iterator[Line]:
    for acceptance in args.acceptance:
        if acceptance is not None:
            engine.executor.verifier.acceptance.fill_(acceptance)  # type: ignore[attr-defined]
        for batch in args.batches:
            kinds: list[tuple[Policy, str]] = [
                (Fixed(length), how) for how in ("off", "lead") for length in args.lengths
            ]
            kinds.append((Fixed(max(args.lengths)), "ride"))
            kinds += [(make_policy("faser"), how) for _ in range(args.repeats) for how in ("off", "auto")]
            for policy, overlap in kinds:
                if time.time() > args.until:
                    print("no time left for the rest", flush=True)
                    return
                yield measure(engine, policy, overlap, acceptance, batch, args)


def render(lines: Sequence[Line]) -> str:
    """Best against best. After each: speed-up, hit rate, saved milliseconds, SMs of the drafting."""
    text = ["accepted  batch  without: best, faser | ride | lead | auto (share of steps)"]
    for acceptance, batch in dict.fromkeys((line.acceptance, line.batch) for line in lines):
        some = [line for line in lines if (line.acceptance, line.batch) == (acceptance, batch)]
        fixed = {
            kind: min(each, key=_ms)
            for kind in ("off", "ride", "lead")
            if (each := [line for line in some if line.overlap == kind and line.policy != "faser"])
        }
        plain, auto = ([line for line in some if (line.policy, line.overlap) == ("faser", o)] for o in ("off", "auto"))
        if len(fixed) < 3 or not auto:
            continue
        before, after = (statistics.median(map(_ms, lines)) for lines in (plain, auto))
        pairs = ", ".join(_times(*pair) for pair in zip(plain, auto, strict=False))
        overlapped = statistics.mean(line.overlapped for line in auto)
        apart = fixed.pop("off")
        ways = " | ".join(
            f"{each.ms_per_token:.3f} {each.policy} {_times(apart, each)} ({100 * each.hit_rate:.0f} %, "
            f"{saved(some, each):.2f}, {each.split})"
            for each in fixed.values()
        )
        chance = "–" if acceptance is None else f"{acceptance:g}"
        text.append(
            f"{chance:>8}  {batch:5}  {apart.ms_per_token:.3f} {apart.policy}, {before:.3f} | {ways} | "
            f"{after:.3f} {before / after:.3f}× ({100 * overlapped:.0f} %; {pairs})"
        )
    return "\n".join(text)


def saved(lines: Sequence[Line], line: Line) -> float:
    """Milliseconds of a step, against one of the same policy that drafts and then verifies."""
    return next(x.step_ms for x in lines if x.overlap == "off" and x.policy == line.policy) - line.step_ms


def _times(before: Line, after: Line) -> str:
    return f"{before.ms_per_token / after.ms_per_token:.3f}×"


def _ms(line: Line) -> float:
    return line.ms_per_token


def build(args: argparse.Namespace) -> Engine:
    options = EngineOptions(
        policy="faser",
        acceptance=args.acceptance[0],
        prefix_caching=False,
        max_running=max(args.batches),
        num_pages=200 if args.tiny else None,
        profiling="full",
        early_exit="off",
        overlap="on",  # whatever the profile says, so that all ways can be tried
    )
    device = make_device(args.device)
    if args.natural is not None:
        options = replace(options, max_model_len=4096)
        (target, draft), _ = inflated_pair(args.natural, DRAFT, (args.target, args.draft), args.device)
    elif args.tiny:
        target, draft = (Transformer.random(TINY, seed, std=0.3) for seed in (0, 0))
    else:
        target, draft = (make_model(name, seed, 4096) for seed, name in enumerate((args.target, args.draft)))
    return build_engine(target, draft, options, device=device)


def natural_prompts(args: argparse.Namespace) -> list[tuple[int, ...]]:
    vocabulary = load_vocabulary(str(args.natural), 4096, chat=True)
    traffic = WorkloadOptions(
        requests=max(args.batches), prompt_len=(PROMPT, PROMPT), output_len=(args.output, args.output),
        prompts="specbench",
    )  # fmt: skip
    return [tuple(item.prompt_token_ids) for item in make_workload(traffic, Load(concurrency=1), vocabulary).items]


def describe(beside: OverlapProfile) -> Iterator[str]:
    for i, size in enumerate(beside.share.rows):
        draft, verify, both = (1e3 * each.seconds[i] for each in (beside.draft, beside.verify, beside.together))
        yield f"{size}: {draft:.2f} and {verify:.2f} ms, together {both:.2f}, share {beside.share.seconds[i]:.2f}"


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--draft", default="llama-1b", choices=SHAPES)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--lengths", type=numbers, default=[1, 3, 5, 7])
    parser.add_argument("--acceptance", default="0.6,0.75,0.9,0.95")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=500.0)
    parser.add_argument(
        "--natural", type=Path, metavar="SMALL.gguf", help="the default model, to be put inside the shapes"
    )
    parser.add_argument("--split", type=int, help="SMs of the drafting; 0: all are shared")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(given)
    args.until = time.time() + args.budget_seconds
    is_given = args.device == "cuda" and args.natural is None
    args.acceptance = [float(each) for each in args.acceptance.split(",")] if is_given else [None]
    if args.tiny:
        args.batches, args.lengths, args.output = [1, 2], [1, 3], 32
    args.prompts = natural_prompts(args) if args.natural is not None else None
    engine = build(args)
    profile = engine.cost.profile if isinstance(engine.cost, ProfiledCost) else None
    if isinstance(engine.cost, ProfiledCost) and hasattr(engine.executor, "prepare_overlap"):
        used = {best_split(engine.cost, batch) for batch in args.batches} if args.split is None else {args.split}
        engine.executor.prepare_overlap(used | worthwhile(engine.cost))
    for beside in profile.besides if profile is not None else ():
        print(f"drafting on {beside.draft_sms or 'all'} SMs: " + ", ".join(describe(beside)), flush=True)
    lines = []
    for line in play(engine, args):
        lines.append(line)
        print(
            f"{line.acceptance}  {line.batch:3} {line.policy:8} {line.overlap:4} {line.ms_per_token:7.3f} ms/token  "
            f"{line.tokens_per_step:.2f} tokens in {line.step_ms:.2f} ms, hits {100 * line.hit_rate:.0f} %",
            flush=True,
        )
    print(render(lines))
    document = json.dumps(
        {
            "target": args.target,
            "draft": args.draft,
            "natural": args.natural is not None,
            "profile": profile.to_dict() if profile is not None else None,
            "lines": list(map(asdict, lines)),
        }
    )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / f"overlap-{args.target}-{args.draft}.json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
