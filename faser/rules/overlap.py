"""Overlap as a part of a plan: which drafts wait to be verified, and which are made beside a verification.

Knows counts by request; no policy, no tensors. B is the number of requests of the step.

frontier  drafts behind a request's context that an earlier step made and no step has verified
chunk     drafts made beside the verification, behind the frontier, as if all of the frontier were accepted
hit       the frontier is accepted and the first token of the chunk equals the target's token behind the frontier; the
          rest of the chunk is the next frontier
miss      not a hit: the chunk is void
lead      drafts made before the verification and verified in the same step, by a request without a frontier
ride      a request with neither frontier nor lead rides: the step brings it one token while it drafts a chunk
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import BoolArray, IntArray

MAX_REQUESTS = 4  # larger batches never overlap


@dataclass(frozen=True)
class OverlapPlan:
    """The overlap of one step. Arrays are [B]."""

    frontier: IntArray
    lead: IntArray
    beside: bool = True  # False: all new drafts are made first and verified together with the frontier
    leads: bool = False  # a void frontier is drafted again as a lead: the step waits until the host knows who missed
    draft_sms: int = 0  # SMs that drafting has to itself; 0: both models share all SMs

    def judged_of(self, num_drafted: IntArray) -> IntArray:
        """[B] drafts that this step verifies, given the actual draft counts."""
        return self.frontier + (np.minimum(self.lead, num_drafted) if self.beside else num_drafted)

    def chunk_of(self, num_drafted: IntArray) -> IntArray:
        """[B] new drafts that this step does not verify."""
        return self.frontier + num_drafted - self.judged_of(num_drafted)

    def settle(self, missed: BoolArray, lengths: IntArray, drafts: BoolArray) -> tuple[OverlapPlan, IntArray]:
        """The plan and the lengths once it is known whose frontier is void. `drafts` [B]: who runs the draft."""
        if not missed.any():
            return self, lengths
        frontier = np.where(missed, 0, self.frontier)
        if not self.leads:
            return replace(self, frontier=frontier), lengths
        new_lead = np.where(missed & drafts, self.frontier, 0)
        return replace(self, frontier=frontier, lead=self.lead + new_lead), lengths + new_lead

    def of(self, some: BoolArray) -> OverlapPlan:
        """The plan of some of the requests."""
        return replace(self, frontier=self.frontier[some], lead=self.lead[some])

    def spread(self, where: BoolArray) -> OverlapPlan:
        """The plan of a larger batch, in which `where` marks these requests; the others have no drafts."""
        frontier, lead = np.zeros((2, where.size), dtype=np.int64)
        frontier[where], lead[where] = self.frontier, self.lead
        return replace(self, frontier=frontier, lead=lead)
