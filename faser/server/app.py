"""The HTTP side: routes, limits, and answers, whole or as events.

Knows ASGI and HTTP; service.py knows what a request means. No answer contains a stack trace. When a client disconnects,
its request is cancelled at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from time import monotonic, time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from faser.config import ServerOptions
from faser.request import Progress
from faser.server import dashboard, openapi
from faser.server.answers import DONE, Choice, Piece, count_usage
from faser.server.dashboard.pages import dashboard_page, video_page
from faser.server.engine_client import Arrival, EngineClient, EngineGone, State
from faser.server.figures import Figures
from faser.server.keys import OPEN_PATHS, KeyCheck, key_name, within_quota
from faser.server.messages import Refused
from faser.server.metrics import PrometheusText
from faser.server.protocol import ApiError, ChatRequest, CompletionRequest, Model, ModelList, parse
from faser.server.quotas import Lease, Quotas
from faser.server.responses import EVENT_STREAM, JSON, disconnect, json_response, read_body, refusal
from faser.server.service import Call, Service, check_model
from faser.server.sessions.api import SessionApi
from faser.server.sessions.registry import Sessions

log = logging.getLogger("faser.server")


class Disconnected(Exception):
    """The client has disconnected."""


class Api:
    """The endpoints; one object per process."""

    def __init__(self, options: ServerOptions, engine: EngineClient, figures: Figures) -> None:
        self.service = Service(options, engine, figures)
        self.dashboard = dashboard.Dashboard(figures, engine)
        self.sessions = Sessions(options, self.service, figures)
        self._options = options
        self._engine = engine
        self._figures = figures
        self._quotas = Quotas(options.rate_limit, options.token_limit, monotonic)
        self._metrics = PrometheusText(figures, engine)
        self._created = int(time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            *SessionApi(self._options, self.service, self.sessions, self._count).routes(),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/", self.root),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/dashboard", self.dashboard_page),
            Route("/dashboard/data", self.dashboard_data),
            Route("/dashboard/video", self.video_page),
            Route("/openapi.json", self.openapi),
        ]
        middleware = []
        if self._options.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self._options.cors_origins),
                    allow_methods=["GET", "POST", "DELETE"],
                    allow_headers=["*"],  # OpenAI's client sends a dozen of its own
                    expose_headers=["retry-after"],
                )
            )
        if self._options.api_keys:
            open_paths = (*OPEN_PATHS, *(["/metrics"] if self._options.open_metrics else []))
            middleware.append(
                Middleware(KeyCheck, keys=self._options.api_keys, open_paths=open_paths, figures=self._figures)
            )
        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ApiError, Exception), self._error)
        handlers[ClientDisconnect] = _disconnected
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def completions(self, request: Request) -> Response:
        body, arrived = await self._body(request), monotonic()
        parsed = parse(body, CompletionRequest)
        lease = self._enter(request, parsed.num_choices * parsed.num_prompts)
        return await self._generation(self.service.complete(parsed, arrived), lease)

    async def chat(self, request: Request) -> Response:
        body, arrived = await self._body(request), monotonic()
        parsed = parse(body, ChatRequest)
        lease = self._enter(request, parsed.num_choices)
        work = self.service.chat(parsed, arrived)
        # Media can take seconds to load, text does not: a client that leaves is noticed when it is answered.
        return await self._generation(_while_connected(request, work) if parsed.has_media else work, lease)

    async def _generation(self, work: Coroutine[Any, Any, Call], lease: Lease) -> Response:
        try:
            call = await work
        except BaseException:
            lease.end()
            raise
        lease.take_tokens(sum(call.prompt_sizes))
        return Generation(call, self.service, self._figures, lease)

    def _enter(self, request: Request, num_streams: int) -> Lease:
        room = self.service.served().about.max_running + self._options.max_waiting
        most = self._options.stream_limit(room)
        if most is not None and num_streams > most:  # waiting would not help
            raise ApiError(400, f"{num_streams} choices in one request: a key may have {most} at a time; ask for fewer")
        with within_quota():
            return self._quotas.enter(key_name(request), num_streams, most)

    async def _body(self, request: Request) -> bytes:
        served = self.service.served()  # answers 503 before the body is read
        self._count(request)
        return await read_body(request, self._options.body_limit(can_see=served.about.vision is not None))

    def _count(self, request: Request) -> None:
        """Before the body is read: also a request that is refused counts."""
        with within_quota():
            self._quotas.count_request(key_name(request))

    async def _error(self, _: Request, error: Exception) -> Response:
        """The answer to any error. The log has the stack trace of an unforeseen one, the answer does not."""
        if isinstance(error, HTTPException):
            message = _REMEDIES.get(error.status_code, error.detail)
            error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        elif not isinstance(error, ApiError):
            error = ApiError(500, "an internal error; the server's log has the details", code="internal_error")
        return refusal(error, self._figures)

    # ── everything else ──────────────────────────────────────────────────────────────────────────────────────────────

    async def models(self, _: Request) -> Response:
        return json_response(ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self.service.served().about)
        return json_response(self._model())

    def _model(self) -> Model:
        about = self.service.served().about
        return Model(about.model, self._created, about.max_tokens)

    async def root(self, _: Request) -> Response:
        return RedirectResponse("dashboard")  # relative: a proxy may serve this under a prefix

    async def health(self, _: Request) -> Response:
        state = self.service.state
        snapshot = self._figures.latest
        body = {
            "status": state,
            "engine_restarts": self._engine.num_restarts,
            "error": self._engine.failure,
            "draft_failure": snapshot.draft_failure if snapshot is not None else None,
        }
        return json_response(body, 200 if state == State.READY else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def dashboard_page(self, _: Request) -> Response:
        return HTMLResponse(dashboard_page())

    async def video_page(self, _: Request) -> Response:
        return HTMLResponse(video_page())

    async def dashboard_data(self, _: Request) -> Response:
        return json_response(self.dashboard.data(self.service.state))

    async def openapi(self, _: Request) -> Response:
        return Response(openapi.document(), media_type=JSON)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Call]) -> Call:
    """The result of the work, which is cancelled when the client disconnects. The body must have been read."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(disconnect(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


