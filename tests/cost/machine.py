"""A profile like that of a GPU with graphs, and plans to price with it."""

from __future__ import annotations

import numpy as np

from faser.cost.curve import Curve
from faser.cost.overlap import OverlapProfile
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.pages import NO_WRITES
from faser.step import StepPlan, StepSeconds

MS, US = 1e-3, 1e-6
GPU = Profile(
    about={"hardware": "a GPU"},
    verify=Curve((1, 4, 16), (4 * MS, 5 * MS, 8 * MS), (1 * US, 1 * US, 2 * US), stepped_to=16),
    prompts=Curve((16, 64), (10 * MS, 34 * MS), (2 * US, 2 * US)),
    first_draft=Curve((1, 2, 4), (1.0 * MS, 1.1 * MS, 1.2 * MS), (0.0, 0.0, 0.0), stepped_to=4),
    next_draft=Curve((1, 2, 4), (0.7 * MS, 0.8 * MS, 0.9 * MS), (0.1 * US,) * 3, stepped_to=4),
    catch_up=Curve((8, 64), (2 * MS, 9 * MS), (0.0, 0.0)),
    host=0.5 * MS,
    besides=(
        OverlapProfile.of(0, {1: (StepSeconds(2 * MS, 4 * MS), StepSeconds(2 * MS, 4 * MS), 5.5 * MS)}),
        OverlapProfile.of(32, {1: (StepSeconds(2 * MS, 4 * MS), StepSeconds(3 * MS, 5 * MS), 5.5 * MS)}),
    ),
    await_seconds=0.2 * MS,
    errors={"verify": 0.02, "verify_worst": 0.05},
)


def make_plan(num_tokens, lengths, num_rows=1, draft_rows=1, cut=0) -> StepPlan:
    """Requests by their context and drafts; of the last, `cut` prompt tokens are left for another step."""

    def each(value) -> np.ndarray:
        return np.broadcast_to(np.array(value, dtype=np.int64), len(num_tokens)).copy()

    tokens, rows, drafted = each(num_tokens), each(num_rows), each(draft_rows) * (each(lengths) > 0)
    start = tokens - rows
    start[-1] -= cut
    return StepPlan(
        (), (), np.arange(tokens.size), tokens, start, rows, each(lengths), tokens - drafted, drafted,
        np.zeros(tokens.size, dtype=bool), NO_WRITES, NO_WRITES,
    )  # fmt: skip


def run(cost: ProfiledCost, plan: StepPlan, factor: float, host: float, steps: int) -> None:
    """Steps of a machine that takes `factor` times the profiled seconds."""
    parts = ProfiledCost(cost.profile).parts(plan)
    spent = StepSeconds(factor * parts.draft, factor * parts.verify)
    for _ in range(steps):
        cost.learn(plan, spent, spent.draft + spent.verify + host)
