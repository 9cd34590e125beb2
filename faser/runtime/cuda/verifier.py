"""The target's part of a step: a forward over contexts and drafts, and the verdict.

Knows the target, its graphs and where verdicts are packed. Does not know who drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from faser.arrays import IntArray
from faser.runtime.cuda.launched import LaunchedStep
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.resampling import Resampler
from faser.runtime.cuda.sampling import Slots
from faser.runtime.cuda.shapes import Shape, on_part, verification
from faser.runtime.cuda.verdict import FIRST_TOKEN, judge
from faser.step import StepPlan


class CudaVerifier:
    """`acceptance` [max_length], for measuring: probabilities to accept drafts by position, whatever they say."""

    def __init__(
        self, target: CudaModel, slots: Slots, resampler: Resampler, max_length: int, acceptance: torch.Tensor | None
    ) -> None:
        max_requests, device = target.requests.slots.shape[0], target.model.device
        self.target = target
        self.resampler = resampler
        self.packed = torch.zeros(max_requests, FIRST_TOKEN + max_length + 1, dtype=torch.int32, device=device)
        self.usual_rows = 1  # rows of a request that drafts; fewer run as this many, so that there are few graphs
        self._slots = slots
        self.acceptance = acceptance

    def launch(self, plan: StepPlan, num_drafted: IntArray, num_sms: int = 0) -> Shape:
        """The forward of a step with num_drafted [B] drafts to verify; the shape that ran."""
        self.set_requests(plan, num_drafted)
        return self.launch_requests(plan, num_drafted, num_sms)

    def set_requests(self, plan: StepPlan, num_drafted: IntArray) -> None:
        self.target.set_requests(
            plan.slots, plan.start, plan.num_rows, num_drafted, plan.samples, plan.unsettled, plan.judged, plan.frontier
        )

    def launch_requests(self, plan: StepPlan, num_drafted: IntArray, num_sms: int = 0) -> Shape:
        """As `launch`, for requests that were set."""
        num_rows = plan.num_rows + num_drafted
        shape = None
        if plan.only_decodes:
            most = int(num_rows.max())
            shape = verification(int(num_rows.sum()), most if most == 1 else max(most, self.usual_rows))
        num_wanted = int(self._num_judged(plan, num_drafted).sum())
        return self.target.launch_rows(on_part(shape, num_sms), num_rows, plan.start, num_wanted)

    def resample(self, step: LaunchedStep, shape: Shape) -> None:
        """Replace the tokens of requests that need more than a temperature."""
        num_judged = self._num_judged(step.plan, step.num_verified)
        step.answers = self.resampler.resample(step.plan, num_judged, shape)

    def judge(self, shape: Shape, *, overlaps: bool = False) -> None:
        """The verdict over the latest forward, into `packed`."""
        target = self.target
        judge(
            target.choices, target.requests_of(shape), target.rows.cu_wanted[: shape.num_requests + 1], self._slots,
            self.packed[: shape.num_requests], overlaps=overlaps, acceptance=self.acceptance,
        )  # fmt: skip

    def _num_judged(self, plan: StepPlan, num_drafted: IntArray) -> IntArray:
        """[B] rows whose token is judged: the last context row and the drafts of each request that samples."""
        return np.where(plan.samples, num_drafted + 1, 0)
