"""The figures: what is counted, what it is called, and what the dashboard says in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from faser.request import FinishReason
from faser.server.dashboard import Dashboard, describe, describe_exits, describe_failure, describe_residency
from faser.server.engine_client import Stream, Track
from faser.server.figures import Figures, Histogram
from faser.server.messages import DraftResidency, Exits, Snapshot
from faser.server.metrics import PrometheusText

NOW = 1000.0


def snapshot(**fields) -> Snapshot:
    plain = dict.fromkeys(Snapshot.__struct_fields__, 0)
    lists = {name: [] for name in ("lengths", "verified_per_position", "accepted_per_position")}
    absent = {"exits": None, "residency": None}
    return Snapshot(**{**plain, **lists, **absent, "speculating_changed": NOW - 12, "num_pages": 10, **fields})


def away(**fields) -> DraftResidency:
    plain = {"is_resident": False, "away_seconds": 7.5, "moves": 3, "pages_gained": 4, "last_move_seconds": 0.02}
    return DraftResidency(**{**plain, "failure": None, **fields})


def about():
    return SimpleNamespace(model="m", draft="d", policy="fixed:2", device="cpu", dtype="float32", max_running=4,
                           num_pages=10, page_size=16, kv_tokens=160)  # fmt: skip


def engine(running=0, waiting=0):
    return SimpleNamespace(about=about(), state="ready", num_restarts=0, num_running=running, num_waiting=waiting)


def test_a_histogram_counts_each_value_below_its_bound():
    histogram = Histogram((1, 2))
    for value, times in ((0.5, 1), (1, 1), (1.5, 3), (9, 1)):
        histogram.add(value, times)
    assert histogram.buckets() == ([("1.0", 2), ("2.0", 5), ("+Inf", 6)], 15.0)
    assert histogram.mean() == 2.5


def test_latency_is_per_token_however_tokens_are_grouped():
    figures, track = Figures(), Track("1", 0, 10.0, 5, Stream())
    figures.gained(track, 1, 10.5)
    figures.gained(track, 4, 12.5)
    figures.gained(track, 1, 13.0)
    figures.ended(track, FinishReason.STOP, 13.0)
    buckets, total = figures.between_tokens.buckets()
    assert (buckets[-1][1], total) == (5, 2.5)
    assert figures.first_token.buckets()[1] == 0.5
    assert figures.per_token.buckets()[1] == pytest.approx(2.5 / 5)
    assert figures.request_seconds.buckets()[1] == 3.0
    assert (figures.output_tokens, figures.prompt_tokens, figures.ends) == (6, 5, {"stop": 1})


def test_a_cancelled_request_is_counted_and_adds_no_latency():
    figures = Figures()
    figures.ended(Track("1", 0, 10.0, 5, Stream()), FinishReason.CANCELLED, 99.0)
    assert figures.ends == {"cancelled": 1}
    assert figures.request_seconds.buckets()[0][-1][1] == 0


def test_metrics_carry_their_names_and_the_snapshot_s_numbers():
    figures = Figures()
    figures.latest = snapshot(
        drafted=30, verified=25, accepted=20, pages_held=5, draft_pages_held=2,
        lengths=[4, 0, 15], accepted_per_position=[12, 8], off_seconds=1.5, looked_up=12, lookup_accepted=11,
    )  # fmt: skip
    text = PrometheusText(figures, engine(running=3, waiting=2)).render().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    plain = {name: values[0][1] for name, values in found.items()}
    assert plain["vllm:num_requests_running"] == 3
    assert plain["vllm:num_requests_waiting"] == 2
    assert plain["vllm:kv_cache_usage_perc"] == 0.5
    assert plain["vllm:spec_decode_num_drafts_total"] == 15
    assert plain["vllm:spec_decode_num_draft_tokens_total"] == 30
    assert plain["vllm:spec_decode_num_accepted_tokens_total"] == 20
    assert plain["faser:spec_decode_num_verified_tokens_total"] == 25
    assert plain["faser:spec_decode_num_pruned_tokens_total"] == 5
    assert plain["faser:speculation_off_seconds_total"] == 1.5
    assert plain["faser:draft_resident"] == 1
    assert plain["faser:kv_pages"] == 10
    assert plain["faser:draft_kv_cache_usage"] == 0.2
    assert plain["faser:draft_moves_total"] == plain["faser:draft_away_seconds_total"] == 0
    positions = {
        labels["position"]: value for labels, value in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    }
    assert positions == {"0": 12, "1": 8}
    for what, expected in (("draft", {"lookup": 12, "draft": 18}), ("accepted", {"lookup": 11, "draft": 9})):
        samples = found[f"faser:spec_decode_guesser_{what}_tokens_total"]
        assert {labels["guesser"]: value for labels, value in samples} == expected
    lengths = {labels["le"]: value for labels, value in found["faser:draft_length_bucket"]}
    assert (lengths["0.0"], lengths["1.0"], lengths["2.0"], lengths["+Inf"]) == (4, 4, 19, 19)
    assert plain["faser:draft_length_sum"] == 30
    assert all(labels["model_name"] == "m" for values in found.values() for labels, _ in values)


def metrics(now: Snapshot) -> dict[str, float]:
    figures = Figures()
    figures.latest = now
    families = text_string_to_metric_families(PrometheusText(figures, engine()).render().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_tell_where_the_draft_is():
    found = metrics(snapshot(draft_pages_held=0, pages_held=7, num_pages=14, residency=away()))
    assert found["faser:draft_resident"] == 0
    assert found["faser:draft_away_seconds_total"] == 7.5
    assert found["faser:draft_moves_total"] == 3
    assert found["faser:draft_pages_gained"] == 4
    assert found["faser:draft_last_move_seconds"] == 0.02
    assert found["faser:kv_pages"] == 14
    assert found["vllm:kv_cache_usage_perc"] == 0.5, "of the pages that there are now"
    back = away(is_resident=True, pages_gained=0)
    assert metrics(snapshot(draft_pages_held=0, residency=back))["faser:draft_resident"] == 1
    assert metrics(snapshot(draft_pages_held=None))["faser:draft_resident"] == 0, "there is no draft model"


def test_the_kv_cache_is_never_more_than_full():
    """While pages are vacated, some that are held lie beyond the end of the pool."""
    assert metrics(snapshot(pages_held=13, residency=away(pages_gained=0)))["vllm:kv_cache_usage_perc"] == 1


def test_early_exit_is_told_by_layer_and_in_words():
    figures = Figures()
    exits = Exits({0: 7, 12: 1200}, 5, 40, 2, 0.25, -0.5)
    figures.latest = snapshot(drafted=30, verified=25, exits=exits)
    text = PrometheusText(figures, engine()).render().decode()
    found = {
        (sample.name, sample.labels.get("layer")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["faser:early_exit_pruned_tokens_total", "0"] == 7
    assert found["faser:early_exit_pruned_tokens_total", "12"] == 1200
    assert found["faser:early_exit_trials_total", None] == 5
    assert found["faser:early_exit_trial_pruned_tokens_total", None] == 40
    assert found["faser:spec_decode_num_false_pruned_tokens_total", None] == 2
    assert found["faser:early_exit_predicted_seconds", None] == 0.25
    assert found["faser:early_exit_measured_seconds", None] == -0.5
    assert describe_exits(figures.latest) == (
        "Early exit pruned 7 before the first layer, 1,200 after layer 12; 5.0 % of it wrongly, by 5 trials."
    )
    assert describe_exits(snapshot(exits=Exits({}, 3, 0, 0, 0.0, 0.0))) == (
        "Early exit: nothing pruned so far, 3 trials."
    )
    assert describe_exits(snapshot()) == ""


WORDS = {
    "speculation off for 12 s; last step: 180 requests decoding": (179, {"last_decoding": 180}),
    "speculation off for 12 s, the draft is offloaded; last step: 9 requests decoding": (
        9, {"last_decoding": 9, "residency": away()},
    ),
    "last step: 2 tokens drafted for each of 3 requests": (
        3, {"last_decoding": 3, "last_drafting": 3, "last_drafted": 6},
    ),
    "last step: 1 token drafted for 1 of 2 requests": (2, {"last_decoding": 2, "last_drafting": 1, "last_drafted": 1}),
    "last step: 1.5 tokens on average drafted for each of 2 requests": (
        2, {"last_decoding": 2, "last_drafting": 2, "last_drafted": 3},
    ),
    "idle; policy fixed:2": (0, {"last_drafting": 3}),
    "1 request being read; none decodes yet": (1, {"speculating_changed": None}),
}  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_speculation_is_described_in_words(words):
    running, fields = WORDS[words]
    assert describe(snapshot(**fields), running, NOW, "fixed:2") == words


def test_the_draft_s_place_is_described_in_words():
    told = "The draft is offloaded: its memory holds 1,200 more KV pages (+24 %)."
    assert describe_residency(snapshot(num_pages=6200, residency=away(pages_gained=1200))) == told
    assert describe_residency(snapshot(residency=away(pages_gained=0))) == "The draft is being moved."
    for resident in (None, snapshot(), snapshot(residency=away(is_resident=True, pages_gained=0))):
        assert describe_residency(resident) == ""
        assert describe_failure(resident) == ""
    assert describe_failure(snapshot(residency=away(failure="it could not be loaded (out of memory)"))) == (
        "The draft is away: it could not be loaded (out of memory). Serving without speculation, trying again later."
    )


IDLE = snapshot()


class Board:
    """A dashboard whose clock, engine and snapshots the test moves."""

    def __init__(self, monkeypatch, first: Snapshot | None = IDLE) -> None:
        self.now, self.figures, self.client = NOW, Figures(), engine()
        monkeypatch.setattr("faser.server.dashboard.monotonic", lambda: self.now)
        self.board = Dashboard(self.figures, self.client)
        self.figures.latest = first
        self.tick()

    def tick(self, seconds=1.0) -> None:
        self.now += seconds
        self.board.tick()

    def play(self, seconds: int, step: float, running: int) -> None:
        """Seconds in which steps run, one after the other. Each brings every running request a token."""
        self.client.num_running = running
        began, first = self.now, self.figures.latest
        for second in range(1, seconds + 1):
            done = int(second / step + 1e-9)
            self.figures.latest = snapshot(
                time=began + done * step, steps=first.steps + done, emitted=first.emitted + done * running,
                step_seconds=first.step_seconds + done * step,
            )  # fmt: skip
            self.tick()

    def history(self) -> dict:
        return self.board.data("ready")["history"]


def test_the_dashboard_s_history_holds_rates_between_seconds(monkeypatch):
    board = Board(monkeypatch)
    board.client.num_running = 2
    board.figures.latest = snapshot(
        time=NOW + 3, emitted=50, steps=10, step_seconds=1.0, predicted_seconds=0.8, accepted=20, drafted=30,
        verified=28, lengths=[5, 0, 15], verified_per_position=[15, 13], accepted_per_position=[12, 8],
        pages_held=5,
    )  # fmt: skip
    board.tick(2.0)
    data = board.board.data("ready")
    history = data["history"]
    assert history["output_rate"][-1] == 25.0
    assert history["step_ms"][-1] == 100.0
    assert history["predicted_ms"][-1] == pytest.approx(80.0)
    assert history["accepted_rate"][-1] == 10.0
    assert history["mean_length"][-1] == 1.5
    assert history["kv_used"][-1] == 0.5
    assert history["running"][-1] == data["now"]["running"] == 2
    assert data["now"]["output_rate"] == 25.0
    assert data["drafted"]["total"] == {"accepted": 20, "rejected": 8, "pruned": 2}
    assert data["positions"] == {"verified": [15, 13], "accepted": [12, 8]}
    assert data["lengths"] == [5, 0, 15]


def test_the_dashboard_counts_contexts_of_the_last_minute(monkeypatch):
    board = Board(monkeypatch)
    empty = {"steps": 0, "drafted": 0, "verified": 0, "accepted": 0}
    names = [(0, 512), (512, 2048), (2048, 8192), (8192, 32_768), (32_768, None)]
    untouched = [{"above": above, "most": most, **empty} for above, most in names]
    assert board.board.data("ready")["contexts"] == untouched
    board.figures.latest = snapshot(by_context=[[5, 0, 0, 0, 1], [9, 0, 0, 0, 4], [8, 0, 0, 0, 4], [3, 0, 0, 0, 2]])
    board.tick(2.0)
    first, *between, long = board.board.data("ready")["contexts"]
    assert first == {"above": 0, "most": 512, "steps": 5, "drafted": 9, "verified": 8, "accepted": 3}
    assert long == {"above": 32_768, "most": None, "steps": 1, "drafted": 4, "verified": 4, "accepted": 2}
    assert between == untouched[1:-1]
    board.tick(61.0)
    assert board.board.data("ready")["contexts"] == untouched


def test_the_dashboard_shows_the_pool_as_large_as_it_is(monkeypatch):
    board = Board(monkeypatch)
    for seen in (
        snapshot(pages_held=8),
        snapshot(pages_held=8, num_pages=16, residency=away(pages_gained=6)),
        snapshot(pages_held=16, num_pages=16, residency=away(pages_gained=6)),
        snapshot(pages_held=12, residency=away(pages_gained=0)),
        snapshot(pages_held=5, residency=away(is_resident=True, pages_gained=0)),
    ):
        board.figures.latest = seen
        board.tick()
    history = board.history()
    assert history["kv_used"][-5:] == [0.8, 0.5, 1.0, 1.0, 0.5]
    assert history["kv_gained"][-5:] == [None, 0.6, 0.6, None, None]
    assert board.board.data("ready")["now"]["kv_tokens"] == 160
    board.figures.latest = snapshot(num_pages=16, residency=away(pages_gained=6, failure="no memory"))
    data = board.board.data("ready")
    assert (data["now"]["kv_tokens"], data["now"]["kv_gained"]) == (256, 0.6)
    assert "no memory" in data["draft_failure"]


def test_a_draft_that_does_not_fit_is_shown_and_a_move_that_failed_comes_first():
    reason = "only 1.0 % of 500 first tokens were accepted"
    found = snapshot(misfit=reason)
    assert found.draft_failure == reason
    assert describe_failure(found) == f"The draft guesses badly: {reason}"
    assert metrics(found)["faser:draft_misfit"] == 1
    assert metrics(snapshot())["faser:draft_misfit"] == 0
    assert describe_failure(snapshot(misfit="")) == ""
    both = snapshot(misfit=reason, residency=away(failure="no memory"))
    assert both.draft_failure == "no memory"
    assert describe_failure(both).startswith("The draft is away: no memory")


@pytest.mark.parametrize("step", [0.05, 0.7, 3.2, 30.0])
def test_rates_are_steady_however_long_a_step_takes(monkeypatch, step):
    board = Board(monkeypatch)
    board.play(seconds=200, step=step, running=21)
    history = board.history()
    num_before = int(step) + 2  # points until the first step has ended
    rates = history["output_rate"][num_before:]
    assert rates == pytest.approx([21 / step] * len(rates), rel=0.01)
    assert {round(milliseconds) for milliseconds in history["step_ms"][num_before:]} == {round(1000 * step)}


def test_the_rate_of_the_first_step_counts_from_the_start(monkeypatch):
    board = Board(monkeypatch, first=None)
    board.client.num_running = 8
    board.tick()
    board.figures.latest = snapshot(time=board.now + 1, steps=1, emitted=8, step_seconds=2.0)
    board.tick()
    assert board.history()["output_rate"] == [0.0, 0.0, 4.0]


def test_a_rate_is_zero_again_when_nothing_is_open_and_when_the_engine_hangs(monkeypatch):
    board = Board(monkeypatch)
    board.play(seconds=30, step=2.0, running=4)
    board.client.num_running = 0
    board.tick()
    board.tick()
    assert board.history()["output_rate"][-3:] == [2.0, pytest.approx(2.0, rel=0.2), 0.0]
    board.play(seconds=30, step=2.0, running=4)
    for _ in range(130):
        board.tick()
    assert board.history()["output_rate"][-1] == 0.0


def test_the_lengths_of_now_are_those_of_several_steps(monkeypatch):
    board = Board(monkeypatch)
    board.client.num_running = 4
    for step in range(6):
        board.figures.latest = snapshot(time=board.now, steps=step, lengths=[0, 4 * step])
        for _ in range(10):
            board.tick()
    assert board.board.data("ready")["lengths"] == [0, 12]


@pytest.mark.parametrize(("accepted", "told"), [([], [0, 0]), ([3], [3, 0])])
def test_a_position_at_which_nothing_was_ever_accepted_has_a_zero(accepted, told):
    figures = Figures()
    board = Dashboard(figures, engine())
    figures.latest = snapshot(verified_per_position=[15, 13], accepted_per_position=accepted)
    board.tick()
    assert board.data("ready")["positions"] == {"verified": [15, 13], "accepted": told}


@pytest.mark.parametrize("steps", [1, 1000])
def test_an_engine_started_again_does_not_make_negative_rates(steps):
    figures, client = Figures(), engine()
    board = Dashboard(figures, client)
    figures.latest = snapshot(steps=100, accepted=50, step_seconds=3.0)
    board.tick()
    client.num_restarts = 1
    figures.latest = snapshot(steps=steps, accepted=1, step_seconds=0.1)
    board.tick()
    history = board.data("ready")["history"]
    assert history["accepted_rate"][-1] == 0
    assert history["step_ms"][-1] is None
