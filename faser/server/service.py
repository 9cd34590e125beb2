"""From a parsed HTTP request to a request for the engine: checks, tokens, defaults, admission.

Knows the engine's limits, the tokenizer and the chat template; knows no sockets. Whatever can be refused is refused
here, by the name of the field.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from faser.config import ServerOptions
from faser.errors import InvalidRequest, RequestTooLong
from faser.media.messages import Reference, num_characters, split_messages
from faser.media.options import VideoOptions, parse_options
from faser.request import Grammar, SamplingParams, check_token_ids, draw_seed
from faser.server import background
from faser.server.answers import Answerer, ChatAnswerer, Choice, CompletionAnswerer
from faser.server.engine_client import EngineClient, EngineGone, ShuttingDown, State, Stream, Track
from faser.server.eyes import Eyes, SeenPrompt
from faser.server.figures import Figures
from faser.server.messages import About
from faser.server.protocol import ApiError, ChatRequest, CompletionRequest, PromptDetails, refusing
from faser.text.chat import ChatTemplate, Message
from faser.text.grammar import GrammarCompiler
from faser.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, where the model has no default; chat may fill the context
MAX_RETRY_SECONDS = 60  # OpenAI's client ignores a longer Retry-After
MIN_START_SECONDS = 2  # Retry-After while the engine starts, if the last start was shorter or there was none
MAX_MEDIA_BYTES = 2 << 30  # that open requests hold, as sent or as pixels; a further one with pictures is answered 503
GRAMMAR_SECONDS = 5.0  # to compile a grammar; almost all take milliseconds
_LONG_TEXT = 16_384  # characters; longer texts are rendered and tokenised in a thread
_MANY_MESSAGES = 64  # more are, too: a template may look at each message for every other
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the choices of one request have distinct seeds


@dataclass(frozen=True)
class Call:
    """A request that was sent to the engine."""

    stream: Stream
    tracks: list[Track]
    choices: list[Choice]
    answerer: Answerer
    prompt_sizes: list[int]
    details: PromptDetails  # of what the prompt shows
    streams: bool
    includes_usage: bool


class ServedModel:
    """The model that is served, with its tokenizer and template, made from the engine's About."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.tokenizer = Tokenizer.from_json(about.tokenizer) if about.tokenizer is not None else None
        self.template = ChatTemplate(*about.chat_template) if about.chat_template is not None else None
        if self.tokenizer is not None and self.template is not None:
            with suppress(RuntimeError):  # no thread is left: the first message that needs it waits
                background.start(self.tokenizer.controls.prepare)

    @cached_property
    def placeholders(self) -> dict[int, str]:
        """The tokens that stand for pictures, with their texts; none where the model has no eyes."""
        settings, tokenizer = self.about.vision, self.tokenizer
        if settings is None or tokenizer is None:
            return {}
        ids = (settings.image_token_id, settings.video_token_id)
        return {token: tokenizer.token_text(token) for token in ids}

    @cached_property
    def grammars(self) -> GrammarCompiler | None:
        if self.tokenizer is None:
            return None
        return GrammarCompiler(self.tokenizer, self.about.vocab_size, self.about.end_ids)


