"""From the journal of `benchmarks.h200 table` to figures, tables and verdicts.

Knows what was measured, the floors and the targets. Knows nothing of processes, models or GPUs, and imports the
standard library alone.

    TPOT = floor + kernels + host + prompts

floor: bytes or FLOPs of the step over what the GPU can do. kernels: the GPU's time above the floor. host: the GPU
idle between two steps. prompts: TPOT - steady TPOT, the time a request waits for prompts of other requests of its
batch; the steady TPOT is that of the time in which all requests decode and none has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.journal import Figures, failures, latest, rounded

BANDWIDTH, FLOPS = 4.3e12, 790e12  # of an H200, as measured: bytes copied, bfloat16 products
BYTES = 2  # of a bfloat16

MOST_GAP, MOST_DRAFT_MS, MOST_PREFILL, MOST_STARTUP = 0.05, 0.75, 1.15, 1.0

Runs = Mapping[tuple[Any, ...], Figures]  # by engine, length, batch


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def num_weights(shape: Mapping[str, int], vocabulary: int) -> int:
    """Weights that a step reads: the layers' matrices and the head; of the embedding it reads only a few rows."""
    attention = 2 * (shape["num_heads"] + shape["num_kv_heads"]) * shape["head_dim"] * shape["hidden_size"]
    mlp = 3 * shape["hidden_size"] * shape["intermediate_size"]
    return shape["num_layers"] * (attention + mlp) + vocabulary * shape["hidden_size"]


def floor_ms(shape: Mapping[str, int], vocabulary: int, rows: int, context: int) -> float:
    """One forward over `rows` that attend to `context` tokens in all: max(bytes / BANDWIDTH, FLOPs / FLOPS)."""
    weights = num_weights(shape, vocabulary)
    kv_bytes = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] * BYTES * context
    return 1e3 * max((BYTES * weights + kv_bytes) / BANDWIDTH, 2 * weights * rows / FLOPS)


