"""What draft heads bring on a GPU: EAGLE-3 and block heads against a draft model, no draft, and vLLM.

The target is SmolLM2 inside the shape of an 8B, the draft model one inside that of a 1B (lib/models.py), and heads that
were trained for SmolLM2 (tools/train_head.py) are put inside the same shape (tools/heads/inflate.py): real acceptance
at real cost. Parts (--parts):

  loops      closed loops of 1 to 256 open requests, greedy and at temperature 1, on Spec-Bench (first turns, prompts of
             128 tokens) and on its questions of the category `coding`: ms a token, tokens a step
  published  heads of published shapes with random weights, 8B, of which drafts are accepted with chances by position
             whose sum is the published one (lib/head_models.py says how they are chosen): ms a token
  off        steps with a head in memory and no drafts against steps of an engine without a draft, by turns in one
             process: the ratio
  equal      tokens a verification with the same EAGLE-3 folder in both systems, greedy

Modes (--modes), each in a process of its own:

  off, model, eagle3, block              FASER without a draft, with the 1B, with a head: `faser` and fixed lengths
  published:eagle3|dspark2|dspark5       of `published`; fixed lengths, for random weights have no confidence
  idle:eagle3|block                      of `off`
  vllm:off, vllm:eagle3:K, vllm:model:K  vLLM: asynchronous scheduling, CUDA graphs up to what the largest batch needs;
                                         those that speculate count drafts (vLLM's statistics are on)

    python3 -m benchmarks.heads --target TARGET.gguf --eagle3 HEAD --block HEAD [--parts loops,published,off,equal]
        [--modes off,model,eagle3,block,vllm:eagle3:3] [--batches 1,16,64] [--texts specbench,code]
        [--temperatures 0,1] [--lengths 2,4] [--vllm-bundle DIR] [--python-path DIR] [--folder DIR]
    python3 -m benchmarks.heads --report-only DIR            # measures nothing
    python3 -m benchmarks.heads --tiny --device cpu          # tiny random models and heads, no vLLM: does it all run?

Milliseconds a token are the mean over requests of (last - first token) / (tokens - 1), end tokens ignored. A loop has
at least six requests, and is warmed up by a short one. Longer drafts are not tried where a shorter one takes 1.3 times
the best. Without --vllm-bundle vLLM's modes are left out.

All modes take more than one call of ten minutes. Calls with the same --folder share models, caches and the journal;
figures measured later replace earlier ones. Results go to $OUT (else to --folder): heads.jsonl is the journal,
heads.log the output of the processes, heads.md the tables. The last line is one JSON document, with every ratio beside
its aim. What fails is listed and the rest goes on; the exit status is then 1.

To a bare machine models and vLLM are carried as benchmarks/h200.py says, in parts of 34 MiB. The two heads, of a few MB
each, go with the last transfer:

    cp -r EAGLE3_HEAD build/h200/eagle3 && cp -r BLOCK_HEAD build/h200/block                        # here
    cp -r build/h200/{eagle3,block} /tmp/h200/ && python3 -m benchmarks.heads --folder /tmp/h200/work
        --target /tmp/h200/TARGET.gguf --eagle3 /tmp/h200/eagle3 --block /tmp/h200/block --python-path /tmp/h200
        --parts loops --modes off,model,eagle3,block                                                # there

At the top this module imports the standard library alone: it is also the driver inside vLLM's process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.lib import head_models, models
from benchmarks.lib.head_models import HEADS, PUBLISHED, TEXTS, expected_tokens, loop_requests
from benchmarks.lib.heads_report import summarize, tables
from benchmarks.lib.journal import Figures, Journal, read_json
from benchmarks.lib.processes import Process, Runner, worker_process
from benchmarks.lib.run_flags import add_run_flags, begin_run, refuse_missing
from benchmarks.vllm_plugin import CPU_ENVIRONMENT, Answer, Mode, Player, Shape, chosen_from, left, short

MODULE = "benchmarks.heads"
PARTS = ("loops", "published", "off", "equal")
OWN_MODES = (
    "off", "model", "eagle3", "block", "published:eagle3", "published:dspark2", "published:dspark5", "idle:eagle3",
    "idle:block",
)  # fmt: skip
MODES = (*OWN_MODES, "vllm:off", "vllm:eagle3:3", "vllm:eagle3:5", "vllm:model:3")
LENGTHS = {"model": (2, 4), "eagle3": (2, 4), "block": (3, 7), "published": (2, 4, 7)}  # fixed ones
MODELS_SECONDS, MODE_SECONDS = 240.0, 520.0  # of a process; then it is ended
KV_BYTES = {"loops": 40 << 30, "idle": 16 << 30}  # of one engine
HOPELESS = 1.3  # times the best: no longer drafts are tried
EQUAL_REQUESTS = 64


@dataclass(frozen=True)
class LoopSizes:
    """Requests and tokens of all parts."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    published: tuple[int, ...] = (1, 16, 64)
    idle: tuple[int, ...] = (1, 16, 128)
    idle_turns: int = 5
    equal: int = 16
    output: int = 128
    lengths: tuple[int, ...] = ()  # those of LENGTHS