class Service:
    def __init__(self, options: ServerOptions, engine: EngineClient, figures: Figures) -> None:
        self.draining = False
        self._options = options
        self._engine = engine
        self._figures = figures
        self._eyes = Eyes(options)
        self._served: ServedModel | None = None

    @property
    def state(self) -> str:
        return "draining" if self.draining else self._engine.state.value

    @property
    def num_open(self) -> int:
        """Choices that run or wait, and requests whose pictures are being loaded."""
        return self._engine.num_open + self._eyes.num_loading

    def served(self) -> ServedModel:
        """The model that is served; ApiError 503 with the reason if there is none."""
        about = self._engine.about
        if self.draining:
            message = "the server is shutting down and takes no new requests; send them to another server"
            raise _busy(message, 1, code="shutting_down")
        if about is None or self._engine.state is not State.READY:
            seconds = self._start_seconds()
            raise _busy(f"the engine is {self._engine.state.value}; try again in {seconds} s", seconds)
        if self._served is None or self._served.about is not about:
            self._served = ServedModel(about)
        return self._served

    def end_session(self, name: str) -> None:
        """The engine gives up what a session has kept."""
        self._engine.end_session(name)

    async def wait_ready(self) -> None:
        """Returns when an engine runs; at once, unless it is being restarted."""
        await self._engine.ready.wait()

    # ── the two kinds of request ─────────────────────────────────────────────────────────────────────────────────────

    async def complete(self, request: CompletionRequest, arrived: float) -> Call:
        served = self._admitting(request)
        if request.echo and request.logprobs is not None:
            raise ApiError(400, "echo with logprobs needs logprobs of the prompt, which are not supported; give one",
                           param="echo")  # fmt: skip
        given = request.prompts(self._max_prompt(served.about))
        self._check_room(served.about, request.num_choices, len(given))
        if sum(len(prompt) for prompt in given if isinstance(prompt, str)) > _LONG_TEXT:
            prompts = await asyncio.to_thread(lambda: [self._prompt_ids(prompt, served) for prompt in given])
        else:
            prompts = [self._prompt_ids(prompt, served) for prompt in given]
        longest = max(map(len, prompts))
        default = served.about.sampling.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
        limit = self._output_limit(served.about, longest, request.max_tokens, default, "prompt", "max_tokens")
        params = await self._params(request.sampling(limit, request.logprobs, served.about.sampling), served)
        echo = None
        if request.echo:
            echo = [_echoed(prompt, served) for prompt in given for _ in range(request.num_choices)]
        answerer = CompletionAnswerer(served.about.model, served.tokenizer, request.logprobs is not None, echo)
        return self._submit(request, prompts, params, answerer, served, arrived)

    async def chat(self, request: ChatRequest, arrived: float) -> Call:
        served = self._admitting(request)
        can_see = served.about.vision is not None
        given = [message.checked(index, can_see) for index, message in enumerate(request.messages)]
        options = _media_options(request, can_see)
        messages, references = split_messages(given)
        if num_characters(messages) > _LONG_TEXT or len(messages) > _MANY_MESSAGES:
            prompt = await asyncio.to_thread(self._chat_ids, messages, served)
        else:
            prompt = self._chat_ids(messages, served)
        seen = await self._see(prompt, references, options, served)
        return await self._send_chat(request, prompt if seen is None else seen.token_ids, served, arrived, seen)

    async def ask(self, request: ChatRequest, seen: SeenPrompt, arrived: float) -> Call:
        """Send a chat whose prompt is ready, with its pictures in place."""
        served = self._admitting(request)
        self._check_bytes(served.about)
        self._check_size(seen.token_ids, served.about, "prompt")
        return await self._send_chat(request, seen.token_ids, served, arrived, seen)

    async def watch_prompt(self, question: str) -> list[int]:
        """The tokens of a question about a video, with one placeholder for it."""
        content = [{"type": "video"}, {"type": "text", "text": question}]
        messages, served = [{"role": "user", "content": content}], self.served()
        return await asyncio.to_thread(self._chat_ids, messages, served, "prompt")

    async def _send_chat(
        self, request: ChatRequest, prompt: list[int], served: ServedModel, arrived: float, seen: SeenPrompt | None
    ) -> Call:
        num_logprobs = request.num_logprobs
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        default = served.about.sampling.get("max_tokens", served.about.max_tokens)
        limit = self._output_limit(served.about, len(prompt), getattr(request, field), default, "messages", field)
        params = await self._params(request.sampling(limit, num_logprobs, served.about.sampling), served)
        answerer = ChatAnswerer(served.about.model, served.tokenizer, num_logprobs is not None)
        return self._submit(request, [prompt], params, answerer, served, arrived, seen)

    async def _see(
        self, prompt: list[int], references: Sequence[Reference], options: VideoOptions, served: ServedModel
    ) -> SeenPrompt | None:
        """The prompt with its pictures; None where it has none."""
        settings = served.about.vision
        if settings is None:
            return None
        if not references:
            self._refuse_placeholders(prompt, served, "messages")
            return None
        self._check_bytes(served.about)
        try:
            seen = await self._eyes.see(
                prompt, references, settings, options, self._max_prompt(served.about),
                lambda: self._check_bytes(served.about),
            )  # fmt: skip
        except RequestTooLong as error:
            raise _too_long(str(error), f"{self._max_prompt(served.about)}", "messages") from None
        self._check_size(seen.token_ids, served.about, "messages")
        return seen

    def _admitting(self, request: CompletionRequest | ChatRequest) -> ServedModel:
        """The model that is served. A full server refuses before it tokenises."""
        served = self.served()
        check_model(request.model, served.about)
        self._check_room(served.about, request.num_choices)
        return served

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prompt_ids(self, prompt: str | list[int], served: ServedModel) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._check_length(len(prompt), served, "prompt")
            token_ids = self._encoded(partial(tokenizer.encode, prompt), served, "prompt")
        else:
            with refusing("prompt"):
                check_token_ids("prompt", prompt, served.about.vocab_size)
            token_ids = self._check_size(prompt, served.about, "prompt")
        self._refuse_placeholders(token_ids, served, "prompt")
        return token_ids

    def _refuse_placeholders(self, token_ids: list[int], served: ServedModel, param: str) -> None:
        """Refuse tokens that stand for pictures where there are none."""
        found = next((token for token in served.placeholders if token in token_ids), None)
        if found is not None:
            message = f"{param}: token {found} ({served.placeholders[found]}) stands for a picture or a video"
            raise ApiError(400, f"{message}; send those as parts of a message to /v1/chat/completions", param=param)

    def _chat_ids(self, messages: Sequence[Message], served: ServedModel, param: str = "messages") -> list[int]:
        if served.template is None:
            remedy = "use /v1/completions, or start the server with --chat-template FILE"
            raise ApiError(400, f"the model has no chat template; {remedy}", param=param)
        self._check_length(num_characters(messages), served, param)
        with refusing(param):
            text = served.template.render(messages)
        tokenizer, template = self._check_length(len(text), served, param), served.template
        encode = partial(tokenizer.encode_chat, text, lambda: template.render_neutral(messages))
        return self._encoded(encode, served, param)

    def _encoded(self, encode: Callable[[], list[int]], served: ServedModel, param: str) -> list[int]:
        try:
            token_ids = encode()
        except InvalidRequest as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        return self._check_size(token_ids, served.about, param)

    def _check_length(self, num_characters: int, served: ServedModel, param: str) -> Tokenizer:
        """Refuse a text that must have too many tokens, without tokenising it."""
        if served.tokenizer is None:
            raise ApiError(400, f"{param}: the model has no tokenizer; send token ids to /v1/completions", param=param)
        most = self._max_prompt(served.about) * served.tokenizer.longest_token
        if num_characters > most:
            raise _too_long(f"{num_characters} characters", f"at most {most}", param)
        return served.tokenizer

    def _max_prompt(self, about: About) -> int:
        return min(self._options.max_prompt_tokens or about.max_tokens, about.max_tokens - 1)

    def _check_size(self, token_ids: list[int], about: About, param: str) -> list[int]:
        if not token_ids:
            raise ApiError(400, f"{param}: holds no token; give at least one", param=param)
        most = self._max_prompt(about)
        if len(token_ids) > most:
            raise _too_long(f"{len(token_ids)} tokens", f"{most}", param)
        return token_ids

    def _output_limit(
        self, about: About, num_prompt: int, asked: int | None, default: int, param: str, field: str
    ) -> int:
        """Output tokens: as asked, or the default cut to the room after the prompt."""
        room = about.max_tokens - num_prompt
        if asked is None:
            return min(default, room)
        if asked > room:
            given = f"{param} of {num_prompt} tokens and {field} {asked} make {num_prompt + asked}"
            message = f"{given}; the server takes {about.max_tokens}: lower {field} or shorten the {param}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return asked

    # ── parameters and admission ─────────────────────────────────────────────────────────────────────────────────────

    async def _params(self, params: SamplingParams, served: ServedModel) -> SamplingParams:
        with refusing():
            params.check_vocabulary(served.about.vocab_size)
        if params.stop and served.tokenizer is None:
            raise ApiError(400, "stop: the model has no tokenizer; use stop_token_ids", param="stop")
        if params.grammar is not None:
            await self._check_grammar(params.grammar, params.stop_token_ids, served)
        return params

    async def _check_grammar(self, grammar: Grammar, stop_ids: Sequence[int], served: ServedModel) -> None:
        param = "structured_outputs.regex" if grammar.kind == "regex" else "response_format"
        grammars = served.grammars
        if grammars is None:
            raise ApiError(400, f"{param}: the model has no tokenizer; remove it", param=param)
        try:
            work = background.start(grammars.check, grammar, stop_ids)
            await asyncio.wait_for(asyncio.wrap_future(work), GRAMMAR_SECONDS)
        except InvalidRequest as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        except TimeoutError:
            raise ApiError(400, f"{param}: takes too long to compile; give a simpler one", param=param) from None

    def _submit(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        answerer: Answerer,
        served: ServedModel,
        arrived: float,
        seen: SeenPrompt | None = None,
    ) -> Call:
        self._check_room(served.about, request.num_choices, len(prompts))
        asked = [(prompt, _seeds(params, request.num_choices)) for prompt in prompts]
        stop_ids = sorted(params.stop_ids(served.about.end_ids))
        try:
            sent = (seen.vision, seen.session, seen.reuse) if seen is not None else ()
            stream, tracks = self._engine.submit(asked, params, stop_ids, arrived, *sent)
        except EngineGone as error:
            raise _busy(str(error), self._start_seconds()) from None
        choices = [Choice(index, served.tokenizer, params) for index in range(len(tracks))]
        sizes = [len(prompt) for prompt in prompts]
        details = seen.details if seen is not None else PromptDetails()
        return Call(stream, tracks, choices, answerer, sizes, details, bool(request.stream), request.includes_usage)

    def engine_error(self, error: EngineGone) -> ApiError:
        """The error for a request whose engine has ended."""
        if isinstance(error, ShuttingDown):
            return _busy(str(error), 1, code="shutting_down")
        return _busy(str(error), self._start_seconds(), code="engine_failed")

    def _start_seconds(self) -> int:
        """Seconds until the engine is ready, by the duration of its last start; at most MAX_RETRY_SECONDS."""
        expected = self._engine.seconds_to_start or 0.0
        return min(MAX_RETRY_SECONDS, max(MIN_START_SECONDS, math.ceil(expected)))

    def _check_room(self, about: About, n: int, num_prompts: int = 1) -> None:
        num_choices, room = num_prompts * n, about.max_running + self._options.max_waiting
        if num_choices > room:
            raise _too_many(num_prompts, n, about, self._options.max_waiting)
        if self.num_open + num_choices > room:
            raise _busy(
                f"{self.num_open} requests run or wait, and the server takes {room}; try again later",
                self._retry_seconds(about),
                code="queue_full",
            )

    def _check_bytes(self, about: About) -> None:
        held = self._eyes.num_bytes + self._engine.num_pixel_bytes
        if held > MAX_MEDIA_BYTES:
            message = f"open requests hold {held >> 20} MiB of pictures and videos; try again later"
            raise _busy(message, self._retry_seconds(about), code="queue_full")

    def _retry_seconds(self, about: About) -> int:
        """Seconds until the queue has moved: waiting requests / rate at which requests end."""
        seconds = self._figures.request_seconds.mean()
        waiting = max(1, self._engine.num_open - about.max_running)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds * waiting / about.max_running)))

    def cancel(self, call: Call) -> None:
        self._engine.cancel(call.tracks)


