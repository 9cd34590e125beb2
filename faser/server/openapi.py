"""The server's OpenAPI document, made from the types that requests are checked against."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from faser.server.protocol import (
    PARTS,
    SCHEMA_REF,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
from faser.server.sessions.protocol import Deleted, EndEvent, ErrorEvent, SessionRequest, SessionState, WindowEvent


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail


@cache
def document() -> bytes:
    types = [
        CompletionRequest, ChatRequest, Completion, ChatCompletion, Model, ModelList, Error, *PARTS.values(),
        SessionRequest, SessionState, Deleted, WindowEvent, ErrorEvent, EndEvent,
    ]  # fmt: skip
    schemas, components = msgspec.json.schema_components(types, ref_template=SCHEMA_REF)
    completion, chat, completed, answered, model, models, error, *_ = schemas
    paths = {
        **_sessions(),
        "/v1/completions": {"post": _generation("Continue a text", completion, completed, error)},
        "/v1/chat/completions": {"post": _generation("Answer a conversation", chat, answered, error)},
        "/v1/models": {"get": _get("What is served", models)},
        "/v1/models/{model}": {
            "get": {
                **_get("One model", model, {"404": _content("Not served here", error)}),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        },
        "/health": {
            "get": _get(
                "Whether requests are served", {"type": "object"}, {"503": _content("Not now", {"type": "object"})}
            )
        },
        "/metrics": {"get": {"summary": "Prometheus", "responses": {"200": _content("Metrics", {}, "text/plain")}}},
        "/dashboard": {"get": {"summary": "For people", "responses": {"200": _content("A page", {}, "text/html")}}},
        "/dashboard/video": {
            "get": {"summary": "Watch a clip", "responses": {"200": _content("A page", {}, "text/html")}}
        },
        "/dashboard/data": {"get": _get("What the page draws", {"type": "object"})},
    }
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "FASER", "version": version("faser"), "description": "The OpenAI API, and its own figures."},
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(whole)


def _generation(summary: str, body: Any, answer: Any, error: Any) -> dict[str, Any]:
    answered = _content("The answer, or with stream=true its parts as events", answer)
    answered["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    refusals = {
        "400": "What is wrong with the request",
        "401": "No valid key",
        "404": "Another model",
        "413": "Too large",
        "500": "The request failed",
        "501": "A package for pictures or video is not installed",
        "503": "Busy, starting or ending: try again",
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answered, **{status: _content(text, error) for status, text in refusals.items()}},
    }


def _sessions() -> dict[str, Any]:
    """The paths of video sessions."""
    state, missing = _ref(SessionState), {"404": _content("No such session", _ref(Error))}
    refusals = {
        "400": "What is wrong with the request", "404": "Another model", "501": "A package for video is not installed",
        "503": "Too many sessions, or not ready: try again",
    }  # fmt: skip
    create = {
        **_get("Watch a live video", state, {code: _content(text, _ref(Error)) for code, text in refusals.items()}),
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(SessionRequest)}}},
    }
    one = {
        "get": {**_get("How a session stands", state, missing), "parameters": [_SESSION_ID]},
        "delete": {**_get("End a session", _ref(Deleted), missing), "parameters": [_SESSION_ID]},
    }
    return {
        "/v1/video/sessions": {"post": create},
        "/v1/video/sessions/{id}": one,
        "/v1/video/sessions/{id}/chunk": {"post": _chunk(state, missing)},
        "/v1/video/sessions/{id}/events": {"get": _events(missing)},
    }


_SESSION_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _chunk(state: Any, missing: dict[str, Any]) -> dict[str, Any]:
    refusals = {
        "409": "Another chunk of this session is arriving", "410": "The session's stream has ended",
        "413": "Too large", "415": "Not raw bytes", "429": "The session's queue is full: send it again later",
    }  # fmt: skip
    last = {"name": "last", "in": "query", "schema": {"type": "boolean", "default": False}}
    binary = {"schema": {"type": "string", "format": "binary"}}
    return {
        **_get("The next bytes of a session's stream", state,
               {**missing, **{code: _content(text, _ref(Error)) for code, text in refusals.items()}}),
        "parameters": [_SESSION_ID, last],
        "requestBody": {"required": True, "content": {"application/octet-stream": binary, "video/*": binary}},
    }  # fmt: skip


def _events(missing: dict[str, Any]) -> dict[str, Any]:
    kinds = {"anyOf": [_ref(kind) for kind in (WindowEvent, ErrorEvent, EndEvent)]}
    events = _content("Server-sent events; the data of each is one of these", kinds, "text/event-stream")
    last_id = {"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer", "minimum": 0}}
    return {
        "summary": "The answers of a session, as they come",
        "parameters": [_SESSION_ID, last_id],
        "responses": {"200": events, **missing, "429": _content("Too many readers", _ref(Error))},
    }


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": SCHEMA_REF.format(name=kind.__name__)}


def _get(summary: str, schema: Any, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _content("OK", schema), **(more or {})}}


def _content(description: str, schema: Any, media_type: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
