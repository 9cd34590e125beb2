"""What it takes to move the draft out and back: one round trip while there are no requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from faser.cost.residency import ResidencyProfile
from faser.errors import MoveError
from faser.runtime.profiling.batches import Subject

log = logging.getLogger("faser.engine")


def round_trip(subject: Subject, clock: Callable[[], float]) -> ResidencyProfile | None:
    """None where the draft cannot move. Raises MoveError if the draft is gone: it could not be loaded again."""
    memory = subject.draft_memory
    if memory is None:
        return None
    try:
        lend_seconds = _seconds_of(memory.offload, clock)
    except MoveError as error:
        log.warning("the draft cannot leave the device: %s", error)
        _seconds_of(memory.load, clock)
        return None
    load_seconds = _seconds_of(memory.load, clock)
    target_bytes, draft_bytes = subject.page_bytes
    return ResidencyProfile(
        weight_bytes=subject.leaving_bytes,
        target_token_bytes=target_bytes // subject.page_size,
        draft_token_bytes=draft_bytes // subject.page_size,
        lend_seconds=lend_seconds,
        load_seconds=load_seconds,
    )


def _seconds_of(move: Callable[[], bool], clock: Callable[[], float]) -> float:
    started = clock()
    while not move():
        pass
    return clock() - started
