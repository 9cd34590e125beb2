"""From runs to the document: every run with its summary, and results of other systems read from files.

Reads a document of `faser bench`, and what scripts for vLLM write: one record per line, or a summary. All systems have
the same definitions of figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.errors import ConfigError
from faser.traffic.document import FIGURES, Document, Record, Run, RunDocument
from faser.traffic.summary import Slo, categories, summarize
from faser.traffic.workload import Load

NEAR = 0.05  # rates that differ by a smaller share are the same load

# Figure → its name in a summary of vLLM's script, and the factor to our unit.
_FOREIGN = {
    "requests": ("requests", 1.0),
    "output_tokens": ("output_tokens", 1.0),
    "seconds": ("makespan_s", 1.0),
    "output_tokens_per_s": ("output_tokens_per_s", 1.0),
    "latency_per_token_mean": ("mean_ms_per_token", 1e-3),
    "latency_per_token_p99": ("p99_ms_per_token", 1e-3),
    "tpot_mean": ("mean_tpot_ms", 1e-3),
    "ttft_mean": ("mean_ttft_ms", 1e-3),
    "ttft_p99": ("p99_ttft_ms", 1e-3),
}


def run_document(run: Run, *, policy: str | None, load: Load, repeat: int, slo: Slo | None) -> RunDocument:
    return RunDocument(
        system=run.system,
        policy=policy,
        rate=load.rate,
        concurrency=load.concurrency,
        repeat=repeat,
        partial=run.partial,
        summary=summarize(run, slo),
        phases=run.phases,
        verified_per_position=run.verified_per_position,
        accepted_per_position=run.accepted_per_position,
        moments=run.moments,
        categories=categories(run.records),
        records=run.records,
        about=run.about,
    )


def read_against(path: Path, name: str, loads: Sequence[Load], slo: Slo | None) -> list[RunDocument]:
    """The runs of another system, each under the load with the nearest rate."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--against {path}: cannot be read ({error})") from None
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"--against {path}: not JSON ({error})") from None
    last = lines[-1] if lines and isinstance(lines[-1], dict) else {}
    try:
        if "version" in last:
            runs = [replace(run, system=f"{name} {run.system}") for run in Document.from_dict(last).runs]
        elif "token_ids" in last:
            runs = [_of_records(lines, name, slo)]
        else:
            runs = [_of_summary(summary, name) for summary in last.get("closed_loop", [last])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--against {path}: expected a document of faser bench, or the records or the summary of a workload "
            f"played elsewhere ({reason})"
        ) from None
    return [_placed(run, loads) for run in runs]


def _of_records(lines: Sequence[Mapping[str, Any]], name: str, slo: Slo | None) -> RunDocument:
    records = tuple(
        Record(
            index=index,
            category=str(line.get("category", "")),
            num_prompt=line["prompt_tokens"],
            arrival=line["arrival"],
            # the script's latencies count from when the request was sent, ours from when it was due
            first=line["finished_at"] - line["latency"] + line["ttft"],
            end=line["finished_at"],
            num_tokens=len(line["token_ids"]),
        )
        for index, line in enumerate(lines)
    )
    first, last = records[0].arrival, records[-1].arrival
    run = Run(name, records, max(line["finished_at"] for line in lines) - first)
    rate = (len(records) - 1) / (last - first) if last > first else None
    return run_document(run, policy=None, load=Load(rate), repeat=0, slo=slo)


def _of_summary(given: Mapping[str, Any], name: str) -> RunDocument:
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    for figure, (foreign, factor) in _FOREIGN.items():
        figures[figure] = factor * given[foreign]
    return RunDocument(name, None, None, given.get("batch"), 0, False, figures)


def _placed(run: RunDocument, loads: Sequence[Load]) -> RunDocument:
    """Under the load of the same rate; if only one load was played, under that one."""
    if len(loads) == 1:
        return replace(run, rate=loads[0].rate, concurrency=loads[0].concurrency)
    for load in loads:
        if run.rate is not None and load.rate is not None and abs(run.rate / load.rate - 1) < NEAR:
            return replace(run, rate=load.rate)
    return run