TINY_LOOPS = LoopSizes((1, 2), (1,), (2,), 2, equal=2, output=6, lengths=(2,))


@dataclass(frozen=True)
class Counts:
    """Totals of an engine, over requests: steps behind the first token and what they gave, verifications of drafts and
    what they accepted. Drafts behind the end of an answer count as drafts alone."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def tokens_per_draft(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class LoopPlayer(Protocol):
    """One engine of either system that plays closed loops."""

    policies: Sequence[str]

    def prepare(self, policy: str) -> None: ...
    def counts(self) -> Counts: ...
    def loop(self, requests: Sequence[Figures], size: int, seconds: float) -> tuple[list[Answer], float]: ...


# ── the process of a mode of FASER ───────────────────────────────────────────────────────────────────────────────────


def engine_options(args: argparse.Namespace, policy: str, kv_bytes: int, **more: Any) -> Any:
    from faser.config import EngineOptions

    on_gpu = args.device == "cuda"
    return EngineOptions(
        policy=policy,
        device=args.device,
        max_running=args.sizes.max_running,
        max_model_len=args.sizes.max_model_len,
        kv_memory=kv_bytes if on_gpu else None,
        prefix_caching=False,
        profiling="full" if on_gpu else "none",
        **more,
    )


class FaserLoops:
    """An engine of FASER in this process."""

    def __init__(self, engine: Any, policies: Sequence[str]) -> None:
        self.engine = engine
        self.policies = policies
        self._steps = self._tokens = 0  # as Counts has them

    @classmethod
    def load(cls, args: argparse.Namespace, mode: str) -> FaserLoops:
        """An engine over the folders of a mode."""
        from faser.build import build_engine, load_pair

        folders = {"off": None, "model": "draft"}
        folder = folders.get(mode, mode)
        draft = None if folder is None else str(args.folder / folder)
        options = engine_options(args, "off" if draft is None else "faser", KV_BYTES["loops"])
        pair = load_pair(str(args.folder / "target"), draft, options)
        policies = ["off"] if draft is None else ["faser", *fixed_lengths(args, mode)]
        return cls(build_engine(pair.target, pair.draft, options), policies)

    def prepare(self, policy: str) -> None:
        from faser.policy import make_policy
        from faser.traffic.play import take_policy

        take_policy(self.engine, make_policy(policy))

    def counts(self) -> Counts:
        stats = self.engine.stats
        return Counts(self._steps, self._tokens, int(stats.verified_per_position[:1].sum()), stats.accepted)

    def loop(self, requests: Sequence[Figures], size: int, seconds: float) -> tuple[list[Answer], float]:
        """A closed loop of `size` open requests; the answers, and how long it took."""
        from faser.request import Request, SamplingParams

        engine, began = self.engine, time.perf_counter()
        waiting, answers, open_answers = enumerate(requests), [], {}

        def refill() -> None:
            for number, given in itertools.islice(waiting, size - len(open_answers)):
                sampling = {"max_tokens": given["max_tokens"], "temperature": given["temperature"]}
                params, tokens = SamplingParams(ignore_eos=True, **sampling), tuple(given["prompt_token_ids"])
                open_answers[str(number)] = Answer(time.perf_counter(), [])
                engine.add(Request(id=str(number), prompt_token_ids=tokens, params=params, seed=number))

        try:
            refill()
            while open_answers or engine.has_work:
                if time.perf_counter() - began > seconds:
                    raise TimeoutError("no time left")
                for item in engine.step():
                    self._note(open_answers[item.request_id], item.token_ids)
                    if item.finish is not None:
                        answers.append(open_answers.pop(item.request_id))
                refill()
        except BaseException:
            engine.abandon()  # open requests must not run into the next loop
            raise
        return answers, time.perf_counter() - began

    def _note(self, answer: Answer, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        answer.last = time.perf_counter()
        if answer.token_ids:
            self._steps += 1
            self._tokens += len(token_ids)
        else:
            answer.first = answer.last
        answer.token_ids.extend(token_ids)


def fixed_lengths(args: argparse.Namespace, kind: str) -> list[str]:
    return [f"fixed:{length}" for length in args.loops.lengths or LENGTHS[kind]]


def run_own_mode(args: argparse.Namespace, journal: Journal) -> None:
    kind, _, head = args.only_mode.partition(":")
    if kind == "published":
        measure_published(args, journal, head)
    elif kind == "idle":
        measure_idle(args, journal, head)
    else:
        play_parts(args, journal, FaserLoops.load(args, kind))


# ── the process of a mode of vLLM ────────────────────────────────────────────────────────────────────────────────────


class VllmHeadMode(Mode):
    """vllm:off, or vllm:DRAFT:K with the draft `eagle3` or `model`."""

    @property
    def draft(self) -> str:
        return self.name.split(":")[1]

    @property
    def length(self) -> int:
        return 0 if self.draft == "off" else int(self.name.split(":")[2])

    def engine_args(self, folder: Path, shape: Shape, on_gpu: bool) -> Figures:
        given = super().engine_args(folder, shape, on_gpu)
        if self.draft == "eagle3":
            given["speculative_config"] |= {"method": "eagle3", "model": str(folder / "eagle3")}
        return given | {"disable_log_stats": not self.length}


class VllmLoops(Player):
    """vLLM's asynchronous engine. Its length is fixed when it starts."""

    def __init__(self, args: argparse.Namespace, mode: VllmHeadMode) -> None:
        sizes = {"max_model_len": args.sizes.max_model_len, "max_running": args.sizes.max_running}
        super().__init__(mode, args.folder, Shape(**sizes), args.device == "cuda")
        self.policies = [f"fixed:{mode.length}" if mode.length else "off"]
        self._counts_drafts = bool(mode.length)

    def prepare(self, policy: str) -> None:
        assert policy in self.policies, "another length takes another engine"

    def counts(self) -> Counts:
        if not self._counts_drafts:
            return Counts()
        from vllm.v1.metrics.reader import get_metrics_snapshot

        time.sleep(0.2)  # the last steps are counted after their tokens are out
        found = {f"vllm:spec_decode_num_{name}": 0 for name in ("drafts", "accepted_tokens")}
        for metric in get_metrics_snapshot():
            if metric.name in found:
                found[metric.name] += int(metric.value)
        drafts, accepted = found.values()
        return Counts(drafts, drafts + accepted, drafts, accepted)  # it drafts in every step


