"""From a URL to bytes: data URLs, files under allowed folders, and the network where it is allowed.

Knows nothing of what the bytes mean. A refusal never tells whether a file outside the allowed folders exists: a path
there is refused by its text alone, before the disk is asked.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from faser.errors import InvalidRequest
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.network import download

NETWORK = ("http", "https")
BASE64_ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "="}
MAX_ESCAPES = 1 << 20  # of a data URL without base64: unescaping takes memory and time for each


def fetch(url: str, access: MediaAccess, limits: MediaLimits) -> bytes:
    """The bytes behind a data URL, a file URL or path, or an http(s) URL."""
    scheme = url[: url.find(":")].lower() if ":" in url[:16] and not url.startswith("/") else ""
    if scheme == "data":
        return _decode_data_url(url, limits)
    if scheme in NETWORK:
        if not access.allow_network:
            raise InvalidRequest(f"{scheme} URL: this server does not fetch from the network; send a data URL instead")
        return download(url, limits)
    if scheme not in ("", "file"):
        raise InvalidRequest(f"URL with scheme {scheme!r}: expected data, file, http or https")
    return _read_file(_path_of(url) if scheme else url, access, limits)


def _too_large(what: str, num_bytes: int, limits: MediaLimits) -> InvalidRequest:
    return InvalidRequest(f"{what} of {num_bytes} bytes: expected at most {limits.max_bytes}; send a smaller one")


# ---- data URLs ----


def _decode_data_url(url: str, limits: MediaLimits) -> bytes:
    header, comma, payload = url[len("data:") :].partition(",")
    if not comma:
        raise InvalidRequest("data URL without a comma: expected data:<type>;base64,<data>")
    is_base64 = header.lower().endswith(";base64")
    if not is_base64 and payload.count("%") > MAX_ESCAPES:
        raise InvalidRequest(f"data URL with more than {MAX_ESCAPES} escaped bytes: expected data:<type>;base64,<data>")
    num_bytes = _decoded_size(payload, is_base64)
    if num_bytes > limits.max_bytes:
        raise _too_large("data URL", num_bytes, limits)
    try:
        data = base64.b64decode(_plain_base64(payload), validate=True) if is_base64 else unquote_to_bytes(payload)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"data URL that is not valid base64: {error}; check that it was not cut") from None
    if not data:
        raise InvalidRequest("data URL without data: expected the bytes of a picture or a video behind the comma")
    return data


def _plain_base64(payload: str) -> bytes:
    """Without escapes of the characters that base64 has. Others are left, and refused."""
    for escape, character in BASE64_ESCAPES.items():
        payload = payload.replace(escape, character).replace(escape.lower(), character)
    return payload.encode("ascii")


def _decoded_size(payload: str, is_base64: bool) -> int:
    """Bytes that the payload stands for, counted before anything is decoded."""
    num_characters = len(payload) - 2 * payload.count("%")
    padding = unquote(payload[-6:])[-2:].count("=")  # each = may be written %3D
    return num_characters * 3 // 4 - padding if is_base64 else num_characters


# ---- files ----


def _path_of(url: str) -> str:
    rest = url[len("file:") :]
    host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest)
    if host not in ("", "localhost"):
        raise InvalidRequest(f"file URL with host {host[:100]!r}: expected file:///path")
    return unquote(slash + path)


def _read_file(path: str, access: MediaAccess, limits: MediaLimits) -> bytes:
    resolved = _allowed_path(path, access)
    try:
        # O_NONBLOCK: a pipe must not hold up the thread. O_NOFOLLOW: the path was resolved, so a link here is new.
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"file {path[:200]!r} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"file {path!r}: expected a regular file")
        if status.st_size > limits.max_bytes:
            raise _too_large(f"file {path!r}", status.st_size, limits)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limits.max_bytes)
    finally:
        os.close(descriptor)


def _allowed_path(path: str, access: MediaAccess) -> Path:
    """The path without links, under an allowed folder."""
    refusal = InvalidRequest(
        f"file {path[:200]!r}: only absolute paths under an allowed folder are read; "
        "start the server with --allowed-media FOLDER or send a data URL"
    )
    if "\0" in path or not os.path.isabs(path) or ".." in Path(path).parts:
        raise refusal
    given = [Path(os.path.abspath(folder)) for folder in access.allowed_folders]
    real = [folder.resolve() for folder in given]
    if not _is_under(Path(path), [*given, *real]):
        raise refusal
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError):  # a loop of links
        raise refusal from None
    if not _is_under(resolved, real):
        raise refusal
    return resolved


def _is_under(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
