"""The command line. Parses first and imports later, so that --help answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faser.llm import LLM
    from faser.types import RequestOutput


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    from faser.errors import FaserError

    try:
        return int(args.run(args))
    except FaserError as error:
        if args.debug:
            raise
        print(f"faser: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("faser: interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="faser", description="Speculative decoding that never changes the output.")
    parser.add_argument("--version", action=_Version, help="print the version and leave")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate = commands.add_parser("generate", help="continue prompts and print the text")
    generate.set_defaults(run=_generate)
    _add_generate_arguments(generate)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"faser {version('faser')}")
        parser.exit()


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads one from standard input"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document per prompt instead of text")
    _add_engine_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, metavar="N")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--seed", type=int, help="same prompt, parameters and seed give the same text")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="with --json: report the N likeliest tokens")
    sampling.add_argument("--max-draft", type=int, metavar="K", help="cap the draft length; 0 switches speculation off")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="Hugging Face folder, hub name or GGUF file; default: SmolLM2-135M-Instruct")
    engine.add_argument(
        "--draft", help="likewise, or a draft patch, or ngram (prompt lookup); default: the default model's"
    )
    engine.add_argument("--policy", help="off or fixed:K; default: fixed:1 with a draft, off without")
    engine.add_argument("--device", default="auto", help="auto or cpu")
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of one request; default: what the model knows"
    )
    engine.add_argument("--max-running", type=int, default=64, metavar="N", help="requests in one batch")
    engine.add_argument("--max-batch-tokens", type=int, default=1024, metavar="N", help="rows in one step")
    engine.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in one KV page")
    engine.add_argument(
        "--kv-memory", type=float, metavar="GIB", help="KV pages of both models; default: the device's choice"
    )
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--debug", action="store_true", help="on an error, show where it was raised")


def _generate(args: argparse.Namespace) -> int:
    from faser.errors import ConfigError
    from faser.types import SamplingParams

    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs has nowhere to go without --json; add it")

    params = SamplingParams(
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
        logprobs=args.logprobs,
        max_draft=args.max_draft,
    )
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    with _make_llm(args) as llm:
        outputs = llm.generate(prompts, params)
        for number, output in enumerate(outputs):
            print(_as_json(output) if args.json else _as_text(prompts[number], output, len(prompts) > 1))
            if output.error is not None:
                print(f"faser: prompt {number + 1} failed: {output.error}", file=sys.stderr)
        print(_summary(llm), file=sys.stderr)
    return int(any(output.error is not None for output in outputs))


def _make_llm(args: argparse.Namespace) -> LLM:
    from faser.llm import LLM

    return LLM(
        args.model,
        args.draft,
        policy=args.policy,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_running=args.max_running,
        max_batch_tokens=args.max_batch_tokens,
        page_size=args.page_size,
        kv_memory=_bytes(args.kv_memory),
        prefix_caching=not args.no_prefix_caching,
    )


def _bytes(gibibytes: float | None) -> int | None:
    if gibibytes is None:
        return None
    if not 0 < gibibytes < float("inf"):
        from faser.errors import ConfigError

        raise ConfigError(f"--kv-memory {gibibytes}: expected gibibytes above 0")
    return max(1, int(gibibytes * 2**30))


def _as_text(prompt: str, output: RequestOutput, named: bool) -> str:
    return f"=== {prompt}\n{output.text}" if named else output.text


def _as_json(output: RequestOutput) -> str:
    import json
    from dataclasses import asdict

    return json.dumps({**asdict(output), "stats": {**asdict(output.stats), "pruned": output.stats.pruned}})


def _summary(llm: LLM) -> str:
    stats = llm.stats
    rate = stats.emitted / stats.step_seconds if stats.step_seconds else 0.0
    text = f"{stats.emitted} tokens in {stats.steps} steps, {stats.step_seconds:.2f} s ({rate:.1f} tokens/s)"
    if stats.drafted:
        text += f"; drafted {stats.drafted}, accepted {stats.accepted} ({100 * stats.acceptance:.0f} % of the verified)"
    return text


if __name__ == "__main__":
    raise SystemExit(main())
