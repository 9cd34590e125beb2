"""The scheduler's part of the plugin, for both versions of vLLM: a mixin over vLLM's own scheduler classes.

vLLM calls three methods in each step. `_update_after_schedule`: a step is scheduled, and lengths are given for the
drafts at its end. `update_from_output`: its result is known. `update_draft_token_ids`, without asynchronous scheduling
alone: the drafts came back and are cut to their lengths.

Uses attributes of vLLM's scheduler and imports nothing of vLLM: faser/vllm/v026.py and v032.py join the two, and the
tests use a scheduler of their own.
"""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

import numpy as np

from faser.cost.profile import Profile
from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.policy import make_policy
from faser.vllm import versions
from faser.vllm.config import FaserConfig, check, max_draft_of
from faser.vllm.costs import SPEEDS, CostTable, ModelShape, assumed_costs, run_folder, table_path
from faser.vllm.lengths import LengthPlanner, PlannedStep, ScheduledStep, log
from faser.vllm.status import WRITE_SECONDS, EngineStatus, status_path

PLACEHOLDERS = [[-1] * length for length in range(HARD_MAX_LENGTH + 1)]  # vLLM only reads them

OTHER_CLASS = "FASER has one scheduler class for each, and chooses if --scheduler-cls is not given"


@dataclass(frozen=True)
class InFlight:
    """A scheduled step whose result is not known yet."""

    output: Any  # vLLM's SchedulerOutput
    planned: PlannedStep
    scheduled_at: float


