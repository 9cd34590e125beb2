"""The server against its own OpenAPI document: whatever the document allows or forbids, never a 5xx."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from faser.server import openapi

PATHS = sorted(json.loads(openapi.document())["paths"])
GENERATING = [path for path in PATHS if path.endswith("completions")]


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.path: operation for operation in found}


def statuses(server, operation, mode, examples, adjust=lambda body: None) -> Counter[int]:
    """Send requests the document allows, or ones it forbids; none may be answered with a 5xx."""
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        if isinstance(case.body, dict):
            adjust(case.body)
        seen[case.call_and_validate(base_url=server.url, checks=[not_a_server_error]).status_code] += 1

    send()
    return seen


def name_what_is_served(body) -> None:
    """Most bodies ask for some other model, more tokens than there are or no text, and would go no further."""
    for name in ("model", "logit_bias", "stream_options", "structured_outputs"):
        body.pop(name, None)
    for message in body.get("messages", []):
        if not isinstance(message.get("content"), str):
            message["content"] = "the fox"
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 8)


pytestmark = pytest.mark.filterwarnings("ignore")  # schemathesis warns about its own dependencies


@pytest.mark.parametrize("path", PATHS)
def test_no_allowed_request_makes_the_server_fail(operations, server, path):
    seen = statuses(server, operations[path], GenerationMode.POSITIVE, 25, name_what_is_served)
    is_blind = path == "/v1/video/sessions"  # this server has no eyes
    assert seen[400 if is_blind else 200] > 0 or "{" in path


@pytest.mark.parametrize("path", GENERATING)
def test_no_forbidden_request_makes_the_server_fail(operations, server, path):
    seen = statuses(server, operations[path], GenerationMode.NEGATIVE, 100)
    assert seen[400] > 0
