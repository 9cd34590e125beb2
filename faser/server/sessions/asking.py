"""From a window to its answer: the prompt, what it takes over from the window before, the request, the event.

Knows the engine by the service, and KV reuse with its checks; knows no stream and no readers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from faser.media.sliding import SlidingPrompts
from faser.server.answers import Piece
from faser.server.eyes import SeenPrompt, place, placed
from faser.server.messages import Refused
from faser.server.protocol import ApiError
from faser.server.service import Call, Service
from faser.server.sessions.masks import MaskLog
from faser.server.sessions.protocol import KvReuse, Milliseconds, SessionRequest, WindowEvent
from faser.server.sessions.windows import SeenWindow, WindowPlan

if TYPE_CHECKING:
    from faser.watch import ReuseState


class WindowAsker:
    """Asks about the windows of one session, one after the other."""

    def __init__(self, session: str, request: SessionRequest, plan: WindowPlan, service: Service) -> None:
        from faser.watch import ReuseState  # imports the decoders

        self._session, self._plan, self._service = session, plan, service
        self._chat = request.chat()
        self._max_tokens = request.max_tokens
        self._prompts = SlidingPrompts(plan.prompt, plan.settings, session, plan.max_positions)
        self._reuse = ReuseState(is_on=request.kv_reuse) if request.kv_reuse else None
        self._masks = MaskLog() if request.masks else None
        self._num_asked = 0
        self._is_closed = False

    async def ask(self, seen: SeenWindow, skipped: int) -> WindowEvent:
        """The answer. Raises ApiError or EngineGone where there is none; then the next window takes nothing over."""
        try:
            prompt = await asyncio.to_thread(self._place, seen)
            event = await self._ask(seen, prompt, skipped)
            if self._is_checked(prompt):
                exact = await self._ask(seen, replace(prompt, session=None, reuse=None), skipped)
                event = self._compared(event, exact)
        except BaseException:
            self._prompts.forget()
            raise
        self._num_asked += 1
        return event if self._masks is None else msgspec.structs.replace(event, masks=self._masks.new(seen.window))

    def close(self) -> None:
        """The engine gives up what the session has kept, and so does this process. Call it once, at the end."""
        self._is_closed = True
        self._prompts.forget()
        if self._reuse is not None:
            self._service.end_session(self._session)

    def _place(self, seen: SeenWindow) -> SeenPrompt:
        media = seen.window.media
        if self._reuse is None or not self._reuse.is_on:
            return place(self._plan.prompt, [media], self._plan.settings)
        prompt = self._prompts.next(media, seen.window.is_anchor, self._max_tokens)
        if self._is_closed:  # while this thread worked: nobody else would drop the window's pixels
            self._prompts.forget()
        return placed(prompt, [media])

    def _is_checked(self, prompt: SeenPrompt) -> bool:
        from faser.watch import CHECKED_WINDOWS

        return prompt.reuse is not None and self._num_asked % CHECKED_WINDOWS == 0

    def _compared(self, event: WindowEvent, exact: WindowEvent) -> WindowEvent:
        assert self._reuse is not None
        self._reuse = self._reuse.checked(event.text != exact.text)
        assert event.kv_reuse is not None
        return msgspec.structs.replace(event, kv_reuse=_as_event(self._reuse, event.kv_reuse.tokens))

    async def _ask(self, seen: SeenWindow, prompt: SeenPrompt, skipped: int) -> WindowEvent:
        arrived = monotonic()
        call = await self._service.ask(self._chat, prompt, arrived)
        try:
            pieces = await _pieces(call)
        finally:
            self._service.cancel(call)
        return self._event(seen, skipped, call, pieces, monotonic() - arrived)

    def _event(self, seen: SeenWindow, skipped: int, call: Call, pieces: list[Piece], seconds: float) -> WindowEvent:
        (choice,), (track,), media = call.choices, call.tracks, seen.window.media
        assert choice.finish is not None
        first = seconds if track.first is None else track.first - track.arrived
        return WindowEvent(
            number=seen.number,
            start=round(seen.window.start, 3),
            end=round(seen.window.end, 3),
            text="".join(piece.text for piece in pieces),
            finish_reason=pieces[-1].finish_reason,
            frames=media.num_frames,
            patches=media.num_patches,
            kept=round(media.kept_share, 4),
            pruning=seen.rule,
            video_tokens=media.num_tokens,
            prompt_tokens=call.prompt_sizes[0],
            cached_tokens=choice.finish.stats.cached,
            completion_tokens=choice.num_tokens,
            skipped=skipped,
            kv_reuse=None if self._reuse is None else _as_event(self._reuse, choice.finish.stats.reused),
            milliseconds=_milliseconds(seen.decode_seconds, first, seconds - first),
        )


def _milliseconds(*seconds: float) -> Milliseconds:
    return Milliseconds(*(round(1e3 * each, 3) for each in seconds))


def _as_event(state: ReuseState, num_tokens: int) -> KvReuse:
    return KvReuse(state.is_on, num_tokens, state.num_checks, state.num_differing)


async def _pieces(call: Call) -> list[Piece]:
    """All parts of an answer with one choice."""
    (choice,) = call.choices
    pieces: list[Piece] = []
    while choice.finish is None:
        for _, message in await call.stream.take():
            if isinstance(message, Refused):
                raise ApiError(400, message.message)
            pieces.append(choice.feed([message]))
    return pieces
