"""Pictures and videos in requests: from the body to the frame for the engine, and every way to be refused."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from unittest.mock import Mock

import msgspec
import numpy as np
import openai
import pytest
from starlette.requests import ClientDisconnect

from faser.config import MEDIA_BODY, TEXT_BODY, ServerOptions
from faser.errors import MissingPackage
from faser.media import load
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.options import VideoOptions
from faser.media.placement import place_media
from faser.server import background, eyes, run, service
from faser.server.app import _while_connected
from faser.server.engine_client import EngineClient, State
from faser.server.figures import Figures
from faser.server.messages import Add, Frames, ToEngine
from faser.server.protocol import ApiError, ChatRequest, CompletionRequest, parse
from faser.server.service import Service
from tests.checkpoint import write_tokenizer
from tests.server.running import running
from tests.server.seeing import data_url, image_part, picture, seeing, text_part, video_part, write_gif
from tests.server.test_engine_client import ABOUT

URL = data_url(picture())


class Transport:
    """Keeps the messages that are sent to the engine."""

    def __init__(self) -> None:
        self.sent: list[Add] = []

    def write(self, data: bytes) -> None:
        self.sent += [message for message in Frames(ToEngine).feed(data) if isinstance(message, Add)]

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.fixture(scope="module")
def about(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    text = (folder / "tokenizer.json").read_text()
    return seeing(msgspec.structs.replace(ABOUT, tokenizer=text, vocab_size=320, max_model_len=256, num_pages=64))


@pytest.fixture
def make_service(about):
    def make(served=about, **options) -> Service:
        given = ServerOptions(**options)
        client = EngineClient(given, Figures())
        client.state, client.about, client._transport = State.READY, served, Transport()
        return Service(given, client, Figures())

    return make


def sent(service: Service) -> list[Add]:
    return service._engine._transport.sent


def body(*parts, **fields) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields}).encode()


def chat(service: Service, *parts, **fields):
    """The call that a request makes; the engine's answer is not waited for."""
    return asyncio.run(service.chat(parse(body(*parts, **fields), ChatRequest), 0.0))


def refusal(service: Service, *parts, **fields) -> dict[str, str]:
    with pytest.raises(ApiError) as refused:
        chat(service, *parts, **fields)
    return {"status": refused.value.status, **json.loads(refused.value.body)["error"]}


# ---- what the engine gets ----


def test_the_engine_gets_the_pixels_in_the_place_of_the_placeholders(make_service, about):
    service = make_service()
    second = data_url(picture(112, 56, seed=1))
    call = chat(service, text_part("a"), image_part(URL), text_part("b"), image_part(second))
    (add,) = sent(service)
    vision, image = add.vision.vision(), about.vision.image_token_id
    assert [grid.num_tokens for grid in vision.grids] == [4, 8]
    for grid, start in zip(vision.grids, vision.starts, strict=True):
        assert set(add.prompt_token_ids[start : start + grid.num_tokens]) == {image}
    assert add.prompt_token_ids.count(image) == 12
    assert len(vision.positions) == len(add.prompt_token_ids) == call.prompt_sizes[0]
    right = load.load_media(
        [load.Reference("image", url, "") for url in (URL, second)], about.vision, MediaAccess(), MediaLimits(),
        VideoOptions(),
    )  # fmt: skip
    assert [grid.name for grid in vision.grids] == [medium.grids[0].name for medium in right]
    text_ids = [token for token in add.prompt_token_ids if token != image]
    placed, expected = place_media([*text_ids[: vision.starts[0]], image, *text_ids[vision.starts[0] :]], right[:1],
                                   about.vision)  # fmt: skip
    np.testing.assert_array_equal(vision.positions[:5], expected.positions[:5])
    assert placed[: vision.starts[0]] == add.prompt_token_ids[: vision.starts[0]]


def test_the_usage_says_what_was_seen(make_service, tmp_path):
    write_gif(tmp_path / "a.gif")
    service = make_service(media_access=MediaAccess(allowed_folders=(tmp_path,)))
    video = video_part(str(tmp_path / "a.gif"))
    details = chat(service, image_part(URL), video, mm_processor_kwargs={"num_frames": 4}).details
    assert (details.image_tokens, details.video_tokens, details.video_frames) == (4, 2 * 4, 4)
    assert details.patches == 3 * 16


def test_a_prompt_without_pictures_has_no_vision_and_the_usage_of_before(make_service):
    service = make_service()
    call = chat(service, text_part("the"), text_part("fox"))
    assert sent(service)[0].vision is None
    assert msgspec.json.encode(call.details) == b'{"cached_tokens":0}'


