"""Measures what forwards of vLLM cost, through the graphs that will run, as a profile that policies plan with.

Every measurement has a fixed number of forwards: with tensor parallelism all workers must run the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.vllm.drafting.lag import STEADY_LAG
from faser.vllm.drafting.loop import DraftLoop
from faser.vllm.drafting.rows import LagPiece

HOST_SECONDS = 5e-4  # of a step outside both models, before the first steps correct it
MAX_SIZES = 14  # measured of a curve; sizes between two of them are interpolated
MIN_CONTEXT = 16  # tokens of each request
MAX_CONTEXT = 2048
ROUNDS = 3  # of which the fastest counts
TIMES = 3  # forwards in a round


class TargetForward(Protocol):
    """The target as an adapter offers it."""

    def run(self, rows: int, context: int, samples: bool) -> int:
        """One forward over made-up rows of contexts of `context` tokens; returns the number of requests.

        `samples`: with the logits of every row.
        """


@dataclass(frozen=True)
class MeasuredSizes:
    """What is measured."""

    graph_rows: Sequence[int]  # rows that the target has graphs for; none: it runs eagerly
    max_rows: int  # of a step
    requests: Sequence[int]  # of the draft's forwards
    has_draft_graphs: bool
    max_context: int  # tokens of a request

    @property
    def contexts(self) -> tuple[int, int]:
        return min(MIN_CONTEXT, self.max_context // 4), min(MAX_CONTEXT, self.max_context // 2)


def thinned(sizes: Sequence[int], number: int = MAX_SIZES) -> list[int]:
    """At most `number` of them, the first and the last included."""
    picked = np.unique(np.linspace(0, len(sizes) - 1, min(number, len(sizes))).round().astype(int))
    return [sizes[index] for index in picked]


def powers(largest: int, factor: int = 2) -> list[int]:
    """1, 2, 4, … up to `largest`, which is included."""
    sizes = [1]
    while sizes[-1] * factor < largest:
        sizes.append(sizes[-1] * factor)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def spread_blocks(table: torch.Tensor, num_blocks: int) -> None:
    """Name other blocks in every entry of a block table [R, W], so that made-up contexts are read from memory."""
    entries = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
    table.copy_((entries % max(num_blocks - 1, 1) + 1).view(table.shape))


def measure_costs(
    target: TargetForward, loop: DraftLoop, *, graph_rows: Sequence[int], max_rows: int, about: Mapping[str, Any]
) -> Profile:
    """Costs of both models. `graph_rows`: rows of the target's graphs; they exist where the loop's do."""
    has_graphs = loop.replay is not None
    sizes = MeasuredSizes(
        graph_rows=sorted(graph_rows) if has_graphs else (),
        max_rows=max_rows,
        requests=powers(loop.max_requests, 4) if loop.replay is None else loop.replay.sizes,
        has_draft_graphs=has_graphs,
        max_context=loop.paging.limit,
    )
    try:
        return CostMeasurement(target, loop, sizes).profile(about)
    finally:
        loop.lengths.zero_()


class CostMeasurement:
    """Seconds of forwards on the loop's device."""

    def __init__(self, target: TargetForward, loop: DraftLoop, sizes: MeasuredSizes) -> None:
        self.target, self.loop, self.sizes = target, loop, sizes
        self.on_gpu = loop.device.type == "cuda"

    @torch.inference_mode()
    def profile(self, about: Mapping[str, Any]) -> Profile:
        """All curves."""
        prompts = self._target_curve(powers(self.sizes.max_rows, 4), samples=False)
        graph_rows = self.sizes.graph_rows
        verify = self._target_curve(graph_rows or powers(min(self.sizes.max_rows, 256)), samples=True)
        if graph_rows:
            verify = Curve(verify.rows, verify.seconds, verify.per_token, stepped_to=verify.rows[-1])
        first, further, catch_up = self._draft_curves(self.loop)
        return Profile(
            about, verify=verify, prompts=prompts, first_draft=first, next_draft=further, catch_up=catch_up,
            host=HOST_SECONDS, kind="quick",
        )  # fmt: skip

    def _target_curve(self, rows: Sequence[int], samples: bool) -> Curve:
        def seconds(size: int, context: int) -> tuple[float, int]:
            requests = self.target.run(size, context, samples)  # warm
            return self._seconds(lambda: self.target.run(size, context, samples)), requests

        return self._curve(rows, seconds)

    def _draft_curves(self, loop: DraftLoop) -> tuple[Curve, Curve, Curve]:
        def first(size: int, context: int) -> tuple[float, int]:
            loop.pretend(size, context)
            return self._seconds(lambda: loop.first(STEADY_LAG, size)), size

        def further(size: int, context: int) -> tuple[float, int]:
            loop.pretend(size, context)
            captured = loop.first(STEADY_LAG, size)
            return self._seconds(lambda: loop.next(captured, size)), size

        curves = [self._curve(self.sizes.requests, each) for each in (first, further)]
        if self.sizes.has_draft_graphs:
            curves = [Curve(each.rows, each.seconds, each.per_token, each.rows[-1]) for each in curves]
        return curves[0], curves[1], self._catch_up_curve(loop, curves[0].seconds[0])

    def _catch_up_curve(self, loop: DraftLoop, first_seconds: float) -> Curve:
        """A catch-up is followed by a first pass, so it takes `first_seconds` more."""
        longest = max(self.sizes.max_context // 2, 1)  # rows of a request
        rows = [size for size in powers(min(loop.max_rows, longest * loop.max_requests), 4) if size >= 4] or [1]

        def seconds(size: int) -> float:
            owners = range(-(-size // longest))
            pieces = [LagPiece(owner, min(longest, size - owner * longest), STEADY_LAG) for owner in owners]
            loop.pretend(len(pieces), longest + STEADY_LAG)
            return first_seconds + self._seconds(lambda: loop.catch_up(pieces))

        return Curve(tuple(rows), tuple(seconds(size) for size in rows), (0.0,) * len(rows)).monotone()

    def _curve(self, sizes: Sequence[int], seconds: Callable[[int, int], tuple[float, int]]) -> Curve:
        """Linear in the context, measured at two of them; sizes that are not measured are interpolated."""
        low, high = self.sizes.contexts
        measured, base, slope = thinned(sizes), [], []
        for size in measured:
            (short, requests), (long, _) = seconds(size, low), seconds(size, high)
            per_token = max(0.0, long - short) / (requests * (high - low))
            base.append(max(0.0, short - per_token * requests * low))
            slope.append(per_token)
        rows, times, slopes = tuple(sizes), np.interp(sizes, measured, base), np.interp(sizes, measured, slope)
        return Curve(rows, tuple(times.tolist()), tuple(slopes.tolist())).monotone()

    def _seconds(self, run: Callable[[], object]) -> float:
        """Of one call, in the fastest round. On a GPU those of the device, so that launches overlap as they will."""
        return min(self._round(run) for _ in range(ROUNDS))

    def _round(self, run: Callable[[], object]) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(TIMES):
                run()
            return (time.perf_counter() - began) / TIMES
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(TIMES):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / TIMES / 1e3
