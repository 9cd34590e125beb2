"""What overlapping costs: drafting and verification at once, as profiled and as corrected by the steps that overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser.cost.curve import ALWAYS_ONE, Curve
from faser.step import StepPlan, StepSeconds

LEARNING_RATE = 0.1  # of both corrections, per step that overlaps
RETURN_DECAY = 0.999  # of a correction, at every step that says nothing of it: half-life 693 steps
MAX_CORRECTION = 2.0  # bound of a correction, and of what one step may say
MIN_AWAITED = 1e-4  # seconds
PROFILE_WAITS = 4  # waiting steps that the profile's await_seconds counts as


@dataclass(frozen=True)
class OverlapProfile:
    """Drafting beside a verification, with the device's SMs split in one way. Curves are by requests."""

    draft_sms: int  # SMs that drafting has to itself; 0: all are shared
    draft: Curve  # seconds of drafting on its part of the device, while nothing else runs
    verify: Curve  # seconds of verification on its part, while nothing else runs
    together: Curve  # seconds of both at once
    share: Curve  # contention: (together - max(draft, verify)) / min(draft, verify on the whole device)
    draft_factor: Curve = ALWAYS_ONE  # seconds on its part / seconds on the whole device
    verify_factor: Curve = ALWAYS_ONE  # the same ratio; may be below 1, where thread blocks divide evenly by fewer SMs

    @classmethod
    def of(cls, draft_sms: int, batches: Mapping[int, tuple[StepSeconds, StepSeconds, float]]) -> OverlapProfile:
        """From measurements by requests: in turn on the whole device, in turn on the parts, and both at once."""
        columns = []
        for apart, alone, together in batches.values():
            share = max(0.0, (together - max(alone.draft, alone.verify)) / min(apart.draft, apart.verify))
            factors = alone.draft / apart.draft, alone.verify / apart.verify
            columns.append((alone.draft, alone.verify, together, share, *factors))
        none = (0.0,) * len(batches)
        return cls(draft_sms, *(Curve(tuple(batches), each, none) for each in zip(*columns, strict=True)))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> OverlapProfile:
        curves = {name: Curve.from_dict(given[name]) for name in given if name != "draft_sms"}
        return cls(int(given["draft_sms"]), **curves)

    def total(self, draft: float, verify: float, requests: int) -> float:
        """Seconds of both at once, given the seconds of each on the whole device."""
        on_part = verify * float(self.verify_factor(requests, 0.0))
        drafting = draft * float(self.draft_factor(requests, 0.0))
        return max(on_part, drafting) + float(self.share(requests, 0.0)) * min(draft, verify)


class OverlapCost:
    """Profiles of all splits, and corrections of them. A correction that no step confirms returns to the profile."""

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}  # measured / profiled seconds of both at once, by SMs of the drafting
        self.adopt((), 0.0)

    def adopt(self, profiles: Iterable[OverlapProfile], await_seconds: float) -> None:
        self._profiles = {each.draft_sms: each for each in profiles}
        # added to a step that cannot begin before the result of the step before it is known
        self._profiled_await = self.await_seconds = await_seconds
        self._num_waits = PROFILE_WAITS

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of SMs that drafting may have to itself, as profiled; 0: all are shared."""
        return tuple(self._profiles)

    def hidden(self, draft: float, verify: float, requests: int, draft_sms: int = 0) -> float:
        """draft + verify - seconds of both at once, which may be negative; 0 for more requests than were measured."""
        profile = self._profiles.get(draft_sms)
        if profile is None or requests > profile.share.max_rows:
            return 0.0
        factor = self._factors.get(draft_sms, 1.0)
        return draft + verify - factor * profile.total(draft, verify, requests)

    def hidden_in(self, plan: StepPlan, draft: float, verify: float) -> float:
        """Seconds hidden in a plan that drafts for `draft` seconds beside its verification."""
        if plan.overlap is None or not plan.overlap.beside or not plan.lengths.any():
            return 0.0
        return self.hidden(draft, verify, int(np.count_nonzero(plan.lengths)), plan.overlap.draft_sms)

    def learn(self, plan: StepPlan, spent: StepSeconds, lead: float, draft: float, verify: float) -> None:
        """Correct the seconds of both at once. Steps with prompts teach nothing: the whole device verifies them."""
        if plan.overlap is None:
            return
        split, requests = plan.overlap.draft_sms, int(np.count_nonzero(plan.lengths))
        profile = self._profiles.get(split)
        is_known = profile is not None and 0 < requests <= profile.share.max_rows
        if not is_known or not plan.only_decodes or spent.total <= lead:
            return
        expected = draft + verify - self.hidden_in(plan, draft, verify)
        ratio = _bounded((spent.total - lead) / expected)
        self._factors[split] = _bounded(self._factors.get(split, 1.0) * (1 + LEARNING_RATE * (ratio - 1)))

    def learn_wait(self, seconds: float) -> None:
        """Correct the seconds that waiting for a result adds. A pause of the process counts as twice the expected."""
        seconds = min(max(seconds, 0.0), 2 * self.await_seconds + MIN_AWAITED)
        self._num_waits += 1
        self.await_seconds += max(1 / self._num_waits, LEARNING_RATE) * (seconds - self.await_seconds)

    def forget(self, plan: StepPlan) -> None:
        """Move the corrections that this step says nothing of towards the profile: what was slow is tried again."""
        own = plan.overlap.draft_sms if plan.overlap is not None and plan.overlap.beside else None
        for split, factor in self._factors.items():
            if split != own:
                self._factors[split] = RETURN_DECAY * factor + 1 - RETURN_DECAY
        if not plan.waits:
            self.await_seconds += (1 - RETURN_DECAY) * (self._profiled_await - self.await_seconds)


def _bounded(ratio: float) -> float:
    return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, ratio))
