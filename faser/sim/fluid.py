"""A cluster too large for every step of every replica: decoding as a flow, prompts step by step.

Each replica serves as its `ThroughputTable` says. Between two events all requests that decode on it get tokens at one
rate, so a request ends when the replica's count of tokens reaches the request's own. Prompts are read in steps of their
own, during which the others wait as they do in the scheduler. The cost grows with the number of requests, not of steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import inf

from faser.engine.prompt_pace import ALONE, GPU
from faser.errors import RequestTooLong
from faser.sim.cluster import Router, per_gpu
from faser.sim.replica import Machine
from faser.sim.throughput import ThroughputTable
from faser.traffic.document import Item, Record, Run, Workload
from faser.traffic.play import Stopped, Update, never, no_update, seconds_of

ALMOST = 1e-6  # tokens: what rounding may leave of a request
SEEN_AFTER = 0.5  # steps, on average, from an arrival to the end of the running step
CHECK_EVERY = 1024  # requests between two checks of `stopped`


class _FluidRequests:
    """The requests, by index."""

    def __init__(self, workload: Workload) -> None:
        self.num_prompt = [len(item.prompt_token_ids) for item in workload.items]
        self.num_output = [item.max_tokens for item in workload.items]
        self.first: list[float | None] = [None] * len(workload.items)
        self.end: list[float | None] = [None] * len(workload.items)
        self.num_ended = 0


class _FluidReplica:
    """One GPU. `next_event` is the time of its next event if no request arrives before."""

    def __init__(self, machine: Machine, table: ThroughputTable, requests: _FluidRequests) -> None:
        self.next_event = inf
        self.busy = 0.0
        self._requests = requests
        self._max_running = machine.max_running
        self._max_rows = machine.max_batch_tokens
        self._max_seconds = machine.max_step_ms / 1e3 or inf
        self._free_tokens = machine.num_pages * machine.page_size
        self._planned = 1 if machine.runs_ahead else 0  # steps already planned when one ends
        self._table = table
        self._time = 0.0  # simulated up to here
        self._given = 0.0  # tokens of a request that has decoded since second 0
        self._decoding: list[tuple[float, int]] = []  # heap: (value of `_given` at which it ends, request)
        self._reading: deque[list[int]] = deque()  # [request, rows of its prompt left]
        self._waiting: deque[tuple[float, int]] = deque()  # (when it can join a step, request)
        self._read: list[int] = []  # requests whose prompts end with the running step
        self._in_step = False  # a step with prompts, or with drafts that catch up, is running
        self._step_gain = 0.0  # tokens per decoding request of the running step
        self._owed = 0.0  # seconds of catching up that drafts still need

    def send(self, request: int, now: float) -> None:
        size = len(self._decoding)
        step = self._table.step[size]
        if self._in_step:
            ready = self.next_event + step * self._planned
        else:
            ready = now + step * (SEEN_AFTER + self._planned) if size else now
        self._waiting.append((ready, request))
        if not self._in_step:
            self._flow(now)
            self._begin()

    def wake(self, now: float) -> int:
        """Handle the next event; returns the number of requests that ended."""
        before = self._requests.num_ended
        if self._in_step:
            self._end_step(now)
        else:
            self._flow(now)
        self._end_requests()
        self._begin()
        return self._requests.num_ended - before

    def _flow(self, now: float) -> None:
        if self._decoding:
            self._given += (now - self._time) * self._table.rate(len(self._decoding))
            self.busy += now - self._time
        self._time = now

    def _end_step(self, now: float) -> None:
        self._in_step = False
        self.busy += now - self._time
        self._time = now
        self._given += self._step_gain
        for request in self._read:
            self._requests.first[request] = now
            heapq.heappush(self._decoding, (self._given + self._requests.num_output[request] - 1, request))
        self._read = []

    def _end_requests(self) -> None:
        requests = self._requests
        while self._decoding and self._decoding[0][0] <= self._given + ALMOST:
            _, request = heapq.heappop(self._decoding)
            requests.end[request] = self._time
            requests.num_ended += 1
            self._free_tokens += requests.num_prompt[request] + requests.num_output[request]

    def _begin(self) -> None:
        """Start a step with prompts if there are any; else decode until a request ends or can join."""
        size, table = len(self._decoding), self._table
        room = min(int(self._max_rows - size * table.prompt_width[size]), self._fitting_rows(size))
        self._admit(room - sum(rest for _, rest in self._reading))
        if self._reading:
            rows = self._take_rows(max(room, 1))
            seconds = table.prompt_step[size] + rows * table.prompt_row[size] + self._owed
            self._hold(seconds, table.prompt_gain[size])
            self._owed = rows * table.late_row[size]
            return
        if self._owed:
            self._hold(self._owed, 0.0)
            self._owed = 0.0
            return
        ends = self._time + (self._decoding[0][0] - self._given) / table.rate(size) if size else inf
        ready = self._waiting[0][0] if self._waiting else inf
        self.next_event = min(ends, ready if ready > self._time else inf)

    def _fitting_rows(self, size: int) -> int:
        """Prompt rows that fit into the bound on a step's seconds, beside `size` decoding requests."""
        seconds = self._max_seconds * (1.0 if size else ALONE) - self._table.prompt_step[size] - self._owed
        row = self._table.prompt_row[size]
        return self._max_rows if seconds == inf or not row else max(GPU.least_rows, int(seconds / row))

    def _hold(self, seconds: float, gain: float) -> None:
        """A step of `seconds`, after which every decoding request has `gain` more tokens."""
        self._in_step, self._step_gain = True, gain
        self.next_event = self._time + seconds

    def _admit(self, room: int) -> None:
        requests = self._requests
        while self._waiting and self._waiting[0][0] <= self._time and room > 0:
            request = self._waiting[0][1]
            tokens = requests.num_prompt[request] + requests.num_output[request]
            if len(self._decoding) + len(self._reading) == self._max_running or tokens > self._free_tokens:
                break
            self._waiting.popleft()
            self._free_tokens -= tokens
            self._reading.append([request, requests.num_prompt[request]])
            room -= requests.num_prompt[request]

    def _take_rows(self, most: int) -> int:
        """Take up to `most` prompt rows, oldest prompt first; returns their number."""
        taken = 0
        while self._reading and taken < most:
            oldest = self._reading[0]
            rows = min(oldest[1], most - taken)
            taken += rows
            oldest[1] -= rows
            if oldest[1]:
                break
            self._read.append(self._reading.popleft()[0])
        return taken