def step_floor_ms(models: Figures, batch: int, length: int) -> float:
    """A step half-way through the output: `length` forwards of the draft, then one of the target."""
    context, vocabulary = batch * (models["prompt"] + models["output"] // 2), models["vocabulary"]
    drafting = length * floor_ms(models["draft"], vocabulary, batch, context)
    return drafting + floor_ms(models["target"], vocabulary, batch * (length + 1), context)


def prefill_floor_ms(models: Figures) -> float:
    """Mean time to first token of prompts computed one after the other: FLOPs of the matrices and of attention."""
    shape, (number, tokens) = models["target"], models["prefill"]
    attention = 2 * shape["num_layers"] * shape["num_heads"] * shape["head_dim"] * tokens**2
    one = (2 * num_weights(shape, 0) * tokens + attention) / FLOPS
    return float(1e3 * one * (number + 1) / 2)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def summarize(records: Sequence[Figures]) -> Figures:
    """The rows of all tables, and the verdicts."""
    models = latest(records, "models").get((), {})
    runs = latest(records, "run", "engine", "length", "batch")
    off = {key: run for key, run in runs.items() if key[1] == 0}
    drafting = {batch for _, length, batch in runs if length}
    summary: Figures = {
        "off": [batch_row(off, off, models, batch) for batch in batches_of(off)],
        "speculation": [batch_row(runs, off, models, batch) for batch in batches_of(runs) if batch in drafting],
        "lengths": [lengths_row(runs, batch) for batch in batches_of(runs)],
        "draft_step": draft_rows(runs, models),
        "prefill": prefill_rows(records, models),
        "startup": startup_rows(records),
        "failed": failures(records),
    }
    summary["targets"] = verdicts(summary)
    return dict(rounded(summary))


def batches_of(runs: Runs) -> list[int]:
    return sorted({batch for _, _, batch in runs})


def over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def batch_row(runs: Runs, off: Runs, models: Figures, batch: int) -> Figures:
    """The best length of each system, 0 included, and where FASER's time goes."""
    ours, theirs = (best_run(runs, engine, batch) for engine in ("faser", "vllm"))
    row: Figures = {"batch": batch, "ratio": over(theirs.get("tpot_ms"), ours.get("tpot_ms"))}
    for name in ("tpot_ms", "steady_ms", "spread", "length", "tokens_per_step"):
        row |= {f"faser_{name}": ours.get(name), f"vllm_{name}": theirs.get(name)}
    if not ours:
        return row
    other = off.get(("vllm" if runs is off else "faser", 0, batch), {})
    row |= {name: ours.get(name) for name in ("acceptance", "step_ms", "draft_ms", "verify_ms")}
    row["same_text"] = common_prefix(ours["texts"], other.get("texts", []))
    return row | parts(ours, models)


def best_run(runs: Runs, engine: str, batch: int) -> Figures:
    """Empty where the system was not measured."""
    found = [run for key, run in runs.items() if (key[0], key[2]) == (engine, batch)]
    return min(found, key=lambda run: float(run["tpot_ms"]), default={})


def parts(run: Figures, models: Figures) -> Figures:
    """The summands of a TPOT of FASER, in milliseconds per token, and `gap`, the share of a step without kernels."""
    tokens = run["tokens_per_step"]
    found = {"floor_ms": step_floor_ms(models, run["batch"], run["length"]) / tokens} if models else {}
    if run["steady_ms"] is not None:
        found["prompts_ms"] = run["tpot_ms"] - run["steady_ms"]
    if "step_ms" in run:
        gap = max(0.0, run["step_ms"] - run["draft_ms"] - run["verify_ms"])
        kernels = (run["step_ms"] - gap) / tokens - found.get("floor_ms", 0.0)
        found |= {"gap": gap / run["step_ms"], "host_ms": gap / tokens, "kernels_ms": kernels}
    return found


def common_prefix(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float | None:
    """Mean length of the common beginning of two runs' texts, in tokens; None without texts to compare."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(left, right, strict=False)
    ]
    return statistics.fmean(same) if same else None


def lengths_row(runs: Runs, batch: int) -> Figures:
    settings = sorted({(engine, length) for engine, length, _ in runs})
    return {"batch": batch} | {
        f"{engine} {length}": runs.get((engine, length, batch), {}).get("tpot_ms") for engine, length in settings
    }


def draft_rows(runs: Runs, models: Figures) -> list[Figures]:
    """Milliseconds of one more drafted token, by batch: the slope of the GPU's drafting time over lengths."""
    rows = []
    for batch in batches_of(runs):
        found = {
            length: run["draft_ms"] for (engine, length, b), run in runs.items() if b == batch and "draft_ms" in run
        }
        short, long = min(filter(None, found), default=0), max(found, default=0)
        if short < long:
            row = {"rows": batch, "lengths": f"{short}-{long}", "ms": (found[long] - found[short]) / (long - short)}
            context = batch * (models["prompt"] + models["output"] // 2)
            rows.append(row | {"floor_ms": floor_ms(models["draft"], models["vocabulary"], batch, context)})
    return rows


def prefill_rows(records: Sequence[Figures], models: Figures) -> list[Figures]:
    """One row, or none."""
    found = {engine: run for (engine,), run in latest(records, "prefill", "engine").items()}
    if not found:
        return []
    ours, theirs = (found.get(engine, {}) for engine in ("faser", "vllm"))
    row = {f"{engine}_{name}": run[name] for engine, run in found.items() for name in ("ttft_ms", "last_ms")}
    row["over"] = over(ours.get("ttft_ms"), theirs.get("ttft_ms"))
    return [row | ({"floor_ms": prefill_floor_ms(models)} if models else {})]


def startup_rows(records: Sequence[Figures]) -> list[Figures]:
    """By mode and state of the caches: seconds of both systems, and FASER over vLLM."""
    found = latest(records, "startup", "engine", "mode", "caches")
    rows = []
    for mode, caches in sorted({(mode, caches) for _, mode, caches in found}):
        ours, theirs = (found.get((engine, mode, caches), {}) for engine in ("faser", "vllm"))
        row = {"mode": mode, "caches": caches, "faser_s": ours.get("seconds"), "vllm_s": theirs.get("seconds")}
        row["over"] = over(row["faser_s"], row["vllm_s"])
        rows.append(row | {part: ours.get(part) for part in ("import_s", "load_s", "build_s")})
    return rows


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def least_speculation(batch: int) -> float:
    return 1.5 if batch <= 16 else 1.2 if batch <= 64 else 1.0


def verdict(name: str, figure: float | None, bound: float, at_least: bool = False) -> Figures:
    """`reached` is None where there is no figure."""
    reached = None if figure is None else figure >= bound if at_least else figure <= bound
    return {"name": name, "figure": figure, "target": f"{'>=' if at_least else '<='} {bound:g}", "reached": reached}


def verdicts(summary: Figures) -> list[Figures]:
    found = []
    for row in summary["off"]:
        found.append(verdict(f"off, batch {row['batch']}: vLLM over FASER", row["ratio"], 1.0, at_least=True))
        found.append(verdict(f"off, batch {row['batch']}: share without kernels", row.get("gap"), MOST_GAP))
    for row in summary["speculation"]:
        name = f"speculation, batch {row['batch']}: vLLM's best over FASER's"
        found.append(verdict(name, row["ratio"], least_speculation(row["batch"]), at_least=True))
    for row in summary["draft_step"][:1]:
        found.append(verdict(f"draft step, {row['rows']} row, ms", row["ms"], MOST_DRAFT_MS))
    for row in summary["prefill"]:
        found.append(verdict("prefill: FASER over vLLM", row["over"], MOST_PREFILL))
    for row in summary["startup"]:
        name = f"start-up, {row['mode']}, {row['caches']} caches: FASER over vLLM"
        found.append(verdict(name, row["over"], MOST_STARTUP))
    return found


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BATCHES = {
    "batch": "batch", "floor": "floor_ms", "+ kernels": "kernels_ms", "+ host": "host_ms", "+ prompts": "prompts_ms",
    "FASER TPOT": "faser_tpot_ms", "spread": "faser_spread", "steady": "faser_steady_ms", "length": "faser_length",
    "tokens/step": "faser_tokens_per_step", "step": "step_ms", "draft": "draft_ms", "verify": "verify_ms", "gap": "gap",
    "vLLM TPOT": "vllm_tpot_ms", "vLLM steady": "vllm_steady_ms", "vLLM length": "vllm_length", "ratio": "ratio",
    "same text": "same_text",
}  # fmt: skip
DRAFT_STEP = {"rows": "rows", "floor": "floor_ms", "FASER": "ms", "from lengths": "lengths"}
PREFILL = {
    "floor": "floor_ms", "FASER mean": "faser_ttft_ms", "last": "faser_last_ms", "vLLM mean": "vllm_ttft_ms",
    "vLLM last": "vllm_last_ms", "FASER/vLLM": "over",
}  # fmt: skip
STARTUP = {
    "mode": "mode", "caches": "caches", "FASER": "faser_s", "vLLM": "vllm_s", "FASER/vLLM": "over",
    "FASER imports": "import_s", "weights": "load_s", "engine": "build_s",
}  # fmt: skip
TARGETS = {"what": "name", "figure": "figure", "target": "target", "reached": "reached"}


def tables(summary: Figures) -> str:
    lengths = {name: name for row in summary["lengths"] for name in row}
    shown = [
        table("Without speculation, ms a token", BATCHES, summary["off"]),
        table("The best fixed length per batch size, ms a token", BATCHES, summary["speculation"]),
        table("TPOT by length, ms", lengths, summary["lengths"]),
        table("One step of the draft, ms", DRAFT_STEP, summary["draft_step"]),
        table("Prefill, time to first token, ms", PREFILL, summary["prefill"]),
        table("Start-up to the first token, s", STARTUP, summary["startup"]),
        table("Targets", TARGETS, summary["targets"]),
        *(f"\nFAILED {each}" for each in summary["failed"]),
    ]
    return "\n".join(each for each in shown if each)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "MISSED"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(title: str, columns: Mapping[str, str], rows: Sequence[Figures]) -> str:
    """Markdown; nothing where there are no rows, an empty cell where nothing was measured."""
    if not rows:
        return ""
    cells = [list(columns), *([cell(row.get(key)) for key in columns.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([f"\n**{title}**\n", lines[0], rule, *lines[1:]])
