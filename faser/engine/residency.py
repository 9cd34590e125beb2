"""Residency: whether the draft is on the device, or its memory holds KV pages of the target.

Decides with the policy's rule (faser/policy/residency.py) and carries a move out in small parts between steps. Knows
the scheduler, and the device's memory by one seam, `DraftMemory`. While the draft is away no request drafts; when it
is back, requests catch up as after any pause.

    RESIDENT ─ leave ─▶ LEAVING ─ memory lent, pool grown ─▶ AWAY
       ▲                                                      │ come back
       └─ weights loaded ─ LOADING ◀─ pages compacted ─ COMPACTING ◀┘   (back to AWAY where pages get short again)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from faser.engine.scheduler import Scheduler
from faser.errors import MoveError
from faser.policy import Policy
from faser.policy.residency import ResidencyRule, ResidencyView

log = logging.getLogger("faser.engine")

FIRST_RETRY, LAST_RETRY = 5.0, 300.0  # seconds between attempts to load a draft; they double


class DraftMemory(Protocol):
    """Memory that the draft's weights and KV pages share with the target's KV pages: the device's side of a move.

    Calls come between two steps. Each does a part of the move that takes a few milliseconds, and says whether the move
    is complete. MoveError: it failed. Then the draft cannot run and no page was gained, and `load` may be called
    again at any later time.
    """

    @property
    def pages_gained(self) -> int:
        """Pages of the target that the draft's memory holds."""

    @property
    def load_seconds(self) -> float:
        """Expected of loading the weights again."""

    def offload(self) -> bool:
        """Give the memory to the target's pool. No step in flight uses the draft. True: the new pages can be used."""

    def load(self) -> bool:
        """Take the memory back and load the weights. No step in flight uses a page of it. True: the draft can run."""


class Place(Enum):
    RESIDENT = "resident"
    LEAVING = "leaving"
    AWAY = "away"
    COMPACTING = "compacting"  # pages that the draft's memory holds are being emptied
    LOADING = "loading"


@dataclass(frozen=True)
class ResidencyStats:
    """What residency did so far, and the present state."""

    is_resident: bool
    away_seconds: float  # in which the draft could not run
    moves: int  # times that it left or came back
    num_pages: int  # of the target's pool now
    pages_gained: int  # of these, in the draft's memory
    last_move_seconds: float
    failure: str | None  # why the latest move failed; None: it did not, or the draft is back


