"""The OpenAI API as types: requests, answers and errors.

Knows JSON and the meaning of every field; knows no engine, no tokens and no sockets. A field that is not supported is
never ignored: the error names it and says what to do. Only values that change nothing pass.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from faser.errors import InvalidRequest
from faser.request import MAX_LOGPROBS, Grammar, SamplingParams
from faser.text.grammar import ANY_OBJECT

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters; every new token is searched for stop strings
MAX_MESSAGES = 4096
MAX_BIASED_TOKENS = 1024
SCHEMA_REF = "#/components/schemas/{name}"  # of a type in the OpenAPI document

_UNSUPPORTED = {
    "best_of": "ask for n choices and pick one",
    "suffix": "FASER serves decoders that continue text; put the suffix into the prompt",
    "tools": "describe the tools in a message and constrain the answer with response_format",
    "tool_choice": "tools are not supported",
    "functions": "tools are not supported",
    "function_call": "tools are not supported",
    "parallel_tool_calls": "tools are not supported",
    "prediction": "the server drafts by itself; max_draft bounds how much",
    "modalities": "only text is served",
    "audio": "only text is served",
    "store": "answers are not stored",
    "reasoning_effort": "the models served do not have it",
    "verbosity": "the models served do not have it",
    "web_search_options": "the server has no tools",
    "service_tier": "there is one tier",
    "metadata": "answers are not stored",
    "chat_template": "start the server with --chat-template FILE",
    "guided_regex": 'use structured_outputs {"regex": …}',
    "guided_json": 'use response_format {"type": "json_schema", …}',
    "length_penalty": "beam search is not supported",
    "use_beam_search": "beam search is not supported",
    "prompt_logprobs": "only logprobs of the output are reported",
    "media_io_kwargs": "use mm_processor_kwargs, which takes fps and num_frames",
}
# Values of unsupported fields that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none",),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "metadata": ({},), "use_beam_search": (False,), "length_penalty": (1, 1.0),
}  # fmt: skip


class ApiError(Exception):
    """An answer other than 200, in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ApiObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of a request body."""


class StreamOptions(ApiObject, frozen=True):
    include_usage: bool = False


class JsonSchema(ApiObject, frozen=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(ApiObject, frozen=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(ApiObject, frozen=True):
    regex: str


StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class _Sampled(ApiObject, frozen=True, kw_only=True):
    """The fields that completions and chat share. None: not given."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    user: str | None = None  # the client's own identifier; not used
    response_format: ResponseFormat | None = None
    # Not OpenAI's: vLLM's names where it has one, and max_draft.
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    max_draft: Annotated[int, Meta(ge=0, le=2**31)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, logprobs: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters: the request's, else the model's defaults, else OpenAI's."""
        given = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        given |= {
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,  # clients of vLLM send -1 for "all"
            "logit_bias": _token_keys(self.logit_bias),
            "logprobs": logprobs,
            "grammar": self.grammar(),
            "max_tokens": max_tokens,
        }
        with refusing():
            given = {name: value for name, value in given.items() if value is not None}
            return SamplingParams(**{"temperature": 1.0, **defaults, **given})

    def grammar(self) -> Grammar | None:
        given = self.response_format
        if self.structured_outputs is not None:
            if given is not None and given.type != "text":
                message = "response_format and structured_outputs both constrain the output; give one of them"
                raise ApiError(400, message, param="structured_outputs")
            with refusing("structured_outputs.regex"):
                return Grammar("regex", self.structured_outputs.regex)
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return Grammar("json_schema", ANY_OBJECT)
        if given.type != "json_schema":
            expected = "text, json_object or json_schema (a regular expression goes into structured_outputs"
            message = f'response_format.type={given.type!r}: expected {expected} {{"regex": …}})'
            raise ApiError(400, message, param="response_format.type")
        if given.json_schema is None or given.json_schema.schema is None:
            message = "response_format of type json_schema needs json_schema.schema"
            raise ApiError(400, message, param="response_format.json_schema")
        param = "response_format.json_schema.schema"
        try:
            text = msgspec.json.encode(given.json_schema.schema).decode()
        except RecursionError:
            raise ApiError(400, f"{param}: nested too deeply; flatten it", param=param) from None
        return Grammar("json_schema", text)  # the text of a schema is never empty


PromptPart = str | Annotated[int, Meta(ge=0)] | list[Annotated[int, Meta(ge=0)]]


class CompletionRequest(_Sampled, frozen=True, kw_only=True):
    prompt: str | list[PromptPart]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def num_prompts(self) -> int:
        """Without a check: a list of token ids is one prompt, any other list has one in each item."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return 1 if is_one else len(self.prompt)

    def prompts(self, most_tokens: int) -> list[str | list[int]]:
        """The prompts: one text, several texts, the token ids of one prompt, or a list of token ids for each."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        is_one = bool(prompt) and isinstance(prompt[0], int)
        most = most_tokens if is_one else MAX_CHOICES
        if len(prompt) > most:
            what = "tokens in the prompt" if is_one else "prompts in one request"
            code = "context_length_exceeded" if is_one else None
            raise ApiError(400, f"prompt: {len(prompt)} {what}; send at most {most}", param="prompt", code=code)
        ids = [part for part in prompt if isinstance(part, int)]
        texts = [part for part in prompt if isinstance(part, str)]
        lists = [part for part in prompt if isinstance(part, list)]
        if not prompt or len(prompt) not in (len(ids), len(texts), len(lists)):
            expected = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
            raise ApiError(400, f"prompt: expected {expected}", param="prompt")
        return [ids] if ids else [*texts, *lists]


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """Further fields are ignored."""

    type: Literal["text"]
    text: str


class MediaUrl(ApiObject, frozen=True):
    """`detail` is OpenAI's; mm_processor_kwargs sets sizes here."""

    url: Annotated[str, Meta(min_length=1)]
    detail: Literal["auto"] | None = None


class ImagePart(ApiObject, frozen=True):
    type: Literal["image_url"]
    image_url: MediaUrl


class VideoPart(ApiObject, frozen=True):
    type: Literal["video_url"]
    video_url: MediaUrl


PARTS: dict[str, type[msgspec.Struct]] = {"text": TextPart, "image_url": ImagePart, "video_url": VideoPart}
_part_names = [kind.__name__ for kind in PARTS.values()]
# Each part is checked on its own, so that an error names its number.
Part = Annotated[
    dict[str, Any], Meta(extra_json_schema={"anyOf": [{"$ref": SCHEMA_REF.format(name=name)} for name in _part_names]})
]


class Message(ApiObject, frozen=True, kw_only=True):
    role: str
    content: str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    refusal: str | None = None  # a field of our own answers, which clients send back in the next turn
    # fields that OpenAI's client adds to them
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def has_media(self) -> bool:
        return isinstance(self.content, list) and any(part.get("type") != "text" for part in self.content)

    def checked(self, index: int, can_see: bool) -> dict[str, Any]:
        """The message with a text, or with checked parts where one of them is no text and the model can see."""
        param = f"messages[{index}].content"
        content: Any = self.content
        if isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(part, param, number, can_see)
            if not self.has_media:
                content = "\n".join(part["text"] for part in content)
        if content is None:
            raise ApiError(400, f"{param}: expected a text", param=param)
        message: dict[str, Any] = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


def _check_part(part: dict[str, Any], param: str, number: int, can_see: bool) -> None:
    given = part.get("type")
    kind = PARTS.get(given) if isinstance(given, str) else None
    if kind is None or (kind is not TextPart and not can_see):
        served = f"{', '.join(PARTS)} are" if can_see else "only text is"
        raise ApiError(400, f"{param}: a part of type {repr(given)[:100]}; {served} served", param=param)
    try:
        msgspec.convert(part, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), f"{param}[{number}]") from None


