import io
import json
import sys

import pytest

from faser.cli import main


@pytest.fixture
def model(folder):
    return ["--model", str(folder), "--max-model-len", "64"]


def test_generate_prints_text_and_a_summary(model, capsys):
    assert main(["generate", "the quick brown", *model, "--max-tokens", "5", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert captured.err.startswith("5 tokens in 5 steps")


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
    assert set(plain[0]["stats"]) == {"drafted", "verified", "accepted", "steps", "pruned"}
    assert len(plain[0]["logprobs"]) == len(plain[0]["token_ids"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--policy", "fixed:2"], "needs a draft"),
        (["--policy", "warp"], "expected off"),
        (["--max-tokens", "500"], "the model takes 64"),
        (["--model", "nowhere/at/all"], "no such folder"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_an_error_is_one_line_with_the_reason(model, capsys, arguments, says):
    assert main(["generate", "x", *model, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_debug_shows_where_an_error_was_raised(model):
    with pytest.raises(ValueError, match="max_tokens"):
        main(["generate", "x", *model, "--max-tokens", "0", "--debug"])


def test_an_unknown_command_or_option_is_refused(capsys):
    for arguments in (["explode"], ["generate", "x", "--model", "m", "--best-of", "3"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    assert "unrecognized arguments: --best-of" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("faser 0.")
