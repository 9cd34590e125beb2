"""Loads the models of a `Start` and builds the engine: the default factory of the engine's process. Imports torch."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from faser.build import LoadedPair, build_engine, load_pair, target_kv
from faser.config import EngineOptions, draft_name, model_name
from faser.engine.engine import Engine
from faser.engine.scheduler import Scheduler
from faser.engine.stats import EngineStats
from faser.errors import ConfigError, InvalidRequest
from faser.models.heads import DraftHead
from faser.models.source import DEFAULT_HUB_NAME, open_target, recommended_sampling
from faser.progress import progress_bar
from faser.request import Grammar, Request, SamplingParams
from faser.runtime.device import why_device
from faser.runtime.kv_cache import KvFormat, bytes_per_page, feature_bytes_per_page
from faser.server.messages import About, Start
from faser.server.worker import Served
from faser.text.grammar import ANY_OBJECT, shared_compiler


def load(start: Start) -> Served:
    """Load the models, build the engine, and describe both."""
    started = monotonic()
    options = EngineOptions(**start.engine)
    source = open_target(start.model)
    template = source.chat_template(start.chat_template)
    if template is not None:
        template.check()
    recommended = recommended_sampling(start.model, start.generation_config)
    recommended.log_ignored()
    pair = load_pair(start.model, start.draft, options)
    engine = build_engine(pair.target, pair.draft, options, pair.tokenizer)
    with progress_bar("warming up"):
        _warm_up(engine, pair)
    scheduler, pages = engine.scheduler, engine.scheduler.target_pages
    kv = target_kv(options, pair.target)
    about = About(
        model=start.served_model_name or model_name(start.model or DEFAULT_HUB_NAME),
        draft=draft_name(start.model, start.draft),
        policy=scheduler.drafts.policy.name,
        device=pair.target.device.type,
        dtype=str(pair.target.dtype).removeprefix("torch."),
        reasons={
            **_reasons(start, options, pair.target.device.type, scheduler.limits.draft_span),
            "sampling": recommended.origin,
        },
        vocab_size=pair.target.config.vocab_size,
        end_ids=list(pair.target.config.eos_token_ids),
        max_model_len=scheduler.limits.max_model_len,
        max_running=scheduler.limits.max_running,
        page_size=pages.page_size,
        num_pages=pages.num_pages,
        kv_dtype=str(kv),
        kv_bytes=_kv_bytes(pair, kv, scheduler),
        load_seconds=monotonic() - started,
        tokenizer=pair.tokenizer.to_json() if pair.tokenizer is not None else None,
        chat_template=(template.source, template.bos_token, template.eos_token) if template is not None else None,
        sampling=dict(recommended.values),
        vision=source.vision_settings(),
        max_positions=scheduler.limits.vision.max_positions if scheduler.limits.vision is not None else 0,
    )
    return Served(engine, about, pair.tokenizer)


def _warm_up(engine: Engine, pair: LoadedPair) -> None:
    """Run a request and compile a grammar, so that the first client does not wait for one-time work."""
    room = engine.scheduler.limits.max_model_len
    prompt, params = (0,) * max(1, min(8, room - 4)), SamplingParams(max_tokens=max(1, min(4, room - 1)))
    if len(prompt) + params.max_tokens > room:
        raise ConfigError(f"max_model_len={room}: a request needs a prompt token and an output token; give at least 2")
    engine.add(Request(id="warm-up", prompt_token_ids=prompt, params=params, seed=0))
    while engine.has_work:
        engine.step()
    engine.stats = EngineStats()
    config = pair.target.config
    if pair.tokenizer is not None and config.eos_token_ids:
        compiler = shared_compiler(pair.tokenizer, config.vocab_size, config.eos_token_ids)
        with suppress(InvalidRequest):  # a request with a grammar gets the same error
            compiler.check(Grammar("json_schema", ANY_OBJECT))


def _kv_bytes(pair: LoadedPair, kv: KvFormat, scheduler: Scheduler) -> int:
    pages, draft_pages, draft = scheduler.target_pages, scheduler.draft_pages, pair.draft_model
    total = pages.num_pages * bytes_per_page(pair.target.config, pages.page_size, kv.dtype)
    if draft is not None and draft_pages is not None:
        total += draft_pages.num_pages * bytes_per_page(draft.config, draft_pages.page_size, draft.dtype)
    if isinstance(draft, DraftHead):
        total += pages.num_pages * feature_bytes_per_page(draft.config, pages.page_size, draft.dtype)
    return total


def _reasons(start: Start, options: EngineOptions, device: str, draft_span: int | None) -> dict[str, str]:
    """The reason of each choice, for the lines printed at start-up."""
    has_draft = draft_name(start.model, start.draft) is not None
    policy = "the default with a draft" if has_draft else "the default without a draft"
    own_dtype = "fastest on a CPU" if device == "cpu" else "the checkpoint's own"
    draft = "as asked" if start.draft is not None else "ships with FASER" if start.model is None else "none named"
    if draft_span is not None:
        draft += f"; it sees {draft_span} tokens of a context"
    sized = options.kv_memory is not None or options.num_pages is not None
    return {
        "device": why_device(options.device),
        "dtype": "as asked" if options.dtype != "auto" else own_dtype,
        "policy": policy if options.policy is None else "as asked",
        "kv": "as asked" if sized else _WHY_KV[device],
        "draft": draft,
    }


_WHY_KV = {
    "cpu": "at most a quarter of the memory and 4 GiB, and no more than can be used",
    "cuda": "the memory that the models leave free, and no more than can be used",
}
