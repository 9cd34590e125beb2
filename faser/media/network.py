"""Bounded downloads over http and https, from public addresses only.

The address that was checked is the address that is connected to, so a name that resolves differently the second time
gains nothing. Every redirect is checked like the first URL. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Timer
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from faser.errors import InvalidRequest
from faser.media.limits import MediaLimits

MAX_REDIRECTS = 5
LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 1 << 16  # bytes
HEADERS = {"User-Agent": "faser", "Accept": "image/*, video/*", "Accept-Encoding": "identity", "Connection": "close"}
SAFE = "/%:?=&+,;@!$'()*~-._[]"  # characters of a URL that are sent as they are


def download(url: str, limits: MediaLimits) -> bytes:
    """The body behind an http(s) URL."""
    deadline = time.monotonic() + limits.max_fetch_seconds  # for all redirects together
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url)
        left = max(0.01, deadline - time.monotonic())
        try:
            answer = _ask(parts, replace(limits, max_fetch_seconds=left))
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = type(error).__name__
            raise InvalidRequest(f"{parts.hostname} could not be read: {reason}; send a data URL") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise InvalidRequest(f"URL with more than {MAX_REDIRECTS} redirects: give the address they lead to")


def _ask(parts: SplitResult, limits: MediaLimits) -> bytes | str:
    """The body, or the URL of a redirect."""
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=SAFE)
    with _connection(parts, limits) as connection:
        connection.request("GET", target, headers=HEADERS)
        with connection.getresponse() as response:
            if response.status in REDIRECTS:
                return response.headers.get("Location", "")
            return _body(response, limits)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidRequest(f"URL {url[:100]!r}: expected http://host/path or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("URL with a user name or password: expected none")
    return parts


def _body(response: http.client.HTTPResponse, limits: MediaLimits) -> bytes:
    if response.status != 200:
        raise InvalidRequest(f"URL answered with status {response.status}: expected 200")
    declared = response.length or 0
    data = bytearray()
    while declared <= limits.max_bytes and len(data) <= limits.max_bytes:
        chunk = response.read(CHUNK)
        if not chunk:
            if len(data) < declared:
                raise InvalidRequest(f"URL gave {len(data)} of {declared} bytes in time; try again or send a data URL")
            return bytes(data)
        data += chunk
    raise InvalidRequest(f"URL with more than {limits.max_bytes} bytes: expected a smaller file")


# ---- connections ----


@contextmanager
def _connection(parts: SplitResult, limits: MediaLimits) -> Iterator[http.client.HTTPConnection]:
    """A connection that is cut after max_fetch_seconds, however slowly the other side drips."""
    assert parts.hostname is not None
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    plain = socket.create_connection(_public_address(parts.hostname, port), limits.max_fetch_seconds)
    handle = plain.dup()  # shutting it down wakes whoever reads from the connection
    was_cut = Event()
    timer = Timer(limits.max_fetch_seconds, _cut, (handle, was_cut))
    timer.daemon = True
    timer.start()
    connection = http.client.HTTPConnection(parts.hostname, port)
    connection.sock = plain
    try:
        if is_secure:
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
        yield connection
    except (OSError, http.client.HTTPException, ValueError) as error:
        if not was_cut.is_set() and not isinstance(error, TimeoutError):
            raise
        was_cut.set()
    finally:
        timer.cancel()
        timer.join()
        for end in (connection, plain, handle):
            end.close()
    if was_cut.is_set():  # what was read may be a part that looks whole
        raise InvalidRequest(f"{parts.hostname} took longer than {limits.max_fetch_seconds:g} s; send a data URL")


def _cut(handle: socket.socket, was_cut: Event) -> None:
    was_cut.set()
    with suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


def _public_address(host: str, port: int) -> tuple[str, int]:
    """The first address of the host; refused if any of its addresses is not public."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        found = []
    if not found or not all(is_public(address) for address in found):
        raise InvalidRequest(f"host {host!r}: expected a name with public addresses; send a data URL instead")
    return found[0], port


def is_public(address: str) -> bool:
    """Not private, loopback, link-local, multicast or reserved; also not inside an IPv6 address."""
    parsed = ipaddress.ip_address(address.split("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is not None:
            return is_public(str(inner))
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed in LOCAL_NAT64 or int(parsed) >> 96 == 0 or parsed.is_site_local:
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved
