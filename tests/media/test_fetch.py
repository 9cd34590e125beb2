"""Bytes come from data URLs and allowed folders; nothing else is read, and nothing else is told."""

from __future__ import annotations

import base64
import os
from urllib.parse import quote

import pytest

from faser.errors import ConfigError, InvalidRequest
from faser.media import fetch as module
from faser.media.fetch import fetch
from faser.media.limits import MediaAccess, MediaLimits

LIMITS = MediaLimits(max_bytes=1000)
NOWHERE = MediaAccess()


def base64_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def message(url: str, access: MediaAccess = NOWHERE) -> str:
    with pytest.raises(InvalidRequest) as caught:
        fetch(url, access, LIMITS)
    return str(caught.value)


# ---- data URLs ----


@pytest.mark.parametrize("size", [1, 2, 3, 999, 1000])
def test_a_data_url_gives_its_bytes(size):
    data = os.urandom(size)
    assert fetch(base64_url(data), NOWHERE, LIMITS) == data
    assert fetch("DATA:;base64," + quote(base64.b64encode(data)), NOWHERE, LIMITS) == data
    assert fetch("data:text/plain," + quote(data), NOWHERE, LIMITS) == data


def test_a_large_data_url_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(module.base64, "b64decode", None)
    monkeypatch.setattr(module, "unquote_to_bytes", None)
    assert "1001 bytes" in message(base64_url(bytes(1001)))
    assert "1001 bytes" in message("data:," + "%00" * 1001)


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data:;base64,@@@@", "data:;base64,QUJ", "data:;base64,é", "data:;base64,", "data:,"],
)
def test_a_broken_data_url_is_refused(url):
    assert "data URL" in message(url)


@pytest.mark.parametrize("url", ["ftp://host/a.png", "gopher:x", "javascript:alert(1)", "concat:a|b"])
def test_other_schemes_are_refused_by_name(url):
    assert repr(url.split(":")[0]) in message(url)


def test_the_network_is_refused_unless_it_is_allowed():
    assert "does not fetch from the network" in message("https://example.com/a.png")


# ---- files ----


@pytest.fixture
def tree(tmp_path):
    """allowed/a.png, allowed/sub/b c.png, a secret outside, and links to it."""
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a.png").write_bytes(b"inside")
    (allowed / "sub" / "b c.png").write_bytes(b"deep")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed / "folder").symlink_to(tmp_path)
    (allowed / "inner.png").symlink_to(allowed / "a.png")
    (allowed / "loop").symlink_to(allowed / "loop")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.png").write_bytes(b"secret")
    return tmp_path


def test_files_under_an_allowed_folder_are_read(tree):
    access = MediaAccess(allowed_folders=(tree / "allowed",))
    assert fetch(str(tree / "allowed/a.png"), access, LIMITS) == b"inside"
    assert fetch(f"file://{tree}/allowed/sub/b%20c.png", access, LIMITS) == b"deep"
    assert fetch(f"file://localhost{tree}/allowed/inner.png", access, LIMITS) == b"inside"


def test_an_allowed_folder_may_itself_be_a_link(tree):
    (tree / "alias").symlink_to(tree / "allowed")
    access = MediaAccess(allowed_folders=(tree / "alias",))
    assert fetch(str(tree / "alias/a.png"), access, LIMITS) == b"inside"
    assert fetch(str(tree / "allowed/a.png"), access, LIMITS) == b"inside"


@pytest.mark.parametrize(
    "path",
    ["secret.png", "allowed/../secret.png", "allowed/link.png", "allowed/folder/secret.png", "allowed-not/a.png",
     "allowed/loop", "allowed/folder/missing.png", "missing.png", "allowed/\0.png"],
)  # fmt: skip
def test_files_elsewhere_are_refused_alike_whether_they_exist_or_not(tree, path):
    access = MediaAccess(allowed_folders=(tree / "allowed",))
    for url in (f"{tree}/{path}", f"file://{tree}/{quote(path)}"):
        told = message(url, access)
        assert told.partition(": ")[2].startswith("only absolute paths under an allowed folder are read")


def test_a_path_elsewhere_is_refused_before_the_disk_is_asked(tree, monkeypatch):
    access = MediaAccess(allowed_folders=(tree / "allowed",))
    asked = []
    resolve = module.Path.resolve
    monkeypatch.setattr(module.Path, "resolve", lambda path: asked.append(path) or resolve(path))
    message(str(tree / "secret.png"), access)
    assert asked == [tree / "allowed"]


@pytest.mark.parametrize("url", ["a.png", "./a.png", "~/a.png", "file:a.png", "file://host/a.png", ""])
def test_relative_paths_and_other_hosts_are_refused(tree, url):
    assert message(url, MediaAccess(allowed_folders=(tree / "allowed",)))


def test_no_folder_is_allowed_by_default(tree):
    assert "--allowed-media" in message(str(tree / "allowed/a.png"))


def test_large_files_folders_and_pipes_are_refused(tree):
    access = MediaAccess(allowed_folders=(tree / "allowed",))
    (tree / "allowed/large").write_bytes(bytes(1001))
    os.mkfifo(tree / "allowed/pipe")
    assert "1001 bytes" in message(str(tree / "allowed/large"), access)
    for name in ("sub", "pipe", "missing"):
        assert repr(str(tree / "allowed" / name)) in message(str(tree / "allowed" / name), access)


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="max_frames=0"):
        MediaLimits(max_frames=0)


def test_escapes_in_base64_cost_no_more_than_their_text():
    """Only characters of base64 may be escaped: unescaping any byte takes eighty times the memory of the URL."""
    encoded = base64.b64encode(b"\xfb\xff\xfe" * 5).decode()
    escaped = encoded.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert fetch(f"data:image/png;base64,{escaped}", MediaAccess(), MediaLimits()) == b"\xfb\xff\xfe" * 5
    with pytest.raises(InvalidRequest, match="not valid base64"):
        fetch("data:image/png;base64," + "%41" * 8, MediaAccess(), MediaLimits())
    with pytest.raises(InvalidRequest, match="escaped bytes"):
        fetch("data:image/png," + "%41" * (2**20 + 1), MediaAccess(), MediaLimits())


def test_a_path_may_hold_a_colon(tmp_path):
    file = tmp_path / "1:2.png"
    file.write_bytes(b"x")
    assert fetch(str(file), MediaAccess(allowed_folders=(tmp_path,)), MediaLimits()) == b"x"
