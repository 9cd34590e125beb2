import re
import socket

import pytest

from faser.bench.remote import Remote, play_remote
from faser.errors import ConfigError, RemoteError
from faser.traffic.document import Item, Workload
from faser.traffic.summary import summarize
from tests.bench.stub_server import BREAKS, BUSY, COUNTLESS, DROPS, FINE, SILENT, serving


def make_workload(*kinds, concurrency=None):
    items = (Item(0.0, (kind, 1, 2), 4 + i, "prose") for i, kind in enumerate(kinds))
    return Workload(tuple(items), concurrency)


def connected(url, **options):
    remote = Remote(url, **options)
    remote.connect()
    return remote


def test_tokens_are_those_of_the_usage_and_not_the_events():
    with serving() as stub:
        remote = connected(stub.url, api_key="secret")
        assert (remote.model, remote.max_model_len) == ("stub", 64)
        run = play_remote(remote, make_workload(FINE, FINE), "stub")
    assert [record.num_tokens for record in run.records] == [4, 5]
    assert [(record.accepted, record.drafted, record.verified) for record in run.records] == [(2, 3, None)] * 2
    assert all(0 <= record.first <= record.end <= run.seconds for record in run.records)
    assert run.records[0].category == "prose"
    assert not run.partial
    body = stub.bodies[0]
    assert body["prompt"] == [10, 1, 2]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert set(stub.authorizations) == {"Bearer secret"}


def test_a_server_that_refuses_ignore_eos_is_asked_without_it():
    with serving(strict=True) as stub:
        run = play_remote(connected(stub.url), make_workload(FINE, FINE, FINE, concurrency=1), "stub")
    assert [record.error for record in run.records] == [None] * 3
    assert ["ignore_eos" in body for body in stub.bodies] == [True, False, False, False]


def test_lost_requests_are_recorded_with_their_reason_and_nothing_hangs():
    kinds = (FINE, DROPS, BUSY, SILENT, BREAKS, COUNTLESS, FINE)
    with serving() as stub:
        run = play_remote(connected(stub.url, request_timeout=2.0), make_workload(*kinds), "stub")
    reasons = [record.error or "" for record in run.records]
    expected = ["", "closed before the answer ended", "503: try again later", "no end within 2 s",
                "broke off: the engine failed", "no usage", ""]  # fmt: skip
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True)), reasons
    figures = summarize(run)
    assert (figures["requests"], figures["lost"], figures["output_tokens"]) == (7, 5, 4 + 10)


def test_a_closed_loop_never_exceeds_its_concurrency():
    with serving() as stub:
        run = play_remote(connected(stub.url), make_workload(*[FINE] * 12, concurrency=3), "stub")
    assert stub.most_open <= 3
    assert [record.index for record in run.records] == list(range(12))
    assert run.records[-1].arrival > 0


def test_an_interrupt_ends_a_run_and_keeps_what_was_seen():
    with serving() as stub:
        ended = [0]
        run = play_remote(
            connected(stub.url),
            make_workload(FINE, SILENT),
            "stub",
            stopped=lambda: ended[-1] > 0,
            update=ended.append,
        )
    assert run.partial
    assert [record.end is not None for record in run.records] == [True, False]
    assert [record.error for record in run.records] == [None, None]


def test_an_unreachable_server_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RemoteError, match=f"{re.escape(url)} cannot be reached .*is the server up"):
            connected(url)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_a_wrong_address_is_refused(url):
    with pytest.raises(ConfigError, match="expected an address"):
        Remote(url)


def test_faser_itself_can_be_played(folder, tmp_path):
    from tests.server.running import running

    with running(folder, tmp_path, "--draft", "ngram", "--policy", "fixed:2") as server:
        items = tuple(Item(0.0, tuple([70, 71, 72, 73] * 4), 12, "loops") for _ in range(3))
        run = play_remote(connected(server.url + "/v1"), Workload(items), "faser")
    assert [(record.error, record.num_tokens) for record in run.records] == [(None, 12)] * 3
    assert sum(record.drafted for record in run.records) >= sum(record.accepted for record in run.records) >= 0