def run_vllm_mode(args: argparse.Namespace, journal: Journal) -> None:
    player = VllmLoops(args, VllmHeadMode(args.only_mode))
    try:
        play_parts(args, journal, player)
    finally:
        player.shutdown()


# ── what either system plays ─────────────────────────────────────────────────────────────────────────────────────────


def play_parts(args: argparse.Namespace, journal: Journal, player: LoopPlayer) -> None:
    mode = args.only_mode
    requests = loop_requests(args.folder, "specbench", 1, 1, 0.0)
    player.loop(requests, 1, left(args))
    journal.add("start", mode=mode, seconds=time.time() - args.spawned)
    measures = {"loops": measure_loops, "equal": measure_equal}
    for part in parts_of(mode, args.parts):
        journal.attempt(part, mode, lambda measure=measures[part]: measure(args, journal, player))


def measure_loops(args: argparse.Namespace, journal: Journal, player: LoopPlayer) -> None:
    """Every policy at every setting, except longer drafts where a shorter one is hopeless."""
    best: dict[tuple[str, float, int], float] = {}
    hopeless = set()
    for policy in player.policies:
        player.prepare(policy)
        for setting in itertools.product(args.texts, args.temperatures, args.loops.batches):
            if setting in hopeless:
                continue
            text, temperature, size = setting
            number = size * models.num_groups(size)
            requests = loop_requests(args.folder, text, number, args.loops.output, temperature)
            figures = loop_figures(args, player, requests, size)
            about = {"mode": args.only_mode, "policy": policy, "text": text, "temperature": temperature}
            journal.add("loop", **about, batch=size, **figures)
            best[setting] = min(best.get(setting, math.inf), figures["tpot_ms"])
            if policy.startswith("fixed:") and figures["tpot_ms"] > HOPELESS * best[setting]:
                hopeless.add(setting)


