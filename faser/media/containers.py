"""The containers that are read: which one a file is, and where it says that it ends.

Knows first bytes and sizes. Knows nothing of codecs, and does not need FFmpeg.
"""

from __future__ import annotations

from typing import BinaryIO

from faser.errors import InvalidRequest

SNIFFED_BYTES = 3 * 188  # two packets of an MPEG transport stream, and the start of a third
BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")  # with which an MP4 file may begin
EBML = b"\x1aE\xdf\xa3"
SEGMENT = b"\x18S\x80g"  # the one part of a Matroska file that holds everything else
H264_STARTS = (0x67, 0x47, 0x27, 0x09, 0x06)  # parameter sets, delimiter, information
HEVC_STARTS = (0x40, 0x42, 0x46)
FORMATS = "MP4, MOV, Matroska, WebM, AVI, MPEG-TS, GIF, raw H.264 or HEVC"


def sniff(file: BinaryIO) -> str:
    """FFmpeg's name for the container's format, by its first bytes. The file is left at its start."""
    start = b""
    while len(start) < SNIFFED_BYTES and (more := file.read(SNIFFED_BYTES - len(start))):  # a live stream may give less
        start += more
    file.seek(0)
    if start[4:8] in BOXES:
        return "mov"
    if start[:4] == EBML:
        return "matroska"
    if start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        return "avi"
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if start[0:1] == start[188:189] == start[376:377] == b"G":
        return "mpegts"
    return _sniff_raw(start)


def _sniff_raw(start: bytes) -> str:
    zeros = 3 if start[:3] == b"\0\0\0" else 2
    if start[: zeros + 1] == b"\0" * zeros + b"\1" and len(start) > zeros + 1:
        unit = start[zeros + 1]
        if unit in H264_STARTS or unit in HEVC_STARTS:
            return "h264" if unit in H264_STARTS else "hevc"
    raise InvalidRequest(f"video of an unknown format: expected {FORMATS}")


def check_whole(data: bytes) -> None:
    """Refuse a file that is shorter than it declares. Streams (MPEG-TS, raw) and GIFs declare nothing."""
    declared = 0
    if data[4:8] in BOXES:
        declared = _end_of_boxes(data)
    elif data[:4] == EBML:
        declared = _end_of_segment(data)
    elif data[:4] == b"RIFF":
        declared = 8 + int.from_bytes(data[4:8], "little")
    if declared > len(data):
        raise InvalidRequest(f"video of {len(data)} bytes that declares {declared}: it was cut; send the whole file")


def _end_of_boxes(data: bytes) -> int:
    """MP4: boxes follow each other, each begins with its size and its name."""
    end = 0
    while end + 8 <= len(data):
        size = int.from_bytes(data[end : end + 4])
        if size == 1:  # the size stands behind the name
            size = int.from_bytes(data[end + 8 : end + 16])
        if size < 8:  # 0: up to the end of the file; others are damage that FFmpeg will name
            return 0
        end += size
    return end


def _end_of_segment(data: bytes) -> int:
    """Matroska: a header, then a segment; both have a size of 1 to 8 bytes behind their id."""
    start, size = _element(data, len(EBML))
    start += size
    if data[start : start + 4] != SEGMENT:
        return 0
    start, size = _element(data, start + len(SEGMENT))
    return start + size


def _element(data: bytes, at: int) -> tuple[int, int]:
    """Where an element's content begins, and its bytes; 0: a live recording does not say."""
    length = 9 - data[at].bit_length() if at < len(data) else 9
    if length > 8:
        return at, 0
    value_bits = 7 * length
    size = int.from_bytes(data[at : at + length]) & ((1 << value_bits) - 1)
    return at + length, 0 if size == (1 << value_bits) - 1 else size
