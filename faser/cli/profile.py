"""`faser profile`: measure what forwards cost, print it, save it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from faser.cli import arguments
from faser.config import EngineOptions
from faser.cost.curve import Curve
from faser.cost.overlap import OverlapProfile
from faser.cost.profile import CURVES, Profile
from faser.errors import ConfigError

TARGET_ERROR = 0.075  # mean error of predictions, of either model, above which the command says so
TITLES = {
    "verify": "verification, by rows",
    "prompts": "with prompts, by rows",
    "first_draft": "first drafted token, by requests",
    "next_draft": "each further drafted token, by requests",
    "catch_up": "first drafted token where the draft catches up, by rows",
}


def profile(args: argparse.Namespace) -> int:
    if args.budget is not None and not 0 < args.budget < float("inf"):
        raise ConfigError(f"--budget {args.budget:g}: expected seconds above 0")
    options = EngineOptions(**arguments.engine_fields(args))
    from faser.build import load_pair, measure_profile

    found, seconds = measure_profile(load_pair(args.model, args.draft, options), options, args.budget)
    print(render(found), end="\n\n")
    print(f"measured in {seconds:.1f} s, {_keep(found, args.out)}", end="\n\n")
    print(json.dumps(found.to_dict()))
    return 0


def _keep(found: Profile, out: str | None) -> str:
    """Save the profile; where it went, for people."""
    if out is None:
        from faser.runtime.profiling.saved import keep

        reason = found.why_not_kept()
        if reason is not None:
            return f"not kept: {reason}; try again when the machine is idle, or with a larger --budget"
        kept = keep(found)
        return "not kept" if kept is None else f"kept in {kept}"
    path = Path(out).expanduser()
    try:
        found.save(path)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error})") from None
    return f"written to {path}"


def render(found: Profile) -> str:
    about = "\n".join(f"{name}: {value}" for name, value in found.about.items())
    tables = [_table(TITLES[name], getattr(found, name)) for name in CURVES]
    tables += map(_beside_table, found.besides)
    return "\n\n".join([about, *tables, _verdict(found)])


def _table(title: str, curve: Curve) -> str:
    end = "" if curve.is_stepped else f" up to {curve.stepped_to:,}"
    steps = f"; sizes in between cost as much as the next larger{end}" if curve.stepped_to else ""
    if not any(curve.seconds):
        return f"{title}: nothing to measure"
    cells: list[tuple[str, ...]] = [("", "ms", "µs per 1,000 tokens of context")]
    points = zip(curve.rows, curve.seconds, curve.per_token, strict=True)
    cells += [(f"{rows:,}", f"{1e3 * seconds:.3f}", f"{1e9 * each:.2f}") for rows, seconds, each in points]
    return "\n".join([title + steps, *_aligned(cells)])


def _beside_table(beside: OverlapProfile) -> str:
    """Drafting and verification at the same time, on one split of the device's SMs."""
    where = f"{beside.draft_sms} SMs reserved for drafting" if beside.draft_sms else "all SMs shared"
    columns = (beside.draft, beside.verify, beside.together)
    cells: list[tuple[str, ...]] = [("", "draft alone", "verify alone", "together", "not hidden")]
    cells += [
        (
            f"{size:,}",
            *(f"{1e3 * each.seconds[i]:.3f} ms" for each in columns),
            f"{100 * beside.share.seconds[i]:.0f} %",
        )
        for i, size in enumerate(beside.share.rows)
    ]
    return "\n".join([f"drafting during verification, {where}, by requests", *_aligned(cells)])


def _aligned(cells: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ("  ".join(map(str.rjust, row, widths)) for row in cells)


def _verdict(found: Profile) -> str:
    checks = [] if found.stop_seconds is None else [f"a confidence check: {1e3 * found.stop_seconds:.3f} ms"]
    lines = [
        f"host, each step: {1e3 * found.host:.3f} ms",
        *checks,
        f"error on batches it was not made from: {found.accuracy}",
    ]
    over = [name for name in ("verify", "draft") if found.errors.get(name, 0.0) > TARGET_ERROR]
    if over:
        lines.append(
            f"{' and '.join(over)}: above the {100 * TARGET_ERROR:.1f} % aimed at; try again when the machine is idle, "
            "or with a larger --budget"
        )
    return "\n".join(lines)
