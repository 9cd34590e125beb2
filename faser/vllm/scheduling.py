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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from time import perf_counter, time
from typing import Any

import numpy as np

from faser.arrays import IntArray
from faser.cost.profile import Profile
from faser.errors import ConfigError, InvalidRequest
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


class Speculation:
    """Lengths for one engine of vLLM: all that its scheduler keeps for FASER."""

    def __init__(self, vllm_config: Any) -> None:
        config = FaserConfig.find(vllm_config.additional_config) or FaserConfig()
        check(config, vllm_config)
        instance, max_length = vllm_config.instance_id, vllm_config.speculative_config.num_speculative_tokens
        self._table = CostTable(_assumed(vllm_config), table_path(config, instance))
        skips = versions.skips_draft(vllm_config)
        self.planner = LengthPlanner(make_policy(config.policy), self._table.cost, max_length, skips)
        self.status = EngineStatus(policy=config.policy)
        self.clock: Callable[[], float] = perf_counter  # seconds of steps; a simulation sets its own
        self._in_flight: deque[InFlight] = deque()
        self._done_at = 0.0  # when the last result came
        self._folder = run_folder(instance)
        self._status_path = status_path(instance, vllm_config.parallel_config.data_parallel_index)
        self._written_at = 0.0
        self._said: set[str] = set()  # warnings
        log.info("FASER: policy %s, at most %d drafted tokens a request", config.policy, max_length)

    def plan(self, output: Any, requests: Mapping[str, Any], tokens_in_flight: TokensInFlight) -> PlannedStep | None:
        """Lengths for the drafts at the end of a step that was just scheduled; None for a step without rows."""
        began = perf_counter()
        self._note_requests(output, requests)
        if not output.num_scheduled_tokens:
            return None
        news = self._table.poll()
        if news is not None:
            log.info("FASER: %s", news)
        planned = self.planner.plan(_scheduled_step(output, requests, tokens_in_flight))
        self._in_flight.append(InFlight(output, planned, self.clock()))
        self.status.planning_seconds += perf_counter() - began
        self.status.note_plan(planned, time())
        return planned

    def learn(self, output: Any, result: Any, requests: Mapping[str, Any]) -> None:
        """Take in the result of a step. `requests`: those that are still open."""
        while self._in_flight and self._in_flight[0].output is not output:
            self._in_flight.popleft()  # its result never comes: the engine was paused or reset
        if not self._in_flight:
            return
        step, now = self._in_flight.popleft(), self.clock()
        seconds = now - max(self._done_at, step.scheduled_at)
        self._done_at = now
        num_sampled = _num_sampled(step.planned.step.request_ids, result, requests)
        predicted = self.planner.cost.seconds_of(step.planned.work)
        accepted = self.planner.learn(step.planned, num_sampled, seconds)
        self.status.add(step.planned, num_sampled, accepted, seconds, predicted)

    def write_status(self, running: int, waiting: int, kv_used: float) -> None:
        """At most once a second, and when the engine becomes idle."""
        now, status = perf_counter(), self.status
        if now - self._written_at < WRITE_SECONDS and (running or waiting):
            return
        self._written_at = now
        status.time, status.running, status.waiting, status.kv_used = time(), running, waiting, kv_used
        status.failures, status.costs = self.planner.num_failures, self.planner.cost.profile.kind
        try:
            status.save(self._status_path)
        except OSError as error:
            self._warn_once(f"no metrics and no dashboard: {error}")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _note_requests(self, output: Any, requests: Mapping[str, Any]) -> None:
        open_requests = self.planner.requests
        open_requests.release(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            if new.req_id in open_requests:  # preempted before
                open_requests.restart(new.req_id)
            else:
                request = requests[new.req_id]
                open_requests.admit(new.req_id, self._max_draft(request), request.max_tokens, request.num_prompt_tokens)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            open_requests.restart(request_id)

    def _max_draft(self, request: Any) -> int:
        """vLLM's HTTP process refuses wrong limits if it loaded the plugin. Here it is too late to refuse."""
        params = request.sampling_params
        try:
            own = max_draft_of(params.extra_args) if params is not None else None
        except InvalidRequest as error:
            self._warn_once(f"{error}. The request does not draft.")
            return 0
        return HARD_MAX_LENGTH if own is None else own

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            log.warning("FASER: %s", text)
        self._said.add(text)


class GivesLengths:
    """Mixed into a scheduler of vLLM, before it. All of its state is in `faser`: vLLM's names stay vLLM's."""

    vllm_config: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    max_num_running_reqs: int
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faser = Speculation(self.vllm_config)
        # vLLM pads prompts of one row to the full length unless it has a table of lengths: here, a constant one
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # before vLLM, which cuts the sampled tokens at a stop
        self.faser.learn(scheduler_output, model_runner_output, self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        self.faser.write_status(running, waiting, self.kv_cache_manager.usage)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        self.faser.close()


class GivesLengthsAhead(GivesLengths):
    """For asynchronous scheduling: the next step is scheduled with placeholders, which the worker fills in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(f"{type(self).__name__} needs --async-scheduling; {OTHER_CLASS}")

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        planned = self.faser.plan(scheduler_output, self.requests, _placeholders)
        if planned is None:
            return
        scheduler_output.num_spec_tokens_to_schedule = planned.depth
        batch = map(self.requests.__getitem__, planned.step.request_ids)
        for request, length in zip(batch, planned.lengths.tolist(), strict=True):
            request.spec_token_ids = PLACEHOLDERS[length]  # none for a request with prompt left


class GivesLengthsAfter(GivesLengths):
    """Without asynchronous scheduling: drafts come back to the scheduler before the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faser_lengths: dict[str, int] = {}  # of the drafts that come back next
        if self.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(f"{type(self).__name__} needs --no-async-scheduling; {OTHER_CLASS}")

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        planned = self.faser.plan(scheduler_output, self.requests, _own_step)
        if planned is None:
            return
        scheduler_output.num_spec_tokens_to_schedule = planned.depth
        self.faser_lengths = dict(zip(planned.step.request_ids, planned.lengths.tolist(), strict=True))

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        draft_token_ids.draft_token_ids = [list(tokens[: self.faser_lengths.get(each, 0)]) for each, tokens in drafts]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]


# ── what is read of vLLM's objects ───────────────────────────────────────────────────────────────────────────────────

TokensInFlight = Callable[[list[Any], IntArray], IntArray]  # requests [B], drafts [B] → tokens [B]
# Everything below that goes through all requests is a `map` over built-in functions: a third of a comprehension's time.


def _placeholders(requests: list[Any], num_drafts: IntArray) -> IntArray:
    """[B] tokens that all steps in flight may still add to each request."""
    return _counts("num_output_placeholders", requests)


def _own_step(requests: list[Any], num_drafts: IntArray) -> IntArray:
    """The same where no step but this one is in flight."""
    return num_drafts + 1


def _scheduled_step(output: Any, requests: Mapping[str, Any], tokens_in_flight: TokensInFlight) -> ScheduledStep:
    ids = list(output.num_scheduled_tokens)
    batch = list(map(requests.__getitem__, ids))
    num_drafts = _num_drafts(output.scheduled_spec_decode_tokens, ids)
    return ScheduledStep(
        request_ids=ids,
        num_rows=np.fromiter(output.num_scheduled_tokens.values(), np.int64, len(ids)),
        num_drafts=num_drafts,
        is_reading=_counts("is_prefill_chunk", batch) > 0,
        num_tokens=_counts("num_tokens", batch) + tokens_in_flight(batch, num_drafts),
    )


def _num_drafts(drafts: Mapping[str, Sequence[int]], ids: Sequence[str]) -> IntArray:
    """[B] drafts that the step verifies; requests without any are not in `drafts`."""
    if not drafts:
        return np.zeros(len(ids), dtype=np.int64)
    return np.fromiter(map(len, map(drafts.get, ids, repeat(()))), np.int64, len(ids))


def _counts(name: str, requests: list[Any]) -> IntArray:
    """[B] an attribute of each request."""
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))


def _num_sampled(request_ids: Sequence[str], result: Any, requests: Mapping[str, Any]) -> IntArray:
    """[B] tokens that each request sampled; 0 for requests that are gone."""
    number = len(request_ids)
    if not result.sampled_token_ids:
        return np.zeros(number, dtype=np.int64)
    counts = np.fromiter(map(len, result.sampled_token_ids), np.int64, len(result.sampled_token_ids))
    rows = np.fromiter(map(result.req_id_to_index.__getitem__, request_ids), np.int64, number)
    is_open = np.fromiter(map(requests.__contains__, request_ids), np.bool_, number)
    return np.where(is_open, counts[rows], 0)


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
