"""Chat templates: messages in, the prompt the model was trained on out.

Knows Jinja, and what the templates that come with Hugging Face models take for granted. A template is somebody else's
code: it runs in Jinja's sandbox and sees the messages and two token texts, nothing else. Knows nothing of tokenizers,
models or where a template was found. Imports no torch.
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

Message = Mapping[str, Any]  # {"role": text, "content": text}, and what else a template may look at


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the token texts it may write. Plain strings, so that it can be sent to another process."""

    source: str
    bos_token: str
    eos_token: str

    def check(self) -> None:
        """Raise ModelError now, not at the first message, if the template does not compile."""
        _compile(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, to be tokenised without special tokens: the template writes them itself."""
        template = _compile(self.source)
        plain = _checked(messages)
        try:
            return template.render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=None,  # named, since templates ask "is not none", which an undefined name is not either
                documents=None,
            )
        except _Refusal as refusal:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {refusal}; send them as it asks"
            ) from None
        except Exception as error:  # whatever the template's code runs into
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
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidRequest(f"messages[{number}]: {key}={message.get(key)!r}: expected a text")
    return [dict(message) for message in messages]


@lru_cache(maxsize=8)  # the texts are few, and compiling one takes longer than rendering it
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja's complaints, and Python's own compiler has limits: depth of nesting, size
        reason = f"line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        raise ModelError(
            f"the model's chat template does not compile ({reason}: {error}); give another with --chat-template FILE"
        ) from error


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} mark, for training, what the assistant says; here they only enclose it."""

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
    """Jinja's own escapes HTML, which a model never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
