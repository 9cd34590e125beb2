"""The options of an engine and of a server, and their checks. Used by `LLM(…)` and the command line; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TypeVar

from faser.errors import ConfigError
from faser.limits import KeyWindow
from faser.machine import DEVICES
from faser.media.limits import MediaAccess, MediaLimits
from faser.models import config as model_config
from faser.models import generation
from faser.policy import Policy, make_policy
from faser.policy.early_exit import MODES as EARLY_EXIT
from faser.policy.overlap import MODES as OVERLAP
from faser.policy.residency import MODES as OFFLOAD

API_KEY_VARIABLE = "FASER_API_KEY"  # an environment variable: a key in it does not show in the process list
DEFAULT_DRAFT = Path(__file__).parent / "drafts" / "smollm2-135m-6.gguf"  # of the default model
NGRAM = "ngram"
BESIDE = f"+{NGRAM}"  # behind the name of a draft: prompt lookup is used beside it
NO_DRAFT = "none"  # a folder of this name is ./none
DEFAULT_POLICY = "faser"  # with a draft
DTYPES = ("auto", *model_config.DTYPES)
QUANTISED = ("auto", "on", "off")
KV_DTYPES = ("auto", "fp8")
PROFILING = ("quick", "full", "none")
TEXT_BODY = 8 * 2**20  # bytes of a request
MEDIA_BODY = 64 * 2**20  # of one with pictures and videos as data URLs, which are a third larger than the files
LOG_LEVELS = ("debug", "info", "warning", "error")

InMemory = TypeVar("InMemory")  # a model that is loaded


def resolve_draft(model: object, draft: InMemory | str | None) -> InMemory | str | None:
    """What the draft option means: a model, NGRAM, a model and NGRAM (MODEL+ngram), or None for no draft.

    Where the model is not given, the default model has its own draft, and other models have none.
    """
    if isinstance(draft, str) and draft.endswith(BESIDE):
        beside = resolve_draft(model, draft.removesuffix(BESIDE) or None)
        return NGRAM if beside is None or beside == NGRAM else f"{beside}{BESIDE}"
    if model is None and draft is None:
        return str(DEFAULT_DRAFT)
    return None if draft == NO_DRAFT else draft


def split_draft(draft: str) -> tuple[str | None, bool]:
    """The model of a draft that `resolve_draft` gave, if it has one, and whether it uses prompt lookup."""
    if draft == NGRAM:
        return None, True
    return draft.removesuffix(BESIDE), draft.endswith(BESIDE)


def draft_name(model: str | None, draft: str | None) -> str | None:
    """What people call the draft; None where there is none."""
    found = resolve_draft(model, draft)
    if found is None:
        return None
    beside, looks_up = split_draft(found)
    return NGRAM if beside is None else model_name(beside) + BESIDE * looks_up


def model_name(model: str) -> str:
    """The last part of a hub name, a folder's name, or a GGUF file's name without its ending."""
    return Path(model).name.removesuffix(".gguf") or model


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs. None lets FASER choose."""

    policy: str | Policy | None = None  # None: faser with a draft, off without
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of the target's keys and values: that of the model (auto), or 8-bit floats (fp8)
    quantised: str = "auto"  # compute with quantised weights as they are stored: where that is fast, on, or off
    # Where these three are None the device chooses.
    max_running: int | None = None  # requests in one batch
    max_batch_tokens: int | None = None  # rows in one step: decoding, drafts and prompts together
    max_step_ms: float | None = None  # a step takes no more prompt rows than fit into this time; 0: no bound
    max_model_len: int | None = None  # tokens of one request; None: the model's context length
    page_size: int = 16  # tokens
    kv_memory: int | None = None  # bytes for the KV pages of target and draft; None: the device's choice
    num_pages: int | None = None  # of the target, and of the draft where its windows need as many; not with kv_memory
    vision_memory: int = 256 * 2**20  # bytes for encoded pictures, of a model that sees
    prefix_caching: bool = True
    # Accept drafted tokens with this probability, or with these by position: wrong text at real cost. Positions beyond
    # the last have its probability.
    acceptance: float | tuple[float, ...] | None = None
    early_exit: str = "auto"  # drop drafts inside a verification: where the profile says it pays, always (on), or never
    overlap: str = "auto"  # draft while earlier drafts are verified: where the profile says it pays, on, or off
    offload: str = "auto"  # the draft leaves the device when KV pages are short: the device's choice (auto), on, or off
    draft_window: str | int = "auto"  # tokens that a draft attends to; off: all; auto: where contexts are long
    profile: str | None = None  # file with the cost of forwards, for policies that need it; None: the saved one
    profiling: str = "quick"  # without a saved profile: quick (the rest is measured when idle), full, or none

    def __post_init__(self) -> None:
        names = (
            "max_running", "max_batch_tokens", "max_model_len", "page_size", "kv_memory", "num_pages", "vision_memory",
        )  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 1")
        step = self.max_step_ms
        if step is not None and (isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < inf):
            raise ConfigError(f"max_step_ms={step!r}: expected milliseconds above 0, or 0 for no bound")
        if self.max_running is not None and self.max_running > (self.max_batch_tokens or self.max_running):
            raise ConfigError(
                f"max_running={self.max_running} exceeds max_batch_tokens={self.max_batch_tokens}: "
                "every running request needs a row; raise the second or lower the first"
            )
        if self.kv_memory is not None and self.num_pages is not None:
            raise ConfigError("kv_memory and num_pages both size the KV cache; give one of them")
        choices = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "quantised": QUANTISED, "device": DEVICES,
                   "early_exit": EARLY_EXIT, "overlap": OVERLAP, "offload": OFFLOAD,
                   "profiling": PROFILING}  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        window = self.draft_window
        is_size = isinstance(window, int) and not isinstance(window, bool) and window >= KeyWindow.LEAST_SIZE
        if window not in ("auto", "off") and not is_size:
            raise ConfigError(f"draft_window={window!r}: expected auto, off or at least {KeyWindow.LEAST_SIZE} tokens")
        chances = self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)
        if not chances or not all(chance is None or 0 <= chance <= 1 for chance in chances):
            raise ConfigError(f"acceptance={self.acceptance!r}: expected a probability, 0 to 1, or one by position")

    def make_policy(self, has_draft: bool) -> Policy:
        """The policy given or named; ConfigError where it would speculate without a draft."""
        policy = self.policy
        if policy is None:
            policy = DEFAULT_POLICY if has_draft else "off"
        if isinstance(policy, str):
            policy = make_policy(policy)
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy {policy!r}: expected a name or an instance of faser.policy.Policy")
        if not has_draft and policy.name != "off":
            raise ConfigError(
                f'policy {policy.name!r} needs a draft: give draft="…" or draft="{NGRAM}", or policy="off"'
            )
        return policy


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds on video sessions."""

    max_sessions: int = 16  # open at a time; a further one is answered 503
    idle_seconds: float = 60.0  # without a chunk, after which a session's stream counts as complete
    max_seconds: float = inf  # of a session, after which it ends
    queue_bytes: int = 8 * 2**20  # of a session that wait to be decoded, and the most of one chunk

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 and not (name == "max_sessions" and value == 0):
                raise ConfigError(f"{name}={value!r}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of `faser serve`, those of its engine included."""

    model: str | None = None  # None: the default pair
    draft: str | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: str | None = None  # None: from the model's own name
    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    open_metrics: bool = False  # /metrics needs no key
    max_waiting: int = 256  # requests in the queue, besides the running ones; a further one is answered 503
    max_connections: int = 4096  # open at a time; a further one is answered 503
    max_streams: int | None = None  # choices of one key that run or wait; None: `stream_limit`
    rate_limit: int | None = None  # requests of one key in a minute; None: no limit
    token_limit: int | None = None  # tokens of one key's prompts and answers in a minute; None: no limit
    max_body_size: int | None = None  # bytes; None: TEXT_BODY, and MEDIA_BODY where the model can see
    max_prompt_tokens: int | None = None  # None: what the model takes
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers
    media_access: MediaAccess = field(default_factory=MediaAccess)  # from where pictures and videos are read
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)  # of video
    grace: float = 30.0  # seconds for open requests to finish after SIGTERM
    on_engine_failure: str = "restart"
    engine_timeout: float = 300.0  # seconds of silence after which an engine with open requests counts as hung
    chat_template: str | None = None  # the text of a Jinja template instead of the model's own
    generation_config: str = "auto"  # sampling defaults: auto (the model's generation_config.json) or none
    log_level: str = "info"
    engine_factory: str = "faser.server.load:load"  # module:function in the engine's process, for benchmarks and tests

    def __post_init__(self) -> None:
        generation.check_mode(self.generation_config)
        can_be_sent = all(key and key.isascii() and key.isprintable() for key in self.api_keys)
        missing = [str(folder) for folder in self.media_access.allowed_folders if not folder.is_dir()]
        if missing:
            raise ConfigError(f"allowed media: {missing[0]!r} is no folder; give one that exists")
        # field: (whether its value is valid, what is expected)
        checks = {
            "port": (0 <= self.port <= 65535, "a port from 0 (any free one) to 65535"),
            "max_waiting": (self.max_waiting >= 0, "an integer of at least 0"),
            "max_connections": (self.max_connections >= 1, "at least 1"),
            "max_streams": (self.max_streams is None or self.max_streams >= 1, "at least 1"),
            "rate_limit": (self.rate_limit is None or self.rate_limit >= 1, "at least 1 request a minute"),
            "token_limit": (self.token_limit is None or self.token_limit >= 1, "at least 1 token a minute"),
            "max_body_size": (self.max_body_size is None or self.max_body_size >= 1, "at least 1 byte"),
            "max_prompt_tokens": (self.max_prompt_tokens is None or self.max_prompt_tokens >= 1, "at least 1"),
            "engine_timeout": (self.engine_timeout > 0, "seconds above 0"),
            "grace": (0 <= self.grace < inf, "seconds, 0 or more"),
            "on_engine_failure": (self.on_engine_failure in ("restart", "exit"), "restart or exit"),
            "log_level": (self.log_level in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}"),
            "api_keys": (can_be_sent, "keys of printable ASCII characters"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                shown = "(not shown)" if name == "api_keys" else repr(getattr(self, name))
                raise ConfigError(f"{name}={shown}: expected {expected}")

    def body_limit(self, can_see: bool) -> int:
        """The most bytes of a request."""
        return self.max_body_size or (MEDIA_BODY if can_see else TEXT_BODY)

    def stream_limit(self, room: int) -> int | None:
        """The most choices of one key, of the `room` that there is: of several keys, none can fill the queue alone."""
        if self.max_streams is not None or len(self.api_keys) < 2:
            return self.max_streams
        return max(1, room * 3 // 4)