def loop_figures(args: argparse.Namespace, player: LoopPlayer, requests: Sequence[Figures], size: int) -> Figures:
    player.loop(short(requests[:size]), size, left(args))
    before = player.counts()
    answers, seconds = player.loop(requests, size, left(args))
    counts = player.counts() - before
    tokens = sum(len(each.token_ids) for each in answers)
    if tokens != sum(request["max_tokens"] for request in requests):
        raise RuntimeError("the requests got the wrong number of tokens")
    return {
        "tpot_ms": 1e3 * statistics.fmean(each.tpot for each in answers),
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": counts.tokens_per_step,
        "tokens_per_draft": counts.tokens_per_draft,
        "requests": len(answers),
    }


def measure_equal(args: argparse.Namespace, journal: Journal, player: LoopPlayer) -> None:
    """At the length of vLLM's mode; ours at the lengths of all modes of vLLM that are asked for."""
    size, number = args.loops.equal, args.loops.equal if args.tiny else EQUAL_REQUESTS
    for length in equal_lengths(args):
        player.prepare(f"fixed:{length}")
        for text in args.texts:
            requests = loop_requests(args.folder, text, number, args.loops.output, 0.0)
            figures = loop_figures(args, player, requests, size)
            about = {"mode": args.only_mode, "text": text, "length": length}
            journal.add("equal", **about, tokens_per_draft=figures["tokens_per_draft"])


def equal_lengths(args: argparse.Namespace) -> list[int]:
    names = [args.only_mode] if args.only_mode.startswith("vllm:") else args.asked_modes
    return sorted({VllmHeadMode(name).length for name in names if name.startswith("vllm:eagle3:")})


# ── what only FASER plays ────────────────────────────────────────────────────────────────────────────────────────────