class Residency:
    """Moves the draft out and in. `proceed` is called before every step, and when there are no requests."""

    def __init__(self, scheduler: Scheduler, memory: DraftMemory, clock: Callable[[], float]) -> None:
        self.place = Place.RESIDENT
        self._scheduler = scheduler
        self._memory = memory
        self._clock = clock
        self._reason = ""  # of the present move
        self._policy: Policy | None = None
        self._rule: ResidencyRule | None = None
        self._barrier = 0  # steps that must have landed before memory moves
        self._began = 0.0  # when the present move began
        self._left = 0.0  # when the draft last stopped
        self._away_seconds = 0.0
        self._moves = 0
        self._last_move_seconds = 0.0
        self._failure: str | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY

    @property
    def stats(self) -> ResidencyStats:
        pool, is_resident = self._scheduler.target_pages, self.place is Place.RESIDENT
        return ResidencyStats(
            is_resident=is_resident,
            away_seconds=self._away_seconds + (0.0 if is_resident else self._clock() - self._left),
            moves=self._moves,
            num_pages=pool.num_pages,
            pages_gained=pool.num_pages - pool.base_pages,
            last_move_seconds=self._last_move_seconds,
            failure=self._failure,
        )

    @property
    def is_moving(self) -> bool:
        """Whether a move is under way. A failed one rests until it is tried again."""
        return self.place not in (Place.RESIDENT, Place.AWAY) and self._clock() >= self._retry_at

    def proceed(self) -> bool:
        """Decide, or do the next part of a move. Whether an idle engine should call again at once."""
        match self.place:
            case Place.RESIDENT:
                reason = self._ask_rule().why_leave(self._view(), self._scheduler.expected_gain)
                if reason is not None:
                    self._begin_leave(reason)
            case Place.LEAVING:
                self._offload()
            case Place.AWAY:
                reason = self._ask_rule().why_return(self._view(), self._scheduler.expected_gain)
                if reason is not None:
                    self._begin_return(reason)
            case Place.COMPACTING:
                self._compact()
            case Place.LOADING:
                self._load()
        return self.is_moving

    def leave(self, reason: str = "asked to") -> None:
        """Begin to leave, whatever the rule says."""
        if self.place is Place.RESIDENT:
            self._begin_leave(reason)

    def come_back(self, reason: str = "asked to") -> None:
        """Begin to come back, whatever the rule says."""
        if self.place is Place.AWAY:
            self._begin_return(reason)

    def bring_back(self) -> None:
        """Come back at once. There are no requests. Raises MoveError where it cannot."""
        while self.place is not Place.RESIDENT:
            if self._failure is not None:
                raise MoveError(self._failure)
            self.come_back()
            if self.is_moving:
                self.proceed()

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_leave(self, reason: str) -> None:
        self._began = self._left = self._clock()
        self._scheduler.stop_drafting()
        self._barrier = self._scheduler.num_planned
        self.place = Place.LEAVING
        self._reason = reason
        self._offload()

    def _offload(self) -> None:
        if self._scheduler.num_landed < self._barrier:
            return
        try:
            if not self._memory.offload():
                return
        except MoveError as error:
            self._fail(f"its memory could not be given to the KV cache ({error})")
            return
        pool = self._scheduler.target_pages
        pool.grow(pool.base_pages + self._memory.pages_gained)
        self.place = Place.AWAY
        self._end_move("left", f"{self._memory.pages_gained} more KV pages (+{self._gained_percent:.0f} %)")

    # ── coming back ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_return(self, reason: str) -> None:
        self._began, self._reason = self._clock(), reason
        pool = self._scheduler.target_pages
        if pool.num_pages > pool.base_pages:
            pool.shrink(pool.base_pages)
        self.place = Place.COMPACTING
        self._compact()

    def _compact(self) -> None:
        pool = self._scheduler.target_pages
        if pool.num_beyond:
            self._scheduler.retained.clear_kept()  # their pages do not move, and nobody may run who would drop them
        if pool.num_beyond:
            is_short = pool.num_available < self._scheduler.num_running  # the next steps would preempt
            if is_short or self._scheduler.lacks_pages:  # requests need the pages that were to be given up
                pool.grow(pool.base_pages + self._memory.pages_gained)
                self.place = Place.AWAY
                log.info("the draft stays away: requests need its memory again")
            return
        self._barrier = self._scheduler.num_planned
        self.place = Place.LOADING
        self._load()

    def _load(self) -> None:
        if self._scheduler.num_landed < self._barrier or self._clock() < self._retry_at:
            return
        try:
            if not self._memory.load():
                return
        except MoveError as error:
            self._fail(f"it could not be loaded ({error})")
            return
        self._failure, self._retry_seconds, self._retry_at = None, FIRST_RETRY, 0.0
        self._away_seconds += self._clock() - self._left
        self._scheduler.drafts.is_away = False
        self.place = Place.RESIDENT
        self._end_move("came back", "speculation is possible again")

    def _fail(self, reason: str) -> None:
        """Serve without speculation, and try to load the draft again later."""
        if self._failure is None:
            log.error("the draft is away: %s; serving without speculation, trying again later", reason)
        self._failure = reason
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY)
        self.place = Place.LOADING

    # ── what rules see ───────────────────────────────────────────────────────────────────────────────────────────────

    def _ask_rule(self) -> ResidencyRule:
        policy = self._scheduler.drafts.policy  # may be exchanged between two steps
        if self._rule is None or policy is not self._policy:
            self._policy, self._rule = policy, policy.residency_rule()
        return self._rule

    def _view(self) -> ResidencyView:
        scheduler, pool = self._scheduler, self._scheduler.target_pages
        return ResidencyView(
            now=self._clock(),
            num_steps=scheduler.num_landed,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_slots=scheduler.limits.max_running - scheduler.num_running,
            context=scheduler.context_tokens,
            lacks_pages=scheduler.lacks_pages,
            num_preemptions=scheduler.num_preemptions,
            pages_held=pool.num_held,
            num_pages=pool.num_pages,
            base_pages=pool.base_pages,
            pages_gained=self._memory.pages_gained,
            load_seconds=self._memory.load_seconds,
            last_drafted=scheduler.last_drafted,
            cost=scheduler.drafts.cost,
        )

    @property
    def _gained_percent(self) -> float:
        return 100 * self._memory.pages_gained / self._scheduler.target_pages.base_pages

    def _end_move(self, what: str, effect: str) -> None:
        self._moves += 1
        self._last_move_seconds = self._clock() - self._began
        log.info("the draft %s in %.0f ms: %s; %s", what, 1e3 * self._last_move_seconds, self._reason, effect)
