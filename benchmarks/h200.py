"""FASER on an H200, and vLLM beside it: three experiments, one command.

  table     closed batches: TPOT, prefill and start-up of both systems, at every batch size  (lib/table.py)
  trace     real traffic at loads below and above saturation, both systems                   (lib/trace.py)
  policies  every policy of FASER at every concurrency, and the parts of `faser`              (lib/policies.py)

The models are SmolLM2 and its draft inside the shapes of an 8B and a 1B (lib/models.py): real acceptance at real cost.
They are made once in --folder, which all experiments share. Each system runs in processes of its own.

    python3 -m benchmarks.h200 table --target TARGET.gguf [--sections off,speculation,prefill,startup]
        [--batches 1,4,16,64,128,256] [--lengths 1,2,3,4,5,6] [--vllm-bundle DIR --vllm-trace vllm_trace.py]
    python3 -m benchmarks.h200 trace --target TARGET.gguf [--policies off,fixed:2] [--loads 0.2,0.5,1.1] [--resume]
        [--vllm-bundle DIR --vllm-trace vllm_trace.py] [--vllm-lengths 0,2]
    python3 -m benchmarks.h200 policies --target TARGET.gguf [--policies off,faser] [--concurrency 1,16,128]
    python3 -m benchmarks.h200 EXPERIMENT --report-only DIR [--folder DIR]     # measures nothing
    python3 -m benchmarks.h200 EXPERIMENT --tiny --device cpu                  # tiny models: does it all run?

Results go to $OUT (else to --folder) and are up to date at any moment: EXPERIMENT.jsonl is the journal, EXPERIMENT.log
the output of the processes. `table` ends with tables in Markdown (table.md) and one JSON line (table.json); the others
write results.json, a document of `faser bench`, tables.txt and report.html, and end with the document without its
details. What fails is listed and the rest goes on; the exit status is then 1. Needs 18 GB of disk and 80 GB of GPU
memory.

Where the machine is bare and a transfer is limited, parts of 34 MiB travel in an ignored folder. Here:

    mkdir -p build/h200 && split -b 34M TARGET.gguf build/h200/target. && split -b 34M vllm.tar.xz build/h200/vllm.
    cp vllm_trace.py build/h200/ && cp -r SITE_PACKAGES/gguf build/h200/

There, three transfers carry target.aa, target.ab and vllm.aa, each with `mkdir -p /tmp/h200 && cp build/h200/PART
/tmp/h200/`. The fourth carries the rest and measures at once, later ones carry nothing. Each call ends within
--budget-seconds; with the flags of vLLM a `trace` in one call leaves a span of 4 to 6 s, so vLLM comes in a second call
with --resume:

    cp -r build/h200/{target.ac,vllm.ab,gguf,vllm_trace.py} /tmp/h200/ && cd /tmp/h200 &&
        cat target.a? > TARGET.gguf && mkdir -p bundle && cat vllm.a? | tar xJ -C bundle && cd - &&
        python3 -m benchmarks.h200 trace --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf
        --python-path /tmp/h200
    python3 -m benchmarks.h200 trace --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
        --vllm-bundle /tmp/h200/bundle --vllm-trace /tmp/h200/vllm_trace.py --resume

At the top this module imports the standard library alone: it is also the driver inside vLLM's process, where nothing of
FASER may be loaded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import documents, models, policies, table, trace
from benchmarks.lib.journal import Journal
from benchmarks.lib.processes import Runner, worker_process
from benchmarks.lib.run_flags import add_run_flags, begin_run, refuse_missing

EXPERIMENTS = {"table": table, "trace": trace, "policies": policies}
MODELS_SECONDS = 150.0  # then the process that makes the models is ended


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, experiment in EXPERIMENTS.items():
        command = commands.add_parser(
            name, description=experiment.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = command.add_argument
        add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model)")
        add("--draft", type=Path, default=models.DRAFT, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
        add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
        add("--vllm-bundle", type=Path, help="vLLM, unpacked; without it FASER is measured alone")
        add("--vllm-trace", type=Path, help="the peer's vllm_trace.py")
        add("--batch-tokens", type=int, help="rows of a step, both systems (each chooses its own)")
        experiment.add_flags(add)
        add_run_flags(add, only_length=int)
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    begin_run(args, given)
    asked = {name: getattr(args, name, None) for name in ("batches", "lengths", "vllm_lengths")}
    chosen = {name: each for name, each in asked.items() if each and args.experiment == "table"}
    args.sizes = replace(models.TINY if args.tiny else models.Sizes(), **chosen)
    args.work = args.folder / args.experiment  # what the processes of this experiment leave for each other
    args.journal = args.work / f"{args.experiment}.jsonl"
    if args.worker is None:
        refuse_halves(parser, args)
    try:
        if args.experiment != "table":
            EXPERIMENTS[args.experiment].complete(args)
    except ValueError as error:  # ConfigError is one
        parser.error(str(error))
    return args


def refuse_halves(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Files that do not exist, and half of what vLLM takes."""
    vllm = (args.vllm_bundle, args.vllm_trace)
    refuse_missing(parser, (args.target, args.draft, args.python_path, *vllm, args.report_only))
    if (args.vllm_bundle is None) != (args.vllm_trace is None):
        parser.error("vLLM takes --vllm-bundle and --vllm-trace together")


def prepare(args: argparse.Namespace) -> Runner | None:
    """Folders, journal and models; None where the models could not be made."""
    experiment = EXPERIMENTS[args.experiment]
    if args.experiment != "table" and not getattr(args, "resume", False):
        shutil.rmtree(args.work, ignore_errors=True)
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.journal, args.started)
    journal.add("call", command=" ".join(args.given))
    log = args.out / f"{args.experiment}.log"
    runner = Runner(journal, log, args.device, lambda: experiment.save(args, journal), len(journal.read()))
    is_ready = runner.run(worker_process(args, "models", MODELS_SECONDS), args.until)
    return runner if is_ready else None


def show_again(args: argparse.Namespace) -> int:
    if args.experiment == "table":
        return table.finish(args, Journal(args.report_only / "table.jsonl", 0.0))
    document = documents.read_document(args.report_only / "results.json")
    remark = policies.comparison if args.experiment == "policies" else None
    documents.write_results(args.out, document, remark)
    documents.show(document, remark)
    return 0


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    experiment = EXPERIMENTS[args.experiment]
    if args.report_only is not None:
        return show_again(args)
    if args.worker == "models":
        models.ensure_models(args)
        return 0
    if args.worker is not None:
        experiment.work(args, Journal(args.journal, args.session))
        return 0
    runner = prepare(args)
    if runner is not None:
        experiment.run(args, runner)
    return experiment.finish(args, Journal(args.journal, args.started))


if __name__ == "__main__":
    sys.exit(main())
