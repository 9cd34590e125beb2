"""The command line. Parses first and imports later, so that --help answers at once.

Knows the commands, their exit status, and how an error becomes one line. Their options are in arguments.py.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from faser.cli import arguments
from faser.extras import require

if TYPE_CHECKING:
    from faser.llm import LLM
    from faser.request import RequestOutput
    from faser.text.chat import ChatTemplate

FAILED, MISUSED, BROKEN, INTERRUPTED = 1, 2, 70, 130  # exit statuses; 70 is EX_SOFTWARE of sysexits.h


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    args.command_line = tuple(sys.argv[1:] if argv is None else argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return MISUSED
    from faser.errors import FaserError, MissingPackage
    from faser.threads import prepare_openmp

    prepare_openmp()  # for this process, before torch loads, and for the server's engine
    try:
        _tolerate_encodings()
        status = int(args.run(args))
        sys.stdout.flush()  # here, where a closed pipe is caught
        return status
    except BrokenPipeError:
        _discard_output()
        return FAILED
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED)
    except FaserError as error:
        if args.debug:
            raise
        is_incomplete = isinstance(error, MissingPackage)  # then some commands work and this one does not
        return _report(str(error), FAILED, f"faser {args.command}" if is_incomplete else "faser")
    except Exception as error:
        if args.debug:
            raise
        reason = f"internal error: {type(error).__name__}: {error}"
        return _report(f"{reason}; run again with --debug for the trace", BROKEN)


def _report(text: str, status: int, program: str = "faser") -> int:
    print(f"{program}:", " ".join(text.splitlines()), file=sys.stderr)
    return status


def _tolerate_encodings() -> None:
    """Write characters that the terminal cannot show, and read bytes that are no characters, as replacements."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """The reader of the pipe has gone: without this, Python would fail to flush at exit and report it."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(prog="faser", description="Speculative decoding that never changes the output.")
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    arguments.add_debug(parser, default=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, run, add_options, text in (
        ("serve", _serve, arguments.add_server, "serve the OpenAI API over HTTP"),
        ("chat", _chat, arguments.add_chat, "talk to the model in the terminal"),
        ("generate", _generate, arguments.add_generate, "continue prompts and print the text"),
        ("watch", _watch, arguments.add_watch, "ask about a video, window by window"),
        ("bench", _bench, arguments.add_bench, "measure policies, or a server, under realistic traffic"),
        ("profile", _profile, arguments.add_profile, "measure what forwards cost on this machine"),
        ("simulate", _simulate, arguments.add_simulate, "play traffic through simulated GPUs, from one to thousands"),
        ("completion", _completion, arguments.add_completion, "print a shell script that completes faser's options"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        add_options(command)
        arguments.add_debug(command)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"faser {version('faser')}")
        parser.exit()


def _serve(args: argparse.Namespace) -> int:
    require("server")
    options = arguments.server_options(args)
    from faser.server.run import serve

    return serve(options)


def _chat(args: argparse.Namespace) -> int:
    from faser.cli.terminal import Chat, Screen

    require("engine")
    params = arguments.sampling_params(args, _sampling_defaults(args, arguments.CHAT_SAMPLING))
    interactive, screen = sys.stdin.isatty(), Screen(args.show_drafts)
    with _make_chat_llm(args) as llm:
        if interactive:
            screen.note(f"{args.model or 'SmolLM2-135M-Instruct'}; /help lists commands, Ctrl-D leaves")
        screen.legend()
        Chat(llm, params, screen, args.system, interactive).run()
    return 0


def _sampling_defaults(args: argparse.Namespace, fallback: dict[str, Any]) -> dict[str, Any]:
    """For options that were not given: the model's recommendation, else `fallback`."""
    from faser.models.source import recommended_sampling

    recommended = recommended_sampling(args.model, args.generation_config)
    recommended.log_ignored()
    return {**fallback, **recommended.values}


def _make_chat_llm(args: argparse.Namespace) -> LLM:
    """An LLM whose chat template is known to compile before the first weight is read."""
    from faser.errors import ConfigError
    from faser.models.source import open_target

    template = open_target(args.model).chat_template(arguments.chat_template_text(args))
    if template is None:
        raise ConfigError(
            f"{args.model} has no chat template; give one with --chat-template FILE, or continue plain text with "
            "`faser generate`"
        )
    template.check()
    return _make_llm(args, chat_template=template)


def _generate(args: argparse.Namespace) -> int:
    from faser.errors import ConfigError

    require("engine")
    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs is only printed with --json; add it")
    if args.chat_template is not None and not args.chat:
        raise ConfigError("--chat-template is only used with --chat; add it")
    params = arguments.sampling_params(args, _sampling_defaults(args, arguments.GENERATE_SAMPLING))
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    with _make_chat_llm(args) if args.chat else _make_llm(args) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts] if args.chat else texts
        is_cut = args.max_tokens is None  # to what fits after the prompt; a number that was asked for is not cut
        outputs = llm.generate(prompts, [llm.fitted(params, prompt) for prompt in prompts] if is_cut else params)
        for number, output in enumerate(outputs):
            heading = f"=== {texts[number]}\n" if len(texts) > 1 else ""
            print(_as_json(output) if args.json else heading + output.text)
            if output.error is not None:
                print(f"faser: prompt {number + 1} failed: {output.error}", file=sys.stderr)
        from faser.cli.terminal import summary

        print(summary(llm.stats), file=sys.stderr)
    return FAILED if any(output.error is not None for output in outputs) else 0


def _watch(args: argparse.Namespace) -> int:
    require("engine")
    require("vision")
    params = arguments.sampling_params(args, _sampling_defaults(args, arguments.WATCH_SAMPLING))
    from faser.cli.watch import print_answers
    from faser.media.options import PictureOptions
    from faser.media.pruning import PruningOptions
    from faser.media.reader import FrameReader
    from faser.watch import VideoWatcher, WatchOptions

    pictures = PictureOptions(max_pixels=args.max_pixels)
    pruning = PruningOptions(rule=args.pruning, tau=args.tau, threshold=args.threshold, refresh=args.refresh)
    options = WatchOptions(args.window, args.stride, args.fps, pictures, pruning, args.kv_reuse)
    with FrameReader(args.video) as reader, _make_chat_llm(args) as llm:
        print_answers(VideoWatcher(llm, args.question, options, params).watch(reader), args.json)
    return 0


def _make_llm(args: argparse.Namespace, chat_template: ChatTemplate | None = None) -> LLM:
    from faser.llm import LLM

    # generation_config "none": every call has parameters, made from the model's recommendation. profiling "none": for a
    # few answers a profile is not worth the wait; a saved one is used.
    fields = {**arguments.engine_fields(args), "profiling": "none"}
    return LLM(args.model, args.draft, chat_template=chat_template, generation_config="none", **fields)


def _as_json(output: RequestOutput) -> str:
    import json
    from dataclasses import asdict

    return json.dumps({**asdict(output), "stats": {**asdict(output.stats), "pruned": output.stats.pruned}})


def _bench(args: argparse.Namespace) -> int:
    from faser.bench.command import bench

    if args.url is None or args.workload is None:  # a server plays a workload of token ids without a model here
        require("engine")
    if args.report is not None:
        require("bench")
    return bench(args, arguments.engine_fields(args))


def _profile(args: argparse.Namespace) -> int:
    from faser.cli.profile import profile

    require("engine")
    return profile(args)


def _simulate(args: argparse.Namespace) -> int:
    from faser.bench.simulate import simulate

    if args.report is not None:
        require("bench")
    return simulate(args)


def _completion(args: argparse.Namespace) -> int:
    import shtab

    parser = make_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.values():
        for action in command._actions:
            if action.dest in arguments.FILE_DESTINATIONS:
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
