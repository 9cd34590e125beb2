"""An engine whose steps take 20 ms and compute nothing: long requests without a long wait for a model.

A prompt that holds token 7 makes its step raise; one that holds token 8 makes the process die; 9 makes it hang.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import numpy as np

from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.engine.pages import PagePool
from faser.engine.residency import Place, Residency, ResidencyStats
from faser.engine.scheduler import Scheduler
from faser.errors import ConfigError
from faser.limits import Limits
from faser.policy import Fixed
from faser.server.messages import About, Start
from faser.server.worker import Served
from faser.step import StepPlan, StepResult
from faser.text.tokenizer import Tokenizer

STEP_SECONDS = 0.02
RAISES, DIES, HANGS = 7, 8, 9
FIRST_TEXT_ID = 70  # the ids above are plain characters of the tests' tokenizer


class PacedExecutor:
    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.admitted:
            if RAISES in new.token_ids:
                raise RuntimeError("secret details of a broken step")
            if DIES in new.token_ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if HANGS in new.token_ids:
                Event().wait()
        sleep(STEP_SECONDS)
        none = np.zeros_like(plan.slots)
        return StepResult(none, none, none, FIRST_TEXT_ID + plan.num_tokens[plan.samples] % 20)

    def close(self) -> None: ...


class StubResidency:
    """Tells what the test sets, and moves nothing."""

    RESIDENT = ResidencyStats(True, 0.0, 0, 64, 0, 0.0, None)
    STRANDED = ResidencyStats(False, 7.5, 1, 64, 0, 0.02, "it could not be loaded (out of memory)")

    is_moving = False

    def __init__(self, stats: ResidencyStats) -> None:
        self.stats = stats

    @property
    def place(self) -> Place:
        return Place.RESIDENT if self.stats.is_resident else Place.LOADING

    def proceed(self) -> bool:
        return False


def make_stranded(start: Start) -> Served:
    """The draft left and cannot be loaded again."""
    served = make(start)
    served.engine.residency = StubResidency(StubResidency.STRANDED)  # type: ignore[assignment]
    return served


def make(start: Start) -> Served:
    options = EngineOptions(**start.engine)
    tokenizer = Tokenizer.from_folder(Path(start.model or ""))
    max_running = options.max_running or 64
    pages = PagePool(1024, 16, max_running, 4096)
    limits = Limits(max_running, 1024, 4096)
    about = About(
        model=start.served_model_name or "paced", draft=None, policy="off", device="cpu", dtype="none",
        reasons=dict.fromkeys(("device", "dtype", "policy", "kv", "draft"), "a test"),
        vocab_size=320, end_ids=[2], max_model_len=4096, max_running=max_running, page_size=16, num_pages=1024,
        kv_bytes=0, load_seconds=0.0, tokenizer=tokenizer.to_json(), chat_template=None,
    )  # fmt: skip
    return Served(Engine(Scheduler(limits, Fixed(0), pages), PacedExecutor()), about, tokenizer)


class Memory:
    """The memory of a draft that there is not."""

    pages_gained = 8
    load_seconds = 0.001

    def offload(self) -> bool:
        return True

    def load(self) -> bool:
        return True


class Leaving(Residency):
    """Leaves at the first step of an engine, and comes back by the usual rule."""

    has_left = False

    def proceed(self) -> bool:
        if not self.has_left:
            self.has_left = True
            self.leave()
        return super().proceed()


def make_moving(start: Start) -> Served:
    """An engine with a draft that leaves and comes back."""
    served = make(start)
    old = served.engine.scheduler
    pages, limits = old.target_pages, old.limits
    sizes = pages.page_size, limits.max_running, limits.max_model_len
    target = PagePool(pages.num_pages, *sizes, most_pages=pages.num_pages + Memory.pages_gained)
    scheduler = Scheduler(limits, Fixed(0), target, PagePool(pages.num_pages, *sizes), speculates=True)
    residency = Leaving(scheduler, Memory(), monotonic)
    return Served(Engine(scheduler, PacedExecutor(), residency=residency), served.about, served.tokenizer)


def refuse(start: Start) -> Served:
    """An engine that cannot be started, with a reason."""
    raise ConfigError("no such model")


def die(start: Start) -> Served:
    """What the kernel does to an engine whose model does not fit into memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives SIGKILL")
