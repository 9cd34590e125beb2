"""The matrix of regret: derived profiles, traffic and scores."""

from __future__ import annotations

import pytest

from benchmarks.regret import (
    LOADS,
    MIXES,
    PAIRS,
    Cell,
    Played,
    Turned,
    is_hopeless,
    parse,
    play_cell,
    profile_of,
    saturation,
    scores_of,
)
from faser.sim.oracle import Draw

CELL = Cell("8b-1b", "code", 0.9, "quiet")


def played(column: str, rate: float, seconds: float, seed: int = 0) -> Played:
    return Played(CELL, column, seed, rate, seconds, 1.0)


def test_a_head_and_an_fp8_target_are_derived_by_the_stated_arithmetic():
    base, head, fp8 = (profile_of(pair) for pair in ("8b-1b", "8b-head", "fp8-8b-1b"))
    assert head.next_draft(1, 0.0) == pytest.approx(0.24e-3, rel=0.01)
    assert head.first_draft(1, 0.0) == pytest.approx(0.31e-3, rel=0.01)
    assert head.verify == base.verify
    assert base.verify(64, 0.0) - fp8.verify(64, 0.0) == pytest.approx(1.7e-3)
    assert fp8.next_draft == base.next_draft


@pytest.mark.parametrize("pair", PAIRS)
def test_longer_requests_saturate_a_machine_sooner(pair):
    rates = {name: saturation(pair, mix) for name, mix in MIXES.items()}
    assert 0 < rates["long"] < rates["chat"]


def test_a_load_is_scaled_in_time_and_not_in_rate():
    arrivals, seconds = LOADS["square"].options(10.0, 0.5)
    assert arrivals == "square:1.0000:9.5000:10.0000"
    assert seconds == 20.0


def test_the_scores_are_against_the_best_column_of_each_figure_and_both_against_one_that_is_ahead_in_both():
    runs = [played("faser", 100, 0.01), played("off", 110, 0.02), played("fixed:1", 90, 0.008)]
    scores = {each.figure: each for each in scores_of(runs, "faser")}
    assert (scores["tokens_per_s"].best, scores["seconds_per_token"].best) == ("off", "fixed:1")
    assert scores["tokens_per_s"].score == pytest.approx(100 / 110)
    assert scores["seconds_per_token"].score == pytest.approx(0.8)
    assert scores["both"].score > 1, "nobody is ahead in both"
    scores = {each.figure: each for each in scores_of([*runs, played("goodput", 105, 0.009)], "faser")}
    assert scores["both"].best == "goodput"
    assert scores["both"].score == pytest.approx(100 / 105)


def test_longer_lengths_are_left_out_once_one_is_worse_in_both_figures():
    best = played("off", 100, 0.01)
    assert is_hopeless(played("fixed:3", 90, 0.02), [best])
    assert not is_hopeless(played("fixed:3", 90, 0.01), [best])


def test_a_run_is_read_back_from_its_line_and_known_columns_are_not_played_again():
    cell = Cell("8b-1b", "code", 0.9, "quiet")
    first = play_cell(cell, 0, ("off", "fixed:2"), 0.05, [])
    assert [Played.parse(each.line()) for each in first] == first
    (second,) = play_cell(cell, 0, ("faser", "off", "fixed:2"), 0.05, first)
    assert second.column == "faser"
    assert second.mean_length > 0


def test_a_texts_character_turns_at_one_position():
    before, after = (Draw(rate).oracle([""], 1) for rate in (1.0, 0.0))
    runs = Turned(before, after, 6).runs(0, 10)
    assert runs.tolist() == [6, 5, 4, 3, 2, 1, 0, 0, 0, 0]


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--pairs", "70b"])
    assert "70b: expected one of 8b-1b" in capsys.readouterr().err
