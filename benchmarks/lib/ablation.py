"""`faser` without some of its parts, to measure what each part brings. Not for serving.

`LADDER` adds the parts one by one; `MEANINGS` explains each step, and the systems of other benchmarks, in a report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import IntArray
from faser.bench.systems import PolicySystem
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.adaptive import DEPTH, Adaptive
from faser.policy.base import BatchView
from faser.policy.early_exit import EarlyExit
from faser.policy.estimates import expected_tokens, seconds_by_length
from faser.policy.overlap import Overlap
from faser.traffic.document import Document, Workload
from faser.traffic.play import Stopped


@dataclass(frozen=True)
class Parts:
    per_request: bool = False
    ragged: bool = False  # set in the executor
    checks_confidence: bool = False
    may_be_off: bool = False


LADDER = {
    "batch-wide": Parts(),
    "+ per request": Parts(per_request=True),
    "+ ragged": Parts(per_request=True, ragged=True),
    "+ confidence": Parts(per_request=True, ragged=True, checks_confidence=True),
    "+ off": Parts(per_request=True, ragged=True, checks_confidence=True, may_be_off=True),
}

MEANINGS = {
    "batch-wide": "ablation of faser, step 1: one length for the whole batch, at least 1",
    "+ per request": "ablation, step 2 adds a length for each request; all still draft until the longest is reached",
    "+ ragged": "ablation, step 3 adds ragged drafting: each request stops at its own length",
    "+ confidence": "ablation, step 4 adds confidence checks: a draft may stop early",
    "+ off": "ablation, step 5 adds length 0: a request may draft nothing; this is all of faser",
    "+ early exit": "faser, and drafts may leave a verification before its last layer",
    "+ overlap": "faser with early exit, and drafting beside verification where the engine expects it to pay",
    "+ overlap on": "faser with early exit, and drafting beside verification in every step that drafts",
}
VLLM = re.compile(r"vLLM (?:off|K=(\d+))")


def explained(document: Document) -> Document:
    """The document with one sentence on every system that is not a policy of FASER."""
    systems = {run.system: _meaning(run.system) for run in document.runs}
    meanings = {name: meaning for name, meaning in systems.items() if meaning is not None}
    return replace(document, about={**document.about, "systems": meanings}) if meanings else document


def _meaning(system: str) -> str | None:
    found = VLLM.fullmatch(system)
    if found is None:
        return MEANINGS.get(system)
    drafting = "without speculation" if found[1] is None else f"drafting {found[1]} tokens in every step"
    return f"vLLM {drafting}, with the same models on the same requests"


@dataclass(frozen=True)
class Rung(PolicySystem):
    """A policy with some of the engine's mechanisms."""

    base: str
    exits: EarlyExit | None
    overlap: Overlap | None

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        """Also sets the mechanisms for the run that follows."""
        self.engine.exits, self.engine.scheduler.overlap = self.exits, self.overlap
        PolicySystem(self.engine, self.base, self.temperature).warm_up(workload, size, stopped)


class Ablated(Adaptive):
    """`faser` with the given parts."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.name = name
        self._parts = parts

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        if not self._parts.checks_confidence:
            view = replace(view, cost=_WithoutChecks(view.cost))  # type: ignore[arg-type]
        lengths = super().lengths(view) if self._parts.per_request else self._common(view)
        if not self._parts.may_be_off:
            lengths = np.maximum(lengths, 1)
        return np.minimum(lengths, view.limit)

    def _common(self, view: BatchView) -> IntArray:
        """The length with the most expected tokens per second for the whole batch, from the mean acceptance."""
        chances = np.broadcast_to(self._acceptance.rates.cumprod()[:, None], (DEPTH, view.num_requests))
        goodput = expected_tokens(chances)[1:] / seconds_by_length(view, DEPTH)[1:]
        return np.full(view.num_requests, 1 + int(goodput.argmax()))


class _WithoutChecks:
    """A cost without confidence checks."""

    def __init__(self, cost: ProfiledCost) -> None:
        self.profile = replace(cost.profile, stop_seconds=None)
        self._cost = cost

    def __getattr__(self, name: str) -> object:
        return getattr(self._cost, name)
