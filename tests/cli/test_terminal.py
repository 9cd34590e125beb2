"""The terminal chat: what is remembered, what is shown, and how it goes on after an error or Ctrl-C."""

from __future__ import annotations

import builtins
import io
import os
import pty
import signal
import termios

import pytest
from rich.console import Console

from faser import LLM, SamplingParams
from faser.cli.terminal import Chat, Screen, without_echo
from faser.text.chat import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
GREEN = "\x1b[32m"


@pytest.fixture(scope="module")
def llm(folder):
    template = ChatTemplate(TEMPLATE, "", "")
    with LLM(str(folder), str(folder), policy="fixed:3", num_pages=128, page_size=4, chat_template=template) as llm:
        yield llm


class Terminal:
    """A screen that remembers, and a keyboard that types `lines`; an exception among them is raised."""

    def __init__(self, monkeypatch, lines, is_terminal=True, show_drafts=False, **colours):
        self.answers, self.notes = io.StringIO(), io.StringIO()
        options = {"force_terminal": is_terminal, "width": 80, "color_system": "standard", **colours}
        self.screen = Screen(show_drafts, Console(file=self.answers, **options), Console(file=self.notes, **options))
        self.lines = iter(lines)
        monkeypatch.setattr(builtins, "input", self.read)

    def read(self, prompt=""):
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


class Recorder:
    """An LLM that remembers the conversations it was asked to answer."""

    def __init__(self, llm):
        self.llm, self.asked = llm, []

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def chat_prompt(self, messages):
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return self.llm.chat_prompt(messages)


def chat(llm, terminal, params=PARAMS, **options):
    recorder = Recorder(llm)
    Chat(recorder, params, terminal.screen, **options).run()
    return recorder.asked


def test_every_turn_sees_the_turns_before_it_and_reset_forgets_them(llm, monkeypatch):
    terminal = Terminal(monkeypatch, ["the", "fox", "/reset", "dog", "/quit", "never read"], is_terminal=False)
    first, second, third = chat(llm, terminal, system="be brief")
    answers = terminal.answers.getvalue()
    assert first == [("system", "be brief"), ("user", "the")]
    assert second[:2] == first
    assert second[2][0] == "assistant"
    assert answers.startswith(second[2][1] + "\n")
    assert second[3] == ("user", "fox")
    assert third == [("system", "be brief"), ("user", "dog")]


def test_a_second_turn_finds_the_first_in_the_prefix_cache(llm, monkeypatch):
    chat(llm, Terminal(monkeypatch, ["jumps over the lazy dog"]))
    before = llm.stats.context_rows
    (_, asked) = chat(llm, Terminal(monkeypatch, ["jumps over the lazy dog", "fox"]))
    prompts = [llm.chat_prompt([{"role": r, "content": c} for r, c in turn]) for turn in (asked[:1], asked)]
    assert llm.stats.context_rows - before < sum(map(len, prompts)) / 2 + 2 * PARAMS.max_tokens


def test_the_system_prompt_can_be_set_and_taken_back(llm, monkeypatch):
    terminal = Terminal(monkeypatch, ["/system be kind", "the", "/system", "/reset", "the"])
    asked = chat(llm, terminal)
    assert asked[0] == [("system", "be kind"), ("user", "the")]
    assert asked[1] == [("user", "the")]
    assert "system prompt: be kind\n" in terminal.notes.getvalue()


def test_commands_answer_and_unknown_ones_are_not_sent_to_the_model(llm, monkeypatch):
    terminal = Terminal(monkeypatch, ["/help", "/stats", "/dance", "/quit now"])
    assert chat(llm, terminal) == []
    notes = terminal.notes.getvalue()
    assert all(command in notes for command in ("/help", "/reset", "/system", "/stats", "/quit", "Ctrl-C"))
    assert "tokens/s" in notes
    assert "no command /dance; /help lists them" in notes


class Interrupting(Recorder):
    """Ctrl-C after some chunks of the first answer."""

    def __init__(self, llm, after):
        super().__init__(llm)
        self.after = after

    def stream(self, prompt, params):
        for number, chunk in enumerate(self.llm.stream(prompt, params)):
            if number == self.after and len(self.asked) == 1:
                raise KeyboardInterrupt
            yield chunk


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(llm, monkeypatch, after):
    terminal = Terminal(monkeypatch, ["the", "fox"])
    interrupting = Interrupting(llm, after)
    Chat(interrupting, PARAMS, terminal.screen).run()
    roles = [role for role, _ in interrupting.asked[1]]
    assert roles == (["user", "assistant", "user"] if after else ["user"])
    assert "stopped" in terminal.notes.getvalue()
    assert not llm.engine.has_work


def test_an_interrupt_at_the_prompt_says_how_to_leave(llm, monkeypatch):
    terminal = Terminal(monkeypatch, [KeyboardInterrupt(), "the"])
    assert len(chat(llm, terminal)) == 1
    assert "Ctrl-D or /quit leaves" in terminal.notes.getvalue()


