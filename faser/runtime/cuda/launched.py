"""A step between its launch and its collection: its counts so far, and the memory its results arrive in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from faser.arrays import NONE, FloatArray, IntArray
from faser.rules.early_exit import ExitReadings
from faser.runtime.cuda.resampling import Answers
from faser.step import StepPlan, StepSeconds


@dataclass
class LaunchedStep:
    """A step that was submitted and not collected. Arrays are [B]."""

    plan: StepPlan  # as it runs
    results: ResultBuffer
    settled: StepPlan  # `plan` with its true numbers; the device may have settled them itself
    num_drafted: IntArray = field(default_factory=lambda: NONE)
    num_verified: IntArray = field(default_factory=lambda: NONE)
    answers: Answers = field(default_factory=Answers)
    confidence: FloatArray | None = None  # [B, depth] of the drafts, where a rule asked for it between tokens
    exits: ExitReadings | None = None
    launches: Iterator[None] = field(default_factory=lambda: iter(()))  # the launches that are left
    is_launched: bool = False  # all kernels are enqueued

    @property
    def events(self) -> StepEvents:
        return self.results.events


class ResultBuffer:
    """Host memory for the results of one step. Each step in flight has its own."""

    def __init__(self, max_requests: int, width: int, device: torch.device) -> None:
        packed = torch.zeros(max_requests, width, dtype=torch.int32)
        self.packed = packed.pin_memory() if device.type == "cuda" else packed
        self.events = StepEvents(device)


class StepEvents:
    """When the parts of a step ended on the device. Without a GPU nothing is measured and nothing waited for."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(7)] if device.type == "cuda" else []
        self._is_beside = False
        self._encodes = False

    def begin(self) -> None:
        """Another step has these events now."""
        self._encodes = False

    def encoding_started(self) -> None:
        """For a step that encodes pictures before everything else."""
        self._encodes = True
        self._record(5)

    def encoded(self) -> None:
        self._record(6)

    def started(self) -> None:
        self._is_beside = False
        self._record(0)

    def verification_started(self) -> None:
        """For a step that drafts beside its verification."""
        self._is_beside = True
        self._record(1)

    def drafted(self) -> None:
        self._record(2)

    def verified(self) -> None:
        self._record(3)

    def finished(self) -> None:
        self._record(4)

    def wait(self) -> None:
        """Until the step is finished."""
        if self._events:
            self._events[4].synchronize()

    def seconds(self) -> StepSeconds:
        """Of a finished step."""
        if not self._events:
            return StepSeconds()
        encode = self._between(5, 6) if self._encodes else 0.0
        if not self._is_beside:
            return StepSeconds(self._between(0, 2), self._between(2, 4), encode=encode)
        draft, verify = self._between(0, 2), self._between(1, 3)
        return StepSeconds(draft, verify, draft + verify - self._between(0, 4), encode)

    def _between(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) / 1e3

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record()