def _media_options(request: ChatRequest, can_see: bool) -> VideoOptions:
    param, given = "mm_processor_kwargs", request.mm_processor_kwargs
    plain = {} if given is None else msgspec.to_builtins(given)
    values = {name: value for name, value in plain.items() if value is not None}
    if values and not can_see:
        raise ApiError(400, f"{param}: only text is served; remove it", param=param)
    if "size" in values:
        values["size"] = {name: value for name, value in values["size"].items() if value is not None}
    try:
        return parse_options(values)
    except InvalidRequest as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _seeds(params: SamplingParams, number: int) -> list[int]:
    """One seed per choice. The first is the request's own, so that n does not change the first choice."""
    first = draw_seed(params.seed)
    return [(first + i * _SEED_STEP) % 2**64 for i in range(number)]


def _echoed(prompt: str | list[int], served: ServedModel) -> str:
    if isinstance(prompt, str):
        return prompt
    return served.tokenizer.decode(prompt) if served.tokenizer is not None else ""


def check_model(name: str | None, about: About) -> None:
    if name is not None and name != about.model:
        message = f"the model {name[:200]!r} is not served here; {about.model!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def _too_long(given: str, most: str, param: str) -> ApiError:
    return ApiError(
        400, f"{param}: {given}, and the server takes {most}; shorten it", param=param, code="context_length_exceeded"
    )


def _too_many(num_prompts: int, n: int, about: About, max_waiting: int) -> ApiError:
    """The error for more choices in one request than the server holds at a time."""
    room = about.max_running + max_waiting
    holds = f"the server holds {room} at a time ({about.max_running} running, {max_waiting} waiting)"
    given = f"{num_prompts} prompt{'s' if num_prompts > 1 else ''} × n={n} are {num_prompts * n} choices in one request"
    if n > room:
        return ApiError(400, f"{given}; {holds}: lower n", param="n")
    return ApiError(400, f"{given}; {holds}: send at most {room // n} prompts in one request", param="prompt")


def _busy(message: str, seconds: int, code: str = "unavailable") -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(seconds)})