def measure_published(args: argparse.Namespace, journal: Journal, name: str) -> None:
    from faser.build import build_engine

    published, on_gpu = PUBLISHED[name], args.device == "cuda"
    target, head = head_models.published_pair(name, args)
    policies = fixed_lengths(args, "published")
    # a CPU has no synthetic acceptance: there it is that of random weights
    more = {"acceptance": published.chances("chat")} if on_gpu else {}
    options = engine_options(args, policies[-1], KV_BYTES["loops"], **more)
    player = FaserLoops(build_engine(target, head, options), policies)
    prompts = models.make_random_prompts(target.config.vocab_size)
    for text in published.tokens:
        chances = published.chances(text)
        if on_gpu:
            set_chances(player.engine, chances)
        for policy, size in itertools.product(policies, args.loops.published):
            player.prepare(policy)
            number = 2 * size * models.num_groups(size)
            some = {"max_tokens": 2 * args.loops.output, "temperature": 1.0}
            requests = [{"prompt_token_ids": tokens, **some} for tokens in prompts(number, args.sizes.prompt)]
            figures = loop_figures(args, player, requests, size)
            expected = expected_tokens(chances[: int(policy.partition(":")[2])])
            about = {"head": name, "policy": policy, "text": text, "batch": size, "expected_tokens": expected}
            journal.add("published", **about, **figures)


def set_chances(engine: Any, chances: Sequence[float]) -> None:
    """Another synthetic acceptance for an engine that has one."""
    import torch

    from faser.runtime.cuda.verifier import chances_by_position

    held = engine.executor.verifier.acceptance
    held.copy_(torch.tensor(chances_by_position(chances, len(held))))


def measure_idle(args: argparse.Namespace, journal: Journal, head: str) -> None:
    """Two engines on one target take turns: with the head in memory, and without a draft."""
    from benchmarks.cuda_steps import run_batch
    from faser.build import build_engine, load_pair

    options = engine_options(args, "off", KV_BYTES["idle"])
    pair = load_pair(str(args.folder / "target"), str(args.folder / head), options)
    engines = [build_engine(pair.target, draft, options) for draft in (pair.draft, None)]
    prompts = [tuple(each) for each in read_json(args.folder / head_models.prompts_file("specbench"))]
    for batch in args.loops.idle:
        steps: list[list[float]] = [[], []]
        for engine, found in (1 + args.loops.idle_turns) * list(zip(engines, steps, strict=True)):
            figures = run_batch(engine, batch, args.sizes.prompt, args.loops.output, prompts=prompts)
            found.append(figures["step_ms"])
        with_head, without = (statistics.median(found[1:]) for found in steps)  # the first turn is the warm-up
        figures = {"step_ms": with_head, "without_ms": without, "ratio": with_head / without}
        journal.add("idle", mode=args.only_mode, batch=batch, **figures, turns_ms=steps)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parts_of(mode: str, wanted: Sequence[str]) -> list[str]:
    """The parts that a mode plays."""
    special = {"published": ["published"], "idle": ["off"]}
    plays_equal = mode == "eagle3" or mode.startswith("vllm:eagle3:")
    able = special.get(mode.partition(":")[0], ["loops", "equal"] if plays_equal else ["loops"])
    return [part for part in wanted if part in able]


