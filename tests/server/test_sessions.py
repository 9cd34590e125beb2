"""Video sessions: chunks in, an answer for each window out, and whatever goes wrong ends one session alone."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import signal
import sys
import threading
import urllib.request
from contextlib import asynccontextmanager, closing
from functools import partial
from http.client import HTTPConnection

import msgspec
import pytest
from starlette.requests import Request

from faser import LLM, SamplingParams
from faser.config import ServerOptions, SessionLimits
from faser.errors import MissingPackage
from faser.media.options import PictureOptions
from faser.media.pruning import PruningOptions
from faser.media.reader import FrameReader
from faser.request import Finish, FinishReason, Progress, Stats
from faser.server.engine_client import EngineClient, State
from faser.server.figures import Figures
from faser.server.messages import Add, Cancel, EndSession, Frames, Outputs, ToEngine
from faser.server.protocol import ApiError, parse_object
from faser.server.service import Service
from faser.server.sessions import registry, session
from faser.server.sessions.api import SessionApi
from faser.server.sessions.events import EventLog
from faser.server.sessions.masks import MaskLog
from faser.server.sessions.protocol import EndEvent, ErrorEvent, SessionRequest
from faser.server.sessions.registry import ENDED_SECONDS, Sessions
from faser.text.tokenizer import Tokenizer
from faser.watch import VideoWatcher, WatchOptions, windows
from tests.checkpoint import write_tokenizer
from tests.media.clips import clip, moving
from tests.media.test_live import FRAGMENTED
from tests.server.running import PATIENCE, eventually, running
from tests.server.seeing import seeing
from tests.server.test_engine_client import ABOUT

SETTINGS = {"prompt": "How many move?", "window": 8, "stride": 4, "fps": 10}
CLIP = clip(30, kind="mpegts")  # seven windows
NUM_WINDOWS = 7


class ScriptedEngine:
    """Stands for the engine's process: answers a window with a text that tells its grids, at once or when told."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.is_paused = False
        self.sent: list[Add] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []  # sessions
        self.order: list[str] = []  # of both
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        for message in Frames(ToEngine).feed(data):
            if isinstance(message, Cancel):
                self.cancelled.append(message.id)
                self.order.append(message.id)
                continue
            if isinstance(message, EndSession):
                self.ended.append(message.name)
                self.order.append(message.name)
                continue
            self.sent.append(message)
            if not self.is_paused:
                self._loop.call_soon(self.answer, message)

    def get_write_buffer_size(self) -> int:
        return 0

    def answer(self, add: Add) -> None:
        finish = Finish(FinishReason.LENGTH, Stats(steps=1))
        token_ids = answer_ids(add.vision.vision().grids) if add.vision is not None else [70]
        self.client._receive(Outputs([Progress(add.id, token_ids, None, finish)]))

    def resume(self) -> None:
        self.is_paused = False
        self.answer(self.sent[-1])


