"""How far off is the simulator? Every run of a document measured on an H200, simulated, side by side.

Takes documents of `benchmarks.h200` (trace, policies). The traffic is made anew as they made it,
steps take the seconds of the shipped profile, and drafts are accepted at the rates of the document, by category; with
--acceptance replay as the shipped sequences say. vLLM's runs and the steps of an ablation are left out.

    .venv/bin/python -m benchmarks.sim_error docs/results/h200-{azure,policies}/results.json
        [--profile NAME|FILE] [--acceptance HOW]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.policies import REQUESTS
from faser.cli.main import main as faser

AIM = 0.10
FIGURES = ("latency_per_token_mean", "output_tokens_per_s")


def traffic_of(workload: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of `faser simulate` that give a run the requests it had."""
    if run["concurrency"] is not None:
        size = int(run["concurrency"])
        lengths = "--prompt-len", "128", "--output-len", "64..192"
        return "--concurrency", str(size), "--requests", str(REQUESTS[size]), *lengths
    given = {"trace": workload["trace"], "span": workload["timing"]["span"], "rate": run["rate"]}
    given |= {"max-prompt": workload["max_prompt"], "max-output": workload["max_output"], "seed": workload["seed"]}
    return tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))


def simulate(traffic: Sequence[str], policies: Sequence[str], how: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The summary of each policy."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        with contextlib.redirect_stdout(io.StringIO()):
            named = "--policies", ",".join(policies), "--max-step-ms", "60"  # the bound of an engine on a GPU
            status = faser(["simulate", *traffic, *named, *how, "--out", str(out)])
        if status:
            raise SystemExit(status)
        return {run["system"]: run["summary"] for run in json.loads(out.read_text())["runs"]}


def compare(path: Path, how: Sequence[str]) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for run in document["runs"]:
        if run["system"] == run["policy"] and run["system"] not in document["about"].get("ablation", ()):
            groups.setdefault(traffic_of(document["workload"], run), {})[run["system"]] = run["summary"]
    lines = []
    for traffic, measured in groups.items():
        found = simulate(traffic, list(measured), how)
        for name, summary in measured.items():
            errors = {figure: found[name][figure] / summary[figure] - 1 for figure in FIGURES}
            lines.append({"traffic": " ".join(traffic[:2]), "policy": name, "measured": summary, **errors})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--profile", default="h200-8b-1b")
    parser.add_argument("--acceptance", help="as of `faser simulate`; default: the document's rates")
    args = parser.parse_args()
    said = []
    for path in args.documents:
        lines = compare(path, ("--profile", args.profile, "--acceptance", args.acceptance or str(path)))
        print(f"{path}\n{'':20} policy              ms/token measured, off by     tok/s measured, off by")
        for line in lines:
            latency, rate = (line["measured"][figure] for figure in FIGURES)
            off = [f"{100 * line[figure]:+6.1f} %" for figure in FIGURES]
            print(f"{line['traffic']:20} {line['policy']:18} {1e3 * latency:18.2f} {off[0]}  {rate:22,.0f} {off[1]}")
        worst = {figure: max(abs(line[figure]) for line in lines) for figure in FIGURES}
        beyond = sum(any(abs(line[figure]) > AIM for figure in FIGURES) for line in lines)
        print(f"worst: {', '.join(f'{name} {100 * each:.1f} %' for name, each in worst.items())}")
        print(f"{len(lines) - beyond} of {len(lines)} within {100 * AIM:g} %\n", flush=True)
        said.append({"document": str(path), "runs": len(lines), "beyond": beyond, "worst": worst})
    print(json.dumps(said))


if __name__ == "__main__":
    main()
