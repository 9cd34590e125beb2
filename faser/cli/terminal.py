"""The terminal chat: one conversation, read line by line, answered token by token.

Knows lines, colours and the conversation so far. Answers go to standard output and everything else to standard error,
so that a pipe gets the answers alone. With a terminal an error is shown and the chat goes on; without one nothing is
coloured and the first error ends the chat.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from faser.engine.stats import EngineStats
from faser.errors import FaserError, RequestTooLong
from faser.request import Chunk, FinishReason, SamplingParams

if TYPE_CHECKING:
    from faser.llm import LLM

ACCEPTED, DIM = Style(color="green"), Style(dim=True)
# A model's text may hold escape sequences, which could do anything to a terminal; line ends and tabs are harmless.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): ""}


class Screen:
    """Where a chat is shown. Accepted drafts are coloured if the terminal has colours."""

    def __init__(self, show_drafts: bool = False, answers: Console | None = None, notes: Console | None = None) -> None:
        self._answers = answers or Console()
        self._notes = notes or Console(stderr=True)
        self._show_drafts = show_drafts
        self._marks = show_drafts and _no_colours_because(self._answers) is None

    def legend(self) -> None:
        """Tell what the colours mean, or why there are none."""
        if self._marks:
            _write(self._notes, "green: draft tokens that were accepted", ACCEPTED)
            self.note("; the rest: the target's own")
        elif self._show_drafts:
            self.note(f"faser: --show-drafts marks nothing: {_no_colours_because(self._answers)}")

    def answer(self, text: str, accepted: bool = False) -> None:
        if self._answers.is_terminal:
            text = text.translate(_CONTROLS)
        _write(self._answers, text, ACCEPTED if accepted and self._marks else None)

    def note(self, text: str) -> None:
        _write(self._notes, f"{text}\n")

    def detail(self, text: str) -> None:
        """A remark for people: dropped where the output is no terminal."""
        if self._notes.is_terminal and self._answers.is_terminal:
            _write(self._notes, text, DIM)
            self.note("")


def _write(console: Console, text: str, style: Style | None = None) -> None:
    """Write the text unchanged: `Console.print` would wrap lines, expand tabs and drop a trailing line end."""
    console.print(Segments([Segment(text, style)]), crop=False)


def _no_colours_because(console: Console) -> str | None:
    if console.no_color:
        return "NO_COLOR is set"
    if not console.is_terminal:
        return "the output is no terminal"
    return "the terminal has no colours" if console.color_system is None else None


class Chat:
    """A conversation, and the loop that reads and answers it."""

    def __init__(
        self, llm: LLM, params: SamplingParams, screen: Screen, system: str | None = None, interactive: bool = True
    ) -> None:
        self._llm = llm
        self._params = params
        self._screen = screen
        self._system = system
        self._interactive = interactive
        self._messages: list[dict[str, str]] = []
        self._left = False
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "list these commands"),
            "/reset": (self._reset, "forget the conversation; the system prompt stays"),
            "/system": (self._set_system, "TEXT: set the system prompt; without TEXT, go back to the model's own"),
            "/stats": (self._stats, "tokens, speed and drafts since the start"),
            "/quit": (self._leave, "leave; Ctrl-D does the same"),
        }

    def run(self) -> None:
        """Read and answer until the input ends or the user leaves."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  gives input() editing and history
        while not self._left and (line := self._read()) is not None:
            try:
                self._take(line)
            except FaserError as error:
                if not self._interactive:
                    raise
                self._screen.note(f"faser: {error}")

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        # Without a terminal to show it on, input() would write the prompt among the answers.
        prompt = "> " if self._interactive and sys.stdout.isatty() else ""
        while True:
            try:
                return input(prompt).strip()
            except EOFError:
                if self._interactive:
                    self._screen.note("")
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._screen.note("\nCtrl-D or /quit leaves")

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name in self._commands:
                self._commands[name][0](rest.strip())
            else:
                self._screen.note(f"faser: no command {name}; /help lists them")
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """One turn. A turn without an answer leaves the conversation unchanged."""
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._stream_answer()
        except BaseException:
            self._messages.pop()
            raise
        if answer is None:
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": answer})

    def _stream_answer(self) -> str | None:
        """Show the answer as it comes, and return it; None if it was stopped before its first text."""
        prompt, params = self._next_request()
        before, text, last, stopped = copy(self._llm.stats), "", None, False
        try:
            with without_echo(sys.stdin), closing(self._llm.stream(prompt, params)) as stream:
                for last in stream:
                    for piece, accepted in last.pieces:
                        text += piece
                        self._screen.answer(piece, accepted)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        finally:
            self._screen.answer("\n")
        self._explain_end(last, stopped, params.max_tokens)
        if last is not None:
            self._screen.detail(summary(self._llm.stats, before))
        return text if text or not stopped else None

    def _next_request(self) -> tuple[list[int], SamplingParams]:
        """The conversation as a prompt, and parameters with max_tokens cut to the room after it."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        prompt = self._llm.chat_prompt([*system, *self._messages])
        most, params = self._llm.max_request_tokens, self._params
        room = most - len(prompt)
        if room < max(1, params.min_tokens):
            remedy = "/reset begins a new conversation" if len(self._messages) > 1 else "send a shorter message"
            raise RequestTooLong(f"the conversation has {len(prompt)} tokens and at most {most} fit; {remedy}")
        return prompt, replace(params, max_tokens=min(params.max_tokens, room))

    def _explain_end(self, last: Chunk | None, stopped: bool, max_tokens: int) -> None:
        if stopped:
            self._screen.detail("stopped")
        elif last is not None and last.finish_reason is FinishReason.FAILED:
            self._screen.note(f"faser: the answer failed: {last.error}")
        elif last is not None and last.finish_reason is FinishReason.LENGTH:
            is_full = max_tokens < self._params.max_tokens
            remedy = "the context is full, /reset begins a new conversation" if is_full else "--max-tokens allows more"
            self._screen.detail(f"cut after {max_tokens} tokens: {remedy}")

    def _help(self, _: str) -> None:
        for name, (_function, text) in self._commands.items():
            self._screen.note(f"{name:8} {text}")
        self._screen.note("Ctrl-C   stop the answer; its text so far stays in the conversation")
        self._screen.note("What you type during an answer is shown at the next prompt.")

    def _leave(self, _: str) -> None:
        self._left = True

    def _reset(self, _: str) -> None:
        self._messages = []

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._screen.note(f"system prompt: {text or 'as the model has it'}")

    def _stats(self, _: str) -> None:
        self._screen.note(summary(self._llm.stats))


def summary(stats: EngineStats, before: EngineStats | None = None) -> str:
    """What an engine did in all, or since `before`, in one line."""
    before = before or EngineStats()
    emitted, seconds = stats.emitted - before.emitted, stats.step_seconds - before.step_seconds
    rate = emitted / seconds if seconds else 0.0
    text = f"{emitted} tokens in {stats.steps - before.steps} steps, {seconds:.2f} s ({rate:.1f} tokens/s)"
    drafted, verified = stats.drafted - before.drafted, stats.verified - before.verified
    accepted = stats.accepted - before.accepted
    if verified:
        text += f"; drafted {drafted}, accepted {accepted} ({100 * accepted / verified:.0f} % of the verified)"
    looked_up = stats.looked_up - before.looked_up
    if looked_up:
        accepted = stats.lookup_accepted - before.lookup_accepted
        text += f"; of these by prompt lookup: drafted {looked_up}, accepted {accepted}"
    return text


@contextmanager
def without_echo(keyboard: TextIO) -> Iterator[None]:
    """Do not show keys typed while the block runs. They stay in the terminal's buffer for the next read.

    The echo is restored when the block ends, and when a signal stops (Ctrl-Z) or ends the process. Without a terminal
    nothing happens.
    """
    if os.name != "posix" or not keyboard.isatty():
        yield
        return
    import termios  # not on Windows

    descriptor = keyboard.fileno()
    before = termios.tcgetattr(descriptor)

    def switch_off() -> None:
        settings = termios.tcgetattr(descriptor)
        settings[3] &= ~termios.ECHO  # the local flags
        termios.tcsetattr(descriptor, termios.TCSANOW, settings)

    def give_way(number: int, _frame: object) -> None:
        """Restore the echo and let the signal do its default; if it only stopped the process, go on without echo."""
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, give_way)
        switch_off()

    numbers = [number for number in (signal.SIGTERM, signal.SIGTSTP) if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, give_way)
        switch_off()
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