def play_fluid(
    machine: Machine,
    table: ThroughputTable,
    num_replicas: int,
    workload: Workload,
    system: str,
    *,
    stopped: Stopped = never,
    update: Update = no_update,
) -> Run:
    """One run, with arrivals by the clock, through `num_replicas` replicas."""
    return _Fluid(machine, table, num_replicas, workload).run(system, stopped, update)


class _Fluid:
    def __init__(self, machine: Machine, table: ThroughputTable, num_replicas: int, workload: Workload) -> None:
        self._machine = machine
        self._workload = workload
        self._requests = _FluidRequests(workload)
        self._replicas = [_FluidReplica(machine, table, self._requests) for _ in range(num_replicas)]
        self._router = Router(num_replicas)
        # heap: (time, replica); outdated if the replica's next event differs
        self._events: list[tuple[float, int]] = []
        self._errors: dict[int, str] = {}
        self._now = 0.0

    def run(self, system: str, stopped: Stopped, update: Update) -> Run:
        for request, item in enumerate(self._workload.items):
            if request % CHECK_EVERY == 0:
                update(self._requests.num_ended)
                if stopped():
                    return self._result(system, request)
            self._run_until(item.arrival)
            self._now = item.arrival
            self._send(request, item)
        self._run_until(inf)
        return self._result(system, len(self._workload.items))

    def _run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            when, index = heapq.heappop(self._events)
            replica = self._replicas[index]
            if when == replica.next_event:
                self._now = when
                ended = replica.wake(when)
                if ended:
                    self._router.ended(index, ended)
                self._expect(index)

    def _send(self, request: int, item: Item) -> None:
        try:
            self._machine.check_size(len(item.prompt_token_ids), item.max_tokens)
        except RequestTooLong as error:
            self._errors[request] = str(error)
            return
        index = self._router.choose()
        replica = self._replicas[index]
        before = replica.next_event
        replica.send(request, self._now)
        if replica.next_event != before:
            self._expect(index)

    def _expect(self, index: int) -> None:
        if self._replicas[index].next_event < inf:
            heapq.heappush(self._events, (self._replicas[index].next_event, index))

    def _result(self, system: str, num_sent: int) -> Run:
        records = tuple(self._record(index) for index in range(num_sent))
        run = Run(
            system,
            records,
            seconds_of(records, self._now),
            partial=num_sent < len(self._workload.items),
            about={"approximate": True},
        )
        return per_gpu(run, len(self._replicas), sum(replica.busy for replica in self._replicas), self._now)

    def _record(self, index: int) -> Record:
        item, end = self._workload.items[index], self._requests.end[index]
        return Record(
            index=index,
            category=item.category,
            num_prompt=self._requests.num_prompt[index],
            arrival=item.arrival,
            first=self._requests.first[index],
            end=end,
            num_tokens=item.max_tokens if end is not None else 0,
            error=self._errors.get(index),
        )
