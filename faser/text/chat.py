"""Chat templates: from messages to the prompt format that the model was trained on.

Knows Jinja, and which functions the templates of Hugging Face models expect. A template is code from outside: it runs
in Jinja's sandbox and sees the messages and two token texts, nothing else. The text that it makes says which characters
the template wrote itself (traced.py). Knows nothing of tokenizers, models or where a template was found. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2

from faser.errors import InvalidRequest, ModelError
from faser.text.template import TemplateEnvironment, TooMuch, working
from faser.text.traced import Traced, traced

# {"role": text, "content": text or a list of parts}, and further fields that a template may read. A part is
# {"type": "text", "text": text}, {"type": "image"} or {"type": "video"}.
Message = Mapping[str, Any]
PART_TYPES = ("text", "image", "video")
MAX_TEMPLATE = 2**20  # characters; the longest of models have 20,000
# Roles that are words of the API. Templates build control tokens of them: '<|' + role + '|>'. Others are a user's text.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the token texts it may write; plain strings, which can be sent to another process."""

    source: str
    bos_token: str
    eos_token: str

    def check(self) -> None:
        """Raise ModelError if the template does not compile."""
        _compile(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> Traced:
        """The text of a conversation; its control tokens are those that the template wrote (control.py)."""
        template = _compile(self.source)
        given = [_traced_message(message) for message in _checked(messages)]
        try:
            with working():
                text = template.render(
                    messages=given,
                    add_generation_prompt=add_generation_prompt,
                    bos_token=Traced.by_template(self.bos_token),
                    eos_token=Traced.by_template(self.eos_token),
                    tools=None,  # templates ask "is not none", which is true of an undefined name
                    documents=None,
                )
            return Traced(text)
        except TooMuch as excess:
            raise InvalidRequest(
                f"the model's chat template {excess}; send less, or give another template with --chat-template FILE"
            ) from None
        except _Refusal as refusal:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {refusal}; send them as it asks"
            ) from None
        except Exception as error:  # the template's code may raise anything
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__}: {error}); send plain "
                "system, user and assistant messages, or give another template with --chat-template FILE"
            ) from error

    def render_neutral(self, messages: Sequence[Message]) -> Traced:
        """The text of a conversation of the same shape, in which everything that is not white space is an x."""
        return self.render([_neutral_message(message) for message in _checked(messages)])


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


def _traced_message(message: dict[str, Any]) -> dict[str, Any]:
    role = message["role"]
    return {**traced(message), "role": Traced.by_template(role) if role in ROLES else Traced(role)}


def _neutral_message(message: dict[str, Any]) -> dict[str, Any]:
    content, role = message["content"], message["role"]
    if isinstance(content, list):
        content = [{**_neutral(part), "type": part["type"]} for part in content]
    else:
        content = _neutral(content)
    return {**_neutral(message), "content": content, "role": role if role in ROLES else _neutral(role)}


def _neutral(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"\S", "x", value)
    if isinstance(value, Mapping):
        return {key: _neutral(item) for key, item in value.items()}
    return [_neutral(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=8)  # compiling takes longer than rendering
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE:
        raise ModelError(
            f"the model's chat template has {len(source)} characters; expected at most {MAX_TEMPLATE}: give another "
            "with --chat-template FILE"
        )
    environment = TemplateEnvironment()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(environment.parse(source))
    except Exception as error:  # of Jinja, or of Python's compiler, which limits nesting and size
        reason = f"line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        raise ModelError(
            f"the model's chat template does not compile ({reason}: {error}); give another with --chat-template FILE"
        ) from error


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)
