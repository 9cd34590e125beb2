"""The options of the command line, each written once, and the values made from them.

Knows argparse, names and defaults; the classes that take the values check them. Imports the standard library alone, so
that --help answers at once. The defaults are therefore repeated here; a test compares them with those of the classes.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from faser.config import ServerOptions
    from faser.request import SamplingParams

SHELLS = ("bash", "zsh", "tcsh")
POLICIES = "faser, off, fixed:K, table:64=3/128=1, goodput, ema, adaspec, tetris, nightjar, faser-gp"
# Options that a shell completes with file names.
FILE_DESTINATIONS = (
    "model", "draft", "chat_template", "trace", "workload", "save_workload", "prompts", "out", "report",
    "profile", "video", "allowed_media",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage, and exits with status 2."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here: a command's own parser knows which --help to name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"faser: {_plain_error(message)}; {self.prog} --help lists the options\n")


_EXPECTED = {"int": "a whole number", "float": "a number", "port": "a port from 0 (any free one) to 65535"}


def _plain_error(message: str) -> str:
    """argparse's message, rewritten as option, given value and what was expected."""
    message = " ".join(message.split())
    if found := re.fullmatch(r"argument (.+?): invalid (\w+) value: (['\"])(.*)\3", message):
        option, kind, _, given = found.groups()
        return f"{option} {given}: expected {_EXPECTED.get(kind, kind)}"
    if found := re.fullmatch(r"argument (.+?): invalid choice: (['\"])(.*)\2 \(choose from (.*)\)", message):
        option, _, given, choices = found.groups()
        return f"{option} {given}: expected one of {choices.replace(chr(39), '')}"
    if found := re.fullmatch(r"argument (.+?): expected (.*)", message):
        return f"{found[1]}: expected {found[2].replace('argument', 'value')}"
    return message.replace("the following arguments are required:", "missing")


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError(text)
    return value


_port.__name__ = "port"  # argparse names the type in its message


