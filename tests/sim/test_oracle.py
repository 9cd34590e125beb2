"""Oracles: random numbers that depend on their keys alone, and measured sequences."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from faser.errors import ConfigError
from faser.sim.oracle import Draw, Replay, draw_like, parse_acceptance, rate_of, runs_of, uniforms
from faser.traffic.document import Document
from tests.bench.make_example import PATH

EVERYBODY = ["prose"] * 2000


def test_runs_count_the_agreements_from_each_position_on():
    assert runs_of(np.array([1, 1, 0, 1, 0, 0, 1], dtype=np.bool_)).tolist() == [2, 1, 0, 1, 0, 0, 1]
    assert runs_of(np.zeros(0, dtype=np.bool_)).tolist() == []


def test_random_numbers_are_uniform_and_depend_on_their_keys_alone():
    many = uniforms(3, 7, np.arange(20_000))
    assert 0 <= many.min() < many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(many[1:], many[:-1])[0, 1] == pytest.approx(0, abs=0.03)
    assert uniforms(3, 7, np.array([123]))[0] == many[123]
    for other in (uniforms(4, 7, np.arange(20_000)), uniforms(3, 8, np.arange(20_000))):
        assert np.corrcoef(many, other)[0, 1] == pytest.approx(0, abs=0.03)


def agreement(oracle, request, size):
    return oracle.runs(request, size) > 0


def test_rates_have_the_mean_and_the_spread_asked_for():
    oracle = Draw(0.7, 0.1).oracle(EVERYBODY, seed=1)
    assert oracle.rates.mean() == pytest.approx(0.7, abs=0.01)
    assert oracle.rates.std() == pytest.approx(0.1, abs=0.01)
    for request in (0, 1, 2):
        share = agreement(oracle, request, 20_000).mean()
        assert share == pytest.approx(oracle.rates[request], abs=0.02)
    assert Draw(0.7, 0.1).oracle(EVERYBODY, 1).rates.tolist() == oracle.rates.tolist()
    assert Draw(0.7, 0.1).oracle(EVERYBODY, 2).rates.tolist() != oracle.rates.tolist()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_of_zero_and_one_are_certain(rate):
    assert agreement(Draw(rate).oracle(EVERYBODY, 0), 5, 500).mean() == rate


def test_categories_have_rates_of_their_own():
    oracle = Draw(0.5, by_category={"maths": 0.9}).oracle(["maths", "prose", "maths"], 0)
    assert oracle.rates.tolist() == [0.9, 0.5, 0.9]


def test_a_drift_changes_the_rate_along_the_output():
    oracle = Draw(0.9, 0.0, -0.1).oracle(EVERYBODY, 0)
    agrees = np.array([agreement(oracle, request, 500) for request in range(400)])
    assert agrees[:, :20].mean() == pytest.approx(0.89, abs=0.02)
    assert agrees[:, 380:420].mean() == pytest.approx(0.5, abs=0.02)


def test_the_confidence_of_drawn_drafts_is_calibrated():
    oracle = Draw(0.8).oracle(EVERYBODY, 0)
    sure, right = oracle.confidence(3, 0, 50_000), agreement(oracle, 3, 50_000)
    assert sure.mean() == pytest.approx(0.8, abs=0.01)
    for low in (0.3, 0.6, 0.9):
        chosen = (sure > low) & (sure < low + 0.1)
        assert right[chosen].mean() == pytest.approx(sure[chosen].mean(), abs=0.05)
    assert oracle.confidence(3, 100, 5).tolist() == sure[100:105].tolist()


SEQUENCES = Replay(
    np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=np.bool_),
    np.array([[0.9, 0.8, 0.1, 0.7], [0.0] * 4, [0.5] * 4]),
    ("maths", "prose", "maths"),
)


def test_requests_replay_a_sequence_of_their_category_round_and_round():
    oracle = SEQUENCES.oracle(["maths", "prose"] * 50, seed=3)
    assert set(oracle.chosen[0::2].tolist()) == {0, 2}
    assert set(oracle.chosen[1::2].tolist()) == {1}
    whole = oracle.chosen.tolist().index(0)
    assert oracle.runs(whole, 10).tolist() == [2, 1, 0, 3, 2, 1, 0, 3, 2, 1]
    assert oracle.confidence(whole, 3, 3).tolist() == [0.7, 0.9, 0.8]
    again, other = SEQUENCES.oracle(["maths"] * 50, 3), SEQUENCES.oracle(["maths"] * 50, 4)
    assert again.chosen[0] == oracle.chosen[0]
    assert again.chosen.tolist() != other.chosen.tolist()


def test_an_unknown_category_takes_any_sequence():
    assert set(SEQUENCES.oracle(["song"] * 50, 0).chosen.tolist()) == {0, 1, 2}


def test_the_shipped_sequences_are_those_of_their_readme():
    shipped = Replay.shipped()
    assert shipped.agreement.shape == shipped.confidence.shape == (96, 160)
    assert shipped.agreement.mean() == pytest.approx(0.81, abs=0.005)
    assert Counter(shipped.categories)["rag"] == 16
    assert len(set(shipped.categories)) == 13
    sure = shipped.confidence > 0.9
    assert shipped.agreement[sure].mean() > 0.95 > shipped.agreement[~sure].mean()


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_acceptance_rate_is_recovered_from_accepted_counts(rate):
    lengths = {1: 1000, 3: 2000, 4: 500}
    accepted = sum(count * sum(rate**t for t in range(1, length + 1)) for length, count in lengths.items())
    assert rate_of(round(accepted), lengths) == pytest.approx(rate, abs=1e-3)


def test_a_document_gives_its_rates_by_category():
    draw = draw_like(Document.from_dict(json.loads(PATH.read_text())), 0.05)
    assert set(draw.by_category) == {"maths", "prose"}
    assert draw.mean == pytest.approx(0.71, abs=0.04)  # the example drafts with 0.70 and 0.72
    assert all(rate == pytest.approx(draw.mean, abs=0.08) for rate in draw.by_category.values())
    assert draw.spread == 0.05


def test_acceptance_is_named_on_the_command_line(tmp_path):
    assert parse_acceptance("0.7") == Draw(0.7)
    assert parse_acceptance("0.7:0.1:-0.05") == Draw(0.7, 0.1, -0.05)
    assert len(parse_acceptance("replay").categories) == 96
    assert parse_acceptance(str(PATH)).by_category
    assert parse_acceptance(f"{PATH}:0.1").spread == 0.1
    odd = tmp_path / "a:b.json"
    odd.write_bytes(Path(PATH).read_bytes())
    assert parse_acceptance(str(odd)).spread == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.2", "expected a probability"),
        ("0.5:0.9", "expected a spread from 0 to below 0.5"),
        ("0.5:-1", "expected a spread"),
        ("1:0.1", "expected a spread"),
        ("0.5:0.1:inf", "drift"),
        ("nan", "expected a probability"),
        ("0.5:0.1:0:0", "expected replay"),
        ("nowhere.json", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_a_wrong_acceptance_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_acceptance(text)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"version": 1}'])
def test_a_file_that_is_not_a_document_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--acceptance"):
        parse_acceptance(str(path))


def test_a_document_without_drafts_is_refused():
    document = Document.from_dict(json.loads(PATH.read_text()))
    quiet = Document(**{**document.__dict__, "runs": tuple(run for run in document.runs if run.policy == "off")})
    with pytest.raises(ConfigError, match="play one with fixed:K"):
        draw_like(quiet)
