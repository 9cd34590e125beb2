"""What does early exit bring? Closed loops with early exit on, off and auto, at fixed lengths and under `faser`.

The engine, the models and the prompts of `benchmarks.h200 policies`, whose flags it takes; one engine plays every
batch size, policy and mode in turn, adaptive policies twice, because the effect of `auto` on them is small. For each:
milliseconds per token, the share of drafted tokens that left early (exit ratio), the share of these that the target
would have accepted (false prunes, from trials), and the seconds saved, predicted by the profile and measured. First
come bounds from the profile: the most that could be saved in a step by dropping a sixth of the drafts, as in the paper,
and by dropping all drafts that will be refused.

    python3 -m benchmarks.early_exit --target TARGET.gguf [--policies fixed:4,fixed:6,faser]
        [--concurrency 32,64,128,256] [--folder DIR] [--python-path DIR] [--budget-seconds 560]
    python3 -m benchmarks.early_exit --tiny --device cpu      # tiny models: does it all run?

The last line is one JSON document; it is also $OUT/early_exit.json (else in --folder).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import h200
from benchmarks.lib.journal import atomic_write, failures
from benchmarks.lib.policies import Loops, open_loops
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import Engine
from faser.policy import make_policy
from faser.policy.early_exit import EarlyExit
from faser.runtime.device import make_device

DEFAULTS = ["--policies", "fixed:4,fixed:6,faser", "--concurrency", "32,64,128,256", "--ablation", ""]
MODES = ("off", "on", "auto")
PAPER_SHARE, REFUSED_SHARE = 0.16, 0.45  # of the drafts: dropped at most in the paper; refused for this pair
SHARES = (PAPER_SHARE, REFUSED_SHARE)
CONTEXT = 200  # tokens of a request, for the bounds


@dataclass(frozen=True)
class Line:
    concurrency: int
    policy: str
    mode: str
    ms_per_token: float
    tokens_per_s: float
    mean_length: float
    acceptance: float
    exit_ratio: float  # share of the drafted tokens that left early
    pruned: dict[int, int]  # by layer
    false_share: float  # share of the pruned tokens that the target accepts, from trials
    trials: int
    predicted_seconds: float  # saved
    measured_seconds: float


@dataclass(frozen=True)
class Bound:
    """Milliseconds, by the profile, of a step in which every request drafts `length` tokens."""

    concurrency: int
    length: int
    verify: float
    draft: float
    check: float  # one exit check
    sixth_before: float  # saved by dropping a sixth of the drafts before the first layer, without a check
    sixth_midway: float  # saved by dropping them after half of the layers, minus the check
    refused_before: float  # the same for all drafts that will be refused
    refused_midway: float


def bound_of(cost: ProfiledCost, size: int, length: int) -> Bound:
    rows, drafted, context = size * (length + 1), size * length, size * CONTEXT
    whole = float(cost.verify(rows, context))
    check = cost.exit_check(drafted)
    before = {share: whole - float(cost.verify(rows - round(share * drafted), context)) for share in SHARES}
    midway = {share: saved / 2 - check for share, saved in before.items()}
    draft = float(cost.first_draft(size, context)) + (length - 1) * float(cost.next_draft(size, context))
    saved = (each[share] for share in SHARES for each in (before, midway))
    return Bound(size, length, *(1e3 * seconds for seconds in (whole, draft, check, *saved)))


def render_bounds(bounds: Sequence[Bound]) -> str:
    lines = [
        "requests  length  verify ms  draft ms  look ms   saved ms, a sixth: before, midway   refused: before, midway"
    ]
    for each in bounds:
        saved = each.sixth_before, each.sixth_midway, each.refused_before, each.refused_midway
        lines.append(
            f"{each.concurrency:8}  {each.length:6}  {each.verify:9.2f}  {each.draft:8.2f}  {each.check:7.3f}"
            f"{' ' * 16}{'  '.join(f'{ms:8.2f}' for ms in saved)}"
        )
    return "\n".join(lines)


def play(
    loops: Loops, policy: str, mode: str, size: int, num_layers: int, depths: Sequence[float], warms: bool
) -> Line:
    engine = loops.engine
    engine.exits = exits = _exits_of(engine, mode, num_layers, depths)
    drafted = engine.stats.drafted
    loops.play(f"{policy}, {mode}", make_policy(policy), size, warms=warms)
    figures = loops.runs.document.runs[-1].summary
    stats = exits.stats if exits is not None else EarlyExit("off", num_layers).stats
    return Line(
        concurrency=size,
        policy=policy,
        mode=mode,
        ms_per_token=1e3 * float(figures["tpot_mean"] or 0.0),
        tokens_per_s=float(figures["output_tokens_per_s"] or 0.0),
        mean_length=float(figures["mean_length"] or 0.0),
        acceptance=float(figures["acceptance"] or 0.0),
        exit_ratio=sum(stats.pruned.values()) / max(1, engine.stats.drafted - drafted),
        pruned=dict(stats.pruned),
        false_share=stats.false_share,
        trials=stats.trials,
        predicted_seconds=stats.predicted_seconds,
        measured_seconds=stats.measured_seconds,
    )


def _exits_of(engine: Engine, mode: str, num_layers: int, depths: Sequence[float]) -> EarlyExit | None:
    if mode == "off":
        return None
    cost = engine.cost if isinstance(engine.cost, ProfiledCost) else None
    return EarlyExit(mode, num_layers, cost, depths=depths)


def render(lines: Sequence[Line]) -> str:
    text = [
        "requests  policy   mode  ms/token    tok/s  length  exits %  wrong %   saved s: predicted, measured; by layer"
    ]
    plain: dict[tuple[int, str], float] = {}
    for line in lines:
        if line.mode == "off":  # the reference of the following modes
            plain[line.concurrency, line.policy] = line.ms_per_token
        against = plain.get((line.concurrency, line.policy), line.ms_per_token) / line.ms_per_token
        text.append(
            f"{line.concurrency:8}  {line.policy:7}  {line.mode:4}  {line.ms_per_token:8.3f}  {line.tokens_per_s:7.0f}"
            f"  {line.mean_length:6.2f}  {100 * line.exit_ratio:7.1f}  {100 * line.false_share:7.1f}"
            f"  {line.predicted_seconds:8.3f} {line.measured_seconds:8.3f}  ×{against:.3f}  {line.pruned}"
        )
    return "\n".join(text)


def main(given: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else list(given)
    args = h200.parse_args(["policies", *DEFAULTS, *given])
    if args.python_path is not None:
        sys.path.insert(0, str(args.python_path))
    runner = h200.prepare(args)
    if runner is None:
        return 1
    journal = runner.journal
    loops = open_loops(args, journal)
    num_layers = json.loads((args.folder / "target" / "config.json").read_text())["num_hidden_layers"]
    depths = make_device(args.device).exit_depths
    cost = loops.engine.cost
    bounds = []
    if isinstance(cost, ProfiledCost):
        bounds = [bound_of(cost, size, length) for size in args.concurrency for length in (4, 6)]
        print(render_bounds(bounds), flush=True)
    lines: list[Line] = []
    for size in args.concurrency:
        for policy in args.policies:
            modes = MODES if policy.startswith("fixed") else (*MODES, *MODES)
            for turn, mode in enumerate(modes):
                journal.attempt(
                    f"{size} {policy}",
                    f"{mode} {turn}",
                    lambda s=size, p=policy, m=mode, t=turn: lines.append(
                        play(loops, p, m, s, num_layers, depths, warms=not t)
                    ),
                )
    print(render(lines))
    about = {"command": list(given), "bounds": [asdict(each) for each in bounds]}
    document = json.dumps({**about, "lines": [asdict(line) for line in lines]})
    atomic_write(args.out / "early_exit.json", document + "\n")
    print(document, flush=True)
    return 1 if failures(journal.read()) else 0


if __name__ == "__main__":
    sys.exit(main())
