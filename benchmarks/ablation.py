"""`faser` with parts of it taken out, for measuring what each part brings. Not for serving.

In the order in which they are added: one length for the whole batch; a length for each request, but the draft goes on
for everybody as long as for anybody; ragged drafting; a look at the draft's confidence; and the right to draft nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser.bench.records import Workload
from faser.bench.systems import PolicySystem, Stopped
from faser.policy.adaptive import DEPTH, Adaptive
from faser.policy.base import BatchView
from faser.policy.early_exit import EarlyExit
from faser.policy.estimates import expected_tokens, seconds_by_length
from faser.policy.overlap import Overlap
from faser.types import IntArray


@dataclass(frozen=True)
class Parts:
    per_request: bool = False
    ragged: bool = False  # the executor's part
    looks: bool = False
    may_be_off: bool = False


LADDER = {
    "batch-wide": Parts(),
    "+ per request": Parts(per_request=True),
    "+ ragged": Parts(per_request=True, ragged=True),
    "+ confidence": Parts(per_request=True, ragged=True, looks=True),
    "+ off": Parts(per_request=True, ragged=True, looks=True, may_be_off=True),
}


@dataclass(frozen=True)
class Rung(PolicySystem):
    """A policy with some of an engine's mechanisms."""

    base: str
    exits: EarlyExit | None
    overlap: Overlap | None

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        """Also sets what is played next."""
        self.engine.exits, self.engine.scheduler.overlap = self.exits, self.overlap
        PolicySystem(self.engine, self.base, self.temperature).warm_up(workload, size, stopped)


class Ablated(Adaptive):
    """`faser`, as far as `parts` say."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.name = name
        self._parts = parts

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        if not self._parts.looks:
            view = replace(view, cost=_Unseeing(view.cost))  # type: ignore[arg-type]
        lengths = super().lengths(view) if self._parts.per_request else self._common(view)
        if not self._parts.may_be_off:
            lengths = np.maximum(lengths, 1)
        return np.minimum(lengths, view.limit)

    def _common(self, view: BatchView) -> IntArray:
        """The one length that promises the most tokens per second; nobody's own acceptance counts."""
        chances = np.broadcast_to(self._acceptance.rates.cumprod()[:, None], (DEPTH, view.num_requests))
        goodput = expected_tokens(chances)[1:] / seconds_by_length(view, DEPTH)[1:]
        return np.full(view.num_requests, 1 + int(goodput.argmax()))


class _Unseeing:
    """A cost that says drafts cannot be looked at."""

    stop_seconds = None

    def __init__(self, cost: object) -> None:
        self._cost = cost

    def __getattr__(self, name: str) -> object:
        return getattr(self._cost, name)