def mode_list(text: str) -> tuple[str, ...]:
    given = tuple(text.split(","))
    unknown = [each for each in given if each not in OWN_MODES and not is_vllm_mode(each)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected modes such as {','.join(MODES)}")
    return given


def is_vllm_mode(name: str) -> bool:
    kind, *rest = name.split(":")
    if kind != "vllm" or rest == ["off"]:
        return kind == "vllm"
    return len(rest) == 2 and rest[0] in ("eagle3", "model") and rest[1].isdigit() and int(rest[1]) > 0


def numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(each) for each in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model)")
    add("--draft", type=Path, default=models.DRAFT, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
    add("--eagle3", type=Path, metavar="FOLDER", help="its EAGLE-3 head")
    add("--block", type=Path, metavar="FOLDER", help="its block head")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--vllm-bundle", type=Path, help="vLLM, unpacked; without it FASER is measured alone")
    add("--parts", type=chosen_from(PARTS), default=PARTS, help="some of them, separated by commas (all)")
    add("--modes", type=mode_list, default=MODES, help=f"({','.join(MODES)})")
    add("--batches", type=numbers(int), help="of `loops` (1,4,16,64,128,256)")
    add("--texts", type=chosen_from(TEXTS), default=TEXTS, help="(specbench,code)")
    add("--temperatures", type=numbers(float), default=(0.0, 1.0), help="of `loops` (0,1)")
    add("--lengths", type=numbers(int), help="fixed ones, ascending (2,4; blocks 3,7; published 2,4,7)")
    add("--output", type=int, help="tokens of an answer (128); twice that in `published`")
    add_run_flags(add, only_mode=str)
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    begin_run(args, given)
    asked = {"batches": args.batches, "lengths": args.lengths, "output": args.output}
    args.loops = replace(TINY_LOOPS if args.tiny else LoopSizes(), **{k: v for k, v in asked.items() if v})
    args.sizes = models.TINY if args.tiny else models.Sizes()
    if max(args.loops.batches) > args.sizes.max_running:
        parser.error(f"--batches: expected at most {args.sizes.max_running}")
    args.work = args.folder / "heads"
    args.journal = args.folder / "heads.jsonl" if args.report_only else args.work / "heads.jsonl"
    args.asked_modes = args.modes
    played = [mode for mode in args.modes if args.vllm_bundle is not None or not mode.startswith("vllm:")]
    args.modes = [mode for mode in played if parts_of(mode, args.parts)]
    models_given = (args.target, args.draft, args.eagle3, args.block)
    refuse_missing(parser, (*models_given, args.python_path, args.vllm_bundle, args.report_only))
    if not args.tiny and args.report_only is None:
        refuse_headless(parser, args)
    return args


def refuse_headless(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Modes whose head is neither given nor kept in the folder."""
    for head, path in zip(HEADS, (args.eagle3, args.block), strict=True):
        needing = [mode for mode in args.modes if head in mode.split(":") and not mode.startswith("published:")]
        if needing and path is None and not (args.folder / head).is_dir():
            parser.error(f"{', '.join(needing)}: give --{head}, or leave these modes out")


def processes_of(args: argparse.Namespace) -> Iterator[Process]:
    """The models first, then every mode."""
    yield replace(worker_process(args, "models", MODELS_SECONDS), module=MODULE)
    for mode in args.modes:
        is_vllm = mode.startswith("vllm:")
        process = worker_process(args, "vllm" if is_vllm else "faser", MODE_SECONDS, mode, only_mode=mode)
        more = vllm_environment(args.device) if is_vllm else {}
        yield replace(process, module=MODULE, environment={**process.environment, **more})


def vllm_environment(device: str) -> Mapping[str, str]:
    given = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return given | (CPU_ENVIRONMENT if device == "cpu" else {})


def measure(args: argparse.Namespace, journal: Journal) -> None:
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal.add("call", command=" ".join(args.given))

    def save() -> None:
        shutil.copy(journal.path, args.out / "heads.jsonl")

    runner = Runner(journal, args.out / "heads.log", args.device, save, len(journal.read()))
    making, *modes = processes_of(args)
    if runner.run(making, args.until):
        for process in modes:
            runner.run(process, args.until)


def work(args: argparse.Namespace, journal: Journal) -> None:
    """What a process of this command does."""
    if args.worker == "models":
        models.ensure_models(args)
        head_models.ensure_heads(args)
        head_models.ensure_prompts(args)
    elif args.worker == "vllm":
        run_vllm_mode(args, journal)
    else:
        run_own_mode(args, journal)


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    journal = Journal(args.journal, args.session)
    if args.worker is not None:
        work(args, journal)
        return 0
    if args.report_only is None:
        measure(args, journal)
    records = journal.read()
    summary, text = summarize(records), tables(records)
    line = json.dumps({"benchmark": "heads", "seconds": round(time.time() - args.started, 1), **summary})
    (args.out / "heads.md").write_text(text + "\n", encoding="utf-8")
    (args.out / "heads.json").write_text(line + "\n", encoding="utf-8")
    print(text)
    print(line, flush=True)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
