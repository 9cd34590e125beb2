"""What steps of vLLM cost: the file that carries the worker's profile to the scheduler, and corrections by the steps.

The worker measures a `Profile` through the graphs that will run and saves it. The scheduler, in another process, reads
the file when it appears. Until then, and where nothing was measured, it plans with a profile assumed from the sizes of
the models. Knows rows and seconds; imports neither vLLM nor torch.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from faser.arrays import FloatArray
from faser.cost.curve import NOTHING, Context, Curve, Rows
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.errors import ConfigError
from faser.vllm.config import FaserConfig

NUM_BYTES = 2  # of a weight, in the assumed profile

NUM_RATIOS = 3  # steps whose median corrects the cost: one pause, or one compilation, then changes nothing
POLL_STEPS = 64  # between two looks for the file


def run_folder(instance_id: str) -> Path:
    """Where the processes of one vLLM leave files for each other."""
    return Path(tempfile.gettempdir()) / f"faser-vllm-{instance_id}"


def table_path(config: FaserConfig, instance_id: str) -> Path:
    """The file of the profile: `instance_id` is the same in all processes of one vLLM."""
    return Path(config.costs) if config.costs is not None else run_folder(instance_id) / "costs.json"


@dataclass(frozen=True)
class AssumedSpeeds:
    """Of a device, roughly: corrections follow within a few steps, so the shape of the curves matters more."""

    bytes_per_second: float
    flops_per_second: float
    layer_seconds: float
    host_seconds: float


SPEEDS = {  # by device type: a large GPU with CUDA graphs; a few cores
    "cuda": AssumedSpeeds(3.5e12, 4e14, 1e-5, 5e-4),
    "cpu": AssumedSpeeds(3e10, 3e11, 1e-3, 2e-3),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, as far as costs follow from them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_weights(self) -> int:
        """Read by every forward."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size

    def curve(self, speeds: AssumedSpeeds, max_rows: int) -> Curve:
        base = self.num_layers * speeds.layer_seconds + self.num_weights * NUM_BYTES / speeds.bytes_per_second
        row = 2 * self.num_weights / speeds.flops_per_second
        token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * NUM_BYTES / speeds.bytes_per_second
        rows = tuple(1 << power for power in range(max_rows.bit_length()))
        return Curve(rows, tuple(base + row * each for each in rows), (token,) * len(rows))


def assumed_costs(target: ModelShape, draft: ModelShape | None, speeds: AssumedSpeeds, max_rows: int) -> Profile:
    """Where nothing was measured. Without a draft model drafting is free."""
    verify = target.curve(speeds, max_rows)
    drafts = NOTHING if draft is None else draft.curve(speeds, max_rows)
    return Profile(
        {"engine": "vllm"},
        verify=verify,
        prompts=verify,
        first_draft=drafts,
        next_draft=drafts,
        catch_up=drafts,
        host=speeds.host_seconds,
        kind="assumed",
    )


@dataclass(frozen=True)
class StepWork:
    """What one step of vLLM asks of both models: it verifies drafts of the step before, then drafts for the next."""

    rows: int  # of decoding requests, drafts included
    prompt_rows: int
    context: int  # tokens that the target reads
    depth: int  # tokens drafted for every request at the end of the step; 0: the draft does not run
    num_drafting: int  # requests in the draft's forwards
    catch_up_rows: int  # rows of the draft's first forward if any draft fell behind; 0: none did


class EngineCost(ProfiledCost):
    """A profile as vLLM runs it: the whole batch is drafted for, as far as the longest length."""

    drafts_whole_batch = True

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.num_requests = 0  # of the batch that is being planned
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)

    def first_draft(self, requests: Rows, context: Context, rows: int = 0) -> FloatArray:
        return super().first_draft(self._drafted_for(requests), context, rows)

    def next_draft(self, requests: Rows, context: Context) -> FloatArray:
        return super().next_draft(self._drafted_for(requests), context)

    def _drafted_for(self, requests: Rows) -> Rows:
        if isinstance(requests, int):
            return max(requests, self.num_requests) if requests else 0
        return np.where(requests > 0, np.maximum(requests, self.num_requests), 0)

    def seconds_of(self, work: StepWork) -> float:
        """Predicted seconds of a step."""
        draft, verify = self._profiled_work(work)
        return self._draft.factor * draft + self._target.factor * verify + self.host

    def learn_step(self, work: StepWork, seconds: float) -> None:
        """Take in what a step took. Both models take their share of the error: only their sum is known."""
        draft, verify = self._profiled_work(work)
        predicted = self._draft.factor * draft + self._target.factor * verify
        if predicted <= 0 or seconds <= 0:
            return
        measured = max(seconds - self.host, 0.1 * seconds)
        self._ratios.append(measured / predicted)
        ratio = median(self._ratios)
        self._learn_error(predicted, ratio * predicted)
        if not work.prompt_rows and work.rows:
            self._decoding.learn(work.rows, math.log(ratio))
        self._target.learn(ratio * self._target.factor)
        if draft > 0:
            self._draft.learn(ratio * self._draft.factor)

    def _profiled_work(self, work: StepWork) -> tuple[float, float]:
        """Seconds of the draft and of the target by the profile alone."""
        verify = float(self._verify(work.rows, work.context, work.prompt_rows))
        if not work.depth or not work.num_drafting:
            return 0.0, verify
        first = float(self._first_draft(work.num_drafting, work.context, work.catch_up_rows))
        further = float(self.profile.next_draft(work.num_drafting, work.context))
        return first + (work.depth - 1) * further, verify


class CostTable:
    """The scheduler's cost: assumed at first, from the worker's file once it is there."""

    def __init__(self, assumed: Profile, path: Path) -> None:
        self.cost = EngineCost(assumed)
        self._path = path
        self._steps_to_poll = 0
        self._is_settled = False

    def poll(self) -> str | None:
        """Look for the file, once in POLL_STEPS calls. Found: what became of it, in words; it is not read again."""
        self._steps_to_poll -= 1
        if self._is_settled or self._steps_to_poll >= 0:
            return None
        self._steps_to_poll = POLL_STEPS
        if not self._path.exists():
            return None
        self._is_settled = True
        try:
            profile = Profile.load(self._path)
        except ConfigError as error:
            return f"costs stay assumed: {error}"
        self.cost.adopt(profile)
        self.cost.host = profile.host
        return f"costs were measured by the worker: {profile.accuracy}"
