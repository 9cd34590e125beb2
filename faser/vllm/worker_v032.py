"""The worker for vLLM 0.32: `--worker-cls faser.vllm.worker_v032.DraftWorker032`.

The V2 runner creates its speculator by a function in its module, the V1 runner its proposer by a class in its own; this
worker puts FASER's under both names. EAGLE, MTP and n-gram stay vLLM's.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner

from faser.vllm.drafting.worker import DraftingWorker, DraftPart
from faser.vllm.runner_v1 import DraftProposerV1
from faser.vllm.runner_v2 import init_drafting

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class DraftWorker032(DraftingWorker, VllmWorker):
    """vLLM's worker of this platform."""

    def init_device(self) -> None:
        model_runner.init_speculator = init_drafting
        gpu_model_runner.DraftModelProposer = DraftProposerV1
        super().init_device()

    def find_draft_part(self) -> DraftPart:
        if not self.use_v2_model_runner:
            return self.model_runner.drafter
        speculator = self.model_runner.speculator
        speculator.runner = self.model_runner
        return speculator
