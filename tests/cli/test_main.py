import io
import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from faser.cli import arguments
from faser.cli import main as cli
from faser.cli.main import main
from faser.cli.terminal import summary
from faser.config import API_KEY_VARIABLE, EngineOptions, ServerOptions
from faser.engine.stats import EngineStats
from faser.media.limits import MediaAccess, MediaLimits
from faser.request import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture
def model(folder):
    return ["--model", str(folder), "--max-model-len", "64"]


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return ["--chat-template", str(path)]


def pipe(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_text_and_a_summary(model, capsys):
    assert main(["generate", "the quick brown", *model, "--max-tokens", "5", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert captured.err.startswith("5 tokens in 5 steps")


def test_a_summary_says_what_prompt_lookup_drafted():
    stats = EngineStats(emitted=9, steps=4, step_seconds=1.0, drafted=10, verified=8, accepted=4)
    assert "lookup" not in summary(stats)
    stats = replace(stats, looked_up=6, lookup_accepted=3)
    assert summary(stats).endswith("of these by prompt lookup: drafted 6, accepted 3")


def test_generate_gives_the_same_json_with_and_without_drafts(model, capsys, monkeypatch):
    def run(*extra):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a draft proposes"))
        sampling = ["--max-tokens", "20", "--seed", "3", "--temperature", "1", "--logprobs", "1"]
        assert main(["generate", "the quick", "-", *model, "--json", *sampling, *extra]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    plain, drafted = run(), run("--draft", "ngram", "--policy", "fixed:6")
    assert len(plain) == len(drafted) == 2
    assert [o["token_ids"] for o in plain] == [o["token_ids"] for o in drafted]
    assert [o["text"] for o in plain] == [o["text"] for o in drafted]
    assert plain[0]["stats"]["drafted"] == 0
    names = {"drafted", "verified", "accepted", "steps", "cached", "reused", "lengths", "pruned", "looked_up",
             "lookup_accepted"}  # fmt: skip
    assert set(plain[0]["stats"]) == names
    assert len(plain[0]["logprobs"]) == len(plain[0]["token_ids"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--policy", "fixed:2"], "needs a draft"),
        (["--policy", "warp"], "expected off"),
        (["--max-tokens", "500"], "the model takes 64"),
        (["--model", "nowhere/at/all"], "no such folder"),
        (["--device", "abacus"], "abacus"),
        (["--kv-memory", "1000000"], "kv_memory of 1e+06 GiB: there is room for at most"),
        (["--kv-memory", "1e-9"], "too few for a request of 64; give at least 0.001 GiB"),
    ],
)
def test_an_error_is_one_line_with_the_reason(model, capsys, wrong, says):
    assert main(["generate", "x", *model, *wrong]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_the_least_kv_memory_an_error_names_is_enough(model, capsys):
    given = ["generate", "x", *model, "--max-tokens", "4", "--kv-memory"]
    assert main([*given, "1e-9"]) == 1
    least = capsys.readouterr().err.split("give at least ")[1].split()[0]
    assert main([*given, least]) == 0


@pytest.mark.parametrize("size", ["1000000", "1e-9"])
def test_kv_memory_is_checked_before_weights_are_read(folder, tmp_path, capsys, size):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    assert main(["generate", "x", "--model", str(tmp_path), "--kv-memory", size]) == 1
    assert capsys.readouterr().err.startswith("faser: kv_memory of")


def test_debug_before_or_after_the_command_shows_where_an_error_was_raised(model):
    wrong = ["generate", "x", *model, "--max-tokens", "0"]
    for asked in ([*wrong, "--debug"], ["--debug", *wrong]):
        with pytest.raises(ValueError, match="max_tokens"):
            main(asked)


def test_an_unexpected_error_is_one_line_with_its_own_status(monkeypatch, capsys):
    def fails(args):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(cli, "_completion", fails)
    assert main(["completion", "bash"]) == 70
    right = "faser: internal error: RuntimeError: two lines; run again with --debug for the trace\n"
    assert capsys.readouterr().err == right
    with pytest.raises(RuntimeError):
        main(["completion", "bash", "--debug"])


def test_an_interrupt_is_no_error(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_completion", interrupted)
    assert main(["completion", "bash", "--debug"]) == 130
    assert capsys.readouterr().err == "faser: interrupted\n"


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = [sys.executable, "-m", "faser.cli.main", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_no_command_prints_help_and_is_a_misuse(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(command in captured.err for command in ("serve", "chat", "generate", "completion"))


COMMANDS = "serve, chat, generate, watch, bench, profile, simulate, completion"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("explode", f"COMMAND explode: expected one of {COMMANDS}; faser --help"),
        ("generate x --best-of 3", "unknown argument --best-of 3; faser generate --help"),
        ("generate", "missing PROMPT; faser generate --help"),
        ("serve --port abc", "--port abc: expected a port from 0 (any free one) to 65535; faser serve --help"),
        ("serve --port 70000", "--port 70000: expected a port from 0 (any free one) to 65535; faser serve --help"),
        ("serve --port", "--port: expected one value; faser serve --help"),
        ("serve --grace soon", "--grace soon: expected a number; faser serve --help"),
        ("chat --max-running few", "--max-running few: expected a whole number; faser chat --help"),
        ("bench --overlap so", "--overlap so: expected one of auto, on, off; faser bench --help"),
        ("profile --budget all", "--budget all: expected a number; faser profile --help"),
        ("simulate --replicas 1.5", "--replicas 1.5: expected a whole number; faser simulate --help"),
        ("completion cmd", "shell cmd: expected one of bash, zsh, tcsh; faser completion --help"),
        ("--max", "unknown argument --max; faser --help"),
    ],
)
def test_a_misuse_is_one_line_with_the_option_the_value_and_what_was_expected(wrong, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(wrong.split())
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"faser: {says} lists the options\n"


def test_a_misuse_that_holds_a_line_end_is_still_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--port", "80\n00"])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("faser 0.")


# ---- chat ----


def test_a_piped_chat_answers_every_line_and_leaves(model, template, monkeypatch, capsys):
    pipe(monkeypatch, "the quick\n\na draft\n")
    options = [*model, *template, "--max-tokens", "5", "--temperature", "0", "--ignore-eos"]
    assert main(["chat", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert main(["generate", "--chat", "the quick", *options]) == 0
    alone = capsys.readouterr().out
    assert captured.out.startswith(alone)
    assert len(captured.out) > len(alone)


def test_generate_with_chat_takes_the_prompt_as_a_message(model, template, capsys):
    options = [*model, *template, "--json", "--max-tokens", "4"]
    assert main(["generate", "the quick", "--chat", *options]) == 0
    as_message = json.loads(capsys.readouterr().out)
    assert main(["generate", "u:the quick\na:", *model, "--json", "--max-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == as_message["token_ids"]


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "x"]])
def test_a_model_without_a_template_is_refused_before_its_weights_are_read(command, folder, tmp_path, capsys):
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert main([*command, "--model", str(tmp_path)]) == 1
    assert "no chat template; give one with --chat-template FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja: cannot be read"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--kv-memory", "nan"], "gibibytes above 0"),
    ],
)
def test_an_error_of_chat_is_one_line_with_the_reason(model, template, capsys, wrong, says):
    assert main(["chat", *model, *template, *wrong]) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_template_that_does_not_compile_is_refused_before_the_first_message(model, tmp_path, capsys):
    path = tmp_path / "broken.jinja"
    path.write_text("{% if %}")
    assert main(["chat", *model, "--chat-template", str(path)]) == 1
    assert "does not compile" in capsys.readouterr().err


def test_a_piped_message_that_does_not_fit_fails_with_the_remedy(model, template, monkeypatch, capsys):
    pipe(monkeypatch, "the quick brown fox " * 30)
    assert main(["chat", *model, *template]) == 1
    assert "at most 64 fit; send a shorter message" in capsys.readouterr().err


def test_a_template_without_chat_is_refused(model, template, capsys):
    assert main(["generate", "x", *model, *template]) == 1
    assert "only used with --chat" in capsys.readouterr().err


# ---- serve ----


@pytest.fixture
def served(monkeypatch):
    """The options that `faser serve` was started with."""
    seen = []
    server = SimpleNamespace(serve=lambda options: seen.append(options) or 3)
    monkeypatch.setitem(sys.modules, "faser.server", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "faser.server.run", server)
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    return seen


def test_serve_without_options_has_the_defaults_of_the_classes(served):
    assert main(["serve"]) == 3, "the server's own status"
    assert served == [ServerOptions()]


def test_serve_takes_every_option_of_server_and_engine(served, monkeypatch, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-the-environment")
    given = (
        "--model m --draft ngram --policy fixed:2 --max-running 7 --max-step-ms 80 --host 0.0.0.0 --port 0 "
        "--served-model-name name --api-key one --api-key two --open-metrics --max-waiting 9 --max-body-size 0.5 "
        "--max-prompt-tokens 11 --cors-origin http://a --cors-origin http://b --grace 1.5 --on-engine-failure exit "
        "--log-level error --generation-config none --allow-media-network "
        "--max-connections 12 --max-streams 13 --rate-limit 14 --token-limit 15 "
        "--max-media-size 2 --max-media-pixels 3 --max-media-frames 4 --max-media-seconds 5"
    )
    folders = [tmp_path, tmp_path.parent]
    media = [part for folder in folders for part in ("--allowed-media", str(folder))]
    main(["serve", *given.split(), *media, "--chat-template", str(template)])
    assert served == [
        ServerOptions(
            model="m",
            draft="ngram",
            engine=EngineOptions(policy="fixed:2", max_running=7, max_step_ms=80.0),
            host="0.0.0.0",
            port=0,
            served_model_name="name",
            api_keys=("one", "two", "from-the-environment"),
            open_metrics=True,
            max_waiting=9,
            max_body_size=2**19,
            max_prompt_tokens=11,
            max_connections=12,
            max_streams=13,
            rate_limit=14,
            token_limit=15,
            cors_origins=("http://a", "http://b"),
            grace=1.5,
            on_engine_failure="exit",
            chat_template="{{ messages }}",
            generation_config="none",
            log_level="error",
            media_access=MediaAccess(allowed_folders=tuple(folders), allow_network=True),
            media_limits=MediaLimits(max_bytes=2**21, max_pixels=3, max_frames=4, max_video_seconds=5.0),
        )
    ]


def test_a_wrong_option_of_serve_is_refused(served, capsys):
    assert main(["serve", "--max-body-size", "inf"]) == 1
    assert "mebibytes above 0" in capsys.readouterr().err
    assert main(["serve", "--max-media-frames", "0"]) == 1
    assert "max_frames=0" in capsys.readouterr().err
    assert main(["serve", "--allowed-media", "/no/such/folder"]) == 1
    assert "'/no/such/folder' is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--on-engine-failure", "shrug"])
    assert served == []


# ---- defaults and completion ----


def test_the_defaults_of_generate_are_those_of_the_classes():
    args = cli.make_parser().parse_args(["generate", "x"])
    assert arguments.sampling_params(args, arguments.GENERATE_SAMPLING) == SamplingParams()
    assert EngineOptions(**arguments.engine_fields(args)) == EngineOptions()


def test_the_command_line_reaches_every_option_of_an_engine_but_those_of_tests_and_benchmarks():
    args = cli.make_parser().parse_args(["chat"])
    missing = {field.name for field in fields(EngineOptions)} - arguments.engine_fields(args).keys()
    assert missing == {"num_pages", "acceptance", "profiling"}  # each command has its own profiling


@pytest.mark.parametrize("shell", arguments.SHELLS)
def test_a_completion_script_names_commands_and_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "faser" in script
    assert "served-model-name" in script


def test_the_bash_script_is_bash_and_completes_file_names(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "_shtab_faser_chat___model_COMPGEN=_shtab_compgen_files" in script
