"""What a plan asks of the two models, in the terms of a profile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser.step import StepPlan

MAX_STEADY_LAG = 2  # context tokens a draft computes first in steady state: the bonus, and the last draft if accepted


class Work(NamedTuple):
    rows: int  # of decoding requests, drafts included
    prompt_rows: int
    context: int  # tokens that the target reads
    num_drafting: int  # requests with rows in the draft's first forward
    catch_up_rows: int  # rows of the draft's first forward if any draft fell behind; 0: none did
    draft_context: int  # tokens that the draft reads


def work_of(plan: StepPlan) -> Work:
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows == 1)))
    num_rows = int(plan.num_rows.sum())
    longest = int(plan.draft_rows.max(initial=0))
    return Work(
        rows=num_decoding + int(plan.judged.sum()),
        prompt_rows=num_rows - num_decoding,
        context=num_rows + int(plan.start.sum()),
        num_drafting=int(np.count_nonzero(plan.draft_rows)) if longest else 0,
        catch_up_rows=int(plan.draft_rows.sum()) if longest > MAX_STEADY_LAG else 0,
        draft_context=int((plan.draft_rows > 0) @ plan.num_tokens) if longest else 0,
    )
