"""What one key may ask for: requests and tokens a minute, and open requests at a time.

Knows counts and seconds, which are arguments. Knows no HTTP and no engine. A key's name is any text; without keys it is
the address of the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MINUTE = 60.0
MAX_NAMES = 10_000  # that are remembered; addresses are not trusted to be few


class OverQuota(Exception):
    """A key asks for more than it may; `seconds`: when it may ask again."""

    def __init__(self, message: str, code: str, seconds: float) -> None:
        super().__init__(message)
        self.code = code
        self.seconds = seconds


class Bucket:
    """Holds a minute's worth at most, and fills evenly. It may be overdrawn: then it is empty until that is paid."""

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self._held = float(most)
        self._when = now

    def take(self, number: int, now: float) -> None:
        self._fill(now)
        self._held -= number

    def seconds_until(self, number: float, now: float) -> float:
        """Until the bucket holds as much; 0: it does."""
        self._fill(now)
        return max(0.0, (number - self._held) * MINUTE / self._most)

    def is_full(self, now: float) -> bool:
        return self.seconds_until(self._most, now) == 0.0

    def _fill(self, now: float) -> None:
        self._held = min(self._most, self._held + (now - self._when) * self._most / MINUTE)
        self._when = now


@dataclass
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    num_open: int = 0

    def is_new(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.num_open and all(bucket.is_full(now) for bucket in buckets)


class Lease:
    """The place of one request among the open ones of its key, until it ends."""

    def __init__(self, account: _Account, num_streams: int, clock: Callable[[], float]) -> None:
        self._account = account
        self._num_streams = num_streams
        self._clock = clock

    def take_tokens(self, number: int) -> None:
        if self._account.tokens is not None:
            self._account.tokens.take(number, self._clock())

    def end(self) -> None:
        """Give the place back; may be called again."""
        self._account.num_open -= self._num_streams
        self._num_streams = 0


class Quotas:
    """The accounts of all keys. `requests` and `tokens`: of one key in a minute; None: no bound."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._tokens = tokens
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def count_request(self, name: str) -> None:
        """Count a request when it arrives, whatever becomes of it."""
        now, account = self._clock(), self._account(name)
        if account.requests is not None:
            _refuse(account.requests.seconds_until(1, now), f"{self._requests} requests", "requests_per_minute")
            account.requests.take(1, now)
        if account.tokens is not None:  # some must be left; how many a request needs is known at its end
            _refuse(account.tokens.seconds_until(1, now), f"{self._tokens} tokens", "tokens_per_minute")

    def enter(self, name: str, num_streams: int, most: int | None) -> Lease:
        """Room for a request with as many choices, of the `most` that a key may have open."""
        account = self._account(name)
        if most is not None and account.num_open + num_streams > most:
            held = f"{account.num_open} choices of this key run or wait, and this request has {num_streams}"
            raise OverQuota(f"{held}; a key may have {most} at a time: wait for one to end", "too_many_streams", 1.0)
        account.num_open += num_streams
        return Lease(account, num_streams, self._clock)

    def _account(self, name: str) -> _Account:
        if name not in self._accounts:
            now = self._clock()
            self._forget(now)
            self._accounts[name] = _Account(_bucket(self._requests, now), _bucket(self._tokens, now))
        return self._accounts[name]

    def _forget(self, now: float) -> None:
        """Keep the number of accounts bounded: forget those that are as new, and then the oldest that are idle."""
        if len(self._accounts) < MAX_NAMES:
            return
        self._accounts = {name: each for name, each in self._accounts.items() if not each.is_new(now)}
        idle = [name for name, each in self._accounts.items() if not each.num_open]
        for name in idle[: max(0, len(self._accounts) - MAX_NAMES // 2)]:
            del self._accounts[name]


def _bucket(most: int | None, now: float) -> Bucket | None:
    return None if most is None else Bucket(most, now)


def _refuse(seconds: float, quota: str, code: str) -> None:
    if seconds > 0:
        raise OverQuota(f"this key may use {quota} a minute; try again in {math.ceil(seconds)} s", code, seconds)
