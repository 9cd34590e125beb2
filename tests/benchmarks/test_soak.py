"""That benchmarks/soak.py sends what it says, and finds what it looks for, without the servers that it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO

import pytest

from benchmarks import soak
from benchmarks.lib.soak_client import Choice, Outcome, find_fault
from benchmarks.lib.soak_load import LEAVING, NUM_WINDOWS, SESSION, SESSIONS, Item, Load
from benchmarks.lib.soak_models import DEFAULT_PAIR, KINDS, RATE, STRIDE, WINDOW, Models, make_media
from benchmarks.soak import Samples, check_books, check_output, comparable
from faser.media.reader import FrameReader
from faser.watch import WatchOptions, windows
from tests.media.clips import SETTINGS

SEEING = Models("target", "draft", "head", sees=True, kv_memory="0.003", most_tokens=48, longest=35, vocabulary=300)


@pytest.fixture(scope="module")
def media():
    return make_media()


def test_a_seed_makes_the_same_requests_and_all_kinds_come(media):
    items = Load(0, SEEING, media).draw(600)
    assert items == Load(0, SEEING, media).draw(600)
    assert items != Load(1, SEEING, media).draw(600)
    kinds = {item.kind for item in items}
    assert {*LEAVING, SESSION, "sees", "broken picture", "reads slowly", "body too large"} <= kinds
    assert {item.path for item in items} == {"/v1/completions", "/v1/chat/completions", SESSIONS}
    bodies = [item.body for item in items]
    for name in ("structured_outputs", "response_format", "max_draft", "logprobs", "stop", "n"):
        assert any(name in body for body in bodies), name
    assert not any(item.is_session or "sees" in item.kind for item in Load(0, DEFAULT_PAIR).draw(600))


def test_a_stream_has_the_windows_that_are_waited_for(media):
    reader = FrameReader(BytesIO(media.streams[0]))
    assert len(list(windows(reader, SETTINGS, WatchOptions(WINDOW, STRIDE, RATE)))) == NUM_WINDOWS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_draft_has_its_server(kind):
    flags = SEEING.flags(kind)
    assert ("--offload" in flags) == (kind in ("model", "both"))
    draft = flags[flags.index("--draft") + 1]
    assert draft == {"model": "draft", "head": "head", "ngram": "ngram", "both": "draft+ngram"}[kind]
    assert SEEING.flags(None)[-2:] == ("--policy", "off")


GOOD = Item(3, "completes", "/v1/completions", {"prompt": "a", "max_tokens": 4})


def completed(item: Item = GOOD, text: str = "abcd", reason: str | None = "length") -> Outcome:
    return Outcome(item, 200, [Choice(text, reason) for _ in range(item.num_choices)], 4 * item.num_choices)


@pytest.mark.parametrize(
    ("fields", "outcome", "says"),
    [
        ({}, {}, None),
        ({}, {"status": 500}, "answered 500"),
        ({}, {"tokens": 5}, "5 tokens"),
        ({}, {"choices": [Choice("a")]}, "finish_reason None"),
        ({"stop": ["bc"]}, {}, "a stop string"),
        ({"response_format": {}, "stream_options": {"include_usage": True}}, {"tokens": None}, "no usage"),
        ({"structured_outputs": {"regex": "[a-z]"}}, {"choices": [Choice("ab", "stop")]}, "does not match"),
        ({"response_format": {"type": "json_object"}}, {"choices": [Choice("{", "stop")]}, "not JSON"),
        ({"logprobs": 2}, {}, "no log-probabilities"),
    ],
)
def test_what_is_wrong_with_an_answer(fields, outcome, says):
    found = find_fault(replace(completed(replace(GOOD, body={**GOOD.body, **fields})), **outcome))
    assert (found is None) if says is None else (found is not None and says in found)


REASONS = 'vllm:request_success_total{{finished_reason="{}"}}'


def test_books_that_do_not_agree_are_told():
    outcomes = [completed(), completed(replace(GOOD, body={**GOOD.body, "n": 2}))]
    right = {REASONS.format("length"): 3.0}
    assert check_books({}, right, outcomes) == []
    assert check_books({}, {**right, "faser:video_sessions": 1.0}, outcomes) == ["faser:video_sessions is 1.0, not 0"]
    assert "is 0.25, not 0" in check_books({}, {**right, "vllm:kv_cache_usage_perc": 0.25}, outcomes)[0]
    assert check_books({}, {**right, "faser:step_failures_total": 1.0}, outcomes)
    assert check_books({}, {REASONS.format("length"): 4.0}, outcomes), "one more than was asked for"
    assert check_books({}, {**right, 'faser:requests_refused_total{status="503"}': 1.0}, outcomes)
    left = [Outcome(replace(GOOD, kind=LEAVING[1]), left=True, choices=[Choice()])]
    for ends in ({}, {REASONS.format("cancelled"): 1.0}):
        assert check_books({}, {**right, **ends}, outcomes + left) == []


def test_a_text_that_differs_is_told_and_one_half_read_is_a_beginning():
    plain = [completed()]
    assert check_output([completed()], plain) == ([], [])
    assert "with speculation" in check_output([completed(text="abcx")], plain)[0][0]
    half = replace(completed(text="ab", reason=None), left=True, item=replace(GOOD, kind=LEAVING[0]))
    assert check_output([half], plain) == ([], [])
    assert check_output([replace(half, choices=[Choice("b")])], plain)[0]


@pytest.mark.parametrize(("temperature", "gap", "is_tie"), [(0, 2e-7, True), (0, 1e-3, False), (1, 2e-7, False)])
def test_only_greedy_texts_may_part_and_only_at_a_tie(temperature, gap, is_tie):
    item = replace(GOOD, body={**GOOD.body, "temperature": temperature})
    plain = [replace(completed(item), choices=[Choice("abcd", "length", gaps=[0.5, gap])])]
    found, ties = check_output([completed(item, text="abcx")], plain)
    assert (len(found), len(ties)) == ((0, 1) if is_tie else (1, 0))


def test_gaps_are_those_of_both_endpoints():
    choice = Choice()
    choice.take(
        {"text": "a", "finish_reason": None, "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1, "b": -3}]}}
    )
    tops = [{"token": "a", "logprob": -2.5}, {"token": "b", "logprob": -1.0}]
    choice.take(
        {"text": "a", "finish_reason": "length", "logprobs": {"content": [{"token": "b", "top_logprobs": tops}]}}
    )
    assert (choice.tokens, choice.gaps) == (["a", "b"], [2, 1.5])


def test_only_requests_with_a_text_are_sent_again_and_whole():
    streamed = replace(GOOD, body={**GOOD.body, "stream": True, "stream_options": {"include_usage": True}}, pause=0.1)
    refused = Outcome(replace(GOOD, status=400), 400)
    (again,) = comparable([completed(streamed), refused])
    assert (again.body, again.pause) == (GOOD.body, 0)
    (greedy,) = comparable([completed(replace(GOOD, body={**GOOD.body, "temperature": 0}))])
    assert greedy.body["logprobs"] == 2


def test_growth_is_that_after_the_warm_up(monkeypatch):
    samples = Samples({"engine": 1}, at=[0, 50, 100, 150, 200], held={"engine": [100, 300, 310, 320, 330]})
    grown = samples.growth("engine", 150)
    assert (grown["after_warm_up_mib"], grown["growth_mib"], grown["mib_per_1000_requests"]) == (300, 30, 200)
    sizes = iter([{"heap": 5 * 2**20, "files": 2**20}, {"heap": 7 * 2**20, "files": 2**20}])
    monkeypatch.setattr(soak, "mapped_bytes", lambda pid: next(sizes))
    samples.mark()
    samples.mark()
    assert samples.growth("engine", 150)["growth_by_mapping_mib"] == {"heap": 2.0, "files": 0.0}
    samples.descriptors = {"engine": 7}
    for count, lost in ((7, 0), (6, 0), (9, 1)):
        monkeypatch.setattr(soak, "count_descriptors", lambda pid, count=count: count)
        assert len(samples.lost_descriptors()) == lost


def test_a_traceback_in_the_log_is_told_with_its_end():
    log = "ready\nTraceback (most recent call last):\n  File x\nValueError: no\n2026 ERROR faser: gone\n"
    assert soak.errors_in(log) == ["2026 ERROR faser: gone", log.removeprefix("ready\n").rstrip()]
    assert soak.errors_in("ready\n") == []


def test_an_unknown_kind_is_refused(monkeypatch, capsys):
    for arguments in (["--kinds", "model,tea"], ["--pair", "default", "--kinds", "head"]):
        monkeypatch.setattr("sys.argv", ["soak", *arguments])
        with pytest.raises(SystemExit):
            soak.main()
    assert "expected some of model, head, ngram, both" in capsys.readouterr().err


def test_a_session_is_read_to_its_end():
    from benchmarks.lib.soak_client import _take_session_event

    item = Item(1, SESSION, SESSIONS, {"max_tokens": 2}, stream=b"x")
    outcome = Outcome(item, 200, [Choice() for _ in range(NUM_WINDOWS)])
    for number in range(NUM_WINDOWS):
        _take_session_event(outcome, "window", {"number": number, "text": "a", "finish_reason": "length"})
    assert find_fault(outcome) is None
    _take_session_event(outcome, "end", {"reason": "complete", "windows_answered": NUM_WINDOWS})
    with pytest.raises(ValueError, match="the session ended as"):
        _take_session_event(outcome, "end", {"reason": "idle", "windows_answered": NUM_WINDOWS})
    with pytest.raises(ValueError, match="window 2 failed"):
        _take_session_event(outcome, "error", {"number": 2, "message": json.dumps("no")})
