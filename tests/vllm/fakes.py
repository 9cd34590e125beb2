"""A small scheduler with the methods and attributes of vLLM's, for tests where vLLM is not installed.

It knows what matters to lengths: rows of prompts and drafts, placeholders of asynchronous scheduling, KV blocks,
preemption of the newest request, aborts. tests/vllm/test_contract.py compares it with the hooks that FASER declares;
tests/vllm/real repeats the same simulations with vLLM's own schedulers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

BLOCK_SIZE = 16


def make_config(
    policy: str | None = "faser",
    num_drafts: int = 4,
    is_async: bool = True,
    worker_cls: str = "auto",
    **speculative: Any,
) -> Any:
    """What FASER reads of a VllmConfig."""
    shape = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: {"intermediate_size": 128}),
        get_hidden_size=lambda: 64,
        get_total_num_hidden_layers=lambda: 2,
        model_arch_config=SimpleNamespace(total_num_attention_heads=4),
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 16,
        get_vocab_size=lambda: 320,
        model="target",
        dtype="torch.float32",
    )
    given = {"method": "draft_model", "model": "draft", "num_speculative_tokens_per_batch_size": None, **speculative}
    return SimpleNamespace(
        additional_config={} if policy is None else {"faser": {"policy": policy}},
        instance_id="test",
        speculative_config=SimpleNamespace(num_speculative_tokens=num_drafts, draft_model_config=shape, **given),
        scheduler_config=SimpleNamespace(
            async_scheduling=is_async, max_num_seqs=16, max_num_batched_tokens=256, scheduler_cls=None
        ),
        parallel_config=SimpleNamespace(worker_cls="auto", pipeline_parallel_size=1, data_parallel_index=0),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=shape,
        lora_config=None,
    )


@dataclass
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: Any
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_output_tokens: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    is_prefill_chunk: bool = False
    num_blocks: int = 0
    num_stale: int = 0  # steps in flight from before a preemption

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class FakeOutput:
    """SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    finished_req_ids: set[str]
    num_spec_tokens_to_schedule: int


def result_of(request_ids: list[str], sampled: list[list[int]]) -> Any:
    """ModelRunnerOutput."""
    indices = {each: index for index, each in enumerate(request_ids)}
    return SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=indices)


class FakeScheduler:
    """Without asynchronous scheduling."""

    def __init__(self, vllm_config: Any, num_blocks: int = 1000) -> None:
        self.vllm_config = vllm_config
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.dynamic_sd_lookup: list[int] | None = None
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.num_free_blocks = self.num_blocks = num_blocks
        self.num_preemptions = 0
        self._finished: set[str] = set()
        self._seen: set[str] = set()

    @property
    def kv_cache_manager(self) -> Any:
        return SimpleNamespace(usage=1 - self.num_free_blocks / self.num_blocks)

    def add(self, request_id: str, num_prompt: int, max_tokens: int, max_draft: int | None = None) -> None:
        params = SimpleNamespace(extra_args=None if max_draft is None else {"max_draft": max_draft})
        request = self.requests[request_id] = FakeRequest(request_id, num_prompt, max_tokens, params)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._finish(self.requests[request_id])

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def shutdown(self) -> None:
        self.waiting.clear()

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> FakeOutput:
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        rows: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        new: list[Any] = []
        resumed: set[str] = set()
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            wanted = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
            number = min(wanted - request.num_computed_tokens, budget)
            is_done = request.num_output_tokens + request.num_output_placeholders >= request.max_tokens
            if number <= 0 or (is_done and request.num_output_placeholders) or not self._allocate(request, number):
                continue
            rows[request.request_id] = number
            budget -= number
            ahead = request.num_tokens + request.num_output_placeholders
            num_drafts = number + request.num_computed_tokens - ahead
            if num_drafts > 0:
                drafts[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []
        rows = {each: number for each, number in rows.items() if self.requests[each] in self.running}
        while self.waiting and budget and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            number = min(request.num_tokens - request.num_computed_tokens, budget)
            if -(-number // BLOCK_SIZE) + 1 > self.num_free_blocks:
                break
            self.running.append(self.waiting.pop(0))
            assert self._allocate(request, number)
            rows[request.request_id] = number
            budget -= number
            if request.request_id in self._seen:
                resumed.add(request.request_id)
            else:
                new.append(SimpleNamespace(req_id=request.request_id))
            self._seen.add(request.request_id)
        depth = self.num_spec_tokens if self.dynamic_sd_lookup is None else self.dynamic_sd_lookup[len(rows)]
        output = FakeOutput(
            rows, {each: drafts[each] for each in rows if each in drafts}, new,
            SimpleNamespace(resumed_req_ids=resumed), self._finished, depth,
        )  # fmt: skip
        self._finished = set()
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, scheduler_output: FakeOutput) -> None:
        for request_id, number in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += number
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )

    def update_from_output(self, scheduler_output: FakeOutput, model_runner_output: Any) -> dict[int, Any]:
        outputs = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.num_stale:
                request.num_stale -= 1
                continue
            sampled = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]]
            num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            if not sampled:
                continue
            rejected = num_drafts - (len(sampled) - 1)
            request.num_computed_tokens -= rejected
            self._settle(request, rejected, len(sampled))
            del sampled[request.max_tokens - request.num_output_tokens :]
            request.num_output_tokens += len(sampled)
            outputs.append(SimpleNamespace(request_id=request_id, new_token_ids=sampled))
            if request.num_output_tokens == request.max_tokens:
                self._finish(request)
        return {0: SimpleNamespace(outputs=outputs)}

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else tokens

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _allocate(self, request: FakeRequest, number: int) -> bool:
        blocks = -(-(request.num_computed_tokens + number) // BLOCK_SIZE)
        while blocks - request.num_blocks > self.num_free_blocks:
            self._preempt(self.running[-1])
            if request not in self.running:
                return False
        self.num_free_blocks -= blocks - request.num_blocks
        request.num_blocks = blocks
        return True

    def _preempt(self, request: FakeRequest) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []

    def _free(self, request: FakeRequest) -> None:
        self.num_free_blocks += request.num_blocks
        request.num_blocks = 0

    def _finish(self, request: FakeRequest) -> None:
        self._free(request)
        (self.running if request in self.running else self.waiting).remove(request)
        del self.requests[request.request_id]
        self._finished.add(request.request_id)

    def _settle(self, request: FakeRequest, num_rejected: int, num_sampled: int) -> None:
        """Counters of asynchronous scheduling: none here."""


class FakeAsyncScheduler(FakeScheduler):
    """With asynchronous scheduling: counts on tokens that are not sampled yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight: dict[str, int] = {}

    def _update_after_schedule(self, scheduler_output: FakeOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            self._in_flight[request_id] = self._in_flight.get(request_id, 0) + 1
            if not request.is_prefill_chunk:
                drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
                request.num_output_placeholders += 1 + len(drafts)
                request.spec_token_ids = [-1] * scheduler_output.num_spec_tokens_to_schedule

    def update_from_output(self, scheduler_output: FakeOutput, model_runner_output: Any) -> dict[int, Any]:
        for request_id in scheduler_output.num_scheduled_tokens:
            self._in_flight[request_id] -= 1
        return super().update_from_output(scheduler_output, model_runner_output)

    def _preempt(self, request: FakeRequest) -> None:
        super()._preempt(request)
        request.num_output_placeholders = 0
        request.num_stale = self._in_flight.get(request.request_id, 0)

    def _settle(self, request: FakeRequest, num_rejected: int, num_sampled: int) -> None:
        request.num_output_placeholders -= num_rejected + num_sampled
        assert request.num_output_placeholders >= 0
