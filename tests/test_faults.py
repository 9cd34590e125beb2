"""Faults inside an engine cost the requests of their step and nothing else (the server's: tests/server/test_faults.py).

After every fault the books must agree, requests that waited get their tokens, and the same requests once more get
those of an engine that nothing ever happened to.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import faser.engine
from faser.engine.engine import Engine
from faser.engine.residency import Place
from faser.policy import Fixed
from faser.request import FinishReason
from tests.faults import armed
from tests.oracle import SEED, World, expected_output
from tests.test_exactness import Immovable, Outcome, assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import make_draft, make_model


@pytest.fixture(scope="module")
def pair():
    target = make_model("llama3")
    chosen = ("greedy", "sampled", "penalised", "everything", "opted out", "one token")
    requests = [request for request in make_requests(target.config) if request.id in chosen]
    return target, make_draft(target), requests, reference(target, requests)


def serve_through(engine: Engine, requests) -> tuple[Outcome, int]:
    """As the server does: a step that raises ends the requests that run. Also the number of steps that raised."""
    outcome, num_raised = Outcome(), 0
    for request in requests:
        outcome.tokens[request.id] = []
        engine.add(request)
    while engine.has_work:
        try:
            progress = engine.step()
        except Exception:
            num_raised += 1
            progress = engine.abandon(keep_waiting=True)
            engine.scheduler.check()
        for item in progress:
            outcome.tokens[item.request_id] += item.token_ids
            if item.finish is not None:
                outcome.reasons[item.request_id] = item.finish.reason
    return outcome, num_raised


def assert_only_some_failed(outcome: Outcome, right: Outcome, most: int) -> None:
    """At most `most` failed; the others have their tokens, and the failed ones the beginning of theirs."""
    failed = [name for name, reason in outcome.reasons.items() if reason is FinishReason.FAILED]
    assert len(failed) <= most
    assert outcome.reasons.keys() == right.reasons.keys(), "every request is answered"
    for name, tokens in right.tokens.items():
        assert tokens[: len(outcome.tokens[name])] == outcome.tokens[name]
        assert name in failed or outcome.tokens[name] == tokens


ON_THE_CPU = ("plan", "reserve", "commit", "publish", "execute", "draft", "verify", "logits")


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_an_exception_at_any_place_fails_the_running_requests_and_those_that_wait_are_served(pair, place):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(3), max_running=2, num_pages=48)
    with armed(f"{place}:5:error,{place}:11:no_memory"):
        outcome, num_raised = serve_through(engine, requests)
    assert num_raised == 2
    assert_only_some_failed(outcome, right, most=4)
    assert_equal(serve(engine, requests), right)


def move_and_step(engine: Engine, move) -> None:
    while engine.has_work:
        move()
        engine.step()


@pytest.mark.parametrize("move", ["offload", "load"])
def test_an_exception_in_a_move_of_the_draft_leaves_the_engine_usable(pair, move):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Immovable(3), num_pages=100, offload="on")
    with armed(f"{move}:1:error"):
        engine.residency.leave() if move == "load" else None
        engine.add(requests[0])
        with pytest.raises(RuntimeError, match="secret"):
            move_and_step(engine, engine.residency.leave if move == "offload" else engine.residency.come_back)
    engine.abandon()
    engine.scheduler.check()
    assert_equal(serve(engine, requests), right)
    engine.residency.bring_back()
    assert engine.residency.place is Place.RESIDENT
    assert_equal(serve(engine, requests), right)


def test_scores_that_are_no_numbers_fail_one_request(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(0), max_running=4)
    with armed("logits:6:nan"):
        outcome, num_raised = serve_through(engine, requests)
    assert num_raised == 0
    assert list(outcome.reasons.values()).count(FinishReason.FAILED) == 1
    assert_only_some_failed(outcome, right, most=1)
    assert_equal(serve(engine, requests), right)


# ── an exception in any function of the scheduler ────────────────────────────────────────────────────────────────────

ENGINE = str(Path(faser.engine.__path__[0]))


class Strike:
    """Raises in a call of a function of faser/engine, the one of the given number. Generators are left alone."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame, event, _) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ENGINE) and not code.co_flags & inspect.CO_GENERATOR:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise RuntimeError(f"struck in {code.co_qualname}")


def struck(number: int) -> tuple[World, bool]:
    """A world in which a step met the exception, and whether its books agree; False: the server starts a new engine."""
    world = World(Fixed(2), agreement=0.6, max_running=3, num_pages=24)
    engine = Engine(world.scheduler, world.executor)
    for i in range(9):
        world.add(make_world_request(i))
    old = sys.getprofile()
    sys.setprofile(Strike(number))
    try:
        while engine.has_work:
            world.receive(engine.step())
    except RuntimeError:
        sys.setprofile(old)
        try:
            world.receive(engine.abandon(keep_waiting=True))
            engine.scheduler.check()
        except Exception:
            return world, False
    finally:
        sys.setprofile(old)
    while engine.has_work:
        world.receive(engine.step())
    engine.scheduler.check()
    return world, True


def make_world_request(number: int):
    from tests.engine.test_engine import make_request

    return make_request(str(number), PROMPTS[number], 12)


PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2][: 2 + n % 7] for n in range(9)]


def test_wherever_the_scheduler_is_interrupted_nothing_is_lost_or_the_books_say_so():
    numbers = np.random.default_rng(1).choice(np.arange(1, 2200), 40, replace=False)
    num_kept = 0
    for number in numbers.tolist():
        world, agrees = struck(number)
        num_kept += agrees
        if not agrees:
            continue
        assert world.target.num_held == 0
        assert len(world.finished) == 9, "every request is answered"
        for i, prompt in enumerate(PROMPTS):
            right = expected_output(prompt, SEED, 12)
            tokens = world.tokens[str(i)]
            is_failed = world.finished[str(i)].finish.reason is FinishReason.FAILED
            assert tokens == right or (is_failed and tokens == right[: len(tokens)]), (number, i)
    assert num_kept >= 0.8 * len(numbers), "most strikes cost a step and not the engine"
