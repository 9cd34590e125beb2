"""The HTTP process's side of the engine, without an engine: frames are handed to it as if they had come."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.config import ServerOptions
from faser.request import Finish, FinishReason, Progress, SamplingParams, Stats
from faser.server import engine_client
from faser.server.engine_client import EngineClient, EngineGone, ShuttingDown, State
from faser.server.figures import Figures
from faser.server.messages import About, Outputs, Running, SentVision
from faser.server.protocol import ApiError
from faser.server.service import Service
from faser.vision import Grid, Vision

ABOUT = About(
    model="m", draft=None, policy="off", device="cpu", dtype="float32", reasons={}, vocab_size=9, end_ids=[],
    max_model_len=64, max_running=4, page_size=16, num_pages=16, kv_bytes=0, load_seconds=0.0, tokenizer=None,
    chat_template=None,
)  # fmt: skip


class Transport:
    """Takes frames and forgets them."""

    num_waiting = 0  # bytes that the engine has not read

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.num_waiting


def ready_client() -> EngineClient:
    client = EngineClient(ServerOptions(), Figures())
    client.state, client._transport = State.READY, Transport()
    return client


def submit(client: EngineClient, number: int):
    prompts = [([1, 2], [seed]) for seed in range(number)]
    return client.submit(prompts, SamplingParams(), [], 0.0)[1]


def end(client: EngineClient, track) -> None:
    finish = Finish(FinishReason.STOP, Stats())
    client._receive(Outputs([Progress(track.id, [3], None, finish)]))


def test_requests_wait_until_the_engine_says_that_they_run():
    client = ready_client()
    submit(client, 20)
    assert (client.num_running, client.num_waiting) == (0, 20)
    client._receive(Running(16))
    assert (client.num_running, client.num_waiting) == (16, 4)


def test_a_request_that_ends_leaves_its_place_to_one_that_waits():
    client = ready_client()
    tracks = submit(client, 6)
    client._receive(Running(4))
    end(client, tracks[0])
    client.cancel(tracks[1:2])
    assert (client.num_running, client.num_waiting) == (4, 0)
    end(client, tracks[2])
    assert (client.num_running, client.num_waiting) == (3, 0)


def test_pixels_are_held_until_the_last_choice_ends_and_while_they_wait_to_be_sent():
    client = ready_client()
    vision = seen(np.zeros((4, 6), np.uint8))
    for _ in range(2):
        client.submit([([1, 2], [0, 1, 2])], SamplingParams(), [], 0.0, vision)
    assert client.num_pixel_bytes == 2 * 24
    first, second, third, *others = list(client._tracks.values())
    end(client, first)
    client.cancel([second])
    assert client.num_pixel_bytes == 2 * 24
    end(client, third)
    assert client.num_pixel_bytes == 24
    client.cancel(others)
    client._transport.num_waiting = 100  # of requests that were cancelled
    assert client.num_pixel_bytes == 100


def seen(patches) -> SentVision:
    return SentVision.of(Vision((Grid(patches, 2, 2, 2),), np.array([0]), None))


async def errors_of(streams):
    return [(await asyncio.gather(stream.take(), return_exceptions=True))[0] for stream in streams]


def test_open_requests_are_told_whether_the_engine_failed_or_the_server_was_shut_down():
    client = ready_client()
    service = Service(ServerOptions(), client, Figures())
    for kind, code in ((EngineGone, "engine_failed"), (ShuttingDown, "shutting_down")):
        streams = [client.submit([([1], [0])], SamplingParams(), [], 0.0)[0] for _ in range(2)]
        client.fail_all(kind, "the reason")
        first, second = asyncio.run(errors_of(streams))
        assert first is not second, "each is raised in a task of its own"
        assert f'"code":"{code}"' in service.engine_error(first).body.decode()
        assert "the reason" in service.engine_error(second).body.decode()


def test_a_restart_is_expected_to_take_as_long_as_the_last_start(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(engine_client, "monotonic", lambda: clock[0])
    client = EngineClient(ServerOptions(), Figures())
    service = Service(ServerOptions(), client, Figures())

    def refusal():
        with pytest.raises(ApiError) as refused:
            service.served()
        return refused.value.headers["Retry-After"], str(refused.value)

    assert refusal() == ("2", "the engine is starting; try again in 2 s"), "nothing is known yet"
    clock[0] += 36
    client._receive(ABOUT)
    client._lose()
    clock[0] += 10
    assert refusal() == ("26", "the engine is restarting; try again in 26 s")
    assert service.engine_error(EngineGone("gone")).headers["Retry-After"] == "26"
    clock[0] += 100
    assert refusal()[0] == "2", "it takes longer than the last one"


EVENTS = st.lists(st.tuples(st.sampled_from(["submit", "end", "cancel", "running"]), st.integers(0, 9)), max_size=30)


@given(EVENTS)
def test_running_and_waiting_are_the_open_requests_at_every_moment(events):
    client, open_ones = ready_client(), []
    for kind, number in events:
        if kind == "submit":
            open_ones += submit(client, number)
        elif kind == "running":
            client._receive(Running(number))
        elif open_ones:
            track = open_ones.pop(number % len(open_ones))
            end(client, track) if kind == "end" else client.cancel([track])
        assert client.num_running + client.num_waiting == client.num_open == len(open_ones)
        assert client.num_running >= 0
        assert client.num_waiting >= 0
