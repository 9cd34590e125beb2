"""What an engine is doing at a moment, for somebody who watches it from outside."""

from __future__ import annotations

from enum import IntEnum


class Activity(IntEnum):
    """Those of the process around the engine come first, then those of a step in their order."""

    STARTING = 0
    WAITING = 1
    SENDING = 2
    IDLE_WORK = 3
    MOVING = 4
    PLANNING = 5
    EXECUTING = 6
    COMMITTING = 7

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Activity.STARTING: "starting",
    Activity.WAITING: "waiting for requests",
    Activity.SENDING: "sending to the HTTP process",
    Activity.IDLE_WORK: "measuring in an idle moment",
    Activity.MOVING: "moving the draft, or deciding whether to",
    Activity.PLANNING: "planning a step",
    Activity.EXECUTING: "executing a step",
    Activity.COMMITTING: "committing a step",
}
