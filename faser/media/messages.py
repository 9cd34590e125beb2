"""Messages with pictures and videos, in OpenAI's form: what a chat template takes, and what must be fetched for it.

Knows the parts of a message. Knows nothing of HTTP, tokens or pixels, and imports no decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faser.errors import InvalidRequest
from faser.text.chat import Message

KINDS = {"image_url": "image", "video_url": "video"}  # by the type of a part


@dataclass(frozen=True)
class Reference:
    """A picture or a video that a message names."""

    kind: str  # "image" or "video"
    url: str
    place: str  # in the request, e.g. messages[0].content[1]


def split_messages(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Reference]]:
    """The messages as a chat template takes them, and what they show, in its order.

    The texts of a message without pictures become one text, a line each. What has another shape passes as it is: the
    template's check refuses it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        return messages, []
    plain: list[Message] = []
    references: list[Reference] = []
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            parts, place = message["content"], f"messages[{number}].content"
            references += [_reference(part, f"{place}[{i}]") for i, part in enumerate(parts) if _kind_of(part)]
            message = {**message, "content": _template_content(parts)}
        plain.append(message)
    return plain, references


def _kind_of(part: Any) -> str | None:
    """ "image" or "video"; None for any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def _template_content(parts: list[Any]) -> str | list[Any]:
    is_text = [isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts]
    if parts and all(is_text):
        return "\n".join(part["text"] for part in parts)
    return [{"type": _kind_of(part)} if _kind_of(part) else part for part in parts]


def _reference(part: Mapping[str, Any], place: str) -> Reference:
    kind = part["type"]
    given = part.get(kind)
    inner = given if isinstance(given, Mapping) else {}
    unknown = [*(part.keys() - {"type", kind}), *(inner.keys() - {"url", "detail"})]
    if unknown:
        raise InvalidRequest(f"{place}: unknown field {unknown[0]!r}: remove it")
    if not isinstance(inner.get("url"), str):
        raise InvalidRequest(f'{place}: expected {{"type": "{kind}", "{kind}": {{"url": text}}}}')
    if inner.get("detail") not in (None, "auto"):
        raise InvalidRequest(f"{place}: detail={inner['detail']!r}: expected auto; min_pixels and max_pixels set sizes")
    return Reference(KINDS[kind], inner["url"], place)


def num_characters(messages: Sequence[Message]) -> int:
    """Of all texts, roles and names."""
    named = [message.get(field) for message in messages for field in ("role", "name")]
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = (*named, *contents, *(part.get("text") for part in parts))
    return sum(len(text) for text in texts if isinstance(text, str))
