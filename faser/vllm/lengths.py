"""How many tokens each request of vLLM drafts next: the seam between vLLM's scheduler and FASER's policies.

A step of vLLM verifies the drafts of the step before and ends with drafting for the next one, for the whole batch and
as far as the longest length. With asynchronous scheduling two steps are in flight: step n+1 is planned before the
result of step n is known, so `learn` is always told which plan it is about.

Knows request ids, counts and seconds. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.cost.profiled_cost import catch_up_rows
from faser.policy.base import BatchView, Outcome, Policy
from faser.vllm.costs import EngineCost, StepWork

HELD_FROM = 32  # requests of a batch whose lengths hold for HELD_STEPS: a policy takes longer than its answer changes
HELD_STEPS = 4
NEW_SHARE = 1 / 8  # of requests without a held length, beyond which the policy is asked at once

log = logging.getLogger("vllm.faser")  # below vLLM's logger, which prints


@dataclass(frozen=True)
class ScheduledStep:
    """A step that vLLM has scheduled. Sequences have one entry a request, in one order."""

    request_ids: Sequence[str]
    num_rows: IntArray  # rows of the target, drafts included
    num_drafts: IntArray  # drafts among these rows
    is_reading: BoolArray  # whether prompt is left after this step: such a request cannot draft
    num_tokens: IntArray  # context behind the step, if all its drafts are accepted


@dataclass(frozen=True)
class PlannedStep:
    """What was decided at the end of a step, and what is needed to learn from its result. Arrays are [B]."""

    step: ScheduledStep
    slots: IntArray
    decodes: BoolArray  # whether the request decodes in this step: its prompt was computed before
    lengths: IntArray  # tokens of each request that the next step verifies
    lag: IntArray  # rows that the draft computes first; 0 where it does not run
    work: StepWork

    @property
    def depth(self) -> int:
        """Tokens that the draft proposes for every request; 0: the draft does not run."""
        return self.work.depth


class OpenRequests:
    """What is remembered of every open request, by slot. A slot is held until the request is finished."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        empty = np.zeros(0, dtype=np.int64)
        self.max_draft, self.max_output, self.num_prompt = (empty.copy() for _ in range(3))
        self.accepted, self.tried = empty.copy(), empty.copy()
        self.unseen = empty.copy()  # context tokens that the draft missed because it did not run
        self.held = empty.copy()  # length that the policy gave last; -1: none yet
        self.decodes: BoolArray = np.zeros(0, dtype=np.bool_)  # whether the prompt is computed

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def admit(self, request_id: str, max_draft: int, max_output: int, num_prompt: int) -> None:
        """A request is scheduled for the first time."""
        if not self._free:
            self._grow()
        slot = self._slots[request_id] = self._free.pop()
        self.max_draft[slot], self.max_output[slot], self.num_prompt[slot] = max_draft, max_output, num_prompt
        self.accepted[slot] = self.tried[slot] = self.unseen[slot] = 0
        self.held[slot] = -1
        self.decodes[slot] = False

    def restart(self, request_id: str) -> None:
        """A preempted request computes its context again. What was learned of it stays."""
        slot = self._slots[request_id]
        self.unseen[slot] = 0
        self.decodes[slot] = False

    def release(self, request_ids: Iterable[str]) -> None:
        """Requests are finished. Ids that were never scheduled are ignored."""
        self._free += [self._slots.pop(each) for each in request_ids if each in self._slots]

    def slots_of(self, request_ids: Sequence[str]) -> IntArray:
        return np.fromiter(map(self._slots.__getitem__, request_ids), np.int64, len(request_ids))

    def _grow(self) -> None:
        old = self.decodes.size
        new = max(64, 2 * old)
        for name in ("max_draft", "max_output", "num_prompt", "accepted", "tried", "unseen", "held", "decodes"):
            setattr(self, name, np.resize(getattr(self, name), new))
        self._free = list(range(new - 1, old - 1, -1))


