"""One engine of vLLM in a process of its own: `python -m tests.vllm.real.engine SPEC`, a JSON object, prints another.

    {"pair": FOLDER, "method": null | "draft_model" | "ngram" | "eagle3", "runs": [{"policy": …, …}], "num_blocks": …}

The engine starts with the policy of the first run; later runs put another one in its place. An engine start takes half
a minute, so that one serves many runs. Every run generates greedily for the same requests, those of prompts.json if
the folder has it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams

from faser.policy import make_policy
from faser.policy.base import BatchView, Policy

NUM_REQUESTS = 12
MAX_TOKENS = 40


class Failing(Policy):
    name = "failing"

    def lengths(self, view: BatchView) -> Any:
        raise ZeroDivisionError


def prompts(folder: Path) -> list[list[int]]:
    """The later half repeats itself: n-grams find something there."""
    if (folder / "prompts.json").is_file():
        return json.loads((folder / "prompts.json").read_text())
    plain = [[1, *((7 * index + 3 * each) % 290 + 3 for each in range(5 + 9 * index))] for index in range(6)]
    return plain + [prompt * 2 for prompt in plain]


def make_engine(spec: dict[str, Any]) -> LLM:
    given: dict[str, Any] = {}
    methods = {
        "draft_model": {"model": f"{spec['pair']}/draft"},
        "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "eagle3": {"model": f"{spec['pair']}/eagle3"},
    }
    if spec["method"] is not None:
        speculative = {"method": spec["method"], "num_speculative_tokens": 5, **methods[spec["method"]]}
        given = {"speculative_config": speculative}
    if spec["runs"][0].get("policy") is not None:
        given["additional_config"] = {"faser": {"policy": spec["runs"][0]["policy"]} | spec.get("options", {})}
    if spec.get("num_blocks"):
        given["num_gpu_blocks_override"] = spec["num_blocks"]
    size = spec.get("tensor_parallel", 1)
    return LLM(
        f"{spec['pair']}/target", dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256,
        enforce_eager=True, block_size=32, enable_prefix_caching=spec.get("prefix_caching", False),
        skip_tokenizer_init=True, tensor_parallel_size=size, distributed_executor_backend="uni" if size == 1 else "mp",
        **given,
    )  # fmt: skip


def generate(llm: LLM, requests: list[list[int]], run: dict[str, Any]) -> list[list[int]]:
    """The tokens of every request; those that are aborted have the tokens they had."""
    engine, tokens = llm.llm_engine, {}
    for index, prompt in enumerate(requests):
        own = {"max_draft": index % 4} if run.get("max_draft") else None
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=own
        )
        engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if run.get("aborts") and steps % 5 == 0:
            engine.abort_request([f"{(steps // 5) % NUM_REQUESTS}"])
    return [tokens.get(f"{index}", []) for index in range(NUM_REQUESTS)]


def run_all(spec: dict[str, Any]) -> dict[str, Any]:
    llm = make_engine(spec)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    num_free, runs, preempted = pool.get_num_free_blocks(), [], []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    for run in spec["runs"]:
        done: dict[str, Any] = {}
        if run.get("policy") is not None:
            planner = scheduler.faser.planner
            planner.policy = Failing() if run.get("fails") else make_policy(run["policy"])
            before = dict(vars(scheduler.faser.status))
        done["tokens"] = generate(llm, prompts(Path(spec["pair"])), run)
        done["leaked"] = num_free - pool.get_num_free_blocks()
        if run.get("policy") is not None:
            after = vars(scheduler.faser.status)
            done |= {name: after[name] - before[name] for name in ("steps", "drafting_steps", "verified", "accepted")}
            done |= {"failures": planner.num_failures}
            # the next step tells who is finished: its own request is then the only one
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            done |= {"open": len(planner.requests)}
        runs.append(done)
    config = llm.llm_engine.vllm_config
    return {
        "runs": runs,
        "scheduler": type(scheduler).__name__,
        "worker": str(config.parallel_config.worker_cls),
        "preemptions": len(preempted),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(run_all(json.loads(sys.argv[1]))))
