"""The options of the command line, each written once, and the values that are made of them.

Knows argparse, names and defaults; what a value may be is known to the classes that take it. Importing this imports the
standard library alone, so that --help answers at once; the defaults are therefore repeated here, and a test holds them
against those of the classes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faser.config import ServerOptions
    from faser.types import SamplingParams

API_KEY_VARIABLE = "FASER_API_KEY"
FILE_DESTINATIONS = ("model", "draft", "chat_template")  # what a shell completes with file names


def add_debug(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """For every parser, so that it may stand before or after the command; only the first of them sets a default."""
    parser.add_argument("--debug", action="store_true", default=default, help="on an error, show where it was raised")


def add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="Hugging Face folder, hub name or GGUF file; default: SmolLM2-135M-Instruct")
    engine.add_argument(
        "--draft", help="likewise, or a draft patch, or ngram (prompt lookup); default: the default model's"
    )
    engine.add_argument("--policy", help="off or fixed:K; default: fixed:1 with a draft, off without")
    engine.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of one request; default: what the model knows"
    )
    engine.add_argument(
        "--max-running", type=int, metavar="N", help="requests in one batch; default: 64 on a CPU, 256 on a GPU"
    )
    engine.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="rows in one step; default: 1024 on a CPU, 4096 on a GPU"
    )
    engine.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in one KV page")
    engine.add_argument(
        "--kv-memory", type=float, metavar="GIB", help="KV pages of both models; default: the device's choice"
    )
    engine.add_argument("--no-prefix-caching", action="store_true")


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineOptions, which `LLM` takes too."""
    return {
        "policy": args.policy,
        "device": args.device,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_running": args.max_running,
        "max_batch_tokens": args.max_batch_tokens,
        "page_size": args.page_size,
        "kv_memory": None if args.kv_memory is None else _num_bytes("--kv-memory", args.kv_memory, 2**30),
        "prefix_caching": not args.no_prefix_caching,
    }


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, temperature: float, top_p: float) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N")
    sampling.add_argument(
        "--temperature", type=float, default=temperature, metavar="T", help=f"0 is greedy; default: {temperature:g}"
    )
    sampling.add_argument("--top-p", type=float, default=top_p, metavar="P", help=f"1 keeps all; default: {top_p:g}")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--seed", type=int, help="same prompt, parameters and seed give the same text")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    sampling.add_argument("--max-draft", type=int, metavar="K", help="cap the draft length; 0 switches speculation off")


def sampling_params(args: argparse.Namespace, logprobs: int | None = None) -> SamplingParams:
    from faser.types import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logprobs=logprobs,
        max_draft=args.max_draft,
    )


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


def add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only; 0.0.0.0 is all")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 is any free one")
    server.add_argument("--served-model-name", metavar="NAME", help="what clients call the model; default: its own")
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"ask clients for it; may be given several times. {API_KEY_VARIABLE} keeps it out of the process list",
    )  # fmt: skip
    server.add_argument("--max-waiting", type=int, default=256, metavar="N", help="requests that queue; default: 256")
    server.add_argument("--max-body-size", type=float, default=8.0, metavar="MIB", help="of one request; default: 8")
    server.add_argument("--max-prompt-tokens", type=int, metavar="N", help="default: what the model takes")
    server.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="a web page that may call the server; may be given several times, * is all",
    )  # fmt: skip
    server.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="for open requests on SIGTERM; default: 30"
    )
    server.add_argument(
        "--engine-timeout", type=float, default=300.0, metavar="SECONDS",
        help="a step that takes longer means a hung engine, which is killed; default: 300",
    )  # fmt: skip
    server.add_argument("--on-engine-failure", choices=("restart", "exit"), default="restart", help="default: restart")
    server.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )
    add_chat_template(parser)


def server_options(args: argparse.Namespace) -> ServerOptions:
    from faser.config import EngineOptions, ServerOptions

    key = os.environ.get(API_KEY_VARIABLE)
    return ServerOptions(
        model=args.model,
        draft=args.draft,
        engine=EngineOptions(**engine_fields(args)),
        host=args.host,
        port=args.port,
        served_model_name=args.served_model_name,
        api_keys=(*args.api_key, *([key] if key else [])),
        max_waiting=args.max_waiting,
        max_body_size=_num_bytes("--max-body-size", args.max_body_size, 2**20),
        max_prompt_tokens=args.max_prompt_tokens,
        cors_origins=tuple(args.cors_origin),
        grace=args.grace,
        on_engine_failure=args.on_engine_failure,
        engine_timeout=args.engine_timeout,
        chat_template=chat_template_text(args),
        log_level=args.log_level,
    )


def _num_bytes(option: str, size: float, unit: int) -> int:
    if not 0 < size < float("inf"):
        from faser.errors import ConfigError

        name = {2**20: "mebibytes", 2**30: "gibibytes"}[unit]
        raise ConfigError(f"{option} {size}: expected {name} above 0")
    return max(1, int(size * unit))
