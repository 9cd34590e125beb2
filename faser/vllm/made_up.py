"""Made-up steps of a few requests, for vLLM's V1 runner: they compile the Triton kernels of a speculative step.

Without them the first requests of users wait for these kernels. vLLM's V2 runner runs such steps itself
(vllm/v1/worker/gpu/warmup.py). Triton compiles a kernel anew where an integer is 1, is a multiple of 16, or is neither,
and vLLM's for every power of two of drafted tokens: so several numbers of requests and several lengths are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

NUMBERS = (1, 3, 16)  # requests
PROMPT = 2  # tokens of each


@dataclass(frozen=True)
class MadeUpSteps:
    """The scheduler's messages. Every round is a step with prompts and one with drafts."""

    max_length: int
    max_requests: int
    max_rows: int  # of a step
    num_blocks: int  # of the KV cache, the first of which is vLLM's own
    block_sizes: Sequence[int]  # of each KV cache group

    @property
    def lengths(self) -> list[int]:
        """Up to the longest, one for every power of two of a length plus one."""
        shorter = ((1 << power) - 1 for power in range(1, self.max_length.bit_length() + 1))
        return [*(length for length in shorter if length < self.max_length), self.max_length]

    @property
    def numbers(self) -> list[int]:
        """NUMBERS, as far as there is room."""
        room = (self.num_blocks - 1) // sum(self._blocks_each)
        return [
            each for each in NUMBERS if each <= min(self.max_requests, self.max_rows // (1 + self.max_length), room)
        ]

    @property
    def _blocks_each(self) -> list[int]:
        """Blocks of a request, by group: for its prompt, a token, drafts, and drafts behind these."""
        tokens = PROMPT + 2 * (1 + self.max_length)
        return [-(-tokens // size) for size in self.block_sizes]

    def __iter__(self) -> Iterator[SchedulerOutput]:
        ended: set[str] = set()
        for number in self.numbers:
            for length in self.lengths:
                ids = [f"faser-made-up-{number}-{length}-{index}" for index in range(number)]
                yield self._prompts(ids, ended)
                yield self._drafts(ids, length)
                ended = set(ids)
        yield self._step({}, ended)

    def _prompts(self, ids: Sequence[str], ended: set[str]) -> SchedulerOutput:
        step = self._step(dict.fromkeys(ids, PROMPT), ended)
        params = SamplingParams(temperature=0.0)
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=request_id,
                prompt_token_ids=[0] * PROMPT,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=self._blocks(index),
                num_computed_tokens=0,
                lora_request=None,
            )
            for index, request_id in enumerate(ids)
        ]
        return step

    def _drafts(self, ids: Sequence[str], length: int) -> SchedulerOutput:
        step = self._step(dict.fromkeys(ids, 1 + length), set())
        step.scheduled_spec_decode_tokens = {each: [0] * length for each in ids}
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(ids)
        cached.new_block_ids = [None] * len(ids)
        cached.num_computed_tokens = [PROMPT] * len(ids)
        cached.num_output_tokens = [1] * len(ids)
        step.scheduled_cached_reqs = cached
        return step

    def _step(self, rows: dict[str, int], ended: set[str]) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = rows, sum(rows.values())
        step.num_common_prefix_blocks = [0] * len(self.block_sizes)  # 0.32 does not read it
        step.finished_req_ids = ended
        step.num_spec_tokens_to_schedule = self.max_length
        return step

    def _blocks(self, index: int) -> tuple[list[int], ...]:
        """Of the request of this index, by group; no block has two owners."""
        first = 1 + index * sum(self._blocks_each)
        starts = [first + sum(self._blocks_each[:group]) for group in range(len(self._blocks_each))]
        return tuple(list(range(start, start + size)) for start, size in zip(starts, self._blocks_each, strict=True))
