"""Engines of vLLM with draft heads, one after the other: `python -m tests.vllm.real.head_engine SPEC` prints JSON.

    {"folder": FOLDER, "heads": [["eagle3", "eagle3"], …], "v2": bool, "max_tokens": …}

A head is the name of a folder and vLLM's method for it; null is none. Every draft is recorded with its context.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm.real import drafting  # sets the environment

LENGTH = 4
Draft = tuple[int, int, list[int]]  # index of the request, tokens of its context, drafts


class Recorder:
    """The drafts of an engine."""

    def __init__(self, llm: Any, is_v2: bool) -> None:
        self.drafts: list[Draft] = []
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._newest: dict[str, list[int]] = {}  # V2: the scheduler gets placeholders, the drafts stay on the device
        if is_v2:
            self._watch(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
        take = self._scheduler.update_draft_token_ids

        def taken(drafted: Any) -> Any:
            for request_id, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
                self._record(request_id, self._newest.get(request_id, tokens))
            return take(drafted)

        self._scheduler.update_draft_token_ids = taken

    def _watch(self, runner: Any) -> None:
        propose = runner.speculator.propose

        def proposed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = propose(batch, *args, **kwargs)
            self._newest = dict(zip(batch.req_ids, drafts.tolist(), strict=False))
            return drafts

        runner.speculator.propose = proposed

    def _record(self, request_id: str, tokens: list[int]) -> None:
        request = self._scheduler.requests.get(request_id)
        if request is not None:
            self.drafts.append((int(request_id.partition("-")[0]), request.num_tokens, [int(each) for each in tokens]))


def run(spec: dict[str, Any], head: list[str] | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    given = {}
    if head is not None:
        name, method = head
        draft = {"method": method, "model": f"{spec['folder']}/{name}", "num_speculative_tokens": LENGTH}
        given = {"speculative_config": draft}
    llm = LLM(
        f"{spec['folder']}/target", dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=128, enforce_eager=True, block_size=32, enable_prefix_caching=False,
        async_scheduling=False, disable_log_stats=False, **given,
    )  # fmt: skip
    recorder = Recorder(llm, bool(spec.get("v2"))) if head is not None else None
    prompts = json.loads((Path(spec["folder"]) / "prompts.json").read_text())
    params = SamplingParams(max_tokens=spec["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    counted = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    done = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": [] if recorder is None else recorder.drafts,
        "steps": counted.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
    }
    del llm, recorder
    gc.collect()
    cleanup_dist_env_and_memory()
    return done


def run_all(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("v2"):
        drafting.interpret_triton()
    return {"none" if head is None else head[0]: run(spec, head) for head in spec["heads"]}


if __name__ == "__main__":
    print("RESULT " + json.dumps(run_all(json.loads(sys.argv[1]))))
