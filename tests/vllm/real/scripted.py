"""Schedulers of vLLM that draft by a script: [4, 4, 0] is four tokens for everybody in two steps, none in the third, …

A process sets `script`; `steps` holds the drafts and how many of them were accepted, one pair of numbers a step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

script: list[int] = []
steps: list[tuple[int, int]] = []
preempted: list[str] = []


class _Scripted:
    num_scheduled = 0

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            scheduler_output.num_spec_tokens_to_schedule = script[self.num_scheduled % len(script)]
            self.num_scheduled += 1

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled, index = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        drafts = scheduler_output.scheduled_spec_decode_tokens
        accepted = sum(max(len(sampled[index[each]]) - 1, 0) for each in drafts)
        steps.append((sum(map(len, drafts.values())), accepted))
        return super().update_from_output(scheduler_output, model_runner_output)


class ScriptedAfter(_Scripted, Scheduler):
    """Synchronous."""


class ScriptedAhead(_Scripted, AsyncScheduler):
    """Asynchronous: the next step is scheduled with placeholders."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * scheduler_output.num_spec_tokens_to_schedule
