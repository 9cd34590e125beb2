"""The worker for vLLM 0.26: `--worker-cls faser.vllm.worker_v026.DraftWorker026`.

The runner creates its proposer for draft models by a name in its module; this worker puts FASER's under that name.
EAGLE, MTP and n-gram stay vLLM's.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner

from faser.vllm.drafting.worker import DraftingWorker, DraftPart
from faser.vllm.runner_v1 import DraftProposerV1

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class DraftWorker026(DraftingWorker, VllmWorker):
    """vLLM's worker of this platform."""

    def init_device(self) -> None:
        gpu_model_runner.DraftModelProposer = DraftProposerV1
        super().init_device()

    def find_draft_part(self) -> DraftPart:
        return self.model_runner.drafter
