"""Chat templates: from messages to the prompt format that the model was trained on.

Knows Jinja, and which functions the templates of Hugging Face models expect. A template is code from outside: it runs
in Jinja's sandbox and sees the messages and two token texts, nothing else. Knows nothing of tokenizers, models or where
a template was found. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from faser.errors import InvalidRequest, ModelError

# {"role": text, "content": text or a list of parts}, and further fields that a template may read. A part is
# {"type": "text", "text": text}, {"type": "image"} or {"type": "video"}.
Message = Mapping[str, Any]
PART_TYPES = ("text", "image", "video")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the token texts it may write; plain strings, which can be sent to another process."""

    source: str
    bos_token: str
    eos_token: str

    def check(self) -> None:
        """Raise ModelError if the template does not compile."""
        _compile(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Tokenise it without special tokens: the template writes them itself."""
        template = _compile(self.source)
        plain = _checked(messages)
        try:
            return template.render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=None,  # templates ask "is not none", which is true of an undefined name
                documents=None,
            )
        except _Refusal as refusal:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {refusal}; send them as it asks"
            ) from None
        except Exception as error:  # the template's code may raise anything
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__}: {error}); send plain "
                "system, user and assistant messages, or give another template with --chat-template FILE"
            ) from error


class _Refusal(Exception):
    """Raised by a template on purpose."""


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages: expected a list of messages, got {type(messages).__name__}; put it in a list")
    if not messages:
        raise InvalidRequest("messages: expected at least one; give the user's")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{number}]: expected a role and a content, got {type(message).__name__}")
        parts = message.get("content")
        if isinstance(parts, list):
            _check_parts(f"messages[{number}].content", parts)
        for key, kind in (("role", str), ("content", str | list)):
            if not isinstance(message.get(key), kind):
                raise InvalidRequest(f"messages[{number}]: {key}={message.get(key)!r}: expected a text")
    return [dict(message) for message in messages]


def _check_parts(place: str, parts: list[Any]) -> None:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PART_TYPES:
            raise InvalidRequest(f"{place}[{number}]: type={kind!r}: expected one of {', '.join(PART_TYPES)}")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place}[{number}]: text={part.get('text')!r}: expected a text")


@lru_cache(maxsize=8)  # compiling takes longer than rendering
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # of Jinja, or of Python's compiler, which limits nesting and size
        reason = f"line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        raise ModelError(
            f"the model's chat template does not compile ({reason}: {error}); give another with --chat-template FILE"
        ) from error


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} mark the assistant's text for training; here they do nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)