def add_debug(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """Add --debug to a parser: to all, so that it may stand before or after the command; one alone sets a default."""
    parser.add_argument("--debug", action="store_true", default=default, help="on an error, show the stack trace")


def add_engine(parser: argparse.ArgumentParser) -> None:
    engine = _add_engine_sizes(parser)
    engine.add_argument("--policy", help=f"{POLICIES}; default: faser with a draft, off without")
    engine.add_argument("--no-prefix-caching", action="store_true")
    _add_mechanisms(engine)


def _add_engine_sizes(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--model", help="Hugging Face folder, hub name or GGUF file; default: SmolLM2-135M-Instruct")
    add(
        "--draft",
        help="folder of a model or of a draft head, hub name, GGUF file, draft patch, ngram (prompt lookup: what "
        "followed the same tokens before) or none; DRAFT+ngram uses both, for each request and step what is likelier "
        "right; default: the default model's own, none for other models",
    )
    add("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add(
        "--kv-dtype", choices=("auto", "fp8"), default="auto",
        help="how the target's keys and values are stored: auto (in the dtype of the model, default) or fp8 (8-bit "
        "floats, e4m3: room for about twice the tokens, and text that can differ)",
    )  # fmt: skip
    add(
        "--quantised", choices=("auto", "on", "off"), default="auto",
        help="multiply by quantised weights as they are stored: auto (on a CPU where that is faster, GGUF files only "
        "without a named --dtype; default), on, or off (dequantise them when loading)",
    )  # fmt: skip
    add("--max-model-len", type=int, metavar="N", help="tokens of one request; default: the model's context length")
    add("--max-running", type=int, metavar="N", help="requests in one batch; default: 64 on a CPU, 256 on a GPU")
    add("--max-batch-tokens", type=int, metavar="N", help="rows in one step; default: 1024 on a CPU, 4096 on a GPU")
    add(
        "--max-step-ms", type=float, metavar="MS",
        help="a step computes no more prompt rows than fit into this time, so that a long prompt does not stall "
        "streams; 0: no bound; default: 300 on a CPU, 60 on a GPU",
    )  # fmt: skip
    add("--page-size", type=int, default=16, metavar="N", help="tokens in one KV page")
    add(
        "--kv-memory", type=float, metavar="GIB",
        help="memory for the KV pages of both models, at least enough for 256 tokens; default: the device's choice",
    )  # fmt: skip
    add(
        "--vision-memory", type=float, default=0.25, metavar="GIB",
        help="memory for encoded pictures, of a model that sees: frames in it are not encoded again",
    )  # fmt: skip
    return engine


def _add_mechanisms(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--early-exit", choices=("auto", "on", "off"), default="auto",
        help="drop drafts inside a verification: auto (where the profile says that it pays, default), on or off",
    )  # fmt: skip
    engine.add_argument(
        "--overlap", choices=("auto", "on", "off"), default="auto",
        help="draft while earlier drafts are verified: auto (where the profile says that it pays, default), on or off",
    )  # fmt: skip
    engine.add_argument(
        "--offload", choices=("auto", "on", "off"), default="auto",
        help="give the draft's memory to the KV cache while pages are short and drafts do not pay: auto (on a GPU, "
        "where it can work; default), on or off",
    )  # fmt: skip
    add_draft_window(engine)
    engine.add_argument(
        "--profile", metavar="FILE",
        help="the cost of forwards, made by `faser profile`; default: the one kept for this machine and these models",
    )  # fmt: skip


def add_draft_window(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--draft-window", type=_draft_window, default="auto", metavar="auto|off|N",
        help="a draft (a model or a head) attends to the first 4 tokens of a context and the last N: auto (1024 where "
        "contexts are longer than those it was trained on, and for a model on a CPU where they are much longer; "
        "default), off (the whole context) or at least 64",
    )  # fmt: skip


def _draft_window(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, off or a number of tokens")
    return int(text)


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what the forwards of target and draft cost on this machine, and keep it for policies that need it. "
        "Prints tables for people, then the profile as one JSON document on the last line."
    )
    parser.add_argument("--out", metavar="FILE", help="default: the cache, where later starts find it")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds to spend; default: 18 on a GPU, 6 on a CPU")
    engine = _add_engine_sizes(parser)
    engine.add_argument("--policy", help="measure the draft lengths of this policy; default: as for `faser serve`")
    add_draft_window(engine)
    parser.set_defaults(profile=None, no_prefix_caching=False, early_exit="auto", overlap="auto", offload="auto")


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineOptions, which `LLM` takes too."""
    names = (
        "policy", "device", "dtype", "kv_dtype", "quantised", "max_model_len", "max_running", "max_batch_tokens",
        "max_step_ms", "page_size", "profile", "early_exit", "overlap", "offload", "draft_window",
    )  # fmt: skip
    return {
        **{name: getattr(args, name) for name in names},
        "kv_memory": None if args.kv_memory is None else _num_bytes("--kv-memory", args.kv_memory, 2**30),
        "vision_memory": _num_bytes("--vision-memory", args.vision_memory, 2**30),
        "prefix_caching": not args.no_prefix_caching,
    }


def add_generation_config(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--generation-config", choices=("auto", "none"), default="auto",
        help="sampling defaults: auto (those of the model's generation_config.json, the default) or none",
    )  # fmt: skip


# For fields that neither the command line nor the model's generation_config.json gives.
CHAT_SAMPLING: dict[str, Any] = {"max_tokens": 512, "temperature": 0.3, "top_p": 0.9}
GENERATE_SAMPLING: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "top_p": 1.0}
WATCH_SAMPLING: dict[str, Any] = {"max_tokens": 32, "temperature": 0.0, "top_p": 1.0}


def add_sampling(parser: argparse.ArgumentParser, fallback: dict[str, Any]) -> None:
    def default(name: str) -> str:
        return f"default: the model's, else {fallback[name]:g}"

    sampling = parser.add_argument_group("sampling")
    add_generation_config(sampling)
    add = sampling.add_argument
    add("--max-tokens", type=int, metavar="N", help=default("max_tokens"))
    add("--min-tokens", type=int, default=0, metavar="N")
    add("--temperature", type=float, metavar="T", help=f"0 is greedy; {default('temperature')}")
    add("--top-p", type=float, metavar="P", help=f"1 keeps all; {default('top_p')}")
    add("--top-k", type=int, metavar="K", help="0 keeps all; default: the model's, else 0")
    add("--min-p", type=float, metavar="P", help="0 keeps all; default: the model's, else 0")
    add("--seed", type=int, help="same prompt, parameters and seed give the same text")
    add("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--ignore-eos", action="store_true", help="continue after the model's end token")
    add("--presence-penalty", type=float, default=0.0, metavar="X")
    add("--frequency-penalty", type=float, default=0.0, metavar="X")
    add("--repetition-penalty", type=float, metavar="X", help="1 is none; default: the model's, else 1")
    add("--max-draft", type=int, metavar="K", help="cap the draft length; 0 switches speculation off")


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """The given options; `defaults` for the others."""
    from dataclasses import fields

    from faser.request import SamplingParams

    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")


def chat_template_text(args: argparse.Namespace) -> str | None:
    if args.chat_template is None:
        return None
    try:
        return Path(args.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        from faser.errors import ConfigError

        raise ConfigError(
            f"--chat-template {args.chat_template}: cannot be read ({error}); give a Jinja file"
        ) from None


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = "Talk to the model. Every line is a message; /help lists commands. Reads from a pipe too."
    parser.add_argument("--system", metavar="TEXT", help="the system prompt; default: the model's own, if it has one")
    parser.add_argument("--show-drafts", action="store_true", help="colour the tokens that the draft guessed right")
    add_chat_template(parser)
    add_engine(parser)
    add_sampling(parser, CHAT_SAMPLING)


def add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads one from standard input")
    add("--chat", action="store_true", help="take each prompt as a message and answer it")
    add("--json", action="store_true", help="one JSON document per prompt instead of text")
    add("--logprobs", type=int, metavar="N", help="with --json: report the N likeliest tokens")
    add_chat_template(parser)
    add_engine(parser)
    add_sampling(parser, GENERATE_SAMPLING)


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask a model that sees the same question about every window of a video. Windows overlap, and each frame is "
        "encoded once. Prints a line per window: its time, the answer, and the milliseconds of each stage."
    )
    add = parser.add_argument
    add("video", help="a video file: MP4, MOV, Matroska, WebM, AVI, MPEG-TS, GIF, raw H.264 or HEVC")
    add("question", help="what to ask about each window")
    add("--window", type=int, default=16, metavar="N", help="frames that one answer is about; default: 16")
    add("--stride", type=int, default=4, metavar="N", help="frames from one answer to the next; default: 4")
    add("--fps", type=float, default=2.0, metavar="F", help="frames a second that the model sees; default: 2")
    add("--max-pixels", type=int, metavar="N", help="pixels of a frame, after resizing; default: at most 602112")
    add("--json", action="store_true", help="one JSON document per window instead of text")
    add(
        "--kv-reuse", action="store_true",
        help="do not compute frames again that stay in the window: faster, and approximate; checked against exact "
        "answers as it goes, and stopped where they differ too often",
    )  # fmt: skip
    _add_pruning(parser)
    add_chat_template(parser)
    add_engine(parser)
    add_sampling(parser, WATCH_SAMPLING)


def _add_pruning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pruning: show the model only what changed (docs/video.md)").add_argument
    add(
        "--pruning", choices=("none", "codec", "difference"), default="none",
        help="codec: by the motion vectors of H.264; other codecs, and difference: by pixels. Default: none",
    )  # fmt: skip
    add("--tau", type=float, default=1.0, metavar="PX", help="codec: motion that counts, in pixels; default: 1")
    add(
        "--threshold", type=float, default=6.0, metavar="N",
        help="difference: mean change that counts, in levels of 0 to 255; default: 6",
    )  # fmt: skip
    add(
        "--refresh", type=float, default=8.0, metavar="SECONDS",
        help="show the whole picture at least this often; default: 8; inf: only where the codec does",
    )  # fmt: skip


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='e.g. for bash: eval "$(faser completion bash)"')


def add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only; 0.0.0.0 is all")
    add("--port", type=_port, default=8000, metavar="N", help="default: 8000; 0 is any free one")
    add("--served-model-name", metavar="NAME", help="what clients call the model; default: its own")
    add(
        "--api-key", action="append", default=[], metavar="KEY",
        help="clients must send it, on all paths but /health and the dashboard's page; may be given several times. A "
        "key in the variable FASER_API_KEY does not show in the process list",
    )  # fmt: skip
    add("--open-metrics", action="store_true", help="serve /metrics without a key")
    add("--max-waiting", type=int, default=256, metavar="N", help="requests in the queue; default: 256")
    add(
        "--max-connections", type=int, default=4096, metavar="N",
        help="open at a time, and fewer where `ulimit -n` is low; default: 4096",
    )  # fmt: skip
    add(
        "--max-streams", type=int, metavar="N",
        help="choices of one key that run or wait; default: with several keys three quarters of the server's room, "
        "else no limit",
    )  # fmt: skip
    add("--rate-limit", type=int, metavar="N", help="requests of one key in a minute; default: no limit")
    add(
        "--token-limit", type=int, metavar="N",
        help="tokens of one key's prompts and answers in a minute; default: no limit",
    )  # fmt: skip
    add(
        "--max-body-size", type=float, metavar="MIB",
        help="of one request; default: 8, and 64 for a model that takes pictures",
    )  # fmt: skip
    add("--max-prompt-tokens", type=int, metavar="N", help="default: what the model takes")
    add(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="a web page that may call the server; may be given several times, * is all",
    )  # fmt: skip
    add(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="for open requests to finish after SIGTERM; default: 30",
    )  # fmt: skip
    add(
        "--engine-timeout", type=float, default=300.0, metavar="SECONDS",
        help="an engine that is silent for longer, with requests open, is killed as hung; default: 300",
    )  # fmt: skip
    add("--on-engine-failure", choices=("restart", "exit"), default="restart", help="default: restart")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info")
    _add_media(parser)
    _add_sessions(parser)
    add_chat_template(parser)
    add_generation_config(parser)
    add_engine(parser)


def _add_media(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pictures and videos").add_argument
    add(
        "--allowed-media", action="append", default=[], metavar="FOLDER",
        help="requests may name files in this folder; may be given several times; default: none, only data URLs",
    )  # fmt: skip
    add(
        "--allow-media-network",
        action="store_true",
        help="requests may name http and https addresses, which the server then fetches",
    )
    add("--max-media-size", type=float, default=64.0, metavar="MIB", help="of one file; default: 64")
    add(
        "--max-media-pixels", type=int, default=2**25, metavar="N",
        help="width × height of a picture or frame, as sent; default: 33554432",
    )  # fmt: skip
    add("--max-media-frames", type=int, default=512, metavar="N", help="that are taken of one video; default: 512")
    add(
        "--max-media-seconds", type=float, default=3600.0, metavar="S",
        help="length of one video; default: 3600",
    )  # fmt: skip


def _add_sessions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("video sessions (docs/video.md)").add_argument
    add("--max-sessions", type=int, default=16, metavar="N", help="open at a time; default: 16; 0 is none")
    add(
        "--session-idle", type=float, default=60.0, metavar="SECONDS",
        help="a session that gets no chunk for longer ends; default: 60",
    )  # fmt: skip
    add(
        "--session-seconds", type=float, default=inf, metavar="SECONDS",
        help="a session that is older ends; default: no limit",
    )  # fmt: skip


def server_options(args: argparse.Namespace) -> ServerOptions:
    from faser.config import API_KEY_VARIABLE, EngineOptions, ServerOptions, SessionLimits
    from faser.media.limits import MediaAccess, MediaLimits

    key, body = os.environ.get(API_KEY_VARIABLE), args.max_body_size
    names = (
        "model", "draft", "host", "port", "served_model_name", "open_metrics", "max_waiting", "max_prompt_tokens",
        "max_connections", "max_streams", "rate_limit", "token_limit", "grace", "on_engine_failure", "engine_timeout",
        "generation_config", "log_level",
    )  # fmt: skip
    return ServerOptions(
        **{name: getattr(args, name) for name in names},
        engine=EngineOptions(**engine_fields(args)),
        api_keys=(*args.api_key, *([key] if key else [])),
        max_body_size=None if body is None else _num_bytes("--max-body-size", body, 2**20),
        media_access=MediaAccess(
            allowed_folders=tuple(map(Path, args.allowed_media)), allow_network=args.allow_media_network
        ),
        media_limits=MediaLimits(
            max_bytes=_num_bytes("--max-media-size", args.max_media_size, 2**20),
            max_pixels=args.max_media_pixels,
            max_frames=args.max_media_frames,
            max_video_seconds=args.max_media_seconds,
        ),
        sessions=SessionLimits(
            max_sessions=args.max_sessions, idle_seconds=args.session_idle, max_seconds=args.session_seconds
        ),
        cors_origins=tuple(args.cors_origin),
        chat_template=chat_template_text(args),
    )


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play traffic through FASER in this process, or through any server of the OpenAI API, and print the figures: "
        "a table for people, then one JSON document on the last line. First prints how long it will take. Ctrl-C and "
        "SIGTERM end it early; what was measured is kept. docs/metrics.md defines every figure."
    )
    sized = (
        "without a trace: Poisson arrivals at about half of this machine's capacity; poisson:1 where --rate, "
        "--scale, --loads, --duration or --requests is given"
    )
    traffic = _add_bench_traffic(parser, sized)
    traffic.add_argument("--save-workload", metavar="FILE", help="write the requests to a file that --workload plays")
    traffic.add_argument("--no-chat-template", action="store_true", help="prompts without the model's chat template")
    traffic.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    _add_bench_systems(parser)
    _add_bench_results(parser)
    engine = _add_engine_sizes(parser)
    engine.add_argument(
        "--prefix-caching", dest="no_prefix_caching", action="store_false",
        help="default: off, so that runs are comparable",
    )  # fmt: skip
    _add_mechanisms(engine)
    engine.add_argument(
        "--acceptance", type=float, metavar="P",
        help="accept each drafted token with this probability: wrong text at real cost",
    )  # fmt: skip
    parser.set_defaults(policy=None, repeats_trace=False)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play traffic through the real scheduler and policies on a virtual clock: a profile gives the seconds of a "
        "step, an oracle decides which drafts are accepted. The figures are those of `faser bench`. docs/simulator.md "
        "explains it."
    )
    _add_bench_traffic(parser, "without a trace: poisson:1")
    systems = parser.add_argument_group("systems")
    _add_policies(systems)
    systems.add_argument(
        "--against", action="append", default=[], metavar="[NAME=]FILE",
        help="a file of results to compare with, from `faser bench`; may be given several times; ratios are taken "
        "against the first",
    )  # fmt: skip
    _add_bench_results(parser)
    _add_simulated_machine(parser)
    # Options of `faser bench` that a simulation does not have.
    parser.set_defaults(
        url=None, api_key=None, request_timeout=600.0, warmup=0, model=None, draft=None, save_workload=None,
        repeats_trace=True,
    )  # fmt: skip


def _add_simulated_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("simulated machine").add_argument
    add(
        "--profile", default="h200-8b-1b", metavar="NAME|FILE",
        help="the cost of forwards: h200-8b-1b (default), h200-32b-0.6b, or a file of `faser profile`",
    )  # fmt: skip
    add(
        "--acceptance", default="replay", metavar="HOW",
        help="which drafts are accepted: replay (measured sequences, default), P, P:SPREAD, P:SPREAD:DRIFT, or a "
        "document of `faser bench`",
    )  # fmt: skip
    add(
        "--replicas", type=int, default=1, metavar="N",
        help="machines behind a least-loaded router; more than 16 are computed from tables of one; default: 1",
    )  # fmt: skip
    add("--max-running", type=int, default=256, metavar="N", help="requests in a batch; default: 256")
    add("--max-batch-tokens", type=int, default=4096, metavar="N", help="rows in one step; default: 4096")
    add(
        "--max-step-ms", type=float, default=50.0, metavar="MS",
        help="a step computes no more prompt rows than fit into this time; 0: no bound; default: 50",
    )  # fmt: skip
    add("--max-model-len", type=int, default=4096, metavar="N", help="tokens of one request; default: 4096")
    add("--kv-tokens", type=int, metavar="N", help="tokens in the target's KV pool; default: as in the profile")
    add("--page-size", type=int, default=16, metavar="N", help="tokens in one KV page; default: 16")
    add("--no-run-ahead", action="store_true", help="plan a step only after the previous one has ended, as on a CPU")
    add(
        "--overlap", choices=("auto", "on", "off"), default="off",
        help="draft while earlier drafts are verified; needs a profile with the cost of it; default: off",
    )  # fmt: skip
    add(
        "--offload", choices=("auto", "off"), default="off",
        help="give the draft's memory to the KV cache while pages are short; needs a profile with its sizes, and 16 "
        "--replicas at most; default: off",
    )  # fmt: skip
    add(
        "--draft-window", type=_draft_window, default="auto", metavar="auto|off|N",
        help="the draft sees the first 4 tokens of a context and the last N: auto (as it did when the profile was "
        "measured; default), off (the whole context) or at least 64",
    )  # fmt: skip
    add("--noise", type=float, default=0.0, metavar="SHARE", help="spread of a step's seconds, e.g. 0.05; default: 0")


def _add_bench_traffic(parser: argparse.ArgumentParser, default_arrivals: str) -> argparse._ArgumentGroup:
    traffic = parser.add_argument_group("traffic")
    add = traffic.add_argument
    add(
        "--trace", metavar="NAME|FILE",
        help="azure-conv, azure-code, or a CSV or JSON Lines file of arrival, prompt_tokens, output_tokens",
    )  # fmt: skip
    add(
        "--arrivals", metavar="PROCESS",
        help="arrivals, instead of a trace's: poisson:RATE, gamma:RATE:SHAPE, square:LOW:HIGH:PERIOD, ramp:LOW:HIGH, "
        "steps:RATE:RATE:…; "
        f"default {default_arrivals}",
    )  # fmt: skip
    add("--concurrency", metavar="N,…", help="closed loops instead: N requests open at all times")
    add("--workload", metavar="FILE", help="play the requests of this file")
    add("--rate", metavar="R,…", help="mean requests per second, one or several values")
    add("--scale", type=float, metavar="X", help="instead of --rate: times the rate of the source")
    add("--loads", metavar="X,…", help="several rates, as multiples of --rate or of the source's; A..B:N are N of them")
    add("--start", type=float, default=0.0, metavar="S", help="skip the first S seconds of a trace")
    add("--duration", type=float, metavar="S", help="seconds of traffic; default: 30, or the whole trace")
    add(
        "--span", type=float, metavar="S",
        help="play that part of the trace in S seconds; requests are left out until the rate is met",
    )  # fmt: skip
    add("--requests", type=int, metavar="N", help="at most N requests; exactly N in a closed loop")
    add("--prompt-len", default="128", metavar="N|A..B", help="prompt tokens, without a trace; default: 128")
    add("--output-len", default="64", metavar="N|A..B", help="output tokens, without a trace; default: 64")
    add("--length-scale", type=float, default=1.0, metavar="X", help="multiplies all lengths; default: 1")
    add("--max-prompt", type=int, metavar="N", help="cut longer prompts; default: what the model takes")
    add("--max-output", type=int, metavar="N", help="cut longer outputs; default: what the model takes")
    add(
        "--prompts", default="specbench", metavar="NAME,…",
        help="specbench, mtbench, gsm8k, a text or JSON Lines file, or random (tokens); default: specbench",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of all random numbers; default: 0")
    return traffic


def _add_bench_systems(parser: argparse.ArgumentParser) -> None:
    systems = parser.add_argument_group("systems")
    _add_policies(systems)
    add = systems.add_argument
    add("--url", help="a server of the OpenAI API instead of FASER in this process")
    add(
        "--against", action="append", default=[], metavar="[NAME=]URL|FILE",
        help="a system to compare with: a server, which plays the same traffic, or a file of results; "
        "may be given several times; ratios are taken against the first",
    )  # fmt: skip
    add("--api-key", metavar="KEY", help="for servers; default: FASER_API_KEY")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="for a server's answer; default: 600")
    add("--warmup", type=int, default=8, metavar="N", help="requests before each run; default: 8")


def _add_policies(systems: argparse._ArgumentGroup) -> None:
    systems.add_argument(
        "--policies", metavar="P,…", help=f"each plays the same traffic: {POLICIES}, fixed:1..6; default: off,faser"
    )
    systems.add_argument(
        "--repeats", type=int, default=1, metavar="N",
        help="runs of each; the table shows median and spread; default: 1",
    )  # fmt: skip


def _add_bench_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument("--slo", metavar="NAME=S,…", help="limits for goodput, e.g. ttft=0.5,tpot=0.05 in seconds")
    results.add_argument("--out", metavar="FILE", help="write the whole JSON document, with every request")
    results.add_argument("--report", metavar="DIR", help="write one HTML page with plots, and the plots as images")


def _num_bytes(option: str, size: float, unit: int) -> int:
    if not 0 < size < float("inf"):
        from faser.errors import ConfigError

        name = {2**20: "mebibytes", 2**30: "gibibytes"}[unit]
        raise ConfigError(f"{option} {size}: expected {name} above 0")
    return max(1, int(size * unit))
