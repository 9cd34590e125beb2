"""The offline API: prompts in, finished outputs out.

Knows text, prompts and defaults; the engine underneath knows none of these.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from threading import Lock
from typing import Any

from faser.config import EngineOptions
from faser.engine import Engine
from faser.errors import EngineError, FaserError, InvalidRequest
from faser.models.transformer import Transformer
from faser.policy import Policy
from faser.progress import progress_bar
from faser.runtime.build import build_engine, load_pair
from faser.stats import EngineStats
from faser.text import StopChecker, Tokenizer
from faser.types import Finish, FinishReason, Progress, Request, RequestOutput, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]


class LLM:
    """A model, or a pair, ready to generate.

    model: a Hugging Face folder, a hub name, a GGUF file, or a model in memory; None is the default pair. draft:
    likewise, or a patch made by tools/distill.py, or "ngram" (prompt lookup, no model), or None. policy: "off" or
    "fixed:K", or a Policy; None is fixed:1 with a draft and off without. `sizes` are the further fields of
    faser.config.EngineOptions. The output never depends on draft, policy or sizes.
    """

    def __init__(
        self,
        model: str | Transformer | None = None,
        draft: str | Transformer | None = None,
        policy: str | Policy | None = None,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | None = None,
        **sizes: Any,
    ) -> None:
        try:
            options = EngineOptions(policy=policy, device=device, dtype=dtype, **sizes)
        except TypeError as error:
            raise TypeError(str(error).replace("EngineOptions.__init__()", "LLM()")) from None
        pair = load_pair(model, draft, options)
        self._tokenizer = tokenizer or pair.tokenizer
        self._config = pair.target.config
        self._engine: Engine | None = build_engine(pair.target, pair.draft, options)
        self._lock = Lock()
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt (a string or a list of token ids), in one continuous batch; answers in their order.

        All prompts are checked before the first is run. `params` is one for all, or one for each.
        """
        with self._lock:
            engine = self._open_engine()
            all_prompts = _as_prompts(prompts)
            requests = [
                self._make_request(*pair) for pair in zip(all_prompts, _as_params(params, all_prompts), strict=True)
            ]
            try:
                for request in requests:
                    engine.add(request, self._make_checker(request.params))
                received = _run(engine, requests)
            except BaseException as error:
                engine.abandon(FinishReason.CANCELLED)
                if isinstance(error, FaserError) or not isinstance(error, Exception):
                    raise
                raise EngineError(
                    f"a step failed ({type(error).__name__}: {error}); all open requests ended"
                ) from error
            return [self._output(request, *received[request.id]) for request in requests]

    @property
    def stats(self) -> EngineStats:
        """Totals over everything generated so far."""
        return self._open_engine().stats

    @property
    def engine(self) -> Engine:
        return self._open_engine()

    def close(self) -> None:
        """Free the models, after the call to `generate` that may be running. Closing twice is fine."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._num_requests += 1
        token_ids = self._token_ids(prompt)
        vocab_size = self._config.vocab_size
        for name, named in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            unknown = [token for token in named if token >= vocab_size]
            if unknown:
                raise InvalidRequest(f"{name} names token {unknown[0]}; the model has {vocab_size} tokens, from 0")
        end_ids = () if params.ignore_eos else self._config.eos_token_ids
        return Request(
            id=str(self._num_requests),
            prompt_token_ids=token_ids,
            params=params,
            seed=(secrets.randbits(64) if params.seed is None else params.seed) % 2**64,
            stop_ids=frozenset([*end_ids, *params.stop_token_ids]),
        )

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest("a text prompt needs a tokenizer, and the model has none; give token ids")
            token_ids = self._tokenizer.encode(prompt)
            if not token_ids:
                raise InvalidRequest(f"the prompt {prompt!r} holds no token; give at least one")
            return tuple(token_ids)
        vocab_size = self._config.vocab_size
        for token in prompt:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= int(token) < vocab_size:
                raise InvalidRequest(f"prompt token {token!r}: expected ids from 0 to {vocab_size - 1}")
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


def _run(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[TokenLogprobs], Finish]]:
    """Step until every request has ended; tokens, log-probabilities and end by request id."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    ends: dict[str, Finish] = {}

    def receive(item: Progress) -> None:
        tokens[item.request_id] += item.token_ids
        logprobs[item.request_id] += item.logprobs or []
        if item.finish is not None:
            ends[item.request_id] = item.finish

    with progress_bar("generating") as update:
        while engine.has_work:
            for item in engine.step():
                receive(item)
            update(len(ends), len(requests))
    return {name: (tokens[name], logprobs[name], ends[name]) for name in tokens}


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several. A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and not any(isinstance(item, str | Sequence) or hasattr(item, "__len__") for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, str) and not hasattr(item, "__len__"):
            raise InvalidRequest(f"prompt {item!r}: expected a string or a list of token ids")
    return listed


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
    return params
