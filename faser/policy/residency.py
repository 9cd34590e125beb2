"""When the draft leaves the device and when it comes back: rules over plain numbers.

The scheduler's side of a move is in faser/engine/residency.py. A rule is asked before every step; it sees pages, queue
and costs, no tensors. It answers with a reason for people, or None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from faser.cost.profiled_cost import ProfiledCost

MODES = ("auto", "on", "off")

ExpectedGain = Callable[[], float]  # speed with drafts over speed without, in the present batch; 1: no drafts pay


@dataclass(frozen=True)
class ResidencyView:
    """The engine between two steps."""

    now: float  # seconds
    num_steps: int  # that have ended
    num_running: int
    num_waiting: int
    num_free_slots: int
    context: int  # tokens of all running requests
    lacks_pages: bool  # a request waits because pages are short
    num_preemptions: int  # so far
    pages_held: int
    num_pages: int  # of the target's pool now
    base_pages: int  # of the target's pool while the draft is resident
    pages_gained: int  # while it is away
    load_seconds: float  # expected of loading the draft
    last_drafted: int  # of `num_steps`, the latest that had drafts
    cost: ProfiledCost | None

    @property
    def free_share(self) -> float:
        return 1 - self.pages_held / self.num_pages


class ResidencyRule(ABC):
    """Asked before every step: `why_leave` while the draft is resident, `why_return` while it is away."""

    @abstractmethod
    def why_leave(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        """A reason to leave now, or None."""

    @abstractmethod
    def why_return(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        """A reason to come back now, or None. Pages need not fit yet: the move waits for that."""


class FreePages(ResidencyRule):
    """Nightjar's rule: leave when nothing was drafted and free pages stay under a share; back when nothing waits."""

    SHARE = 0.1
    STEPS = 3  # in a row

    def __init__(self) -> None:
        self._last_step = 0
        self._num_short = 0

    def why_leave(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        if view.num_steps == self._last_step:
            return None
        self._last_step = view.num_steps
        is_short = view.free_share < self.SHARE and view.last_drafted < view.num_steps
        self._num_short = self._num_short + 1 if is_short else 0
        if self._num_short < self.STEPS:
            return None
        self._num_short = 0
        return f"under {100 * self.SHARE:.0f} % of KV pages free for {self.STEPS} steps without drafts"

    def why_return(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        fits = view.pages_held <= (1 - self.SHARE) * view.base_pages
        return "no request waits" if fits and not view.num_waiting else None


class Regret(ResidencyRule):
    """The rule of `faser`: move when staying has cost clearly more seconds than the move and its way back will.

    Between two calls, the share of time that the other place would have saved is added up, and what it would have lost
    is taken off; the sum never falls below zero. So a load that swings faster than a move pays causes no move, and what
    waiting costs is bounded by what a move costs.

    Speeds come from the cost model. While resident: requests that the pages hold, drafting where that pays. Away: more
    requests where some wait, and no drafts.
    """

    PART_SECONDS = 0.02  # of a move, without loading
    PATIENCE = 2.0  # a move is made when staying has cost this many times its seconds
    MARGIN = 1.05  # the other place must be faster by this factor
    SPARE = 0.8  # share of the base pages that may be held when the draft comes back
    GAIN_SECONDS = 0.1  # between two evaluations of the expected gain
    MAX_GAP = 0.5  # seconds that one call may count
    IDLE_SHARE = 0.5  # of the time without requests that counts for coming back

    def __init__(self) -> None:
        self._regret = 0.0
        self._last: float | None = None
        self._gain, self._gain_at = 1.0, float("-inf")
        self._preemptions = 0

    def why_leave(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        seconds = self._elapsed(view.now)
        preempted = view.num_preemptions > self._preemptions
        self._preemptions = view.num_preemptions
        if view.cost is None or not view.num_running:
            return None
        if not (view.lacks_pages or preempted):
            if not view.num_waiting:  # else the next request happens to fit
                self._regret = max(0.0, self._regret - seconds)
            return None
        most = view.num_running + min(max(view.num_waiting, int(preempted)), view.num_free_slots)
        more = min(view.num_running * (1 + view.pages_gained / view.num_pages), most)
        resident = self._current_gain(view.now, gain) * _speed(view, view.num_running) * self.MARGIN
        self._add(seconds, away := _speed(view, more), resident)
        if self._regret < self.PATIENCE * self._move_seconds(view):
            return None
        self._forget()
        return (
            f"KV pages are short ({view.num_running} running, {view.num_waiting} waiting); "
            f"without the draft {100 * (away / resident - 1):+.0f} % tokens/s are expected"
        )

    def why_return(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        seconds = self._elapsed(view.now)
        if not view.num_running and not view.num_waiting:
            self._regret += self.IDLE_SHARE * seconds
            return self._decide_return(view, "there are no requests")
        if view.cost is None or not view.num_running:
            return None
        fits = view.pages_held <= self.SPARE * view.base_pages and not view.num_waiting
        fitting = view.num_running * min(1.0, self.SPARE * view.base_pages / max(1, view.pages_held))
        faster = self._current_gain(view.now, gain)
        self._add(seconds, faster * _speed(view, fitting), _speed(view, view.num_running) * self.MARGIN)
        return self._decide_return(view, f"drafting is expected to be {faster:.2f} times as fast") if fits else None

    def _decide_return(self, view: ResidencyView, reason: str) -> str | None:
        if self._regret < self.PATIENCE * self._move_seconds(view):
            return None
        self._forget()
        return reason

    def _move_seconds(self, view: ResidencyView) -> float:
        """Of leaving, loading and catching up."""
        catch_up = 0.0
        if view.cost is not None and view.num_running:
            first = view.cost.first_draft(view.num_running, float(view.context))
            catch_up = float(view.cost.first_draft(view.num_running, float(view.context), view.context) - first)
        return 2 * self.PART_SECONDS + view.load_seconds + catch_up

    def _add(self, seconds: float, other: float, present: float) -> None:
        self._regret = max(0.0, self._regret + seconds * (other - present) / max(other, present))

    def _current_gain(self, now: float, gain: ExpectedGain) -> float:
        if now - self._gain_at >= self.GAIN_SECONDS:
            self._gain, self._gain_at = max(1.0, gain()), now
        return self._gain

    def _elapsed(self, now: float) -> float:
        seconds = 0.0 if self._last is None else min(now - self._last, self.MAX_GAP)
        self._last = now
        return seconds

    def _forget(self) -> None:
        self._regret, self._last, self._gain_at = 0.0, None, float("-inf")


def _speed(view: ResidencyView, num_requests: float) -> float:
    """Tokens per second of so large a batch without drafts."""
    assert view.cost is not None
    context = view.context / view.num_running * num_requests
    return num_requests / (float(view.cost.verify(max(1, round(num_requests)), context)) + view.cost.host)
