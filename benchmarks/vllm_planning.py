"""What the plugin adds to a step of vLLM's scheduler: CPU time of planning lengths, and of learning from the result.

Needs no vLLM: scheduler, requests and results are stand-ins with the attributes that the plugin reads. All requests
decode, with asynchronous scheduling. Steps take the seconds of an 8B target and a 1B draft on an H200, roughly, on a
clock of their own. In large batches the policy is asked in one of four steps (faser/vllm/lengths.py): the mean counts.

    .venv/bin/python -m benchmarks.vllm_planning [--requests 256] [--steps 800] [--policy faser] [--acceptance 0.7]

Prints microseconds, and one JSON document on the last line. The aim: planning in under 300 µs a step, on the mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from faser.arrays import IntArray
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.vllm.scheduling import GivesLengthsAhead

PROMPT = 128
TARGET = (32, 4096, 14336, 32, 8, 128)  # layers, hidden, intermediate, heads, KV heads, head size
DRAFT = (16, 2048, 8192, 32, 8, 64)
STEP_SECONDS, ROW_SECONDS, DRAFT_SECONDS = 4.5e-3, 1.2e-5, 6e-4  # of a step, each row of it, each drafted token
WARM_STEPS = 200


class BenchRequest:
    """What the plugin reads of a request of vLLM."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_known = PROMPT
        self.max_tokens = 1 << 30
        self.num_output_placeholders = 0
        self.is_prefill_chunk = False
        self.spec_token_ids: list[int] = []
        self.sampling_params = SimpleNamespace(extra_args=None)

    @property
    def num_tokens(self) -> int:  # a property in vLLM too
        return self.num_known


def model_config(sizes: tuple[int, ...]) -> Any:
    layers, hidden, intermediate, heads, kv_heads, head_size = sizes
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: {"intermediate_size": intermediate}),
        get_hidden_size=lambda: hidden,
        get_total_num_hidden_layers=lambda: layers,
        model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
        get_total_num_kv_heads=lambda: kv_heads,
        get_head_size=lambda: head_size,
        get_vocab_size=lambda: 128_256,
    )


def make_config(policy: str, max_requests: int) -> Any:
    """What the plugin reads of a VllmConfig."""
    return SimpleNamespace(
        additional_config={"faser": {"policy": policy}},
        instance_id="planning",
        speculative_config=SimpleNamespace(
            method="draft_model",
            num_speculative_tokens=ADAPTIVE_MAX_LENGTH,
            num_speculative_tokens_per_batch_size=None,
            draft_model_config=model_config(DRAFT),
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=True, max_num_seqs=max_requests, max_num_batched_tokens=8192, scheduler_cls=None
        ),
        parallel_config=SimpleNamespace(worker_cls="auto", pipeline_parallel_size=1, data_parallel_index=0),
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=model_config(TARGET),
        lora_config=None,
    )


class BareScheduler:
    """The part of vLLM's: keeps counters, as asynchronous scheduling does, and takes no time to speak of."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.requests = {f"request-{index:04}": BenchRequest() for index in range(self.max_num_running_reqs)}
        self.kv_cache_manager = SimpleNamespace(usage=0.5)

    def schedule(self, is_first: bool) -> Any:
        drafts = {name: each.spec_token_ids for name, each in self.requests.items() if each.spec_token_ids}
        for request in self.requests.values():
            request.num_output_placeholders += 1 + len(request.spec_token_ids)
        return SimpleNamespace(
            num_scheduled_tokens={name: 1 + len(drafts.get(name, ())) for name in self.requests},
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in self.requests] if is_first else [],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            finished_req_ids=set(),
            num_spec_tokens_to_schedule=0,
        )

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        pass

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for (name, request), sampled in zip(self.requests.items(), model_runner_output.sampled_token_ids, strict=True):
            request.num_output_placeholders -= 1 + len(drafts.get(name, ()))
            request.num_known += len(sampled)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def shutdown(self) -> None:
        pass


class TimedScheduler(GivesLengthsAhead, BareScheduler):
    """The plugin's over it."""


def sample(output: Any, acceptance: float, random: np.random.Generator) -> Any:
    """A result in which each draft is accepted with the chance `acceptance`."""
    drafts, names = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
    lengths = np.array([len(drafts.get(name, ())) for name in names])
    accepted: IntArray = np.minimum(random.geometric(1 - acceptance, size=lengths.size) - 1, lengths)
    return SimpleNamespace(
        sampled_token_ids=[[5] * (1 + number) for number in accepted.tolist()],
        req_id_to_index={name: index for index, name in enumerate(names)},
    )


def measure(requests: int, steps: int, policy: str, acceptance: float) -> dict[str, float]:
    scheduler, random = TimedScheduler(make_config(policy, requests)), np.random.default_rng(0)
    planning, learning, depths = [], [], []
    now = 0.0
    scheduler.faser.clock = lambda: now
    for number in range(WARM_STEPS + steps):
        output = scheduler.schedule(is_first=number == 0)
        began = time.process_time()
        scheduler._update_after_schedule(output)
        planned = time.process_time()
        result = sample(output, acceptance, random)
        depth = output.num_spec_tokens_to_schedule
        now += STEP_SECONDS + ROW_SECONDS * sum(output.num_scheduled_tokens.values()) + DRAFT_SECONDS * depth
        sampled = time.process_time()
        scheduler.faser.learn(output, result, scheduler.requests)
        learned = time.process_time()
        BareScheduler.update_from_output(scheduler, output, result)
        if number >= WARM_STEPS:
            planning.append(1e6 * (planned - began))
            learning.append(1e6 * (learned - sampled))
            depths.append(depth)
    scheduler.shutdown()
    return {
        "plan_us": round(statistics.fmean(planning), 1),
        "plan_p50_us": round(statistics.median(planning), 1),
        "plan_p99_us": round(sorted(planning)[int(0.99 * len(planning))], 1),
        "learn_us": round(statistics.fmean(learning), 1),
        "mean_depth": round(statistics.fmean(depths), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--policy", default="faser")
    parser.add_argument("--acceptance", type=float, default=0.7)
    args = parser.parse_args()
    figures = measure(args.requests, args.steps, args.policy, args.acceptance)
    print(f"{args.requests} requests, policy {args.policy}, CPU time of {args.steps} steps")
    for name, value in figures.items():
        print(f"  {name:12} {value:8.1f}")
    print(json.dumps({"benchmark": "vllm_planning", "requests": args.requests, "policy": args.policy, **figures}))


if __name__ == "__main__":
    main()