class Generation(Response):
    """The answer to a request that is still generating."""

    def __init__(self, call: Call, service: Service, figures: Figures, lease: Lease) -> None:
        self._call = call
        self._lease = lease
        self._service = service
        self._figures = figures
        self._started = False  # headers are sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._call.streams else self._whole(send))
        except ApiError as error:
            await self._fail(error, send)
        except EngineGone as error:
            await self._fail(self._service.engine_error(error), send)
        except Disconnected:
            log.debug("a client disconnected")
        finally:
            watcher.cancel()
            self._service.cancel(self._call)
            self._lease.take_tokens(sum(track.num_tokens for track in self._call.tracks))
            self._lease.end()

    async def _watch(self, receive: Receive) -> None:
        await disconnect(receive)
        self._call.stream.fail(Disconnected())

    async def _whole(self, send: Send) -> None:
        call = self._call
        pieces: list[list[Piece]] = [[] for _ in call.choices]
        while any(choice.finish is None for choice in call.choices):
            for choice, progress in _by_choice(await call.stream.take(), call.choices):
                pieces[choice.index].append(choice.feed(progress))
        body = call.answerer.whole(
            [_joined(parts) for parts in pieces], count_usage(call.prompt_sizes, call.choices, call.details)
        )
        await Response(body, media_type=JSON)({"type": "http"}, _nothing, send)

    async def _stream(self, send: Send) -> None:
        """Headers are sent with the first token, so that a refusal before it has its own status."""
        call, answerer = self._call, self._call.answerer
        arrivals = _by_choice(await call.stream.take(), call.choices)
        await send(EVENT_STREAM)
        self._started = True
        events = b"".join(answerer.opening(choice.index) for choice in call.choices)
        num_open = len(call.choices)
        while True:
            for choice, progress in arrivals:
                events += answerer.event(choice.index, choice.feed(progress))
                num_open -= choice.finish is not None
            if not num_open:
                break
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            events = b""
            arrivals = _by_choice(await call.stream.take(), call.choices)
        if call.includes_usage:
            events += answerer.usage_event(count_usage(call.prompt_sizes, call.choices, call.details))
        await send({"type": "http.response.body", "body": events + DONE})

    async def _fail(self, error: ApiError, send: Send) -> None:
        """Send an error as the answer, or as the last event of a stream that has begun."""
        answer = refusal(error, self._figures)
        if self._started:
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % error.body})
        else:
            await answer({"type": "http"}, _nothing, send)


def _by_choice(arrivals: Sequence[Arrival], choices: Sequence[Choice]) -> list[tuple[Choice, list[Progress]]]:
    """What arrived, grouped by choice. If one choice is refused, the whole request is."""
    found: dict[int, list[Progress]] = {}
    for index, message in arrivals:
        if isinstance(message, Refused):
            raise ApiError(400, message.message)
        found.setdefault(index, []).append(message)
    return [(choices[index], progress) for index, progress in found.items()]


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [item for piece in pieces for item in piece.logprobs],
        pieces[-1].finish_reason,
    )


async def _nothing() -> Message:
    raise AssertionError("a complete response does not read the request")


_REMEDIES = {
    404: "no such path; the API is under /v1, and /openapi.json lists it",
    405: "this path does not take that method; /openapi.json lists those it takes",
}


async def _disconnected(_: Request, error: Exception) -> Response:
    """The client disconnected before it was answered: nobody will read this answer."""
    return Response(status_code=400)