class Edges(ApiObject, frozen=True):
    """The names are those of the models' processors; the numbers are pixels of a whole picture or frame."""

    shortest_edge: Annotated[int, Meta(ge=1)] | None = None  # at least as many pixels
    longest_edge: Annotated[int, Meta(ge=1)] | None = None  # at most as many


class MediaOptions(ApiObject, frozen=True):
    """mm_processor_kwargs, with vLLM's names. They hold for every picture and video of the request."""

    fps: Annotated[float, Meta(gt=0)] | None = None  # frames of a video, per second
    num_frames: Annotated[int, Meta(ge=1)] | None = None  # of a video, instead of fps
    min_pixels: Annotated[int, Meta(ge=1)] | None = None  # of a picture, or of a video's frame, after resizing
    max_pixels: Annotated[int, Meta(ge=1)] | None = None
    size: Edges | None = None  # the same two numbers


class ChatRequest(_Sampled, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    mm_processor_kwargs: MediaOptions | None = None

    @property
    def has_media(self) -> bool:
        return any(message.has_media for message in self.messages)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is only reported with logprobs: set it to true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", CompletionRequest, ChatRequest)
Object = TypeVar("Object", bound=ApiObject)


def parse(body: bytes, type_: type[Body]) -> Body:
    """The request for an answer in a body; ApiError says which field is wrong and why."""
    request = parse_object(body, type_)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only for streams: set stream to true", param="stream_options")
    return request


def parse_object(body: bytes, type_: type[Object]) -> Object:
    """The object in a body. Fields of OpenAI's that are not supported pass where they change nothing."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON ({error}); send a JSON object", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "the body is not a JSON object; send one", code="invalid_json")
    known = set(type_.__struct_fields__)
    for name in [name for name in raw if name not in known]:
        _refuse_unless_neutral(name, raw.pop(name), known)
    try:
        return msgspec.convert(raw, type_)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid_field(str(error)) from None


def _refuse_unless_neutral(name: str, value: Any, known: set[str]) -> None:
    if name in _UNSUPPORTED and (value is None or value in _NEUTRAL.get(name, ())):
        return
    if name in _UNSUPPORTED:
        message, code = f"{name} is not supported: {_UNSUPPORTED[name]}", "unsupported_field"
    else:
        close = difflib.get_close_matches(name[:100], known, n=1)
        message = f"unknown field {name[:100]!r}: " + (f"did you mean {close[0]}?" if close else "remove it")
        code = "unknown_field"
    raise ApiError(400, message, param=name[:100], code=code)


_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")


def _invalid_field(message: str, within: str | None = None) -> ApiError:
    """msgspec's message ("Expected `int`, got `str` - at `$.n`") as an ApiError with the field's name.

    `within`: where in the request the checked object is.
    """
    if len(message) > 1000:  # it repeats the request
        return ApiError(400, f"{message[:200]} …", code="invalid_value")
    path = _PATH.search(message)
    param = ".".join(filter(None, (within, path and path[1]))) or None
    text = _PATH.sub("", message)
    found = re.search(r"(required|unknown) field `(\w+)`", text)
    if found is None:
        message = f"{param}: {text[0].lower()}{text[1:]}" if param else text
        return ApiError(400, message, param=param, code="invalid_value")
    param = ".".join(filter(None, (param, found[2])))
    if found[1] == "required":
        return ApiError(400, f"{param} is required", param=param, code="missing_field")
    return ApiError(400, f"unknown field {param!r}: remove it", param=param, code="unknown_field")


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """Turn an InvalidRequest into an ApiError. Without `param`, the message begins with the field's name."""
    try:
        yield
    except InvalidRequest as error:
        name = re.match(r"(\w+)[=:]", str(error))
        raise ApiError(400, str(error), param=param or (name and name[1])) from None


def _token_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise ApiError(400, f"logit_bias: {key[:100]!r} is no token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class PromptDetails(msgspec.Struct, frozen=True):
    """image_tokens and video_tokens are part of prompt_tokens. Frames and patches are those that were encoded."""

    cached_tokens: int = 0
    # Left out of answers to text alone.
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    video_frames: int | UnsetType = UNSET
    patches: int | UnsetType = UNSET


class CompletionDetails(msgspec.Struct, frozen=True):
    """accepted: output tokens from the draft; rejected: drafted tokens that were not used."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str


class Completion(_Answer, frozen=True):
    """A whole answer, or one event of a stream."""

    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatCompletion(_Answer, frozen=True):
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatChunk(_Answer, frozen=True):
    choices: list[ChatDelta]
    usage: Usage | None = None


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "faser"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"
