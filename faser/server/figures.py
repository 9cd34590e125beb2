"""Counts and latencies of requests, kept as plain numbers.

Knows requests by their times and the engine by its snapshots; metrics.py and dashboard/ present them. Latencies are per
token, never per event: tokens that arrive together share the time since the previous ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from faser.request import FinishReason
from faser.server.messages import Snapshot

if TYPE_CHECKING:
    from faser.server.engine_client import Track

_MAX_SAMPLES = 4096  # latencies kept for percentiles

# Upper bounds; the same as vLLM's.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts by upper bound. Has no lock, which makes `add` cheap: the event loop is the only writer."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def mean(self) -> float:
        return self._sum / max(1, sum(self._counts))

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, and the sum, in Prometheus's format."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._sum


class Figures:
    """Figures of all requests since the start, and the engine's latest snapshot."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ends: Counter[str] = Counter()  # stop, length, cancelled, failed
        self.refused: Counter[int] = Counter()  # by HTTP status
        self.first_token = Histogram(TTFT_BUCKETS)
        self.between_tokens = Histogram(TOKEN_BUCKETS)
        self.per_token = Histogram(TOKEN_BUCKETS)
        self.request_seconds = Histogram(REQUEST_BUCKETS)
        self.prompt_sizes = Histogram(SIZE_BUCKETS)
        self.output_sizes = Histogram(SIZE_BUCKETS)
        self.open_sessions = 0  # of video
        self.session_frames = 0  # that sessions decoded
        self.windows_answered = 0
        self.windows_skipped = 0  # newer ones came before they could be answered
        self.latest: Snapshot | None = None
        self.recent_first_token: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)  # (when, seconds)
        self.recent_per_token: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def gained(self, track: Track, num_tokens: int, now: float) -> None:
        self.output_tokens += num_tokens
        if track.first is None:
            track.first = now
            self.first_token.add(now - track.arrived)
            self.recent_first_token.append((now, now - track.arrived))
            num_later = num_tokens - 1  # arrived with the first one
            if num_later:
                self.between_tokens.add(0.0, num_later)
        else:
            self.between_tokens.add((now - track.last) / num_tokens, num_tokens)
        track.last = now
        track.num_tokens += num_tokens

    def ended(self, track: Track, reason: FinishReason, now: float) -> None:
        self.ends[reason.value] += 1
        self.prompt_tokens += track.num_prompt
        self.prompt_sizes.add(track.num_prompt)
        self.output_sizes.add(track.num_tokens)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.request_seconds.add(now - track.arrived)
            if track.first is not None and track.num_tokens > 1:
                seconds = (now - track.first) / (track.num_tokens - 1)
                self.per_token.add(seconds)
                self.recent_per_token.append((now, seconds))