def answer_ids(grids) -> list[int]:
    return [70 + byte % 20 for grid in grids for byte in grid.name[:2]]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def about(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    text = (folder / "tokenizer.json").read_text()
    fields = {"vocab_size": 320, "max_model_len": 256, "num_pages": 64, "max_positions": 256}
    return seeing(msgspec.structs.replace(ABOUT, tokenizer=text, **fields))


class Stage:
    """Sessions with a scripted engine and a clock of their own."""

    def __init__(self, about, limits: SessionLimits) -> None:
        options, self.figures, self.clock = ServerOptions(sessions=limits), Figures(), Clock()
        client = EngineClient(options, self.figures)
        self.engine = ScriptedEngine(client)
        client.state, client.about, client._transport = State.READY, about, self.engine
        client.ready.set()
        self.client, self.service = client, Service(options, client, self.figures)
        self.sessions = Sessions(options, self.service, self.figures, self.clock)

    async def create(self, **fields):
        return await self.sessions.create(parse_object(json.dumps({**SETTINGS, **fields}).encode(), SessionRequest))

    async def refused(self, **fields) -> dict:
        with pytest.raises(ApiError) as refusal:
            await self.create(**fields)
        return {"status": refusal.value.status, **json.loads(refusal.value.body)["error"]}


def play(about, scene, **limits) -> None:
    """Run a scene: an async function of a stage."""

    @asynccontextmanager
    async def stage():
        found = Stage(about, SessionLimits(**limits))
        try:
            yield found
        finally:
            found.sessions.end_all("shutting_down")
            await asyncio.sleep(0)

    async def run():
        async with asyncio.timeout(PATIENCE), stage() as found:
            await scene(found)

    asyncio.run(run())


async def read(found, last_id: int = 0) -> list[tuple[str, dict]]:
    """All events of a session, to its end: names and data."""
    text = b"".join([event async for event in found.events.read(last_id)]).decode()
    return [parsed(block) for block in text.split("\n\n") if block]


def parsed(block: str) -> tuple[str, dict]:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    return fields["event"], json.loads(fields["data"]) | {"id": int(fields["id"])}


def answers(events) -> list[dict]:
    return [data for name, data in events if name == "window"]


async def feed(found, data: bytes, is_last: bool) -> None:
    with found.claimed():
        await found.feed(data, is_last)


async def send(found, data: bytes, most: int = 4000, is_last: bool = True) -> None:
    sizes, start = random.Random(3), 0
    while start < len(data):
        size = sizes.randint(1, most)
        await feed(found, data[start : start + size], False)
        start += size
    if is_last:
        await feed(found, b"", True)


def watch_options(**fields) -> WatchOptions:
    return WatchOptions(8, 4, 10, PictureOptions(), **fields)


# ── what a session answers ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", ["none", "codec", "difference"])
def test_windows_of_a_session_are_those_of_the_whole_file(about, rule):
    pruning = PruningOptions(rule=rule)
    right = list(windows(FrameReader(io.BytesIO(CLIP)), about.vision, watch_options(pruning=pruning)))
    decoded = Tokenizer.from_json(about.tokenizer)

    async def scene(stage):
        found = await stage.create(when_behind="wait", pruning=rule)
        await send(found, CLIP, most=500)
        *given, (last, end) = await read(found)
        assert [data["text"] for data in answers(given)] == [
            decoded.decode(answer_ids(window.media.grids)) for window in right
        ]
        assert [(data["start"], data["end"]) for data in answers(given)] == [
            (round(window.start, 3), round(window.end, 3)) for window in right
        ]
        assert [data["kept"] for data in answers(given)] == [round(each.media.kept_share, 4) for each in right]
        assert {data["pruning"] for data in answers(given)} == {rule}
        assert (last, end["reason"], end["windows_answered"], end["frames_decoded"]) == ("end", "complete", 7, 30)

    play(about, scene)


def test_an_event_says_what_the_model_saw_and_where_the_time_went(about):
    async def scene(stage):
        found = await stage.create(when_behind="wait")
        await send(found, CLIP)
        first = answers(await read(found))[0]
        assert first["milliseconds"].keys() == {"decode", "first_token", "answer"}
        assert all(value >= 0 for value in first["milliseconds"].values())
        grids = stage.engine.sent[0].vision.vision().grids
        assert first["patches"] == sum(len(grid.patches) for grid in grids)
        assert first["video_tokens"] == sum(grid.num_tokens for grid in grids)
        assert first["prompt_tokens"] == len(stage.engine.sent[0].prompt_token_ids) > first["video_tokens"]
        assert (first["frames"], first["completion_tokens"], first["finish_reason"]) == (8, 8, "length")

    play(about, scene)


@pytest.mark.parametrize("rule", ["none", "codec"])
def test_events_have_the_mask_of_each_grid_once_where_the_session_asks_for_masks(about, rule):
    right, data = {}, clip(30, kind="mpegts", size=(112, 112), gop=16, draw=moving)
    pruning = PruningOptions(rule=rule)
    for window in windows(FrameReader(io.BytesIO(data)), about.vision, watch_options(pruning=pruning)):
        for grid, (start, end) in zip(window.media.grids, window.times.tolist(), strict=True):
            right[round(start, 3)] = (round(end, 3), None if grid.kept is None else grid.kept.tolist())

    async def scene(stage):
        found = await stage.create(when_behind="wait", pruning=rule, masks=True)
        await send(found, data)
        masks = [data["masks"] for data in answers(await read(found))]
        given = [(grid["start"], (grid["end"], groups(grid["kept"]))) for each in masks for grid in each["grids"]]
        assert given == list(right.items())
        assert [len(each["grids"]) for each in masks] == [4, 2, 2, 2, 2, 2, 1]
        assert any(kept is not None for _, kept in right.values()) == (rule == "codec")
        grid = stage.engine.sent[0].vision.vision().grids[0]
        assert {(each["rows"], each["columns"]) for each in masks} == {(grid.height // 2, grid.width // 2)}

    play(about, scene)


def groups(kept: str | None) -> list[int] | None:
    """What a mask of an event says."""
    if kept is None:
        return None
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(kept))
    return [index for index, bit in enumerate(bits) if bit == "1"]


def test_masks_of_skipped_windows_come_with_the_next_and_nobody_else_pays_for_masks(about):
    whole = list(windows(FrameReader(io.BytesIO(CLIP)), about.vision, watch_options()))
    log = MaskLog()
    starts = [[mask.start for mask in log.new(whole[number]).grids] for number in (0, 2)]
    assert starts == [[0.0, 0.2, 0.4, 0.6], [0.8, 1.0, 1.2, 1.4]]

    async def scene(stage):
        found = await stage.create(when_behind="wait")
        await send(found, CLIP)
        assert all("masks" not in data for data in answers(await read(found)))

    play(about, scene)


def test_two_sessions_at_once_do_not_mix(about):
    other = clip(30, kind="matroska", size=(64, 48), gop=4)
    decoded = Tokenizer.from_json(about.tokenizer)

    async def scene(stage):
        pair = [await stage.create(when_behind="wait", prompt=prompt) for prompt in ("one", "two")]
        await asyncio.gather(*(send(found, data, 700) for found, data in zip(pair, (CLIP, other), strict=True)))
        for found, data in zip(pair, (CLIP, other), strict=True):
            right = windows(FrameReader(io.BytesIO(data)), about.vision, watch_options())
            texts = [decoded.decode(answer_ids(window.media.grids)) for window in right]
            assert [each["text"] for each in answers(await read(found))] == texts
        assert stage.figures.windows_answered == 2 * NUM_WINDOWS
        assert stage.figures.session_frames == 60

    play(about, scene)


def test_the_newest_window_is_answered_and_older_ones_are_skipped_and_counted(about):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create()
        await send(found, CLIP[:-4000], is_last=False)
        while not stage.engine.sent:
            await asyncio.sleep(0)
        await send(found, CLIP[-4000:])
        while found.state().windows_skipped < NUM_WINDOWS - 2:  # one is asked, one waits
            await asyncio.sleep(0)
        stage.engine.resume()
        first, second = answers(await read(found))
        assert first["skipped"] == first["number"], "the decoder may be ahead of the first question"
        assert second["number"] == NUM_WINDOWS - 1
        assert first["skipped"] + second["skipped"] == NUM_WINDOWS - 2
        assert stage.figures.windows_skipped == NUM_WINDOWS - 2

    play(about, scene)


def test_sampling_is_greedy_unless_the_session_says_otherwise(about):
    async def scene(stage):
        for fields in ({}, {"temperature": 0.7, "seed": 5, "max_tokens": 3}):
            found = await stage.create(when_behind="wait", **fields)
            await send(found, CLIP)
            await read(found)
        greedy, sampled = stage.engine.sent[0], stage.engine.sent[-1]
        assert (greedy.params.temperature, greedy.params.max_tokens) == (0.0, 32)
        assert (sampled.params.temperature, sampled.params.max_tokens, sampled.seed) == (0.7, 3, 5)

    play(about, scene)


def test_a_window_takes_over_the_kv_of_grids_that_stay_and_the_engine_learns_of_the_end(about):
    async def scene(stage):
        found = await stage.create(when_behind="wait", kv_reuse=True)
        await send(found, CLIP)
        given = answers(await read(found))
        first, second = stage.engine.sent[:2]
        assert (first.session, first.reuse, second.session) == (found.id, None, found.id)
        starts, ends, sources = second.reuse
        assert sum(ends) - sum(starts) > 0
        assert all(source > start for start, source in zip(starts, sources, strict=True))
        assert [each["kv_reuse"]["is_on"] for each in given] == [True] * NUM_WINDOWS
        while not stage.engine.ended:
            await asyncio.sleep(0)
        assert is_closed(stage, found)

    play(about, scene)


def is_closed(stage, found) -> bool:
    return stage.engine.ended == [found.id] and found._asker._prompts._last is None


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_engine_learns_of_the_end_once_and_behind_the_cancelled_window_and_its_pixels_are_dropped(about, is_asked):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait", kv_reuse=True)
        if is_asked:
            await send(found, CLIP, is_last=False)
            while not stage.engine.sent:
                await asyncio.sleep(0)
        found.end("deleted")
        found.end("expired")
        while not is_closed(stage, found):
            await asyncio.sleep(0)
        assert stage.engine.order == [*(add.id for add in stage.engine.sent), found.id]
        assert len(stage.engine.sent) == is_asked

    play(about, scene)


def test_a_window_after_one_that_failed_takes_nothing_over(about):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait", kv_reuse=True)
        await send(found, CLIP)
        for number in range(3):
            while len(stage.engine.sent) <= number:
                await asyncio.sleep(0)
            if number == 1:
                stage.client.fail_all(session.EngineGone, "the engine process ended")
            else:
                stage.engine.answer(stage.engine.sent[number])
        found.end("deleted")
        await read(found)
        assert [add.reuse is None for add in stage.engine.sent[:3]] == [True, False, True]

    play(about, scene)


@pytest.mark.parametrize("is_right", [True, False])
def test_reuse_is_checked_against_exact_twins_and_stops_where_they_differ(about, is_right, monkeypatch):
    monkeypatch.setattr("faser.watch.CHECKED_WINDOWS", 1)

    async def scene(stage):
        if not is_right:
            monkeypatch.setattr(sys.modules[__name__], "answer_ids", lambda grids: [70 + len(stage.engine.sent) % 20])
        found = await stage.create(when_behind="wait", kv_reuse=True)
        await send(found, CLIP)
        last = answers(await read(found))[-1]["kv_reuse"]
        if is_right:
            assert last == {"is_on": True, "tokens": 0, "checks": NUM_WINDOWS - 1, "differing": 0}
            assert len(stage.engine.sent) == 2 * NUM_WINDOWS - 1
        else:
            assert last == {"is_on": False, "tokens": 0, "checks": 4, "differing": 4}
            assert len(stage.engine.sent) == NUM_WINDOWS + 4

    play(about, scene)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "an odd window": ({"window": 7}, "window", "multiple of 2"),
    "a stride beyond the window": ({"stride": 10}, "stride", "at most the window"),
    "an unknown field": ({"frames": 3}, "frames", "unknown field"),
    "a wrong rule": ({"pruning": "motion"}, "pruning", "motion"),
    "a tau of nothing": ({"tau": 0}, "tau", "> 0"),
    "no prompt": ({"prompt": ""}, "prompt", "length"),
    "large frames": ({"max_pixels": 10**9}, "max_pixels", "max_pixels"),
    "more frames than fit": ({"window": 1000, "stride": 2}, "window", "expected at most 512"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_refused_by_its_name(about, case):
    fields, param, says = WRONG[case]

    async def scene(stage):
        error = await stage.refused(**fields)
        assert (error["status"], error["param"]) == (400, param)
        assert says in error["message"]
        assert stage.figures.open_sessions == 0

    play(about, scene)


def test_a_model_without_eyes_and_another_model_are_refused(about):
    async def scene(stage):
        error = await stage.refused(model="other")
        assert (error["status"], error["code"]) == (404, "model_not_found")
        stage.client.about = msgspec.structs.replace(about, vision=None)
        error = await stage.refused()
        assert error["status"] == 400
        assert "cannot see" in error["message"]

    play(about, scene)


def test_a_missing_decoder_is_answered_501(about, monkeypatch):
    def missing(extra: str) -> None:
        raise MissingPackage(f"av is missing; install it with: pip install 'faser[{extra}]'")

    async def scene(stage):
        monkeypatch.setattr(registry, "require", missing)
        error = await stage.refused()
        assert (error["status"], error["code"]) == (501, "missing_package")

    play(about, scene)


def test_a_window_that_the_model_cannot_take_ends_the_session(about):
    async def scene(stage):
        found = await stage.create(max_tokens=250)
        await send(found, CLIP, is_last=False)
        (name, error), (last, end) = await read(found)
        assert (name, error["code"]) == ("error", "context_length_exceeded")
        assert (last, end["reason"], end["windows_failed"]) == ("end", "failed", 1)

    play(about, scene)


def test_sessions_beyond_the_limit_wait_for_another_to_end(about):
    async def scene(stage):
        first = await stage.create()
        assert (await stage.refused())["code"] == "too_many_sessions"
        stage.sessions.delete(first.id)
        assert (await stage.create()).state().status == "open"
        with pytest.raises(ApiError, match="no such video session"):
            stage.sessions.find(first.id)

    play(about, scene, max_sessions=1)


def test_a_session_is_not_made_once_the_server_shuts_down(about, monkeypatch):
    async def scene(stage):
        async def prompt(question: str) -> list[int]:
            stage.service.draining = True
            stage.sessions.end_all("shutting_down")
            return [1]

        monkeypatch.setattr(stage.service, "watch_prompt", prompt)
        error = await stage.refused()
        assert (error["status"], error["code"]) == (503, "shutting_down")
        assert (stage.figures.open_sessions, stage.sessions._num_opening) == (0, 0)

    play(about, scene)


def test_few_sessions_are_kept_after_their_end(about, monkeypatch):
    async def scene(stage):
        monkeypatch.setattr(registry, "MAX_ENDED", 2)
        found = [await stage.create() for _ in range(4)]
        for each in found:
            each.end("expired")
        last = await stage.create()
        assert list(stage.sessions._sessions) == [found[2].id, found[3].id, last.id]

    play(about, scene)


# ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("data", [b"hello " * 200, bytes(2000), CLIP[:400], b""], ids=["text", "zeros", "cut", "none"])
def test_garbage_ends_its_own_session_alone(about, data):
    async def scene(stage):
        good, bad = await stage.create(when_behind="wait"), await stage.create()
        await send(good, CLIP[:3000], is_last=False)
        await send(bad, data)
        (name, error), (_, end) = await read(bad)
        assert (name, error["code"], end["reason"]) == ("error", "invalid_stream", "failed")
        await send(good, CLIP[3000:])
        assert len(answers(await read(good))) == NUM_WINDOWS
        with pytest.raises(ApiError) as refused:
            await feed(bad, CLIP, False)
        assert refused.value.status == 410

    play(about, scene)


def test_a_stream_that_is_cut_is_answered_as_far_as_it_came(about):
    async def scene(stage):
        found = await stage.create(when_behind="wait")
        await send(found, CLIP[: len(CLIP) // 2])
        *given, (_, end) = await read(found)
        assert end["reason"] == "complete"
        assert 1 <= len(answers(given)) < NUM_WINDOWS

    play(about, scene)


def test_a_full_queue_refuses_the_chunk_whole_and_takes_it_later(about, monkeypatch):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait")
        data = clip(200, kind="mpegts")
        monkeypatch.setattr(session, "CHUNK_SECONDS", 0)
        given, refusals = 0, []
        while given < len(data):
            try:
                await feed(found, data[given : given + 2000], False)
                given += 2000
            except ApiError as error:
                refusals.append((error.status, error.headers, found.state().bytes_received == given))
                if stage.engine.is_paused and stage.engine.sent:
                    stage.engine.resume()
                await asyncio.sleep(0)
            assert found.state().bytes_queued <= 4000
        await feed(found, b"", True)
        assert refusals[0] == (429, {"Retry-After": "1"}, True)
        assert all(nothing_was_taken for _, _, nothing_was_taken in refusals)
        assert len(answers(await read(found))) == 49

    play(about, scene, queue_bytes=4000)


def test_chunks_of_one_session_come_one_after_the_other(about):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait")
        data = clip(200, kind="mpegts")
        waiting = asyncio.create_task(send(found, data, 2000))
        while not (stage.engine.sent and found._is_claimed):
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await feed(found, b"x", False)
        assert refused.value.status == 409
        found.end("deleted")
        with pytest.raises(ApiError) as refused:
            await waiting
        assert refused.value.status == 410

    play(about, scene, queue_bytes=4000)


class Upload:
    """A chunk on its way: its body comes, or the client leaves, when the test says so."""

    def __init__(self, stage, found) -> None:
        self.is_read, self._message = asyncio.Event(), asyncio.get_running_loop().create_future()
        scope = {"type": "http", "method": "POST", "headers": [], "query_string": b"", "path_params": {"id": found.id}}
        api = SessionApi(ServerOptions(sessions=SessionLimits()), stage.service, stage.sessions, lambda _: None)
        self.answer = asyncio.create_task(api.chunk(Request(scope, self._receive)))

    async def _receive(self):
        self.is_read.set()
        return await self._message

    def come(self, body: bytes) -> None:
        self._message.set_result({"type": "http.request", "body": body})

    def leave(self) -> None:
        self._message.set_result({"type": "http.disconnect"})


def test_a_second_chunk_is_refused_before_its_body_is_read_until_the_first_has_come_or_its_client_has_left(about):
    async def scene(stage):
        found = await stage.create()
        for end in (lambda upload: upload.come(CLIP[:2000]), Upload.leave):
            first = Upload(stage, found)
            await first.is_read.wait()
            second = Upload(stage, found)
            with pytest.raises(ApiError) as refused:
                await second.answer
            assert (refused.value.status, second.is_read.is_set()) == (409, False)
            end(first)
            await asyncio.gather(first.answer, return_exceptions=True)
        await feed(found, CLIP[2000:4000], True)
        assert found.state().bytes_received == 4000
        late = Upload(stage, found)
        with pytest.raises(ApiError) as refused:
            await late.answer
        assert (refused.value.status, late.is_read.is_set()) == (410, False)

    play(about, scene)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_session_answers_what_it_has_and_ends(about):
    async def scene(stage):
        found = await stage.create(when_behind="wait")
        await send(found, CLIP, is_last=False)
        stage.clock.now += 59
        stage.sessions.tick()
        assert found.state().status == "open"
        await feed(found, b"", False)
        stage.clock.now += 59
        stage.sessions.tick()
        assert not found.is_finishing, "a chunk came meanwhile"
        stage.clock.now += 2
        stage.sessions.tick()
        *given, (_, end) = await read(found)
        assert (end["reason"], len(answers(given))) == ("idle", NUM_WINDOWS)
        stage.clock.now += ENDED_SECONDS + 1
        stage.sessions.tick()
        with pytest.raises(ApiError, match="no such video session"):
            stage.sessions.find(found.id)

    play(about, scene)


def test_a_session_ends_when_its_time_is_over(about):
    async def scene(stage):
        found = await stage.create()
        stage.clock.now += 11
        await feed(found, b"", False)
        stage.sessions.tick()
        assert (await read(found))[-1][1]["reason"] == "expired"
        assert stage.figures.open_sessions == 0

    play(about, scene, max_seconds=10)


def test_a_session_that_is_deleted_while_it_decodes_leaves_no_thread_and_no_request(about):
    async def scene(stage):
        before = threading.active_count()
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait")
        await send(found, CLIP, is_last=False)
        while not stage.engine.sent:
            await asyncio.sleep(0)
        stage.sessions.delete(found.id)
        assert (await read(found))[-1][1]["reason"] == "deleted"
        while threading.active_count() > before + 1 or not stage.engine.cancelled:  # one is asyncio's own
            await asyncio.sleep(0)
        assert stage.engine.cancelled == [stage.engine.sent[0].id]
        assert (stage.client.num_open, found._file.num_waiting, found._slot._waiting) == (0, 0, None)

    play(about, scene)


def test_an_engine_that_dies_costs_the_window_it_worked_on(about):
    async def scene(stage):
        stage.engine.is_paused = True
        found = await stage.create(when_behind="wait")
        await send(found, CLIP)
        while not stage.engine.sent:
            await asyncio.sleep(0)
        stage.client.ready.clear()
        stage.client.fail_all(session.EngineGone, "the engine process ended")
        while not found.state().windows_failed:
            await asyncio.sleep(0)
        stage.engine.is_paused = False
        assert len(stage.engine.sent) == 1, "nothing is asked before the engine is back"
        stage.client.ready.set()
        (name, error), *rest = await read(found)
        assert (name, error["number"], error["code"]) == ("error", 0, "engine_failed")
        assert [data["number"] for data in answers(rest)] == list(range(1, NUM_WINDOWS))

    play(about, scene)


def test_a_session_that_skips_asks_a_new_engine_about_its_newest_window(about):
    async def scene(stage):
        stage.client.ready.clear()
        found = await stage.create()
        await send(found, CLIP[:-4000], is_last=False)
        while not found.state().frames_decoded:
            await asyncio.sleep(0)
        await send(found, CLIP[-4000:])
        while not found._slot._is_closed:  # by the decoder, behind its last window
            await asyncio.sleep(0)
        stage.client.ready.set()
        (only,) = answers(await read(found))
        assert (only["number"], only["skipped"]) == (NUM_WINDOWS - 1, NUM_WINDOWS - 1)
        assert stage.figures.windows_skipped == NUM_WINDOWS - 1

    play(about, scene)


def test_a_session_whose_thread_cannot_be_started_fails_and_gives_its_place_up(about, monkeypatch):
    async def scene(stage):
        def no_thread(*args):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(session.background, "start", no_thread)
        (name, _), (_, end) = await read(await stage.create())
        assert (name, end["reason"]) == ("error", "failed")
        assert stage.figures.open_sessions == 0

    play(about, scene)


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_reader_loses_the_oldest_events_and_is_told_how_many():
    async def scene():
        log = EventLog(most=3)
        reader = log.read()
        log.add(ErrorEvent(message="1"))
        assert parsed((await anext(reader)).decode().strip())[1]["id"] == 1
        for number in range(2, 8):
            log.add(ErrorEvent(message=str(number)))
        log.close()
        rest = [parsed(event.decode().strip())[1] for event in [event async for event in reader]]
        assert [(each["id"], each["message"], each["dropped"]) for each in rest] == [
            (5, "5", 3), (6, "6", 0), (7, "7", 0),
        ]  # fmt: skip
        again = [parsed(event.decode().strip())[1]["id"] async for event in log.read(last_id=6)]
        late = [parsed(event.decode().strip())[1]["dropped"] async for event in log.read()]
        assert (again, late, log.num_readers) == ([7], [4, 0, 0], 0)
        assert [event async for event in log.read(last_id=10**9)] == []

    asyncio.run(scene())


def test_readers_wait_for_news_and_each_gets_all_of_it():
    async def scene():
        log = EventLog()

        async def collect() -> bytes:
            return b"".join([event async for event in log.read()])

        readers = [asyncio.create_task(collect()) for _ in range(2)]
        await asyncio.sleep(0)
        end = EndEvent(reason="x", frames_decoded=0, windows_answered=0, windows_skipped=0, windows_failed=0)
        log.add(end)
        await asyncio.sleep(0)
        log.close()
        first, second = await asyncio.gather(*readers)
        assert first == second
        assert first.startswith(b"id: 1\nevent: end\ndata: ")

    asyncio.run(scene())


# ── over HTTP, with a model that sees ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(seeing_folder):
    return seeing_folder


@pytest.fixture
def server(seeing_server):
    return seeing_server


def open_session(server, **fields) -> str:
    body = {**SETTINGS, "max_tokens": 6, "ignore_eos": True, "when_behind": "wait", **fields}
    status, state = server.post("/v1/video/sessions", body)
    assert status == 200, state
    assert state["settings"]["model"] == server.model
    return f"/v1/video/sessions/{state['id']}"


def post_chunks(server, path: str, data: bytes, most: int, is_last: bool = True) -> None:
    sizes, start = random.Random(most), 0
    headers = {"Content-Type": "video/mp2t"}
    while start < len(data):
        size = sizes.randint(1, most)
        status, state = server.post(f"{path}/chunk", data[start : start + size], headers)
        assert status == 200, state
        start += size
    if is_last:
        assert server.post(f"{path}/chunk?last=true", b"", headers)[0] == 200


def open_events(server, path: str, **headers):
    return urllib.request.urlopen(
        urllib.request.Request(f"{server.url}{path}/events", headers=headers), timeout=PATIENCE
    )


def all_events(response) -> list[tuple[str, dict]]:
    with response:
        return [parsed(block) for block in response.read().decode().split("\n\n") if block and block[0] != ":"]


def get_events(server, path: str, **headers) -> list[tuple[str, dict]]:
    return all_events(open_events(server, path, **headers))


STREAMS = {
    "mpegts": lambda: CLIP,
    "fragmented mp4": lambda: clip(30, options=FRAGMENTED),
    "raw": partial(clip, 30, kind="h264"),
}


def test_a_session_answers_as_faser_watch_does_of_the_whole_file(server, folder):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(str(folder), num_pages=64) as llm:
        for kind, make in STREAMS.items():
            data = make()
            watcher = VideoWatcher(llm, SETTINGS["prompt"], watch_options(), params)
            right = [(each.number, each.start, each.text) for each in watcher.watch(FrameReader(io.BytesIO(data)))]
            path = open_session(server)
            post_chunks(server, path, data, 900)
            given = answers(get_events(server, path))
            assert [(each["number"], each["text"]) for each in given] == [(n, text) for n, _, text in right], kind
            assert [each["start"] for each in given] == pytest.approx([start for _, start, _ in right], abs=1e-3)


def test_a_session_with_kv_reuse_answers_as_faser_watch_does(server, folder):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(str(folder), num_pages=64) as llm:
        watcher = VideoWatcher(llm, SETTINGS["prompt"], watch_options(kv_reuse=True), params)
        right = list(watcher.watch(FrameReader(io.BytesIO(CLIP))))
    path = open_session(server, kv_reuse=True)
    post_chunks(server, path, CLIP, 900)
    given = answers(get_events(server, path))
    assert [each["text"] for each in given] == [each.text for each in right]
    assert [each["kv_reuse"]["tokens"] for each in given] == [each.reuse.num_tokens for each in right]
    assert given[1]["kv_reuse"]["tokens"] > 0


def test_text_is_answered_beside_sessions_and_each_is_counted(server):
    answered = server.metric("faser:video_windows_answered_total")
    paths = [open_session(server) for _ in range(3)]
    for path in paths:
        post_chunks(server, path, CLIP, 4000)
        assert server.complete(prompt="the fox", max_tokens=4)["choices"][0]["text"]
    given = [get_events(server, path) for path in paths]
    assert {tuple(data["text"] for data in answers(each)) for each in given} == {
        tuple(data["text"] for data in answers(given[0]))
    }
    assert server.metric("faser:video_windows_answered_total") - answered == 3 * NUM_WINDOWS
    assert server.metric("faser:video_sessions") == 0
    assert server.metric("faser:video_frames_decoded_total") > 0


def test_a_reader_that_comes_back_resumes_behind_its_last_event(server):
    path = open_session(server)
    post_chunks(server, path, CLIP, 4000)
    whole = get_events(server, path)
    assert get_events(server, path, **{"Last-Event-ID": "5"}) == whole[5:]
    assert server.get(f"{path}/events", {"Last-Event-ID": "x"})[0] == 400
    status, state = server.get(path)
    assert (status, state["status"], state["reason"], state["windows_answered"]) == (200, "ended", "complete", 7)


def delete(server, path: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, method="DELETE"), timeout=PATIENCE) as done:
        return done.status


def test_a_deleted_session_ends_its_readers_and_is_gone(server):
    path = open_session(server)
    post_chunks(server, path, CLIP[:4000], 4000, is_last=False)
    reader = open_events(server, path)
    assert delete(server, path) == 200
    name, end = all_events(reader)[-1]
    assert (name, end["reason"]) == ("end", "deleted")
    assert server.get(path)[0] == 404
    assert server.post(f"{path}/chunk", b"x", {"Content-Type": "video/mp2t"})[0] == 404


def test_a_chunk_is_raw_bytes_of_bounded_size(server):
    path = open_session(server)
    assert server.post(f"{path}/chunk", b"{}", {"Content-Type": "application/json"})[0] == 415
    assert server.post(f"{path}/chunk?last=maybe", b"", {"Content-Type": "video/mp4"})[0] == 400
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)) as connection:
        connection.putrequest("POST", f"{path}/chunk")
        connection.putheader("Content-Length", str((8 << 20) + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413, "before the body is sent"
    assert delete(server, path) == 200


def test_sessions_outlive_an_engine_and_end_with_the_server(chat_folder, tmp_path):
    flags, headers = ("--api-key", "k"), {"Authorization": "Bearer k"}
    with running(chat_folder, tmp_path, *flags, factory="tests.server.seeing:make_seeing") as server:
        assert server.post("/v1/video/sessions", SETTINGS)[0] == 401
        fields = {**SETTINGS, "max_tokens": 3000, "when_behind": "wait"}
        _, state = server.post("/v1/video/sessions", fields, headers)
        path = f"/v1/video/sessions/{state['id']}"
        octets = {**headers, "Content-Type": "application/octet-stream"}
        assert server.post(f"{path}/chunk", CLIP, octets)[0] == 200
        eventually(lambda: server.log.count("grids") == 1, "a window is asked")
        reader = open_events(server, path, **headers)
        os.kill(server.engine_id, signal.SIGKILL)
        eventually(lambda: server.log.count("grids") == 2, "the next window is asked of the next engine")
        assert server.stop() == 0
        (name, error), (last, end) = all_events(reader)
    assert (name, error["code"], error["number"]) == ("error", "engine_failed", 0)
    assert (last, end["reason"]) == ("end", "shutting_down")
