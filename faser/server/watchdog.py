"""What the engine is doing, as the HTTP process sees it: also when the engine is stuck, stopped or dead.

The engine's process writes a few numbers into memory that both processes share, a few times in a step. Nobody waits for
anybody. A note that is read while it is written may have numbers of two steps; one of a slow step stands still.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from faser.engine.activity import Activity
from faser.step import StepPlan

SLOW_SECONDS = 10.0  # of one activity of the engine, after which the log says what it is
_ABOUT = struct.Struct("=qd")  # Activity, since when
_STEP = struct.Struct("=qqqqqqd")  # number, requests, prompts, rows, drafts, pictures, expected seconds or -1
SIZE = _ABOUT.size + _STEP.size


class Note:
    """The engine's side: what it is doing. Time is `monotonic`, which is one clock for all processes."""

    def __init__(self, memory: bytearray | mmap.mmap, clock: Callable[[], float] = monotonic) -> None:
        self._memory = memory
        self._clock = clock
        self._num_steps = 0
        self.enter(Activity.STARTING)

    @classmethod
    def at(cls, descriptor: int) -> Note:
        """In the memory behind a descriptor that the HTTP process gave."""
        return cls(mmap.mmap(descriptor, SIZE))

    def enter(self, activity: Activity, plan: StepPlan | None = None, expected: float | None = None) -> None:
        """The engine begins with something; `plan`: the step that it executes, `expected`: in how many seconds."""
        if plan is not None:
            self._num_steps += 1
            num_prompts, num_pictures = np.count_nonzero(~plan.samples), 0
            if plan.vision is not None:
                num_pictures = len(plan.vision.writes)
            _STEP.pack_into(
                self._memory, _ABOUT.size, self._num_steps, plan.slots.size, num_prompts, int(plan.num_rows.sum()),
                int(plan.lengths.sum()), num_pictures, -1.0 if expected is None else expected,
            )  # fmt: skip
        _ABOUT.pack_into(self._memory, 0, activity, self._clock())

    def read(self) -> Doing:
        return _read(self._memory)


@dataclass(frozen=True)
class Doing:
    """A note, read."""

    activity: Activity
    since: float
    step: int  # the latest that was executed, from 1; 0: none yet
    requests: int
    prompts: int  # of these, requests whose prompts are longer than their rows of the step
    rows: int  # of contexts; drafts have one each beside
    drafts: int  # at most
    pictures: int  # that the step encodes
    expected: float | None  # seconds

    def text(self, now: float) -> str:
        said = f"{self.activity.text} for {now - self.since:.1f} s"
        if not self.step:
            return said
        parts = [f"{self.requests} requests", f"{self.rows} rows"]
        if self.prompts:
            parts.append(f"{self.prompts} unfinished prompts")
        if self.drafts:
            parts.append(f"up to {self.drafts} drafts")
        if self.pictures:
            parts.append(f"{self.pictures} pictures to encode")
        if self.expected is not None:
            parts.append(f"{self.expected:.3f} s expected")
        which = "" if self.activity is Activity.EXECUTING else "the last executed was "
        return f"{said} ({which}step {self.step}: {', '.join(parts)})"


def _read(memory: bytearray | mmap.mmap) -> Doing:
    activity, since = _ABOUT.unpack_from(memory, 0)
    step, requests, prompts, rows, drafts, pictures, expected = _STEP.unpack_from(memory, _ABOUT.size)
    known = expected if expected >= 0 else None
    return Doing(Activity(activity), since, step, requests, prompts, rows, drafts, pictures, known)


class Watchdog:
    """The HTTP process's side: reads the note of one engine, and says which steps take long."""

    def __init__(self) -> None:
        self.descriptor = _shared_memory()  # for the engine's process
        self._memory = mmap.mmap(self.descriptor, SIZE)
        Note(self._memory)
        self._told = 0.0  # `since` of the activity that was last told

    @property
    def doing(self) -> Doing:
        return _read(self._memory)

    def take_warning(self, now: float) -> str | None:
        """What takes longer than SLOW_SECONDS, once for each time."""
        doing = self.doing
        is_slow = doing.activity not in (Activity.STARTING, Activity.WAITING) and now - doing.since > SLOW_SECONDS
        if not is_slow or doing.since == self._told:
            return None
        self._told = doing.since
        return doing.text(now)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def _shared_memory() -> int:
    """The descriptor of memory that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("faser-note")
        os.ftruncate(descriptor, SIZE)
        return descriptor
    with tempfile.TemporaryFile() as file:  # systems other than Linux
        file.truncate(SIZE)
        return os.dup(file.fileno())
