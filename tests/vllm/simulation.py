"""A made-up worker under a scheduler of vLLM's kind: two steps in flight, or one where drafts come back.

It knows no models: whether a draft is accepted is drawn for each request. It checks what a worker relies on: the drafts
of a step were proposed in the step before, and a request that drafts has one row besides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any


@dataclass
class Simulation:
    scheduler: Any
    make_result: Callable[[list[str], list[list[int]]], Any]  # → ModelRunnerOutput
    is_async: bool = True
    seed: int = 1
    rates: dict[str, float] = field(default_factory=dict)  # chance that a draft is accepted, by request
    emitted: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, list[int]] = field(default_factory=dict)  # drafts verified in each step, by request
    depths: list[int] = field(default_factory=list)  # tokens proposed at the end of each step
    num_ragged: int = 0  # steps in which lengths differ

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self._proposed: dict[str, int] = {}

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._check(output)
        reading = {each: self.scheduler.requests[each].is_prefill_chunk for each in output.num_scheduled_tokens}
        if output.num_scheduled_tokens:
            self._in_flight.append((output, reading))
        if self._in_flight and (not self.is_async or len(self._in_flight) > 1 or not output.num_scheduled_tokens):
            self._finish_step()

    def run(self, max_steps: int = 5000) -> None:
        """Until no request is open."""
        for _ in range(max_steps):
            if not self.scheduler.requests and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"stuck: {list(self.scheduler.requests)}")

    def _check(self, output: Any) -> None:
        drafts = output.scheduled_spec_decode_tokens
        for request_id, rows in output.num_scheduled_tokens.items():
            number = len(drafts.get(request_id, ()))
            assert number <= self._proposed.get(request_id, 0), f"{request_id}: drafts that nobody proposed"
            assert not number or rows == number + 1
            self.lengths.setdefault(request_id, []).append(number)
        self.num_ragged += len({len(drafts.get(each, ())) for each in output.num_scheduled_tokens}) > 1
        self._proposed = dict.fromkeys(output.num_scheduled_tokens, output.num_spec_tokens_to_schedule)
        if output.num_scheduled_tokens:
            self.depths.append(output.num_spec_tokens_to_schedule)

    def _finish_step(self) -> None:
        output, reading = self._in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if reading[each] else self._sample(each, output) for each in ids]
        outputs = self.scheduler.update_from_output(output, self.make_result(ids, sampled))
        for outcome in (each for part in outputs.values() for each in part.outputs):
            self.emitted[outcome.request_id] += len(outcome.new_token_ids)
        if not self.is_async:
            drafts = [[7] * output.num_spec_tokens_to_schedule for _ in ids]
            self.scheduler.update_draft_token_ids(SimpleNamespace(req_ids=ids, draft_token_ids=drafts))

    def _sample(self, request_id: str, output: Any) -> list[int]:
        number = 0
        for _ in output.scheduled_spec_decode_tokens.get(request_id, ()):
            if self._random.random() >= self.rates.get(request_id, 0.7):
                break
            number += 1
        return [9] * (1 + number)
