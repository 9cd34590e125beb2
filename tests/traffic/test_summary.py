import pytest

from faser.bench.results import run_document
from faser.errors import ConfigError
from faser.traffic.document import FIGURES, Record, Run, RunDocument
from faser.traffic.summary import Slo, categories, group_runs, rank, summarize
from faser.traffic.workload import Load

RECORDS = (
    Record(0, "a", 5, 0.0, 0.5, 2.5, 5, None, 8, 6, 2, 3, (1, 0, 0, 2)),
    Record(1, "b", 7, 1.0, 2.0, 4.0, 2, None, 2, 2, 1, 1, (0, 0, 1)),
    Record(2, "a", 7, 2.0, 2.25, 2.25, 1, None, 0, 0, 0, 1, (1,)),
    Record(3, "b", 7, 3.0, None, None, 0, "dropped"),
)
RUN = Run("x", RECORDS, 4.0, context_rows=92)


def test_the_figures_are_those_computed_by_hand():
    figures = summarize(RUN, Slo({"ttft": 0.6, "tpot": 0.5}))
    assert tuple(figures) == FIGURES
    right = {
        "requests": 4, "lost": 1, "output_tokens": 8, "seconds": 4.0, "output_tokens_per_s": 2.0,
        "requests_per_s": 0.75,
        "latency_per_token_mean": (0.5 + 1.5 + 0.25) / 3, "latency_per_token_p50": 0.5, "latency_per_token_p99": 1.5,
        "ttft_mean": (0.5 + 1.0 + 0.25) / 3, "ttft_p50": 0.5, "ttft_p99": 1.0,
        "tpot_mean": (0.5 + 2.0) / 2, "tpot_p50": 2.0, "tpot_p99": 2.0,  # one token has no time per further token
        "e2e_mean": (2.5 + 3.0 + 0.25) / 3, "e2e_p50": 2.5, "e2e_p99": 3.0,
        "goodput_share": 0.5, "goodput_per_s": 0.5,  # requests 0 and 2; the lost one counts as missed
        "acceptance": 3 / 8, "wasted_rows": 5, "wasted_share": 5 / 100, "mean_length": (3 + 3 + 2) / 5,
    }  # fmt: skip
    assert figures == pytest.approx(right)


def test_a_value_that_a_system_does_not_report_is_none():
    told = summarize(Run("x", (Record(0, "", 5, 0.0, 0.5, 2.5, 5),), 2.5))
    for name in ("acceptance", "wasted_rows", "wasted_share", "mean_length", "goodput_share", "goodput_per_s"):
        assert told[name] is None
    nothing = summarize(Run("x", (), 0.0), Slo({"ttft": 1.0}))
    assert nothing["requests"] == 0
    assert nothing["output_tokens_per_s"] is None
    assert nothing["ttft_mean"] is None


def test_acceptance_is_over_drafts_if_a_server_does_not_report_verified_ones():
    told = summarize(Run("x", (Record(0, "", 5, 0.0, 0.5, 2.5, 5, drafted=8, accepted=2),), 2.5))
    assert (told["acceptance"], told["wasted_rows"], told["wasted_share"]) == (0.25, 6, None)


def test_ranks_are_those_of_the_scripts_for_other_systems():
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank(list(range(1000)), 0.99) == 990
    assert rank([1.0], 0.99) == 1.0


def test_categories_are_counted_apart():
    found = categories(RECORDS)
    assert list(found) == ["a", "b"]
    assert (found["a"].requests, found["a"].verified, found["a"].accepted) == (2, 6, 2)
    assert found["a"].lengths == (2, 0, 0, 2)
    assert (found["b"].requests, found["b"].lost, found["b"].output_tokens) == (2, 1, 2)


def document_of(seconds, partial=False, rate=1.0) -> RunDocument:
    run = Run("x", RECORDS, seconds, partial=partial)
    return run_document(run, policy="off", load=Load(rate), repeat=0, slo=None)


def test_repeats_become_median_and_spread():
    (group,) = group_runs([document_of(2.0), document_of(8.0), document_of(4.0)])
    spread = group.figures["output_tokens_per_s"]
    assert (group.repeats, spread.median, spread.min, spread.max) == (3, 2.0, 1.0, 4.0)
    assert group.figures["goodput_share"] is None


def test_an_interrupted_repeat_counts_only_if_all_are_interrupted():
    (group,) = group_runs([document_of(2.0), document_of(8.0, partial=True)])
    assert (group.repeats, group.partial, group.figures["seconds"].median) == (1, False, 2.0)
    (group,) = group_runs([document_of(8.0, partial=True)])
    assert (group.repeats, group.partial) == (1, True)


def test_other_loads_are_other_groups():
    assert [group.rate for group in group_runs([document_of(2.0), document_of(2.0, rate=2.0)])] == [1.0, 2.0]


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "speed=1", "ttft=1,", "ttft=nan"])
def test_a_wrong_objective_is_refused(text):
    with pytest.raises(ConfigError, match="expected seconds by name"):
        Slo.parse(text)


def test_an_objective_is_read():
    assert Slo.parse("ttft=0.5, tpot=0.05").most == {"ttft": 0.5, "tpot": 0.05}
