"""vLLM 0.26: its two schedulers with FASER's lengths. Imports vLLM: only vLLM itself loads this module, by name."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from faser.vllm.scheduling import GivesLengthsAfter, GivesLengthsAhead


class AheadScheduler026(GivesLengthsAhead, AsyncScheduler):  # type: ignore[misc]
    """With asynchronous scheduling."""


class AfterScheduler026(GivesLengthsAfter, Scheduler):  # type: ignore[misc]
    """Without."""
