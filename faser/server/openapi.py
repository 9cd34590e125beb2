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


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail


@cache
def document() -> bytes:
    types = [CompletionRequest, ChatRequest, Completion, ChatCompletion, Model, ModelList, Error, *PARTS.values()]
    schemas, components = msgspec.json.schema_components(types, ref_template=SCHEMA_REF)
    completion, chat, completed, answered, model, models, error, *_ = schemas
    paths = {
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


def _get(summary: str, schema: Any, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _content("OK", schema), **(more or {})}}


def _content(description: str, schema: Any, media_type: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
