"""A machine like an H200 with an 8B target and a 1B draft, and views and outcomes to ask policies with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.adaptive import Adaptive
from faser.policy.base import BatchView, Outcome

MS = 1e-3


def curve(rows: tuple[int, ...], milliseconds: tuple[float, ...], per_token: float, is_stepped: bool = False) -> Curve:
    seconds = tuple(MS * each for each in milliseconds)
    return Curve(rows, seconds, (per_token,) * len(rows), rows[-1] if is_stepped else 0)


H200 = Profile(
    about={},
    verify=curve((1, 4, 16, 64, 128, 256, 512), (3.8, 4.05, 4.2, 4.9, 5.6, 7.8, 13.5), 40e-9, is_stepped=True),
    prompts=curve((512, 4096), (13.5, 100.0), 40e-9),
    first_draft=curve((1, 4, 16, 64, 128, 256), (0.80, 0.95, 1.01, 1.24, 1.64, 2.20), 8e-9),
    next_draft=curve((1, 4, 16, 64, 128, 256), (0.70, 0.85, 0.91, 1.14, 1.54, 2.10), 8e-9),
    catch_up=curve((512, 4096), (1.7, 12.5), 8e-9),
    host=5e-5,
)
SMOOTH = replace(H200, verify=replace(H200.verify, stepped_to=0))  # no graph sizes: every row counts


def make_view(
    size: int,
    *,
    profile: Profile | None = H200,
    limit: object = 32,
    accepted: object = 0,
    tried: object = 0,
    lag: object = 1,
    num_tokens: object = 200,
    prefill_rows: int = 0,
) -> BatchView:
    """A view of `size` requests; a number holds for all of them, a list has one value for each."""

    def each(value: object) -> np.ndarray:
        return np.broadcast_to(np.array(value, dtype=np.int64), size).copy()

    return BatchView(
        slots=np.arange(size),
        num_tokens=each(num_tokens),
        lag=each(lag),
        limit=each(limit),
        accepted=each(accepted),
        tried=each(tried),
        num_output=each(50),
        remaining=each(100),
        num_prefill_rows=prefill_rows,
        cost=None if profile is None else ProfiledCost(profile),
    )


def make_outcome(
    lengths: object, accepted: object, *, seconds: float = 5 * MS, lag: object = 1, prefill_rows: int = 0
) -> Outcome:
    drafted = np.atleast_1d(np.array(lengths, dtype=np.int64))

    def each(value: object) -> np.ndarray:
        return np.broadcast_to(np.array(value, dtype=np.int64), drafted.size).copy()

    rows = np.where(drafted > 0, each(lag), 0)
    return Outcome(np.arange(drafted.size), drafted, each(accepted), rows, prefill_rows, seconds)


def proven() -> Adaptive:
    """A policy that has tried its draft, and found what it believed before."""
    policy = Adaptive()
    policy.learn(make_outcome([1] * 70, [1] * 49 + [0] * 21))
    return policy