def test_without_a_terminal_an_interrupt_ends_the_chat(llm, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        chat(llm, Terminal(monkeypatch, [KeyboardInterrupt()], is_terminal=False), interactive=False)
    with pytest.raises(KeyboardInterrupt):
        Chat(
            Interrupting(llm, 1), PARAMS, Terminal(monkeypatch, ["the"], is_terminal=False).screen, interactive=False
        ).run()
    assert not llm.engine.has_work


def test_a_conversation_that_outgrows_the_context_is_told_the_remedy_and_goes_on(llm, monkeypatch):
    long = "the quick brown fox jumps over the lazy dog " * 4
    terminal = Terminal(monkeypatch, ["the", long, "/reset", "fox"])
    asked = chat(llm, terminal, SamplingParams(max_tokens=20, ignore_eos=True))
    assert "at most 128 fit; /reset begins a new conversation" in terminal.notes.getvalue()
    assert asked[2] == [("user", "fox")]


def test_an_answer_is_cut_where_the_context_ends(llm, monkeypatch):
    terminal = Terminal(monkeypatch, ["the"])
    chat(llm, terminal, SamplingParams(max_tokens=500, ignore_eos=True))
    assert "the context is full, /reset" in terminal.notes.getvalue()
    terminal = Terminal(monkeypatch, ["the"])
    chat(llm, terminal)
    assert "cut after 6 tokens: --max-tokens allows more" in terminal.notes.getvalue()


def test_accepted_drafts_are_coloured_and_the_text_is_the_same(llm, monkeypatch):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = Terminal(monkeypatch, ["the the the the"])
    chat(llm, plain, params)
    before = llm.stats.accepted
    coloured = Terminal(monkeypatch, ["the the the the"], show_drafts=True)
    coloured.screen.legend()
    chat(llm, coloured, params)
    assert llm.stats.accepted > before, "else there is nothing to colour"
    answer = coloured.answers.getvalue()
    assert GREEN in answer
    assert answer.replace(GREEN, "").replace("\x1b[0m", "") == plain.answers.getvalue()
    legend = coloured.notes.getvalue().splitlines()[0]
    assert GREEN in legend
    assert "accepted" in legend
    assert "\x1b[2m" in coloured.notes.getvalue(), "the summary is dim"


@pytest.mark.parametrize(
    ("colours", "says"), [({"no_color": True}, "NO_COLOR is set"), ({"is_terminal": False}, "no terminal")]
)
def test_without_colours_nothing_is_marked_and_the_reason_is_said(llm, monkeypatch, colours, says):
    terminal = Terminal(monkeypatch, ["the the the the"], show_drafts=True, **colours)
    terminal.screen.legend()
    chat(llm, terminal, SamplingParams(max_tokens=60, ignore_eos=True))
    assert "\x1b" not in terminal.answers.getvalue()
    assert says in terminal.notes.getvalue()


def test_a_terminal_is_shown_no_escape_sequence_of_the_model_s(monkeypatch):
    terminal = Terminal(monkeypatch, [])
    terminal.screen.answer("a\x1b[2Jb\r\x9b1A\tc\n")
    assert terminal.answers.getvalue() == "a\ufffd[2Jb\ufffd1A\tc\n"
    piped = Terminal(monkeypatch, [], is_terminal=False)
    piped.screen.answer("a\x1b[2Jb\t" + "long " * 40 + "\n")
    assert piped.answers.getvalue() == "a\x1b[2Jb\t" + "long " * 40 + "\n", "a file gets what the model wrote"


# ── keys typed during an answer ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def keyboard(monkeypatch):
    """A terminal as standard input, and the end that a person types at."""
    person, program = pty.openpty()
    with open(program, closefd=True) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield person, stdin
    os.close(person)


def has_echo(stdin):
    return bool(termios.tcgetattr(stdin)[3] & termios.ECHO)


class Typing(Recorder):
    """Somebody types while the model answers."""

    def __init__(self, llm, keyboard, error=None):
        super().__init__(llm)
        self.person, self.stdin = keyboard
        self.error, self.echoes = error, []

    def stream(self, prompt, params):
        os.write(self.person, b"next")
        for chunk in self.llm.stream(prompt, params):
            self.echoes.append(has_echo(self.stdin))
            yield chunk
            if self.error is not None:
                raise self.error


def test_keys_typed_during_an_answer_are_not_echoed_and_wait_for_the_next_prompt(llm, monkeypatch, keyboard):
    person, stdin = keyboard
    typing = Typing(llm, keyboard)
    Chat(typing, PARAMS, Terminal(monkeypatch, ["the"]).screen).run()
    assert set(typing.echoes) == {False}
    assert has_echo(stdin)
    os.write(person, b"!\n")
    assert stdin.readline() == "next!\n"
    assert os.read(person, 100) == b"!\r\n", "all that was echoed is what was typed after the answer"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), RuntimeError("broken")])
def test_the_echo_is_back_however_an_answer_ends(llm, monkeypatch, keyboard, error):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGTSTP)]
    chat = Chat(Typing(llm, keyboard, error), PARAMS, Terminal(monkeypatch, ["the"]).screen)
    if isinstance(error, KeyboardInterrupt):
        chat.run()
    else:
        with pytest.raises(type(error)):
            chat.run()
    assert has_echo(keyboard[1])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGTSTP)] == handlers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGTSTP])
def test_a_signal_that_ends_or_stops_the_chat_finds_the_echo_on(monkeypatch, keyboard, number):
    stdin, found = keyboard[1], []

    def kill(_process, sent):
        found.append((sent, has_echo(stdin), signal.getsignal(sent)))

    monkeypatch.setattr("faser.cli.terminal.os.kill", kill)
    with without_echo(stdin):
        assert not has_echo(stdin)
        signal.raise_signal(number)
        assert not has_echo(stdin), "off again when the process is continued"
    assert found == [(number, True, signal.SIG_DFL)]
    assert has_echo(stdin)


def test_without_a_terminal_nothing_is_switched(tmp_path):
    (tmp_path / "input").write_text("the\n")
    handler = signal.getsignal(signal.SIGTSTP)
    with (tmp_path / "input").open() as stdin, without_echo(stdin):
        assert signal.getsignal(signal.SIGTSTP) == handler
        assert stdin.readline() == "the\n"
