"""What the scheduler did, for the processes that serve metrics and the dashboard: totals in a small JSON file.

vLLM's scheduler and its HTTP server are two processes, and vLLM's own messages between them have no room for a
plugin's figures. The scheduler replaces the file at most once a second. A server on another machine has no figures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.machine import atomic_write
from faser.vllm.costs import run_folder
from faser.vllm.lengths import PlannedStep

VERSION = 1
WRITE_SECONDS = 1.0  # between two writes of the file


def status_path(instance_id: str, engine_index: int) -> Path:
    return run_folder(instance_id) / f"status-{engine_index}.json"


def _zeros() -> list[int]:
    return [0] * (HARD_MAX_LENGTH + 1)


@dataclass
class EngineStatus:
    """Totals since the engine started, and the state after its last step. Lists by length or by position, from 0."""

    policy: str = ""
    costs: str = "assumed"  # kind of the profile
    time: float = 0.0  # of the last step, seconds since the epoch
    steps: int = 0
    drafting_steps: int = 0  # in which the draft ran for somebody
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    planning_seconds: float = 0.0
    emitted: int = 0  # output tokens
    verified: int = 0  # drafted tokens that were verified
    accepted: int = 0
    failures: int = 0  # of the policy
    lengths: list[int] = field(default_factory=_zeros)  # steps of decoding requests, by length
    verified_per_position: list[int] = field(default_factory=_zeros)
    accepted_per_position: list[int] = field(default_factory=_zeros)
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    last_decoding: int = 0
    last_drafting: int = 0  # requests that draft at the end of the last step
    last_drafted: int = 0  # tokens given to them
    last_lengths_changed: float = 0.0  # when drafting began or ended

    def add(
        self, planned: PlannedStep, num_sampled: IntArray, accepted: IntArray, seconds: float, predicted: float
    ) -> None:
        """Count a step whose result is known."""
        drafts = planned.step.num_drafts[planned.decodes]
        self.steps += 1
        self.drafting_steps += planned.depth > 0
        self.step_seconds += seconds
        self.predicted_seconds += predicted
        self.emitted += int(num_sampled.sum())
        self.verified += int(drafts.sum())
        self.accepted += int(accepted.sum())
        _count(self.lengths, np.bincount(drafts))
        _count(self.verified_per_position, _reached(drafts))
        _count(self.accepted_per_position, _reached(accepted[planned.decodes]))
        self.last_decoding = int(np.count_nonzero(~planned.step.is_reading))

    def note_plan(self, planned: PlannedStep, now: float) -> None:
        """Keep what the newest plan drafts. `now`: seconds since the epoch."""
        drafting = int(np.count_nonzero(planned.lengths))
        if (drafting > 0) != (self.last_drafting > 0):
            self.last_lengths_changed = now
        self.last_drafting, self.last_drafted = drafting, int(planned.lengths.sum())

    def save(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"version": VERSION, **asdict(self)}))

    @classmethod
    def load(cls, path: Path) -> EngineStatus | None:
        """None if there is no such file yet. Raises ConfigError for another version."""
        try:
            given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if given.pop("version", None) != VERSION:
            raise ConfigError(f"{path}: written by another version of FASER")
        return cls(**given)


def _count(totals: list[int], more: IntArray) -> None:
    for index, number in enumerate(more[: len(totals)].tolist()):
        totals[index] += number


def _reached(lengths: IntArray) -> IntArray:
    """How many of the lengths are more than 0, 1, 2, …"""
    return lengths.size - np.bincount(lengths).cumsum()[:-1] if lengths.size else np.zeros(0, dtype=np.int64)
