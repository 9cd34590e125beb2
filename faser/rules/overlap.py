"""Overlap as a part of a plan: which drafts wait for their verification, and which are made beside one.

Knows counts by request; no policy, no tensors. B is the number of requests of the step.

A request's frontier is the drafts behind its context that an earlier step made and nobody has verified. A step with
`beside` verifies the frontier while the draft model drafts the next chunk behind it, as if the whole frontier were
accepted. The target's token after the frontier says what the first token of the chunk should have been. A hit: the
frontier was accepted and that first token is right; the rest of the chunk is the next frontier. A miss: the chunk is
void.

A request without a frontier either rides (the step brings it one token while it drafts) or has a lead: drafts that are
made before the verification and verified in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import BoolArray, IntArray

MAX_REQUESTS = 4  # larger batches never overlap


@dataclass(frozen=True)
class OverlapPlan:
    """Of one step. Arrays are [B]."""

    frontier: IntArray  # drafts of an earlier step, verified in this one
    lead: IntArray  # new drafts that are made before the verification and verified in this step
    beside: bool = True  # False: all new drafts are made first and verified together with the frontier
    leads: bool = False  # a frontier that turns out to be void is drafted anew, as a lead: the step waits for that news
    draft_sms: int = 0  # SMs that drafting has to itself; 0: both models share all SMs

    def judged_of(self, num_drafted: IntArray) -> IntArray:
        """[B] the drafts that this step verifies, if `num_drafted` new ones are made."""
        return self.frontier + (np.minimum(self.lead, num_drafted) if self.beside else num_drafted)

    def chunk_of(self, num_drafted: IntArray) -> IntArray:
        """[B] the new drafts that this step does not verify."""
        return self.frontier + num_drafted - self.judged_of(num_drafted)

    def settle(self, missed: BoolArray, lengths: IntArray, drafts: BoolArray) -> tuple[OverlapPlan, IntArray]:
        """This plan and the lengths, now that it is known whose frontier is void. `drafts`: who runs the draft."""
        if not missed.any():
            return self, lengths
        frontier = np.where(missed, 0, self.frontier)
        if not self.leads:
            return replace(self, frontier=frontier), lengths
        anew = np.where(missed & drafts, self.frontier, 0)
        return replace(self, frontier=frontier, lead=self.lead + anew), lengths + anew

    def of(self, some: BoolArray) -> OverlapPlan:
        """The plan of these requests alone."""
        return replace(self, frontier=self.frontier[some], lead=self.lead[some])
