"""From what a message names to what a prompt takes: fetched, decoded and cut into grids.

Imports the decoders; messages.py does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from faser.errors import InvalidRequest
from faser.media.fetch import fetch
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.media import Media
from faser.media.messages import Reference
from faser.media.options import VideoOptions
from faser.media.prepare import picture_media, video_media
from faser.vision import VisionSettings


def load_medium(
    reference: Reference, settings: VisionSettings, access: MediaAccess, limits: MediaLimits, options: VideoOptions
) -> Media:
    data = fetch(reference.url, access, limits)
    if reference.kind == "image":
        return picture_media(data, settings, limits, options)
    return video_media(data, settings, limits, options)


def load_media(
    references: Sequence[Reference],
    settings: VisionSettings,
    access: MediaAccess,
    limits: MediaLimits,
    options: VideoOptions,
) -> list[Media]:
    """One after the other; an error says where in the messages the medium is."""
    if len(references) > limits.max_media:
        raise InvalidRequest(f"{len(references)} pictures and videos: expected at most {limits.max_media}")
    media = []
    for reference in references:
        try:
            media.append(load_medium(reference, settings, access, limits, options))
        except InvalidRequest as error:
            raise InvalidRequest(f"{reference.place}: {error}") from None
    return media
