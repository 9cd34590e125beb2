"""Several replicas behind a router, with every step of every replica simulated.

Each replica is a real engine with its own time. The progress of a step is delivered when the step ends, not when it is
computed, so that the router knows no more than a real one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from faser.request import Progress
from faser.sim.replica import Replica
from faser.traffic.document import Run, Workload
from faser.traffic.play import Ledger, Stopped, Update, never, no_update, seconds_of
from faser.traffic.summary import added


class Router:
    """Sends to the replica with the fewest open requests; among equals, to the one that changed least recently."""

    def __init__(self, num_replicas: int) -> None:
        self._open = [0] * num_replicas
        self._tickets = list(range(num_replicas))
        self._next_ticket = num_replicas
        self._heap = [(0, ticket, replica) for replica, ticket in enumerate(self._tickets)]

    def choose(self) -> int:
        """The replica for the next request, which counts as open from now on."""
        while True:
            _, ticket, replica = self._heap[0]
            if ticket == self._tickets[replica]:
                self._changed(replica, +1)
                return replica
            heapq.heappop(self._heap)  # an outdated entry

    def ended(self, replica: int, count: int = 1) -> None:
        self._changed(replica, -count)

    def _changed(self, replica: int, by: int) -> None:
        self._open[replica] += by
        self._tickets[replica] = self._next_ticket
        heapq.heappush(self._heap, (self._open[replica], self._next_ticket, replica))
        self._next_ticket += 1


def per_gpu(run: Run, num_replicas: int, busy: float, wall: float) -> Run:
    """The run with figures per GPU. `busy` is summed over the replicas, `wall` is the same for each."""
    tokens = sum(record.num_tokens for record in run.records if record.error is None)
    figures = {
        "replicas": num_replicas,
        "output_tokens_per_s_per_gpu": tokens / run.seconds / num_replicas if run.seconds else None,
        "busy_share": busy / (num_replicas * wall) if wall else None,
    }
    return replace(run, about={**run.about, **figures})


def play_cluster(
    replicas: Sequence[Replica],
    workload: Workload,
    system: str,
    *,
    stopped: Stopped = never,
    update: Update = no_update,
) -> Run:
    """One run through fresh replicas. It ends early, as partial, when `stopped` returns true."""
    return _Cluster(replicas, workload).run(system, stopped, update)


class _Cluster:
    def __init__(self, replicas: Sequence[Replica], workload: Workload) -> None:
        self._replicas = replicas
        self._workload = workload
        self._ledger = Ledger()
        self._router = Router(len(replicas))
        self._now = 0.0
        self._next = 0  # of the workload's items
        self._idle = set(range(len(replicas)))
        self._steps: list[tuple[float, int, list[Progress]]] = []  # heap: (end, replica, progress)

    def run(self, system: str, stopped: Stopped, update: Update) -> Run:
        while self._next < len(self._workload.items) or self._ledger.num_open:
            if stopped():
                return self._result(system, partial=True)
            self._send_due()
            self._start_steps()
            self._advance()
            update(self._ledger.num_ended)
        return self._result(system, partial=False)

    def _due(self) -> float:
        """When the next request is sent; infinite if another must end first."""
        if self._next == len(self._workload.items):
            return inf
        most = self._workload.concurrency
        if most is not None:
            return self._now if self._ledger.num_open < most else inf
        return self._workload.items[self._next].arrival

    def _send_due(self) -> None:
        while self._due() <= self._now:
            index, item = self._next, self._workload.items[self._next]
            self._next += 1
            arrival = self._now if self._workload.concurrency is not None else item.arrival
            chosen = self._router.choose()
            if not self._ledger.send(self._replicas[chosen].engine, index, item, arrival):
                self._router.ended(chosen)

    def _start_steps(self) -> None:
        for index in sorted(self._idle):
            replica = self._replicas[index]
            if replica.engine.has_work:
                replica.idle_until(self._now)
                progress = replica.engine.step()
                heapq.heappush(self._steps, (replica.time.now(), index, progress))
                self._idle.discard(index)

    def _advance(self) -> None:
        """To the next event: a request, or the end of a step."""
        self._now = min(self._due(), self._steps[0][0] if self._steps else inf)
        while self._steps and self._steps[0][0] <= self._now:
            _, index, progress = heapq.heappop(self._steps)
            self._idle.add(index)
            self._router.ended(index, self._ledger.receive(progress, self._now))

    def _result(self, system: str, partial: bool) -> Run:
        records, stats = self._ledger.records(), [replica.engine.stats for replica in self._replicas]
        draft, verify = sum(each.draft_seconds for each in stats), sum(each.verify_seconds for each in stats)
        busy, wall = sum(each.step_seconds for each in stats), self._now
        run = Run(
            system=system,
            records=records,
            seconds=seconds_of(records, wall),
            phases={
                "draft": draft,
                "verify": verify,
                "host": max(0.0, busy - draft - verify),
                "idle": max(0.0, len(stats) * wall - busy),
            },
            verified_per_position=added(each.verified_per_position.tolist() for each in stats),
            accepted_per_position=added(each.accepted_per_position.tolist() for each in stats),
            context_rows=sum(each.context_rows for each in stats),
            partial=partial,
        )
        return per_gpu(run, len(stats), busy, wall)
