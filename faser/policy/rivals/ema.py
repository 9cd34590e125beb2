"""`ema`: one length for the batch from a few tiers, by an average of how many drafts were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from faser.arrays import IntArray
from faser.policy.base import BatchView, Outcome

WEIGHT = 0.2  # of the newest step in the average
WARM_UP = 10  # steps before the first change
INTERVAL = 5  # steps between two changes
FIRST_LENGTH = 3  # where it is among the tiers; the middle one elsewhere


@dataclass
class _Slot:
    """The batch sizes from one threshold to the next: their tiers, the one in use and how it has fared."""

    tiers: tuple[int, ...]
    patience: float  # by so much further the average must fall for a lower tier
    current: int = field(init=False)  # index of a tier
    average: float = field(init=False)  # drafts accepted by a request in a step
    steps: int = 0

    def __post_init__(self) -> None:
        self.current = self.tiers.index(FIRST_LENGTH) if FIRST_LENGTH in self.tiers else len(self.tiers) // 2
        self.average = self.length - 1.0

    @property
    def length(self) -> int:
        return self.tiers[self.current]

    def learn(self, lengths: IntArray, accepted: IntArray) -> None:
        drafted = lengths > 0
        if drafted.any():
            self.average += WEIGHT * (float(accepted[drafted].mean()) - self.average)
        elif self.length:
            return  # a step of prompts, or one planned before this tier
        self.steps += 1
        if self.steps > WARM_UP and (self.steps - WARM_UP) % INTERVAL == 0:
            self._change()

    def _change(self) -> None:
        if self.length == 0:
            self.current = min(self.current + 1, len(self.tiers) - 1)
            return
        before = self.current
        while self.current and self.average <= self._floor(self.tiers[self.current - 1]):
            self.current -= 1
        if self.current == before:
            while self.current < len(self.tiers) - 1 and self.average > self.length - 0.5:
                self.current += 1

    def _floor(self, lower: int) -> float:
        """The average at which the lower tier does as well."""
        return max(lower - 0.5, 0.5) - self.patience


class Ema:
    """By batch size, a short list of lengths; the average of accepted drafts says which of them.

    SGLang's adaptive speculation: the batch belongs to the largest threshold it reaches. After 10 steps, every 5, the
    length falls to the next tier below while the average is at most that tier less a half (at most a half for tier 0),
    or else rises while it exceeds the tier in use less a half. A tier of 0 is left after 5 steps, to see how drafts
    fare. The rule knows no costs: the tiers stand for them. Two deviations: the average is that of the requests that
    drafted at all, and the start is length 3, which SGLang takes from its command line.
    """

    name = "ema"
    max_length = 7

    def __init__(self) -> None:
        self._slots = {
            1: _Slot((1, 3, 5, 7), patience=0.25),
            8: _Slot((0, 1, 3), patience=0.0),
            32: _Slot((0, 1), patience=0.0),
            64: _Slot((0,), patience=0.0),
        }

    def learn(self, outcome: Outcome) -> None:
        if outcome.slots.size:
            self._slot(outcome.slots.size).learn(outcome.lengths, outcome.accepted)

    def lengths(self, view: BatchView) -> IntArray:
        return np.full(view.num_requests, self._slot(view.num_requests).length, dtype=np.int64)

    def _slot(self, num_requests: int) -> _Slot:
        return self._slots[max(threshold for threshold in self._slots if threshold <= num_requests)]
