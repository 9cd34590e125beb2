"""/dashboard: two pages, and their data: the last ten minutes by the second, shares of the last minute, and now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import zip_longest
from time import monotonic, time
from typing import Any

import numpy as np

from faser.arrays import IntArray
from faser.policy.acceptance import CONTEXT_BOUNDS
from faser.request import FinishReason
from faser.server.engine_client import EngineClient
from faser.server.figures import Figures
from faser.server.messages import Snapshot

HISTORY_SECONDS = 600
WINDOW_SECONDS = 60.0  # of percentiles and shares
LENGTHS_SECONDS = 3.0  # window of the draft lengths shown as current
RATE_STEPS = 3  # least steps of a window for rates, because a step can take longer than a second
RATE_SECONDS = 120.0  # longest window for rates


class _Second:
    """One second of the past."""

    __slots__ = ("counted", "monotonic", "num_restarts", "running", "snapshot", "time", "waiting")

    def __init__(self, figures: Figures, engine: EngineClient, before: _Second | None) -> None:
        self.time, self.monotonic = time(), monotonic()
        self.num_restarts = engine.num_restarts  # totals of different engines must not be subtracted
        self.running, self.waiting = engine.num_running, engine.num_waiting
        self.snapshot = figures.latest
        self.counted = self.monotonic  # the snapshot's totals are complete up to this time
        if not self.is_idle and self.snapshot is not None:
            self.counted = max(self.snapshot.time, before.counted if before is not None else 0.0)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def steps(self) -> int:
        return self.snapshot.steps if self.snapshot is not None else 0


class Dashboard:
    """Records the figures once a second; answers with all that the page shows."""

    def __init__(self, figures: Figures, engine: EngineClient) -> None:
        self._figures = figures
        self._engine = engine
        self._started = monotonic()
        self._points: deque[_Second] = deque([_Second(figures, engine, None)], maxlen=HISTORY_SECONDS + 1)

    def tick(self) -> None:
        """Once a second."""
        self._points.append(_Second(self._figures, self._engine, self._points[-1]))

    def data(self, state: str) -> dict[str, Any]:
        points = list(self._points)
        several_steps = monotonic() - points[_window_start(points, len(points) - 1)].monotonic
        lengths = self._gained("lengths", max(LENGTHS_SECONDS, several_steps))
        verified = self._gained("verified_per_position", WINDOW_SECONDS)
        accepted = self._gained("accepted_per_position", WINDOW_SECONDS)
        num_positions = sum(count > 0 for count in verified)  # counts never grow with the position
        accepted += [0] * (num_positions - len(accepted))  # the list ends with the last position ever accepted
        return {
            "server": self._server(state),
            "now": self._now(),
            "history": self._history(),
            "lengths": lengths if any(lengths) else [],  # no shares without drafts
            "positions": {"verified": verified[:num_positions], "accepted": accepted[:num_positions]},
            "contexts": self._contexts(),
            "drafted": {"minute": self._drafted(self._snapshot_before(WINDOW_SECONDS)), "total": self._drafted(None)},
            "exits": describe_exits(self._figures.latest),
            "residency": describe_residency(self._figures.latest),
            "draft_failure": describe_failure(self._figures.latest),
            "requests": self._requests(),
        }

    def _server(self, state: str) -> dict[str, Any]:
        about = self._engine.about
        named = {name: getattr(about, name, None) for name in ("model", "draft", "policy", "device", "dtype")}
        return {
            **named,
            "version": version("faser"),
            "uptime_seconds": monotonic() - self._started,
            "state": state,
            "max_running": about.max_running if about is not None else 0,
            "sees": getattr(about, "vision", None) is not None,
        }

    def _now(self) -> dict[str, Any]:
        snapshot, about = self._figures.latest, self._engine.about
        ttft_p50, ttft_p99 = _percentiles(self._figures.recent_first_token)
        tpot_p50, tpot_p99 = _percentiles(self._figures.recent_per_token)
        last = _row(list(self._points), len(self._points) - 1)
        now: dict[str, Any] = {
            "running": self._engine.num_running, "waiting": self._engine.num_waiting,
            "kv_used": 0.0, "kv_tokens": about.kv_tokens if about is not None else 0, "kv_gained": None,
            "draft_kv_used": None, "speculating": False, "prefix_hit_rate": None,
            "output_rate": last["output_rate"], "step_ms": last["step_ms"], "predicted_ms": last["predicted_ms"],
            "ttft_p50": ttft_p50, "ttft_p99": ttft_p99, "tpot_p50": tpot_p50, "tpot_p99": tpot_p99,
            "speculation": describe(snapshot, self._engine.num_running, monotonic(), about.policy if about else ""),
        }  # fmt: skip
        if snapshot is not None:
            now |= {
                "kv_used": snapshot.kv_used,
                "kv_tokens": snapshot.num_pages * about.page_size if about is not None else 0,
                "kv_gained": snapshot.kv_gained,
                "draft_kv_used": snapshot.draft_kv_used,
                "speculating": self._engine.num_running > 0 and snapshot.last_drafting > 0,
                "prefix_hit_rate": snapshot.prefix_hits / snapshot.prefix_queries if snapshot.prefix_queries else None,
            }
        return now

    def _history(self) -> dict[str, list[Any]]:
        points = list(self._points)
        rows = [_row(points, index) for index in range(1, len(points))]
        return {name: [row[name] for row in rows] for name in _row(points, 0)}

    def _snapshot_before(self, seconds: float) -> Snapshot | None:
        """The snapshot of `seconds` ago; None if the engine started later."""
        latest, since = self._figures.latest, monotonic() - seconds
        before = next((point for point in reversed(self._points) if point.monotonic <= since), None)
        if before is None or latest is None or before.num_restarts != self._engine.num_restarts:
            return None
        return before.snapshot

    def _gained(self, name: str, seconds: float) -> list[int]:
        """The increase of a list of totals in the last `seconds`."""
        earlier = getattr(self._snapshot_before(seconds), name, [])
        now = getattr(self._figures.latest, name, [])
        return [after - before for after, before in zip_longest(now, earlier, fillvalue=0)]

    def _drafted(self, before: Snapshot | None) -> dict[str, int]:
        latest = self._figures.latest
        if latest is None:
            return {"accepted": 0, "rejected": 0, "pruned": 0}
        drafted, verified, accepted = (_gain(name, before, latest) for name in ("drafted", "verified", "accepted"))
        return {"accepted": accepted, "rejected": verified - accepted, "pruned": drafted - verified}

    def _contexts(self) -> list[dict[str, int | None]]:
        """Totals of the last minute by the length of the context: above one bound, up to the next; None: no bound."""
        gained = _by_context(self._figures.latest) - _by_context(self._snapshot_before(WINDOW_SECONDS))
        bounds = CONTEXT_BOUNDS.tolist()
        names = ("steps", "drafted", "verified", "accepted")
        return [
            {"above": above, "most": most, **dict(zip(names, counts, strict=True))}
            for above, most, counts in zip([0, *bounds], [*bounds, None], gained.T.tolist(), strict=True)
        ]

    def _requests(self) -> dict[str, int]:
        ends = self._figures.ends
        by_reason = {reason.value: ends[reason.value] for reason in FinishReason}
        refused = sum(self._figures.refused.values())
        return {"finished": ends["stop"] + ends["length"], **by_reason, "refused": refused}


def describe(snapshot: Snapshot | None, running: int, now: float, policy: str) -> str:
    """What speculation does now, in words. `running`: requests in the batch now; the last step may have had others."""
    if snapshot is None:
        return "nothing has run yet"
    decoding, drafting = snapshot.last_decoding, snapshot.last_drafting
    if running == 0:
        return f"idle; policy {policy}"
    if snapshot.speculating_changed is None:
        return f"{_requests(running)} being read; none decodes yet"
    if not drafting:
        age = _age(now - snapshot.speculating_changed)
        away = ", the draft is offloaded" if snapshot.kv_gained is not None else ""
        return f"speculation off for {age}{away}; last step: {_requests(decoding)} decoding"
    mean = snapshot.last_drafted / drafting
    tokens = f"{mean:.0f} token{'s' if mean != 1 else ''}" if mean == round(mean) else f"{mean:.1f} tokens on average"
    who = f"each of {_requests(drafting)}" if drafting == decoding else f"{drafting} of {_requests(decoding)}"
    return f"last step: {tokens} drafted for {who}"


def describe_exits(snapshot: Snapshot | None) -> str:
    """What early exit has done so far, in words; empty without early exit."""
    exits = snapshot.exits if snapshot is not None else None
    if exits is None:
        return ""
    pruned = sum(exits.pruned.values())
    if not pruned:
        return f"Early exit: nothing pruned so far, {exits.trials} trials."
    where = ", ".join(
        f"{tokens:,} {f'after layer {layer}' if layer else 'before the first layer'}"
        for layer, tokens in sorted(exits.pruned.items())
    )
    wrong = 100 * exits.trial_false / exits.trial_pruned if exits.trial_pruned else 0.0
    return f"Early exit pruned {where}; {wrong:.1f} % of it wrongly, by {exits.trials} trials."


def describe_residency(snapshot: Snapshot | None) -> str:
    """Where the draft is, in words; empty while it is on the device."""
    residency = snapshot.residency if snapshot is not None else None
    if snapshot is None or residency is None or residency.is_resident or residency.failure is not None:
        return ""
    if not residency.pages_gained:
        return "The draft is being moved."
    gained = f"{residency.pages_gained:,} more KV pages (+{100 * (snapshot.kv_gained or 0.0):.0f} %)"
    return f"The draft is offloaded: its memory holds {gained}."


def describe_failure(snapshot: Snapshot | None) -> str:
    """What is wrong with the draft, in words; empty if nothing is."""
    failure = snapshot.draft_failure if snapshot is not None else None
    if snapshot is not None and failure and failure == snapshot.misfit:
        return f"The draft guesses badly: {failure}"
    return f"The draft is away: {failure}. Serving without speculation, trying again later." if failure else ""


def _requests(number: int) -> str:
    return f"{number} request{'s' if number != 1 else ''}"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _by_context(snapshot: Snapshot | None) -> IntArray:
    """As EngineStats has it."""
    if snapshot is None or not snapshot.by_context:
        return np.zeros((4, CONTEXT_BOUNDS.size + 1), dtype=np.int64)
    return np.array(snapshot.by_context)


def _row(points: Sequence[_Second], index: int) -> dict[str, Any]:
    """One second of the charts. Rates are of a window that ends with the last step before it."""
    before, after = points[_window_start(points, index)], points[index]
    row: dict[str, Any] = {
        "time": after.time,
        "output_rate": 0.0,
        "running": after.running,
        "waiting": after.waiting,
        "kv_used": 0.0,
        "kv_gained": None,
        "step_ms": None,
        "predicted_ms": None,
        "accepted_rate": 0.0,
        "mean_length": None,
    }
    now, was = after.snapshot, before.snapshot
    if now is None:
        return row
    row |= {"kv_used": now.kv_used, "kv_gained": now.kv_gained}
    if before.num_restarts != after.num_restarts:
        return row
    steps, seconds = _gain("steps", was, now), after.counted - before.counted
    decoded = sum(now.lengths) - (sum(was.lengths) if was is not None else 0)
    if steps:
        row["step_ms"] = 1e3 * _gain("step_seconds", was, now) / steps
        row["predicted_ms"] = 1e3 * _gain("predicted_seconds", was, now) / steps
    if decoded:
        row["mean_length"] = _gain("drafted", was, now) / decoded
    if seconds > 0:
        row["output_rate"] = _gain("emitted", was, now) / seconds
        row["accepted_rate"] = _gain("accepted", was, now) / seconds
    return row


def _gain(name: str, was: Snapshot | None, now: Snapshot) -> Any:
    """The increase of a total. Totals are 0 before an engine's first snapshot."""
    return getattr(now, name) - (getattr(was, name) if was is not None else 0)


def _window_start(points: Sequence[_Second], index: int) -> int:
    """The latest earlier second that is RATE_STEPS steps back, or in which no request was open."""
    after = points[index]
    for start in range(index - 1, -1, -1):
        before = points[start]
        if before.num_restarts != after.num_restarts or after.monotonic - before.monotonic > RATE_SECONDS:
            return min(start + 1, index - 1)
        if before.is_idle or after.steps - before.steps >= RATE_STEPS:
            return start
    return 0


def _percentiles(samples: Iterable[tuple[float, float]]) -> tuple[float | None, float | None]:
    """p50 and p99 of the samples (when, value) of the last WINDOW_SECONDS; None without samples."""
    since = monotonic() - WINDOW_SECONDS
    ordered = sorted(value for when, value in samples if when >= since)
    if not ordered:
        return None, None
    return ordered[int(len(ordered) * 50 / 100)], ordered[int(len(ordered) * 99 / 100)]
