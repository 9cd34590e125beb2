"""The Python API: prompts or messages in, finished outputs or streams out.

Knows text, prompts and defaults; the engine knows none of these.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from faser.build import build_engine, load_pair
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.engine.stats import EngineStats
from faser.errors import EngineError, FaserError, InvalidRequest
from faser.extras import require
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.media import MediaPrompt
from faser.media.messages import split_messages
from faser.media.options import parse_options
from faser.media.placement import place_media
from faser.media.sliding import PlacedPrompt
from faser.models import generation
from faser.models.source import open_target, recommended_sampling
from faser.models.transformer import Transformer
from faser.policy import Policy
from faser.progress import progress_bar
from faser.request import (
    Chunk,
    Finish,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    check_token_ids,
    draw_seed,
)
from faser.text.chat import ChatTemplate, Message
from faser.text.grammar import GrammarCompiler, shared_compiler
from faser.text.stream import ChunkStream
from faser.text.tokenizer import StopChecker, Tokenizer
from faser.vision import Vision, VisionSettings

Prompt = str | Sequence[int] | MediaPrompt | PlacedPrompt
URL_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_BLIND = "the model takes text alone; load one that sees, such as Qwen2.5-VL"
LOCAL_MEDIA = MediaAccess(allowed_folders=(Path("/"),))  # the caller may read what this process may


class LLM:
    """A model, with or without a draft, ready to generate.

    model: a Hugging Face folder, a hub name, a GGUF file, or a model in memory; None: the default model.
    draft: the same kinds of model, a patch made by tools/distill.py, "ngram" (prompt lookup, no model), or "none";
        "DRAFT+ngram" is a draft and prompt lookup, "+ngram" the default model's draft and prompt lookup;
        None: the default model's own draft, and no draft for other models.
    policy: a name of faser/policy ("faser", "off", "fixed:K", …), or a Policy; None: "faser" with a draft, else "off".
    chat_template: a template or its text; None: the model's own.
    vision_settings: how a model in memory takes pictures; other models bring their own.
    generation_config: sampling of calls without SamplingParams: "auto" follows the model's generation_config.json,
        "none" uses SamplingParams().
    sizes: further fields of faser.config.EngineOptions.

    The output never depends on draft, policy or sizes.
    """

    def __init__(
        self,
        model: str | Transformer | None = None,
        draft: str | Transformer | None = None,
        policy: str | Policy | None = None,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | None = None,
        chat_template: str | ChatTemplate | None = None,
        generation_config: str = "auto",
        vision_settings: VisionSettings | None = None,
        **sizes: Any,
    ) -> None:
        try:
            options = EngineOptions(policy=policy, device=device, dtype=dtype, **sizes)
        except TypeError as error:
            raise TypeError(str(error).replace("EngineOptions.__init__()", "LLM()")) from None
        generation.check_mode(generation_config)
        recommended = generation.NOTHING
        self.vision_settings = vision_settings
        if not isinstance(model, Transformer):
            recommended = recommended_sampling(model, generation_config)
            self.vision_settings = vision_settings or open_target(model).vision_settings()
        recommended.log_ignored()
        self.default_params = recommended.params
        pair = load_pair(model, draft, options)
        self._tokenizer = tokenizer or pair.tokenizer
        self._config = pair.target.config
        self._compiler: GrammarCompiler | None = None
        if self._tokenizer is not None:
            self._compiler = shared_compiler(self._tokenizer, self._config.vocab_size, self._config.eos_token_ids)
        self._engine: Engine | None = build_engine(pair.target, pair.draft, options, self._tokenizer)
        self._lock = Lock()
        self._streaming_thread: int | None = None  # the thread whose open stream holds the lock
        self._model = model
        self._given_template = chat_template
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt in one continuous batch; outputs in their order.

        A prompt is a string, a list of token ids, or a MediaPrompt of either with pictures and videos.

        All prompts are checked before the first is run. `params`: one for all, or one for each; None: `default_params`,
        with max_tokens cut to the room that the prompt leaves.
        """
        with self._turn():
            engine = self.engine
            all_prompts = _as_prompts(prompts)
            requests = [
                self._make_request(*pair) for pair in zip(all_prompts, _as_params(params, all_prompts), strict=True)
            ]
            with _all_or_nothing(engine):
                for request in requests:
                    engine.add(request, self._make_checker(request.params))
                received = _run(engine, requests)
            return [self._output(request, *received[request.id]) for request in requests]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> RequestOutput:
        """Answer a conversation: messages are {"role": …, "content": …}, as the model's chat template takes them.

        The content may be a list of parts as in OpenAI's API: text, image_url and video_url, with data URLs or paths of
        files. `mm_processor_kwargs`: fps, num_frames, min_pixels, max_pixels. `params`: as for `generate`.
        """
        return self.generate([self._conversation(messages, mm_processor_kwargs)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Generate for one prompt; yields tokens and text as they become certain.

        `params`: as for `generate`. Nothing happens, and nothing is refused, before the first chunk is asked for. From
        then on this LLM is busy until the last chunk, the one with a finish_reason, or until the stream is closed,
        which ends the request at once.
        """
        with self._turn():
            engine = self.engine
            request = self._make_request(prompt, params)
            checker = self._make_checker(request.params)
            chunks = ChunkStream(self._tokenizer, checker)
            self._streaming_thread = get_ident()
            try:
                with _all_or_nothing(engine):
                    engine.add(request, checker)
                    while engine.has_work:
                        for item in self.engine.step():  # it may have been closed between two chunks
                            chunk = chunks.receive(item)
                            if item.finish is None:
                                yield chunk
            finally:
                self._streaming_thread = None
        yield chunk  # the last one, after the lock is released

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> Generator[Chunk, None, None]:
        """`stream` for a conversation."""
        yield from self.stream(self._conversation(messages, mm_processor_kwargs), params)

    def _conversation(self, messages: Sequence[Message], options: Mapping[str, object] | None) -> Prompt:
        plain, references = split_messages(messages)
        if self.vision_settings is None and (references or options):
            raise InvalidRequest(f"{references[0].place if references else 'mm_processor_kwargs'}: {_BLIND}")
        token_ids = self.chat_prompt(plain)
        if self.vision_settings is None or not references:
            return token_ids
        require("vision")
        from faser.media.load import load_media  # imports the decoders

        local = [replace(each, url=_absolute(each.url)) for each in references]
        given = parse_options(options or {})
        return MediaPrompt(token_ids, load_media(local, self.vision_settings, LOCAL_MEDIA, MediaLimits(), given))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to the beginning of the model's answer. Each picture has one."""
        if self._tokenizer is None:
            raise InvalidRequest("messages need a tokenizer, and the model has none; give token ids to generate()")
        if self.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template; give one (chat_template=…, --chat-template FILE), or a plain prompt"
            )
        template = self.chat_template
        return self._tokenizer.encode_chat(template.render(messages), lambda: template.render_neutral(messages))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The given template, or the model's own; read when it is first needed."""
        given = self._given_template
        if isinstance(given, ChatTemplate):
            return given
        if isinstance(self._model, Transformer):
            return ChatTemplate(given, "", "") if given is not None else None
        return open_target(self._model).chat_template(given)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of one request, prompt and output: the smaller of the model's context and the KV pool."""
        scheduler = self.engine.scheduler
        pool = scheduler.target_pages
        return min(scheduler.limits.max_model_len, pool.num_pages * pool.page_size)

    def fitted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """`params` with max_tokens cut to the room after the prompt, but at least 1."""
        return self._fitted(params, len(self._placed(prompt)[0]))

    def _fitted(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        room = self.max_request_tokens - num_prompt
        return replace(params, max_tokens=min(params.max_tokens, max(1, params.min_tokens, room)))

    @property
    def stats(self) -> EngineStats:
        """Totals over everything generated so far."""
        return self.engine.stats

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    def close(self) -> None:
        """Free the models when calls of other threads have ended. May be called twice, and within an open stream."""
        holds_the_lock = self._streaming_thread == get_ident()
        with nullcontext() if holds_the_lock else self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time. A thread with an open stream would wait for itself: EngineError instead."""
        if self._streaming_thread == get_ident():
            raise EngineError("this thread has an open stream of this LLM; read it to its end, or close() it")
        with self._lock:
            yield

    def _make_request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        self._num_requests += 1
        token_ids, vision = self._placed(prompt)
        if params is None:
            params = self._fitted(self.default_params, len(token_ids))
        params.check_vocabulary(self._config.vocab_size)
        if params.grammar is not None:
            if self._compiler is None:
                raise InvalidRequest("a grammar needs a tokenizer, and the model has none; leave the grammar out")
            self._compiler.check(params.grammar, params.stop_token_ids)
        return Request(
            id=str(self._num_requests),
            prompt_token_ids=token_ids,
            params=params,
            seed=draw_seed(params.seed),
            stop_ids=params.stop_ids(self._config.eos_token_ids),
            vision=vision,
            session=prompt.session if isinstance(prompt, PlacedPrompt) else None,
            reuse=prompt.reuse if isinstance(prompt, PlacedPrompt) else None,
        )

    @property
    def _placeholder_ids(self) -> tuple[int, ...]:
        settings = self.vision_settings
        return () if settings is None else (settings.image_token_id, settings.video_token_id)

    def _placed(self, prompt: Prompt) -> tuple[tuple[int, ...], Vision | None]:
        """The token ids of a prompt, and what it shows."""
        if isinstance(prompt, MediaPrompt):
            if self.vision_settings is None:
                raise InvalidRequest(f"prompt: {_BLIND}")
            placed, vision = place_media(self._token_ids(prompt.prompt), prompt.media, self.vision_settings)
            return tuple(placed), vision
        if isinstance(prompt, PlacedPrompt):
            return tuple(prompt.token_ids), prompt.vision
        token_ids = self._token_ids(prompt)
        found = next((token for token in self._placeholder_ids if token in token_ids), None)
        if found is not None:
            raise InvalidRequest(f"prompt: token {found} stands for a picture or a video; give a MediaPrompt with them")
        return token_ids, None

    def _token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest("a text prompt needs a tokenizer, and the model has none; give token ids")
            token_ids = self._tokenizer.encode(prompt)
            if not token_ids:
                raise InvalidRequest(f"the prompt {prompt!r} holds no token; give at least one")
            return tuple(token_ids)
        for token in prompt:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidRequest(f"prompt: {token!r} is no token id; expected integers")
        check_token_ids("prompt", prompt, self._config.vocab_size)
        return tuple(int(token) for token in prompt)

    def _make_checker(self, params: SamplingParams) -> StopChecker | None:
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and the model has none; use stop_token_ids")
        return StopChecker(self._tokenizer, params.stop, params.min_tokens)

    def _output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs], finish: Finish
    ) -> RequestOutput:
        text = finish.text
        if text is None:
            shown = token_ids[:-1] if finish.stop_id is not None else token_ids
            text = self._tokenizer.decode(shown) if self._tokenizer is not None else ""
        return RequestOutput(
            prompt_token_ids=list(request.prompt_token_ids),
            text=text,
            token_ids=token_ids,
            finish_reason=finish.reason,
            logprobs=logprobs if request.params.logprobs is not None else None,
            stats=finish.stats,
            error=finish.error,
        )


@contextmanager
def _all_or_nothing(engine: Engine) -> Iterator[None]:
    """End the engine's open requests if the block is left early: by an error, Ctrl-C or a closed stream."""
    try:
        yield
    except BaseException as error:
        engine.abandon(FinishReason.CANCELLED)
        if isinstance(error, FaserError) or not isinstance(error, Exception):
            raise
        raise EngineError(f"a step failed ({type(error).__name__}: {error}); all open requests ended") from error


def _run(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[TokenLogprobs], Finish]]:
    """Step until every request has ended; tokens, log-probabilities and end by request id."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    ends: dict[str, Finish] = {}
    with progress_bar("generating", logs=False) as update:
        while engine.has_work:
            for item in engine.step():
                tokens[item.request_id] += item.token_ids
                logprobs[item.request_id] += item.logprobs or []
                if item.finish is not None:
                    ends[item.request_id] = item.finish
            update(len(ends), len(requests))
    return {name: (tokens[name], logprobs[name], ends[name]) for name in tokens}


def _absolute(url: str) -> str:
    """A path of a file, made absolute; other URLs as they are."""
    return url if URL_SCHEME.match(url) else str(Path(url).expanduser().absolute())


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several. A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | MediaPrompt | PlacedPrompt):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and not any(isinstance(item, MediaPrompt | PlacedPrompt) or hasattr(item, "__len__") for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, MediaPrompt | PlacedPrompt) and not hasattr(item, "__len__"):
            raise InvalidRequest(f"prompt {item!r}: expected a string or a list of token ids, or a MediaPrompt")
    return listed


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
    return params
