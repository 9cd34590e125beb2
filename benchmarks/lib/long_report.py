"""From the journal of benchmarks/long_context.py to figures, tables and aims.

Figures measured later replace earlier ones. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.lib.heads_report import Aim
from benchmarks.lib.journal import Figures, failures, latest
from benchmarks.lib.table_report import FLOPS, num_weights, over

VERIFY_ROWS = 5
OVER_ONE_ROW, OVER_FLOOR = 1.15, 1.2  # of attention of VERIFY_ROWS rows, at AIM_CASE
AIM_CASE = (32_768, 24)  # context, requests


def prompt_floor_s(shape: Mapping[str, int], tokens: int) -> float:
    """Seconds for one prompt: FLOPs of the matrices and of attention over what the tensor cores do."""
    attention = 2 * shape["num_layers"] * shape["num_heads"] * shape["head_dim"] * tokens**2
    return float((2 * num_weights(shape, 0) * tokens + attention) / FLOPS)


def summarize(records: Sequence[Figures]) -> Figures:
    engines = latest(records, "engine", "context", "requests", "mode")
    found: Figures = {
        "kernels": kernel_rows(records),
        "capacity": capacity_rows(records),
        "prefill": prefill_rows(records, engines),
        "loops": loop_rows(records),
        "trace": trace_rows(records),
        "vllm": [_plain(record) for record in latest(records, "note", "mode", "acceptance").values()],
    }
    return {**found, "aims": list(map(str, aims(found))), "failed": failures(records)}


def _plain(record: Figures) -> Figures:
    return {name: value for name, value in record.items() if name not in ("kind", "session")}


def kernel_rows(records: Sequence[Figures]) -> list[Figures]:
    """Attention at every number of rows, against one row and against the memory floor."""
    found = latest(records, "kernel", "context", "requests", "rows")
    rows = []
    for (context, requests, number), record in sorted(found.items()):
        one = found.get((context, requests, 1), {}).get("attend_us")
        rows.append(
            {
                "context": context, "requests": requests, "rows": number, "attend_us": record["attend_us"],
                "floor_us": record["floor_us"], "over_one_row": over(record["attend_us"], one),
                "over_floor": over(record["attend_us"], record["floor_us"]),
            }
        )  # fmt: skip
    return rows


def capacity_rows(records: Sequence[Figures]) -> list[Figures]:
    """KV tokens of each mode, how many times those of whole contexts, and requests that fit by context."""
    found = {mode: record for (mode,), record in latest(records, "capacity", "mode").items()}
    whole = found.get("whole", {}).get("tokens")
    return [
        {"mode": mode, "tokens": record["tokens"], "over_whole": over(record["tokens"], whole), **record["fitting"]}
        for mode, record in found.items()
    ]


def prefill_rows(records: Sequence[Figures], engines: Mapping[tuple[Any, ...], Figures]) -> list[Figures]:
    shape = next((record["shapes"]["target"] for record in engines.values()), None)
    rows = []
    for record in latest(records, "prefill", "context", "mode", "policy").values():
        floor = None if shape is None else round(prompt_floor_s(shape, record["tokens"]), 5)
        rows.append({**_plain(record), "floor_s": floor})
    return sorted(rows, key=lambda row: (row["context"], row["mode"], row["policy"]))


def loop_rows(records: Sequence[Figures]) -> list[Figures]:
    """Every system at every case, and how many times the tokens/s of others `faser` with a window gives."""
    found = latest(records, "loop", "context", "requests", "mode", "policy")
    rows = []
    for context, requests in sorted({key[:2] for key in found}):
        systems = {
            f"{mode} {policy}".removesuffix(" vllm"): record
            for (*case, mode, policy), record in found.items()
            if tuple(case) == (context, requests)
        }
        rates = {name: record["tokens_per_s"] for name, record in systems.items() if record["tokens_per_s"]}
        own = rates.get("window faser")
        rivals = {
            "off": _best(rates, " off"), "whole": _best(rates, "whole "), "fixed": _best(rates, "window fixed"),
            "vllm_off": rates.get("vllm:off"), "vllm": _best(rates, "vllm:"),
        }  # fmt: skip
        rows.append(
            {
                "context": context, "requests": requests,
                "systems": {name: _plain(record) for name, record in systems.items()},
                "window_faser_over": {name: over(own, rate) for name, rate in rivals.items()},
            }
        )  # fmt: skip
    return rows


def _best(rates: Mapping[str, float], part: str) -> float | None:
    """The highest of the systems whose name begins or ends with `part`."""
    return max((rate for name, rate in rates.items() if name.startswith(part) or name.endswith(part)), default=None)


def trace_rows(records: Sequence[Figures]) -> list[Figures]:
    """Every load; `faser` against the best of the fixed lengths and of vLLM: above 1 it is ahead."""
    found = latest(records, "trace", "load", "system")
    rows = []
    for load in sorted({load for load, _ in found}):
        systems = {system: _plain(record) for (at, system), record in found.items() if at == load}
        own = systems.get("faser", {})
        ahead = {}
        for name, part in (("fixed", "fixed:"), ("off", "off"), ("vllm", "vllm:")):
            others = [each for system, each in systems.items() if system.startswith(part)]
            if own and others:
                latency = min(each["latency_per_token_mean"] for each in others)
                rate = max(each["output_tokens_per_s"] for each in others)
                ahead[name] = {
                    "latency": over(latency, own["latency_per_token_mean"]),
                    "tokens_per_s": over(own["output_tokens_per_s"], rate),
                }
        rows.append({"load": load, "systems": systems, "faser_over": ahead})
    return rows


def aims(found: Figures) -> Iterator[Aim]:
    for row in found["kernels"]:
        if (row["context"], row["requests"]) == AIM_CASE and row["rows"] == VERIFY_ROWS:
            where = f"{row['context']} × {row['requests']}, {VERIFY_ROWS} rows"
            if row["over_one_row"]:
                yield Aim("attention over one row's", where, row["over_one_row"], at_most=OVER_ONE_ROW)
            yield Aim("attention over its memory floor", where, row["over_floor"], at_most=OVER_FLOOR)
    for row in found["loops"]:
        for name in ("off", "vllm"):
            value = row["window_faser_over"][name]
            if value:
                what = f"tokens/s of faser with a window over the best of {name}"
                yield Aim(what, f"{row['context']} × {row['requests']}", value, at_least=1.0)
    for row in found["trace"]:
        if "fixed" in row["faser_over"]:
            what = "latency per token of the best fixed length over faser's"
            yield Aim(what, f"load {row['load']:g}", row["faser_over"]["fixed"]["latency"], at_least=1.0)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────

LOOP_COLUMNS = (
    "tokens_per_s", "running", "step_ms", "floor_ms", "draft_ms", "verify_ms", "tokens_per_step", "mean_length",
    "acceptance", "turns",
)  # fmt: skip


def tables(found: Figures) -> str:
    parts = [
        _table("Attention of the 8B, µs a layer", found["kernels"]),
        _table("Capacity, KV tokens", found["capacity"]),
        _table("One prompt alone", found["prefill"]),
    ]
    for row in found["loops"]:
        systems = [
            {"system": name, **{each: figures.get(each) for each in LOOP_COLUMNS}}
            for name, figures in row["systems"].items()
        ]
        parts.append(_table(f"{row['context']} × {row['requests']}", systems))
    for row in found["trace"]:
        names = ("output_tokens_per_s", "latency_per_token_mean", "ttft_mean", "mean_length")
        systems = [
            {"system": name, **{each: figures.get(each) for each in names}} for name, figures in row["systems"].items()
        ]
        parts.append(_table(f"Trace, load {row['load']:g}", systems))
    return "\n".join([*filter(None, parts), *found["aims"], *(f"FAILED {each}" for each in found["failed"])])


def _table(title: str, rows: Sequence[Figures]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [f"{title}\n", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)
