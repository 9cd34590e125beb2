"""Is `faser` ever slower than `off`? Closed loops on a CPU, greedy and sampled, idle and beside busy loops.

One engine with the default pair plays the same requests under both policies by turns (off faser faser off …); each
keeps what it learned from turn to turn, as in a server. Outputs are compared; they may differ only where two tokens
tie in the last bits of their scores. The ratio is the median over pairs of turns, by the wall clock and
by the CPU seconds that the process took: on a machine shared with others the former varies by a tenth without a cause.

    python -m benchmarks.never_slower [--streams 1,4,16] [--temperatures 0,0.9] [--busy 0,2] [--turns 8]

Prints a table, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from time import perf_counter, process_time

from benchmarks.contention import busy_loops
from faser.threads import prepare_openmp

prepare_openmp()

from faser.llm import LLM  # noqa: E402
from faser.policy import Policy, make_policy  # noqa: E402
from faser.request import SamplingParams  # noqa: E402
from faser.traffic.prompts import SHIPPED  # noqa: E402
from faser.traffic.traces import open_text  # noqa: E402

OUTPUT_TOKENS = 32
MAX_PROMPT_TOKENS = 96
WARM_UP_TURNS = 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.9")
    parser.add_argument("--busy", default="0,2")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--policy", default="faser")
    args = parser.parse_args()
    figures = []
    with LLM(policy="faser", prefix_caching=False) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts()]
        prompts = [prompt for prompt in prompts if len(prompt) < MAX_PROMPT_TOKENS]
        for busy in map(int, args.busy.split(",")):
            with busy_loops(busy):
                for temperature in map(float, args.temperatures.split(",")):
                    policies = {name: make_policy(name) for name in ("off", args.policy)}
                    for streams in map(int, args.streams.split(",")):
                        figures.append(compare(llm, policies, prompts, streams, temperature, busy, args.turns))
    print(json.dumps({"benchmark": "never_slower", "figures": figures}))
    return 0


def texts() -> list[str]:
    with open_text(SHIPPED["specbench"]) as lines:
        return [json.loads(line)["turns"][0] for line in lines]


def compare(
    llm: LLM,
    policies: dict[str, Policy],
    prompts: list[list[int]],
    streams: int,
    temperature: float,
    busy: int,
    turns: int,
) -> dict[str, object]:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=temperature, seed=1)
    off, other = policies
    tokens, seconds = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0.0)
    ratios, cpu_ratios, differing, drafted = [], [], 0, 0
    for turn in range(-WARM_UP_TURNS, turns):
        count = streams if streams > 4 else 2 * streams
        chosen = [prompts[(turn * count + i) % len(prompts)] for i in range(count)]
        rates, work, outputs = {}, {}, {}
        for name in (off, other) if turn % 2 else (other, off):
            engine = llm.engine
            engine.scheduler.drafts.policy = policies[name]
            before = engine.stats.drafted
            started, computed = perf_counter(), process_time()
            outputs[name] = []
            for first in range(0, count, streams):
                outputs[name] += [each.token_ids for each in llm.generate(chosen[first : first + streams], params)]
            spent, work[name] = perf_counter() - started, process_time() - computed
            rates[name] = count * OUTPUT_TOKENS / spent
            if turn >= 0:
                drafted += engine.stats.drafted - before
                tokens[name] += count * OUTPUT_TOKENS
                seconds[name] += spent
        differing += sum(a != b for a, b in zip(outputs[off], outputs[other], strict=True))
        if turn >= 0:
            ratios.append(rates[other] / rates[off])
            cpu_ratios.append(work[off] / work[other])
    speeds = {name: tokens[name] / seconds[name] for name in policies}
    ratio = statistics.median(ratios)
    print(
        f"{busy} busy loops, temperature {temperature:g}, {streams} streams: off {speeds[off]:.1f}, "
        f"{other} {speeds[other]:.1f} tokens/s, ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"by CPU seconds {statistics.median(cpu_ratios):.2f}, "
        f"{drafted / tokens[other]:.2f} drafted a token, {differing} outputs differ",
        flush=True,
    )
    return {
        "busy": busy, "temperature": temperature, "streams": streams, **speeds, "ratio": ratio, "ratios": ratios,
        "cpu_ratios": cpu_ratios, "differing": differing, "drafted": drafted,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