def test_the_choices_of_a_request_send_its_pixels_once(make_service):
    service = make_service()
    call = chat(service, image_part(URL), n=3)
    (add,) = sent(service)
    assert len(add.choices) == len(call.tracks) == 3
    assert [track.index for track in call.tracks] == [0, 1, 2]
    assert service._engine.num_pixel_bytes == add.vision.num_bytes
    service.cancel(call)
    assert service._engine.num_pixel_bytes == 0


@pytest.mark.parametrize("given", [{"max_pixels": 56 * 56}, {"size": {"longest_edge": 56 * 56}}])
def test_the_size_of_a_picture_follows_the_request(make_service, given):
    service = make_service()
    chat(service, image_part(data_url(picture(112, 112))), mm_processor_kwargs=given)
    assert sent(service)[0].vision.vision().grids[0].num_tokens == 4


# ---- what is refused ----

WRONG = {
    "not base64": (image_part("data:image/png;base64,???"), "messages[0].content[1]", "base64"),
    "no picture": (image_part(data_url(b"hello")), "messages[0].content[1]", "format"),
    "a picture as a video": (video_part(URL), "messages[0].content[1]", "video"),
    "the network": (image_part("http://127.0.0.1/a.png"), "messages[0].content[1]", "network"),
    "a file": (image_part("/etc/hostname"), "messages[0].content[1]", "--allowed-media"),
    "no url": ({"type": "image_url", "image_url": {}}, "messages[0].content[1].image_url.url", "required"),
    "a number": ({"type": "image_url", "image_url": {"url": 7}}, "messages[0].content[1].image_url.url", "str"),
    "a field": ({**image_part(URL), "uuid": "x"}, "messages[0].content[1].uuid", "unknown field"),
    "a detail": ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                 "messages[0].content[1].image_url.detail", "low"),
    "a type": ({"type": "input_audio"}, "messages[0].content", "input_audio"),
    "no type": ({}, "messages[0].content", "None"),
    "a list as a type": ({"type": []}, "messages[0].content", "[]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_part_is_answered_400_with_its_place(make_service, case):
    part, param, says = WRONG[case]
    error = refusal(make_service(), text_part("see"), part)
    assert (error["status"], error["param"]) == (400, param)
    assert says in error["message"]


OPTIONS = {
    "unknown": ({"frames": 3}, "mm_processor_kwargs.frames"),
    "negative": ({"fps": -1}, "mm_processor_kwargs.fps"),
    "an unknown edge": ({"size": {"height": 3}}, "mm_processor_kwargs.size.height"),
    "two ways": ({"fps": 1.0, "num_frames": 2}, "mm_processor_kwargs"),
    "more than the model takes": ({"max_pixels": 10**9}, "messages[0].content[0]"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option_is_refused_by_its_name(make_service, case):
    given, param = OPTIONS[case]
    error = refusal(make_service(), image_part(URL), mm_processor_kwargs=given)
    assert (error["status"], error["param"]) == (400, param)


def test_a_model_without_eyes_refuses_pictures_and_their_options(make_service, about):
    service = make_service(msgspec.structs.replace(about, vision=None))
    error = refusal(service, image_part(URL))
    assert (error["status"], error["param"]) == (400, "messages[0].content")
    assert "'image_url'; only text is served" in error["message"]
    assert refusal(service, text_part("x"), mm_processor_kwargs={"fps": 1})["param"] == "mm_processor_kwargs"
    assert chat(service, text_part("x"), mm_processor_kwargs={}).prompt_sizes


@pytest.mark.parametrize(
    "parts",
    [
        [text_part("see <|image_pad|>")],
        [image_part(URL), text_part("<|image_pad|>")],
        [image_part(URL), text_part("<|image_"), text_part("pad|>")],
        [text_part("<|video_"), text_part("pad|>"), image_part(URL)],
    ],
)
def test_what_a_user_writes_never_becomes_a_picture(make_service, about, parts):
    service = make_service()
    chat(service, *parts)
    [added] = sent(service)
    num_pictures = sum(part["type"] == "image_url" for part in parts)
    num_placeholders = sum(
        i in (about.vision.image_token_id, about.vision.video_token_id) for i in added.prompt_token_ids
    )
    assert num_placeholders == 4 * num_pictures
    text = service.served().tokenizer.decode(added.prompt_token_ids)
    assert "".join(part.get("text", "") for part in parts) in text


def test_a_question_about_a_video_has_one_placeholder_whatever_it_says(make_service, about):
    prompt = asyncio.run(make_service().watch_prompt("see <|video_pad|> and <|image_pad|>"))
    assert prompt.count(about.vision.video_token_id) == 1
    assert about.vision.image_token_id not in prompt


def test_a_completion_cannot_name_a_placeholder(make_service, about):
    for prompt in ("a <|video_pad|>", [5, about.vision.image_token_id]):
        request = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
        with pytest.raises(ApiError, match=r"stands for a picture.*/v1/chat/completions"):
            asyncio.run(make_service().complete(request, 0.0))


def test_the_size_of_a_prompt_is_counted_with_its_pictures(make_service):
    large = image_part(data_url(picture(448, 448)))  # 256 tokens
    error = refusal(make_service(), large)
    assert (error["status"], error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    error = refusal(make_service(), image_part(data_url(picture(224, 224))), max_tokens=200)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_a_prompt_that_is_already_too_long_loads_no_further_picture(make_service, monkeypatch):
    loaded = []
    real = load.load_medium
    monkeypatch.setattr(load, "load_medium", lambda reference, *rest: loaded.append(1) or real(reference, *rest))
    large = image_part(data_url(picture(448, 448)))
    assert refusal(make_service(), *[large] * 5)["code"] == "context_length_exceeded"
    assert len(loaded) == 1


def test_more_media_than_allowed_are_refused_before_any_is_loaded(make_service):
    service = make_service(media_limits=MediaLimits(max_media=2))
    assert "3 pictures and videos; send at most 2" in refusal(service, *[image_part("data:")] * 3)["message"]


def test_a_missing_package_is_answered_501_with_the_command_that_installs_it(make_service, monkeypatch):
    def missing(extra: str) -> None:
        raise MissingPackage(f"av is missing; install it with: pip install 'faser[{extra}]'")

    monkeypatch.setattr(eyes, "require", missing)
    error = refusal(make_service(), image_part(URL))
    assert (error["status"], error["code"]) == (501, "missing_package")
    assert "pip install 'faser[vision]'" in error["message"]


def test_too_many_bytes_of_open_requests_are_answered_503(make_service, monkeypatch):
    service_ = make_service()
    chat(service_, image_part(URL))
    monkeypatch.setattr(service, "MAX_MEDIA_BYTES", 100)
    error = refusal(service_, image_part(URL))
    assert (error["status"], error["code"]) == (503, "queue_full")
    assert chat(service_, text_part("text is served")).tracks


def test_pixels_count_as_soon_as_they_are_loaded_and_no_further_medium_is(make_service, monkeypatch):
    loaded, real = [], load.load_medium

    def counted(*args):
        loaded.append(real(*args))
        return loaded[-1]

    monkeypatch.setattr(load, "load_medium", counted)
    monkeypatch.setattr(service, "MAX_MEDIA_BYTES", 3 * len(URL) + 100)
    service_ = make_service()
    error = refusal(service_, *[image_part(URL)] * 3)
    assert (error["status"], error["code"], len(loaded)) == (503, "queue_full", 1)
    assert (service_._eyes.num_bytes, sent(service_)) == (0, [])
    assert sum(grid.patches.nbytes for grid in loaded[0].grids) > 100


# ---- loading beside other requests ----


class Gate:
    """Stands for load_medium: counts those inside, and keeps them there until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.entered, self.started = Event(), asyncio.Event(), 0
        self._real, self._loop = load.load_medium, asyncio.get_running_loop()
        monkeypatch.setattr(load, "load_medium", self)

    def __call__(self, *args):
        self.started += 1
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.open.wait(60)
        return self._real(*args)


def task(service: Service, *parts):
    return asyncio.create_task(service.chat(parse(body(*parts), ChatRequest), 0.0))


def test_text_is_served_while_every_thread_is_busy_and_no_more_threads_start(make_service, monkeypatch):
    async def play():
        monkeypatch.setattr(eyes, "available_cpus", lambda: 2)
        service, gate = make_service(), Gate(monkeypatch)
        waiting = [task(service, image_part(URL)) for _ in range(3)]
        await gate.entered.wait()
        assert (await task(service, text_part("the fox"))).tracks
        assert (gate.started, service._eyes.num_loading) == (1, 3)
        gate.open.set()
        await asyncio.gather(*waiting)
        assert (gate.started, service._eyes.num_loading, service._eyes.num_bytes) == (3, 0, 0)

    asyncio.run(play())


def test_a_cancelled_request_loads_no_further_medium_and_keeps_its_thread_s_place_until_it_ends(
    make_service, monkeypatch
):
    async def play():
        monkeypatch.setattr(eyes, "available_cpus", lambda: 2)
        service, gate = make_service(), Gate(monkeypatch)
        leaving = task(service, image_part(URL), image_part(URL))
        await gate.entered.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert service._eyes.num_loading == 0
        assert service._eyes._threads.locked(), "its thread still works"
        gate.open.set()
        assert (await task(service, image_part(URL))).tracks
        assert gate.started == 2, "one of each request"
        assert len(sent(service)) == 1

    asyncio.run(play())


def test_a_thread_that_cannot_be_started_gives_its_place_up(make_service, monkeypatch):
    async def play():
        service = make_service()
        places = service._eyes._threads._value
        with monkeypatch.context() as patch:
            patch.setattr(background, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="new thread"):
                await task(service, image_part(URL))
        assert (service._eyes._threads._value, service._eyes.num_loading) == (places, 0)
        assert (await task(service, image_part(URL))).tracks

    asyncio.run(play())


def test_a_server_that_stops_waits_for_pictures_that_are_loading(make_service, monkeypatch):
    async def play():
        monkeypatch.setattr(run, "_POLL_SECONDS", 0)
        service, gate = make_service(), Gate(monkeypatch)
        server = run._Server(ServerOptions(), Mock())
        server._api.service = service
        loading = task(service, image_part(URL))
        await gate.entered.wait()
        stopping = asyncio.create_task(server._drain())
        for _ in range(10):
            await asyncio.sleep(0)
        assert service.draining
        assert not stopping.done()
        gate.open.set()
        call = await loading
        assert not stopping.done(), "the request is in the engine now"
        service.cancel(call)
        await stopping

    asyncio.run(play())


def test_requests_whose_media_are_loading_count_as_open(make_service, about, monkeypatch):
    async def play():
        service, gate = make_service(max_waiting=0), Gate(monkeypatch)
        waiting = [task(service, image_part(URL)) for _ in range(about.max_running)]
        await gate.entered.wait()
        with pytest.raises(ApiError, match="run or wait"):
            await task(service, text_part("one more"))
        gate.open.set()
        await asyncio.gather(*waiting)

    asyncio.run(play())


class Connection:
    """Stands for a request whose body was read."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_a_client_that_leaves_cancels_the_work_for_it():
    async def play():
        connection, ended = Connection(), asyncio.Event()

        async def work():
            connection.left.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(ClientDisconnect):
            await _while_connected(connection, work())
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(play())


def test_a_client_that_stays_gets_the_result_or_the_error():
    async def play():
        async def result():
            return "call"

        async def failure():
            raise ApiError(400, "wrong")

        assert await _while_connected(Connection(), result()) == "call"
        with pytest.raises(ApiError, match="wrong"):
            await _while_connected(Connection(), failure())

    asyncio.run(play())


def test_the_body_may_be_larger_where_the_model_sees():
    assert (ServerOptions().body_limit(False), ServerOptions().body_limit(True)) == (TEXT_BODY, MEDIA_BODY)
    assert ServerOptions(max_body_size=5).body_limit(True) == 5


# ---- over HTTP ----


@pytest.fixture(scope="module")
def seeing_server(chat_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(picture())
    write_gif(folder / "a.gif")
    flags = ("--allowed-media", str(folder))
    factory = "tests.server.seeing:make_seeing"
    with running(chat_folder, tmp_path_factory.mktemp("log"), *flags, factory=factory) as found:
        yield found, folder


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_client_sends_pictures_and_reads_the_answer(seeing_server, stream):
    server, folder = seeing_server
    parts = [image_part(URL), image_part(f"file://{folder}/a.png"), video_part(str(folder / "a.gif")), text_part("?")]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        more = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.chat.completions.create(
            model="paced", messages=[{"role": "user", "content": parts}], max_tokens=4, stream=stream, **more,
            extra_body={"mm_processor_kwargs": {"num_frames": 2}},
        )  # fmt: skip
        usage = (list(answer)[-1] if stream else answer).usage
    details = usage.prompt_tokens_details.model_dump()
    assert {name: details[name] for name in ("image_tokens", "video_tokens", "video_frames", "patches")} == {
        "image_tokens": 8, "video_tokens": 4, "video_frames": 2, "patches": 48,
    }  # fmt: skip
    assert usage.prompt_tokens > 12
    last = [line for line in server.log.splitlines() if line.startswith("grids")][-1].split()[1:]
    assert len(last) == 3
    assert last[0] == last[1], "the same picture has the same name in the engine, however it was sent"
    assert last[2] != last[0]


def test_a_picture_larger_than_the_body_of_a_text_request_is_answered(seeing_server):
    server, _ = seeing_server
    large = data_url(picture(2048, 2048))  # 12 MB, more than TEXT_BODY
    assert len(large) > TEXT_BODY
    status, answer = server.post("/v1/chat/completions", json.loads(body(image_part(large), max_tokens=2)))
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 256


def test_a_refusal_over_http_names_the_part(seeing_server):
    server, _ = seeing_server
    for url in ("https://example.com/a.png", "/etc/hostname"):
        status, answer = server.post("/v1/chat/completions", json.loads(body(text_part("?"), image_part(url))))
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