class GivesLengths:
    """Mixed into a scheduler of vLLM, before it. Everything else is the scheduler's own."""

    requests: dict[str, Any]
    vllm_config: Any
    num_spec_tokens: int
    max_num_running_reqs: int
    running: list[Any]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = FaserConfig.find(self.vllm_config.additional_config) or FaserConfig()
        check(config, self.vllm_config)
        # vLLM pads prompts of one row to the full length unless it has a table of lengths: here, a constant one
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        instance = self.vllm_config.instance_id
        self._table = CostTable(_assumed(self.vllm_config), table_path(config, instance))
        skips = versions.skips_draft(self.vllm_config)
        self._planner = LengthPlanner(make_policy(config.policy), self._table.cost, self.num_spec_tokens, skips)
        self._in_flight: deque[InFlight] = deque()
        self._done_at = 0.0  # when the last result came
        self.faser_status = EngineStatus(policy=config.policy)
        self._status_path = status_path(instance, self.vllm_config.parallel_config.data_parallel_index)
        self._written_at = 0.0
        self._said_unwritten = False
        log.info("FASER: policy %s, at most %d drafted tokens a request", config.policy, self.num_spec_tokens)

    # ── a step is scheduled ──────────────────────────────────────────────────────────────────────────────────────────

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self._note_requests(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return
        began = perf_counter()
        news = self._table.poll()
        if news is not None:
            log.info("FASER: %s", news)
        planned = self._planner.plan(self._scheduled(scheduler_output))
        scheduler_output.num_spec_tokens_to_schedule = planned.depth
        self._give(planned)
        now = perf_counter()
        self._in_flight.append(InFlight(scheduler_output, planned, now))
        self.faser_status.planning_seconds += now - began
        self.faser_status.note_plan(planned, time())

    def _note_requests(self, scheduler_output: Any) -> None:
        open_requests = self._planner.requests
        open_requests.release(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in open_requests:  # preempted before
                open_requests.restart(new.req_id)
            else:
                request = self.requests[new.req_id]
                params = request.sampling_params
                own = max_draft_of(params.extra_args) if params is not None else 0
                open_requests.admit(new.req_id, HARD_MAX_LENGTH if own is None else own, request.max_tokens)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            open_requests.restart(request_id)

    def _scheduled(self, scheduler_output: Any) -> ScheduledStep:
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        ids, size = list(scheduled), len(scheduled)
        requests = [self.requests[each] for each in ids]
        num_drafts = np.fromiter((len(drafts.get(each, ())) for each in ids), np.int64, size)
        in_flight = self._tokens_in_flight(requests, num_drafts)
        return ScheduledStep(
            request_ids=ids,
            num_rows=np.fromiter(scheduled.values(), np.int64, size),
            num_drafts=num_drafts,
            is_reading=np.fromiter((each.is_prefill_chunk for each in requests), np.bool_, size),
            num_tokens=np.fromiter((each.num_tokens for each in requests), np.int64, size) + in_flight,
            num_output=np.fromiter((each.num_output_tokens for each in requests), np.int64, size) + in_flight,
        )

    def _tokens_in_flight(self, requests: list[Any], num_drafts: Any) -> Any:
        """[B] tokens that steps in flight may still add to each request."""
        raise NotImplementedError

    def _give(self, planned: PlannedStep) -> None:
        """Let the next step verify as many drafts of each request as planned."""
        raise NotImplementedError

    # ── its result is known ──────────────────────────────────────────────────────────────────────────────────────────

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._learn(scheduler_output, model_runner_output)  # first: vLLM cuts the sampled tokens at a stop
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._write_status()
        return outputs

    def _learn(self, scheduler_output: Any, model_runner_output: Any) -> None:
        while self._in_flight and self._in_flight[0].output is not scheduler_output:
            self._in_flight.popleft()  # its result never comes: the engine was paused or reset
        if not self._in_flight:
            return
        step, now = self._in_flight.popleft(), perf_counter()
        seconds = now - max(self._done_at, step.scheduled_at)
        self._done_at = now
        ids = step.planned.step.request_ids
        sampled, index_of = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        counts = (len(sampled[index_of[each]]) if each in self.requests else 0 for each in ids) if sampled else ()
        num_sampled = np.fromiter(counts, np.int64, len(ids)) if sampled else np.zeros(len(ids), dtype=np.int64)
        predicted = self._planner.cost.seconds_of(step.planned.work)
        accepted = self._planner.learn(step.planned, num_sampled, seconds)
        self.faser_status.add(step.planned, num_sampled, accepted, seconds, predicted)

    def _write_status(self) -> None:
        """At most once a second, and when the engine becomes idle."""
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        now = perf_counter()
        if now - self._written_at < WRITE_SECONDS and (running or waiting):
            return
        self._written_at = now
        status = self.faser_status
        status.time, status.running, status.waiting = time(), running, waiting
        status.kv_used = self.kv_cache_manager.usage
        status.failures = self._planner.num_failures
        status.costs = self._planner.cost.profile.kind
        try:
            status.save(self._status_path)
        except OSError as error:
            if not self._said_unwritten:
                log.warning("FASER: no metrics and no dashboard: %s", error)
            self._said_unwritten = True

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        shutil.rmtree(run_folder(self.vllm_config.instance_id), ignore_errors=True)


class GivesLengthsAhead(GivesLengths):
    """For asynchronous scheduling: the next step is scheduled with placeholders, which the worker fills in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(f"{type(self).__name__} needs --async-scheduling; {OTHER_CLASS}")

    def _tokens_in_flight(self, requests: list[Any], num_drafts: Any) -> Any:
        return np.fromiter((each.num_output_placeholders for each in requests), np.int64, len(requests))

    def _give(self, planned: PlannedStep) -> None:
        step = planned.step
        for request_id, length, is_reading in zip(
            step.request_ids, planned.lengths.tolist(), step.is_reading.tolist(), strict=True
        ):
            if not is_reading:
                self.requests[request_id].spec_token_ids = PLACEHOLDERS[length]


class GivesLengthsAfter(GivesLengths):
    """Without asynchronous scheduling: drafts come back to the scheduler before the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: dict[str, int] = {}
        if self.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(f"{type(self).__name__} needs --no-async-scheduling; {OTHER_CLASS}")

    def _tokens_in_flight(self, requests: list[Any], num_drafts: Any) -> Any:
        return num_drafts + 1

    def _give(self, planned: PlannedStep) -> None:
        self._given = dict(zip(planned.step.request_ids, planned.lengths.tolist(), strict=True))

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        draft_token_ids.draft_token_ids = [list(tokens[: self._given.get(each, 0)]) for each, tokens in drafts]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]


def _assumed(vllm_config: Any) -> Profile:
    """Costs from the sizes of the models, until the worker has measured them."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative.method not in ("ngram", "ngram_gpu") else None
    return assumed_costs(
        _shape(vllm_config.model_config),
        None if draft is None else _shape(draft),
        SPEEDS["cpu" if vllm_config.device_config.device_type == "cpu" else "cuda"],
        vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _shape(model_config: Any) -> ModelShape:
    text = model_config.hf_text_config
    hidden = model_config.get_hidden_size()
    return ModelShape(
        num_layers=model_config.get_total_num_hidden_layers(),
        hidden_size=hidden,
        intermediate_size=text.to_dict().get("intermediate_size") or 4 * hidden,
        num_heads=model_config.model_arch_config.total_num_attention_heads,
        num_kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.get_head_size(),
        vocab_size=model_config.get_vocab_size(),
    )
