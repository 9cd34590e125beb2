"""FASER's drafting in vLLM's V1 runner: a proposer that stands in for vLLM's own for draft models.

0.26 runs draft models on this runner; 0.32 does where it has no Triton, which is the case on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from faser.cost.profile import Profile
from faser.vllm.drafting.graphs import capture_graphs, max_splits
from faser.vllm.drafting.lag import STEADY_LAG, DraftBatch, DraftLag
from faser.vllm.drafting.loop import DraftLoop
from faser.vllm.drafting.measure import measure_costs, spread_blocks
from faser.vllm.drafting.rows import ForwardRows, Paging
from faser.vllm.drafting.steps import DraftSteps
from faser.vllm.made_up import MadeUpSteps

NO_LIMIT = 1 << 60


class DraftProposerV1(DraftModelProposer):
    """vLLM's proposer, of which it remains an instance: the runner asks for that. Until `prepare` it drafts as vLLM."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.steps: DraftSteps | None = None
        self._limit = runner.max_model_len  # positions of the draft
        # [R, L]: one column more than a context has, for the token after the last one
        shape = (self.max_batch_size, self.max_model_len + 1)
        self._history = torch.zeros(shape, dtype=torch.int32, device=device)
        self._is_measuring = False
        self._probs: list[Tensor] = []

    def why_not(self) -> str | None:
        """Why drafting stays vLLM's; None: it does not."""
        parallel = self.vllm_config.parallel_config
        reasons = {
            "vocabularies differ": self.use_heterogeneous_vocab,
            "the draft proposes all tokens at once": self.parallel_drafting,
            "the draft reads images": self.supports_mm_inputs,
            "positions have several dimensions": self.uses_mrope,
            "data parallelism": parallel.data_parallel_size > 1,
            "context parallelism": parallel.decode_context_parallel_size > 1,
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "experts are balanced": self.eplb_state is not None,
            "the draft's layers differ in attention": len(self.draft_attn_groups) != 1,
            "max_num_batched_tokens is below twice max_num_seqs": STEADY_LAG * self.max_batch_size
            > self.max_num_tokens,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """vLLM's graphs of the draft, one per layer, would never run."""
        super().initialize_cudagraph_keys(cudagraph_mode if self.why_not() else CUDAGraphMode.NONE)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_measuring:
            super().dummy_run(*args, **kwargs)

    # ── FASER's part of the runner (DraftPart) ───────────────────────────────────────────────────────────────────────

    def prepare(self) -> str:
        runner, group = self.runner, self.kv_cache_gid
        self._limit = min(runner.effective_drafter_max_model_len, runner.max_model_len)
        runner.effective_drafter_max_model_len = NO_LIMIT  # one long request does not keep the others from drafting
        table = runner.input_batch.block_table[group].block_table.gpu
        loop = DraftLoop(
            self,
            Paging(self._history, table, self.block_size, self._limit),
            max_requests=self.max_batch_size,
            max_rows=self.max_num_tokens,
            max_depth=self.speculative_config.num_speculative_tokens,
        )
        block_size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self.steps = DraftSteps(DraftLag(self.max_batch_size, block_size), loop, group)
        if self.device.type != "cuda" or self.speculative_config.enforce_eager:
            return "drafting without CUDA graphs"
        return capture_graphs(loop, graph_capture(device=self.device))

    def begin_step(self, output: Any) -> None:
        assert self.steps is not None
        for found in self.steps.begin(output):
            self._history[found.slot, : len(found.tokens)].copy_(torch.tensor(found.tokens, dtype=torch.int32))

    def measure(self) -> Profile:
        assert self.steps is not None
        table = self.runner.input_batch.block_table[self.kv_cache_gid].block_table
        spread_blocks(table.cpu, self.runner.kv_cache_config.num_blocks)
        table.copy_to_gpu()
        self._is_measuring = True
        try:
            return measure_costs(
                RunnerForwardV1(self.runner),
                self.steps.loop,
                graph_rows=self.compilation_config.cudagraph_capture_sizes or (),
                max_rows=self.max_num_tokens,
                about={"engine": "vllm, V1 runner", "target": self.vllm_config.model_config.model},
            )
        finally:
            self._is_measuring = False
            table.cpu.zero_()
            table.copy_to_gpu()

    def made_up_steps(self) -> Iterable[Any]:
        config, runner = self.vllm_config, self.runner
        sends_kv = config.kv_transfer_config is not None or config.ec_transfer_config is not None
        if sends_kv or config.model_config.is_hybrid:
            return ()
        kv = runner.kv_cache_config
        return MadeUpSteps(
            max_length=self.speculative_config.num_speculative_tokens,
            max_requests=self.max_batch_size,
            max_rows=self.max_num_tokens,
            num_blocks=kv.num_blocks,
            block_sizes=[group.kv_cache_spec.block_size for group in kv.kv_cache_groups],
        )

    # ── the draft model (DraftForward) ───────────────────────────────────────────────────────────────────────────────

    def forward(self, rows: ForwardRows) -> Tensor:
        number = rows.input_ids.shape[0]
        common = CommonAttentionMetadata(
            query_start_loc=rows.starts,
            query_start_loc_cpu=rows.starts_cpu,
            seq_lens=rows.seq_lens,
            num_reqs=rows.seq_lens.shape[0],
            num_actual_tokens=number,
            max_query_len=rows.max_rows,
            max_seq_len=self._limit,
            block_table_tensor=rows.block_table,
            slot_mapping=rows.slots,
            causal=True,
        )
        groups, layers = self.build_per_group_and_layer_attn_metadata(common, draft_index=1)
        if self.device.type == "cuda":
            bound_splits(groups, max_splits(common.num_reqs, rows.max_rows))
        with set_forward_context(
            layers,
            self.vllm_config,
            num_tokens=number,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self._draft_attn_layer_names, rows.slots),
        ):
            return self.model(input_ids=rows.input_ids, positions=rows.positions, inputs_embeds=None)

    def top_tokens(self, hidden_states: Tensor) -> Tensor:
        return self._greedy_sample(hidden_states)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        if self.steps is None:
            return super().propose(
                num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, next_token_ids,
                token_indices_to_sample, common_attn_metadata, sampling_metadata, mm_embed_inputs,
                num_rejected_tokens_gpu, slot_mappings,
            )  # fmt: skip
        batch = self._batch(self.steps, common_attn_metadata.batch_size())
        lengths = common_attn_metadata.seq_lens + 1
        if num_rejected_tokens_gpu is not None:
            lengths = lengths - num_rejected_tokens_gpu
        slots = self.steps.lag.slots(batch.request_ids)
        rows = self._record(batch, slots, target_token_ids, target_positions, lengths, next_token_ids)
        is_greedy = not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy
        self._probs, self._last_draft_probs = [], None

        def sample(hidden_states: Tensor, place: int) -> Tensor:
            tokens, probs = self._sample_draft_tokens(hidden_states, sampling_metadata)
            self._probs.append(probs)
            return tokens

        drafts = self.steps.draft(batch, lengths, rows, num_speculative_tokens, None if is_greedy else sample)
        if self._probs:
            self._last_draft_probs = torch.stack(self._probs, dim=1).contiguous()
        return drafts

    def _batch(self, steps: DraftSteps, number: int) -> DraftBatch:
        runner = self.runner
        return steps.batch(
            runner.input_batch.req_ids[:number],
            computed=runner.input_batch.num_computed_tokens_cpu[:number],
            samples=~runner.discard_request_mask.np[:number],
        )

    def _record(
        self, batch: DraftBatch, slots: Any, token_ids: Tensor, positions: Tensor, lengths: Tensor, newest: Tensor
    ) -> Tensor:
        """Write the step's tokens to the history, skipped steps included; returns the rows of the history [B]."""
        both = torch.from_numpy(np.concatenate((np.repeat(slots, batch.scheduled), slots)))
        both = both.to(self.device, non_blocking=True)
        by_row, rows = both[: -slots.size], both[-slots.size :]
        self._history.index_put_((by_row, positions[: by_row.shape[0]]), token_ids[: by_row.shape[0]])
        self._history.index_put_((rows, lengths.long() - 1), newest.to(torch.int32))
        return rows


def bound_splits(groups: list[Any], most: int) -> None:
    """Bound the parts that FlashAttention splits a context into."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    for metadata in groups:
        if isinstance(metadata, FlashAttentionMetadata):
            metadata.max_num_splits = most


class RunnerForwardV1:
    """The target's forward over made-up rows, as vLLM warms it up (TargetForward)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def run(self, rows: int, context: int, samples: bool) -> int:
        runner = self._runner
        requests = min(rows, runner.scheduler_config.max_num_seqs)
        longest = -(-rows // requests) + rows % requests  # rows of the last request
        hidden, _ = runner._dummy_run(
            rows, force_attention=True, skip_eplb=True, remove_lora=False, profile_seq_lens=max(context, longest)
        )
        if samples:
            runner.model.compute_logits(hidden[:rows])
        return requests
