"""One request's progress as chunks: text that is certain, each piece with whether the draft guessed it.

Knows tokens, text and stop strings; knows nothing of engines or of where the chunks go. Imports no torch.
"""

from __future__ import annotations

from collections import deque

from faser.request import Chunk, Finish, Progress
from faser.text.tokenizer import StopChecker, Tokenizer, make_text_stream


class ChunkStream:
    """Makes the chunks of one request. Without a tokenizer they carry tokens and no text.

    `checker` is the engine's own: it has seen all tokens that are received here, and says how much of their text may be
    shown.
    """

    def __init__(self, tokenizer: Tokenizer | None, checker: StopChecker | None) -> None:
        self._text = make_text_stream(tokenizer) if tokenizer is not None else None
        self._checker = checker
        self._pieces: deque[tuple[str, bool]] = deque()  # not handed out yet
        self._num_waiting = 0  # characters in these pieces
        self._num_shown = 0  # characters handed out

    def receive(self, item: Progress) -> Chunk:
        """The chunk of one step."""
        token_ids, finish = item.token_ids, item.finish
        # A step emits accepted drafts and one token of the target. If a stop cut it, the last counts as the target's.
        num_accepted = max(0, len(token_ids) - 1)
        self._push(token_ids, num_accepted, finish)
        return Chunk(
            token_ids=tuple(token_ids),
            num_accepted=num_accepted,
            pieces=self._take(self._num_showable(finish)),
            logprobs=tuple(item.logprobs) if item.logprobs is not None else None,
            finish_reason=finish.reason if finish is not None else None,
            stats=finish.stats if finish is not None else None,
            error=finish.error if finish is not None else None,
        )

    def _push(self, token_ids: list[int], num_accepted: int, finish: Finish | None) -> None:
        if self._text is None:
            return
        stopped = finish is not None and finish.stop_id is not None
        shown = token_ids[:-1] if stopped else token_ids
        for index, token_id in enumerate(shown):
            self._add(self._text.push(token_id), index < num_accepted)
        if finish is not None:
            self._add(self._text.finish(), False)

    def _add(self, text: str, accepted: bool) -> None:
        if text:
            self._pieces.append((text, accepted))
            self._num_waiting += len(text)

    def _num_showable(self, finish: Finish | None) -> int:
        """Characters not handed out yet that cannot change any more."""
        if self._checker is None:
            return self._num_waiting
        if finish is not None and finish.text is not None:
            return len(finish.text) - self._num_shown
        return len(self._checker.text) - self._checker.num_held() - self._num_shown

    def _take(self, num_characters: int) -> tuple[tuple[str, bool], ...]:
        taken = []
        while num_characters > 0 and self._pieces:
            text, accepted = self._pieces.popleft()
            if len(text) > num_characters:
                self._pieces.appendleft((text[num_characters:], accepted))
                text = text[:num_characters]
            taken.append((text, accepted))
            num_characters -= len(text)
            self._num_waiting -= len(text)
            self._num_shown += len(text)
        return tuple(taken)
