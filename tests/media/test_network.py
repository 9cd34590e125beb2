"""Downloads are bounded in bytes, seconds and redirects, and never reach an address that is not public."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from faser.errors import InvalidRequest
from faser.media import network
from faser.media.fetch import fetch
from faser.media.limits import MediaAccess, MediaLimits

LIMITS = MediaLimits(max_bytes=1000)
OPEN = MediaAccess(allow_network=True)


class _Handler(BaseHTTPRequestHandler):
    """/N gives N bytes; /to/URL redirects; /loop redirects to itself; /short and /slow break off; others fail."""

    def do_GET(self):
        name = self.path[1:]
        if name.startswith("to/") or name == "loop":
            self._answer(302, b"", Location=name[3:] if name != "loop" else "/loop")
        elif name.isdigit():
            self._answer(200, bytes(int(name)))
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(5000))
        elif name == "short":
            self._answer(200, b"part", **{"Content-Length": "900"})
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"part")
            self.wfile.flush()
            self.server.released.wait(10)
        else:
            self._answer(404, b"")

    def _answer(self, status, body, **headers):
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as http:
        http.released = threading.Event()
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.released.set()
        http.shutdown()
        thread.join()


@pytest.fixture
def url(server, monkeypatch):
    """The server's address, which counts as public. Other loopback addresses do not."""
    monkeypatch.setattr(network, "is_public", lambda address: address == "127.0.0.1")
    return f"http://127.0.0.1:{server.server_port}"


def message(url: str, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        fetch(url, OPEN, limits)
    return str(caught.value)


def test_a_download_gives_the_body(url):
    assert fetch(f"{url}/1000", OPEN, LIMITS) == bytes(1000)
    assert fetch(f"{url}/to//7", OPEN, LIMITS) == bytes(7)


def test_downloads_are_bounded(url):
    assert "more than 1000 bytes" in message(f"{url}/1001")
    assert "more than 1000 bytes" in message(f"{url}/endless")
    assert "redirects" in message(f"{url}/loop")
    assert "404" in message(f"{url}/missing")
    assert "4 of 900 bytes" in message(f"{url}/short")


def test_a_slow_download_is_cut(url):
    assert "longer than" in message(f"{url}/slow", MediaLimits(max_fetch_seconds=0.1))


@pytest.mark.parametrize(
    "target", ["http://127.0.0.2/", "https://[::1]/", "file:///etc/passwd", "http://u:p@127.0.0.1/"]
)
def test_redirects_are_checked_like_the_first_url(url, target):
    assert "expected" in message(f"{url}/to/{target}")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
     "2002:7f00:1::", "255.255.255.255", "ff02::1", "::"],
)  # fmt: skip
def test_addresses_inside_are_not_public(address):
    assert not network.is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8"])
def test_addresses_outside_are_public(address):
    assert network.is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "169.254.169.254"]
)
def test_a_host_with_an_inner_address_is_refused_however_it_is_written(host):
    assert "public addresses" in message(f"http://{host}:1/x")


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://host:99999/", "https://[::1/", "http://host:x/"])
def test_malformed_urls_are_refused(url):
    assert "expected http" in message(url)


def test_a_host_is_refused_if_any_of_its_addresses_is_inner(monkeypatch):
    found = [(0, 0, 0, "", ("93.184.216.34", 80)), (0, 0, 0, "", ("10.0.0.1", 80))]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: found)
    assert "public addresses" in message("http://mixed.example/")
