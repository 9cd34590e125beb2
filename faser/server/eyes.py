"""Pictures and videos of requests on their way to the engine: fetched, decoded and cut into patches in threads.

Knows threads, bounds and where errors belong; faser/media knows formats. Text requests do not wait for any of it: the
number of threads is bounded, and so are the bytes that wait for a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from faser.config import ServerOptions
from faser.errors import InvalidRequest, MissingPackage, RequestTooLong
from faser.extras import require
from faser.media.media import Media
from faser.media.messages import Reference
from faser.media.options import VideoOptions
from faser.media.placement import place_media
from faser.media.sliding import PlacedPrompt
from faser.request import Reuse
from faser.server import background
from faser.server.messages import SentVision
from faser.server.protocol import ApiError, PromptDetails
from faser.threads import available_cpus
from faser.vision import VisionSettings

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 8  # that decode at a time, and at most half of the CPUs


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with its pictures, ready for the engine."""

    token_ids: list[int]
    vision: SentVision
    details: PromptDetails
    session: str | None = None  # as in a Request
    reuse: Reuse | None = None


class Eyes:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._threads = asyncio.Semaphore(max(1, min(MAX_THREADS, available_cpus() // 2)))
        self.num_loading = 0  # requests whose media are being loaded
        self.num_bytes = 0  # of their URLs, which are most of their bodies, and of the pixels that are loaded

    async def see(
        self,
        token_ids: list[int],
        references: Sequence[Reference],
        settings: VisionSettings,
        options: VideoOptions,
        most_tokens: int,
        check_bytes: Callable[[], None],
    ) -> SeenPrompt:
        """The prompt with its placeholders replaced. A task that is cancelled loads no further medium.

        `check_bytes` is called after each medium: it raises where all requests together hold too much.
        """
        limits = self._options.media_limits
        if len(references) > limits.max_media:
            given = f"{len(references)} pictures and videos"
            raise ApiError(400, f"messages: {given}; send at most {limits.max_media}", param="messages")
        media: list[Media] = []
        num_tokens = len(token_ids) - len(references)
        with self._counting(references) as hold:
            for reference in references:
                media.append(await self._load(reference, settings, options))
                num_tokens += media[-1].num_tokens
                if num_tokens > most_tokens:
                    raise RequestTooLong(f"{num_tokens} tokens or more with the pictures")
                hold(sum(grid.patches.nbytes for grid in media[-1].grids))
                check_bytes()
            with _refusing("messages"):
                return await self._in_thread(place, token_ids, media, settings)

    async def _load(self, reference: Reference, settings: VisionSettings, options: VideoOptions) -> Media:
        with _refusing(reference.place):
            require("vision")
            from faser.media.load import load_medium  # imports the decoders

            access, limits = self._options.media_access, self._options.media_limits
            return await self._in_thread(load_medium, reference, settings, access, limits, options)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The place is given up when the thread ends, even where nobody waits for its result any more."""
        await self._threads.acquire()
        loop = asyncio.get_running_loop()
        try:
            work = background.start(function, *args, **kwargs)
        except BaseException:  # no thread is left
            self._threads.release()
            raise
        work.add_done_callback(lambda _: background.call_in(loop, self._threads.release))
        return await asyncio.wrap_future(work)

    @contextmanager
    def _counting(self, references: Sequence[Reference]) -> Iterator[Callable[[int], None]]:
        """Counts a request while its media are loaded; gives a function that adds bytes to what it holds."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            held += num_bytes
            self.num_bytes += num_bytes

        self.num_loading += 1
        hold(sum(len(reference.url) for reference in references))
        try:
            yield hold
        finally:
            self.num_loading -= 1
            self.num_bytes -= held


def place(token_ids: list[int], media: Sequence[Media], settings: VisionSettings) -> SeenPrompt:
    """The prompt with its media in place. Hashes pixels: call it in a thread."""
    return placed(PlacedPrompt(*place_media(token_ids, media, settings)), media)


def placed(prompt: PlacedPrompt, media: Sequence[Media]) -> SeenPrompt:
    """The same for a prompt whose media stand in their places."""
    vision = SentVision.of(prompt.vision)
    return SeenPrompt(list(prompt.token_ids), vision, _details(media), prompt.session, prompt.reuse)


def _details(media: Sequence[Media]) -> PromptDetails:
    """What the usage of an answer says of its pictures."""
    pictures = [medium for medium in media if medium.kind == "image"]
    videos = [medium for medium in media if medium.kind == "video"]
    return PromptDetails(
        image_tokens=sum(medium.num_tokens for medium in pictures),
        video_tokens=sum(medium.num_tokens for medium in videos),
        video_frames=sum(medium.num_frames for medium in videos),
        patches=sum(medium.num_patches for medium in media),
    )


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
    except MissingPackage as error:
        raise ApiError(501, f"{param}: the server cannot decode it: {error}", code="missing_package") from None
