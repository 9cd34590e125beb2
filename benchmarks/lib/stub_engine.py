"""An engine that costs almost nothing: the real scheduler over an executor that only names the next token.

What a server cannot carry with it, it cannot carry with a model. Every running request gains one token a step, cut
from real text so that detokenising it is real work. Used as the engine_factory "benchmarks.lib.stub_engine:make"; a
step takes at least STUB_STEP_SECONDS (an environment variable, 0 by default).
"""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.lib.http_client import SENTENCES, STUB_STEP_SECONDS
from faser.arrays import IntArray
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.engine.pages import PagePool
from faser.engine.scheduler import Scheduler
from faser.limits import Limits
from faser.models.source import open_target
from faser.policy import make_policy
from faser.server.messages import About, Start
from faser.server.worker import Served
from faser.step import StepPlan, StepResult

MAX_MODEL_LEN = 2048


class StubExecutor:
    """Emits the next token of a text, round and round, and makes every step last at least `step_seconds`."""

    def __init__(self, text_ids: IntArray, step_seconds: float) -> None:
        self._text_ids = text_ids
        self._step_seconds = step_seconds
        self._next_step = 0.0  # the time before which no step starts

    def execute(self, plan: StepPlan) -> StepResult:
        self._wait()
        none = np.zeros_like(plan.slots)
        position = (plan.num_tokens + 37 * plan.slots)[plan.samples]  # each request at another place
        return StepResult(none, none, none, self._text_ids[position % self._text_ids.size])

    def _wait(self) -> None:
        now = time.perf_counter()
        if now < self._next_step:
            time.sleep(self._next_step - now)
        self._next_step = max(now, self._next_step) + self._step_seconds

    def close(self) -> None:
        pass


def make(start: Start) -> Served:
    options = EngineOptions(**start.engine)
    source = open_target(start.model)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    max_running = options.max_running or 256
    limits = Limits(max_running, options.max_batch_tokens or 1024, MAX_MODEL_LEN)
    num_pages = max_running * MAX_MODEL_LEN // options.page_size
    pages = PagePool(num_pages, options.page_size, max_running, MAX_MODEL_LEN, options.prefix_caching)
    scheduler = Scheduler(limits, make_policy("off"), pages, prefix_caching=options.prefix_caching)
    text_ids = np.array(tokenizer.encode(" ".join(SENTENCES), add_special_tokens=False))
    about = About(
        model="stub",
        draft=None,
        policy="off",
        device="none",
        dtype="none",
        reasons=dict.fromkeys(("device", "dtype", "policy", "kv", "draft"), "a stub"),
        vocab_size=source.config.vocab_size,
        end_ids=list(source.config.eos_token_ids),
        max_model_len=MAX_MODEL_LEN,
        max_running=max_running,
        page_size=options.page_size,
        num_pages=num_pages,
        kv_bytes=0,
        load_seconds=0.0,
        tokenizer=tokenizer.to_json(),
        chat_template=None,
    )
    step_seconds = float(os.environ.get(STUB_STEP_SECONDS, "0"))
    return Served(Engine(scheduler, StubExecutor(text_ids, step_seconds)), about, tokenizer)