class LengthPlanner:
    """Asks a policy for lengths after every schedule, and tells it the outcome of every step."""

    def __init__(self, policy: Policy, cost: EngineCost, max_length: int, skips_draft: bool) -> None:
        self.policy = policy
        self.cost = cost
        self.requests = OpenRequests()
        self.num_failures = 0  # of the policy
        self._max_length = max_length  # vLLM's num_speculative_tokens
        self._skips_draft = skips_draft  # whether the draft does not run where nobody drafts, and catches up later
        self._steps_held = 0
        self._typical = 0  # median of the held lengths: for requests that have none
        self._held_with_prompts = False

    def plan(self, step: ScheduledStep) -> PlannedStep:
        """Give every request of the step a length. The step will run: the draft sees its tokens, or misses them."""
        requests, slots = self.requests, self.requests.slots_of(step.request_ids)
        decodes = requests.decodes[slots] & (step.num_rows == step.num_drafts + 1)
        lag = requests.unseen[slots] + np.where(decodes, 1, step.num_rows)
        may_draft = ~step.is_reading
        lengths = np.zeros(slots.size, dtype=np.int64)
        prompt_rows = int(step.num_rows.sum() - (step.num_drafts + 1)[decodes].sum())
        if may_draft.any():
            lengths[may_draft] = self._lengths(self._view(step, slots, lag, may_draft, prompt_rows))
        depth = int(lengths.max(initial=0))
        runs = depth > 0 or not self._skips_draft
        requests.unseen[slots] = 0 if runs else requests.unseen[slots] + step.num_rows
        requests.decodes[slots] = may_draft
        lag = lag if depth > 0 else np.zeros_like(lag)
        work = StepWork(
            rows=int((step.num_drafts + 1)[decodes].sum()),
            prompt_rows=prompt_rows,
            context=int(step.num_tokens.sum()),
            depth=depth,
            num_drafting=slots.size if depth > 0 else 0,
            catch_up_rows=catch_up_rows(lag),
        )
        return PlannedStep(step, slots, decodes, lengths, lag, work)

    def learn(self, planned: PlannedStep, num_sampled: IntArray, seconds: float) -> IntArray:
        """Take in the result of a step: tokens that each request sampled (0: none, or it is gone), and its seconds.

        Returns the accepted drafts of each request.
        """
        drafts = planned.step.num_drafts
        told = planned.decodes & (num_sampled > 0)
        accepted = np.where(told, np.minimum(num_sampled - 1, drafts), 0)
        slots, requests = planned.slots[told], self.requests
        requests.accepted[slots] += accepted[told]
        requests.tried[slots] += np.minimum(accepted + 1, drafts)[told]
        missed = np.where(requests.unseen[slots] > 0, (drafts - accepted)[told], 0)  # rejected: no part of the context
        requests.unseen[slots] -= np.minimum(missed, requests.unseen[slots])
        self.cost.learn_step(planned.work, seconds)
        if told.any() and self.policy.learns:
            self._tell(
                Outcome(
                    slots=slots,
                    lengths=drafts[told],
                    accepted=accepted[told],
                    lag=planned.lag[told],
                    num_prefill_rows=planned.work.prompt_rows,
                    seconds=seconds,
                )
            )
        return accepted

    def _view(
        self, step: ScheduledStep, slots: IntArray, lag: IntArray, may_draft: BoolArray, prompt_rows: int
    ) -> BatchView:
        requests, slots = self.requests, slots[may_draft]
        num_tokens = step.num_tokens[may_draft]
        num_output = num_tokens - requests.num_prompt[slots]
        remaining = np.maximum(requests.max_output[slots] - num_output, 0)
        limit = np.minimum(requests.max_draft[slots], self._max_length)
        return BatchView(
            slots=slots,
            num_tokens=num_tokens,
            lag=lag[may_draft],
            limit=np.minimum(limit, np.maximum(remaining - 1, 0)),
            accepted=requests.accepted[slots],
            tried=requests.tried[slots],
            num_output=num_output,
            remaining=remaining,
            num_prefill_rows=prompt_rows,
            cost=self.cost if self.policy.needs_cost else None,
        )

    def _lengths(self, view: BatchView) -> IntArray:
        """Lengths by the policy, or those it gave before to a large batch that is still about the same."""
        held = self.requests.held[view.slots]
        if self._still_holds(view, held):
            self._steps_held += 1
            return np.minimum(np.where(held < 0, self._typical, held), view.limit)
        lengths = self._ask(view)
        self.requests.held[view.slots] = lengths
        self._steps_held, self._typical = 1, int(np.partition(lengths, lengths.size // 2)[lengths.size // 2])
        self._held_with_prompts = view.num_prefill_rows > 0
        return lengths

    def _still_holds(self, view: BatchView, held: IntArray) -> bool:
        return (
            view.num_requests >= HELD_FROM
            and 0 < self._steps_held < HELD_STEPS
            and self._held_with_prompts == (view.num_prefill_rows > 0)
            and int(np.count_nonzero(held < 0)) <= NEW_SHARE * view.num_requests
        )

    def _ask(self, view: BatchView) -> IntArray:
        """The policy's lengths, at most the limits. If it fails, vLLM's own length."""
        self.cost.num_requests = view.num_requests
        try:
            lengths = np.broadcast_to(self.policy.lengths(view), view.limit.shape)
        except Exception as error:
            self._say_failure(error)
            return view.limit
        return np.clip(lengths, 0, view.limit)

    def _tell(self, outcome: Outcome) -> None:
        try:
            self.policy.learn(outcome)
        except Exception as error:
            self._say_failure(error)

    def _say_failure(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            log.error(
                "FASER: policy %s failed (%s: %s). Where it fails, requests draft %d tokens as vLLM would. "
                "This is said once.", self.policy.name, type(error).__name__, error, self._max_length, exc_info=error,
            )  # fmt: skip
