"""One engine of vLLM that drafts by a script: `python -m tests.vllm.real.drafting SPEC`, a JSON object, prints another.

    {"pair": FOLDER, "script": null | [4, 0], "worker": null | CLASS, "ahead": bool, "v2": bool, …}

The V2 runner is written in Triton; on a CPU its kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def interpret_triton() -> None:
    """Let vLLM find a Triton for CPUs: the interpreter."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def allow_async() -> None:
    """Let vLLM schedule asynchronously on a CPU, with two steps in flight: its platform turns that off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_but_keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_but_keep)


def prompts(longest: int) -> list[list[int]]:
    """Of 1 to `longest` tokens; some begin alike."""
    drawn = random.Random(0)
    shared = [drawn.randrange(3, 320) for _ in range(100)]
    sizes = [(0, 1), (64, 5), (100, 30), (100, longest - 100), (0, 40), (64, 64), (100, 2), (0, longest)]
    return [shared[:begin] + [drawn.randrange(3, 320) for _ in range(own)] for begin, own in sizes]


def make_engine(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    given: dict[str, Any] = {}
    if spec.get("script"):
        draft = {"method": "draft_model", "model": f"{spec['pair']}/draft", "num_speculative_tokens": 4}
        kind = "Ahead" if spec.get("ahead") else "After"
        given = {"speculative_config": draft, "scheduler_cls": f"tests.vllm.real.scripted.Scripted{kind}"}
        given |= {"async_scheduling": bool(spec.get("ahead"))}
    if spec.get("worker"):
        given["worker_cls"] = spec["worker"]
    if spec.get("costs"):
        given["additional_config"] = {"faser": {"costs": spec["costs"]}}
    if spec.get("num_blocks"):
        given["num_gpu_blocks_override"] = spec["num_blocks"]
    size = spec.get("tensor_parallel", 1)
    return LLM(
        f"{spec['pair']}/target", dtype="float32", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256,
        enforce_eager=True, block_size=32, enable_prefix_caching=spec.get("prefix_caching", False),
        tensor_parallel_size=size, distributed_executor_backend="uni" if size == 1 else "mp", **given,
    )  # fmt: skip


def run(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("v2"):
        interpret_triton()
    elif spec.get("ahead"):
        allow_async()
    from vllm import SamplingParams

    from tests.vllm.real import scripted

    scripted.script[:] = spec.get("script") or []
    llm = make_engine(spec)
    params = SamplingParams(max_tokens=spec.get("max_tokens", 60), temperature=0.0, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts(spec.get("longest", 200))]
    tokens = []
    for _ in range(spec.get("rounds", 1)):
        outputs = llm.generate(given, params, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    done = {"tokens": tokens, "steps": scripted.steps, "preemptions": len(scripted.preempted)}
    done |= {"in_flight": llm.llm_engine.engine_core.engine_core.batch_queue_size}
    if spec.get("worker") and spec.get("tensor_parallel", 1) == 1:
        part = llm.llm_engine.model_executor.driver_worker.worker.draft_part
        done |= {"skipped": part.steps.num_skipped, "catch_ups": part.steps.num_catch_ups}
    return done


if __name__ == "__main__":
    print("RESULT " + json.dumps(run(json.loads(sys.argv[1]))))
