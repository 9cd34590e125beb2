"""FASER's drafting in vLLM's V2 runner, which 0.32 runs draft models on: a speculator that stands in for vLLM's own.

vLLM's has no CUDA graphs and always drafts K tokens. The runner keeps the tokens of every request on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from faser.cost.profile import Profile
from faser.vllm.drafting.graphs import capture_graphs
from faser.vllm.drafting.lag import STEADY_LAG, DraftBatch, DraftLag
from faser.vllm.drafting.loop import DraftLoop
from faser.vllm.drafting.measure import measure_costs, spread_blocks
from faser.vllm.drafting.rows import ForwardRows, Paging
from faser.vllm.drafting.steps import DraftSteps


def init_drafting(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """In place of vLLM's `init_speculator`."""
    if vllm_config.speculative_config.uses_draft_model():
        return DraftSpeculatorV2(vllm_config, device, req_states)
    return init_speculator(vllm_config, device, req_states)


class DraftSpeculatorV2(StandaloneARSpeculator):
    """vLLM's speculator. Until `prepare`, and in its dummy runs, it drafts as vLLM does."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.runner: Any = None
        self.steps: DraftSteps | None = None
        self._is_measuring = False
        self._group = -1  # KV cache group of the draft's layers
        self._limit = min(self.max_model_len, self.draft_model_config.max_model_len)

    def why_not(self) -> str | None:
        """Why drafting stays vLLM's; None: it does not."""
        groups = [group for groups in self.attn_groups for group in groups]
        reasons = {
            "data parallelism": self.dp_size > 1,
            "context parallelism": self.dcp_size > 1 or self.pcp_manager is not None,
            "pipeline parallelism": self.vllm_config.parallel_config.pipeline_parallel_size > 1,
            "adaptive verification": self.enable_adaptive_verification,
            "watermarks": self.draft_watermarker is not None,
            "experts are balanced": self.eplb_state is not None,
            "the draft's layers differ in attention": len(groups) != 1,
            "max_num_batched_tokens is below twice max_num_seqs": STEADY_LAG * self.max_num_reqs > self.max_num_tokens,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    # ── FASER's part of the runner (DraftPart) ───────────────────────────────────────────────────────────────────────

    def prepare(self) -> str:
        self._group = next(index for index, groups in enumerate(self.attn_groups) if groups)
        tables = self.block_tables
        loop = DraftLoop(
            self,
            Paging(
                self.req_states.all_token_ids.gpu,
                tables.input_block_tables[self._group],
                tables.block_sizes[self._group],
                self._limit,
            ),
            max_requests=self.max_num_reqs,
            max_rows=self.max_num_tokens,
            max_depth=self.num_speculative_steps,
        )
        block_size = self.kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self.steps = DraftSteps(DraftLag(self.max_num_reqs, block_size), loop, self._group)
        if self.device.type != "cuda" or self.vllm_config.model_config.enforce_eager:
            return "drafting without CUDA graphs"
        return capture_graphs(loop, graph_capture(device=self.device))

    def begin_step(self, output: Any) -> None:
        assert self.steps is not None
        self.steps.begin(output)  # the runner itself keeps tokens of the prefix cache

    def measure(self) -> Profile:
        assert self.steps is not None
        table = self.block_tables.input_block_tables[self._group]
        spread_blocks(table, self.kv_cache_config.num_blocks)
        self._is_measuring = True
        try:
            return measure_costs(
                RunnerForwardV2(self.runner),
                self.steps.loop,
                graph_rows=self.vllm_config.compilation_config.cudagraph_capture_sizes or (),
                max_rows=self.max_num_tokens - self.max_num_reqs,  # vLLM's dummy runs leave room for one per request
                about={"engine": "vllm, V2 runner", "target": self.vllm_config.model_config.model},
            )
        finally:
            self._is_measuring = False
            table.zero_()

    def made_up_steps(self) -> Iterable[Any]:
        return ()  # vLLM ran its own

    # ── the draft model (DraftForward) ───────────────────────────────────────────────────────────────────────────────

    def forward(self, rows: ForwardRows) -> Tensor:
        number, num_groups = rows.input_ids.shape[0], len(self.kv_cache_config.kv_cache_groups)
        layers = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows.seq_lens.shape[0],
            num_tokens=number,
            query_start_loc_gpu=rows.starts,
            query_start_loc_cpu=rows.starts_cpu,
            max_query_len=rows.max_rows,
            seq_lens=rows.seq_lens,
            max_seq_len=self._limit,
            block_tables=[rows.block_table] * num_groups,
            slot_mappings=rows.slots.expand(num_groups, number),
            kv_cache_config=self.kv_cache_config,
            positions=rows.positions,
            for_cudagraph_capture=self.device.type == "cuda" and torch.cuda.is_current_stream_capturing(),
        )
        with set_forward_context(
            layers,
            self.vllm_config,
            num_tokens=number,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self.draft_attn_layer_names, rows.slots),
        ):
            return self.model(input_ids=rows.input_ids, positions=rows.positions)

    def top_tokens(self, hidden_states: Tensor) -> Tensor:
        if self.use_local_argmax_reduction:
            return self.get_draft_top_tokens(hidden_states, 0)
        return self.compute_draft_logits(hidden_states, 0).argmax(dim=-1)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """[B, K]: the columns behind `num_speculative_tokens` mean nothing."""
        number = input_batch.num_reqs
        if self._is_measuring:
            return self.draft_tokens[:number]
        if self.steps is None or dummy_run:
            return super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run,
                skip_attn_for_dummy_run, mm_inputs, is_profile, num_speculative_tokens,
            )  # fmt: skip
        depth = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self._copy_request_inputs(number, input_batch.idx_mapping, temperature, seeds)
        lengths = input_batch.seq_lens[:number] - num_rejected[:number] + 1
        drafts = self.steps.draft(
            self._batch(self.steps, input_batch),
            lengths,
            input_batch.idx_mapping[:number],
            depth,
            None if self.draft_logits is None else self._sample,
        )
        self.draft_tokens[:number, :depth].copy_(drafts)
        return self.draft_tokens[:number]

    def _batch(self, steps: DraftSteps, input_batch: Any) -> DraftBatch:
        computed = input_batch.num_computed_tokens_np
        samples = computed + input_batch.num_scheduled_tokens >= input_batch.prefill_len_np
        return steps.batch(input_batch.req_ids, computed=computed, samples=samples)

    def _sample(self, hidden_states: Tensor, place: int) -> Tensor:
        """Drafts as vLLM samples them at a temperature; it keeps their logits for the verification."""
        assert self.steps is not None
        number = hidden_states.shape[0]
        self.current_draft_step.fill_(place)
        return self.sample_draft(
            hidden_states,
            self.steps.loop.ends[:number] - 1,
            self.idx_mapping[:number],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )


class RunnerForwardV2:
    """The target's forward over made-up rows, as vLLM warms it up (TargetForward)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def run(self, rows: int, context: int, samples: bool) -> int:
        runner = self._runner
        hidden, _ = runner._dummy_run(rows, context_len=context, skip_eplb=True)
        if samples:
            runner.model.compute_logits(hidden[:rows])
        return min(rows, int(runner.max_num_reqs))
