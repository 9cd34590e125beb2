"""What benchmarks/heads.py plays and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import heads
from benchmarks.lib import head_models, heads_report
from benchmarks.lib.head_models import PUBLISHED, expected_tokens
from benchmarks.lib.journal import Journal
from benchmarks.vllm_plugin import Answer, Shape

TINY = ["--tiny", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUT", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with tiny models, heads and prompts."""
    path = tmp_path_factory.mktemp("made")
    heads.work(heads.parse_args([*TINY, "--worker", "models", "--folder", str(path)]), Journal(path / "none", 1.0))
    return path


def play_mode(made, tmp_path, mode, *flags):
    """The records of a mode, played in this process."""
    args = heads.parse_args([*TINY, "--folder", str(made), "--worker", "faser", "--only-mode", mode, *flags])
    journal = Journal(tmp_path / "heads.jsonl", 1.0)
    heads.work(args, journal)
    return journal.read()


def loop(mode, policy, tpot, batch=1, text="specbench", temperature=0.0, session=1.0):
    about = {"kind": "loop", "session": session, "mode": mode, "policy": policy, "text": text, "batch": batch}
    return about | {"temperature": temperature, "tpot_ms": tpot, "tokens_per_step": 2.0}


def aim_of(records, what):
    return next(aim for aim in heads_report.aims(records) if aim.what == what)


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["off", "model", "eagle3", "block"])
def test_a_mode_plays_every_policy_at_every_setting(made, folder, mode):
    records = play_mode(made, folder, mode, "--parts", "loops", "--batches", "1", "--texts", "code")
    assert not [record for record in records if record["kind"] == "failed"]
    played = [(each["policy"], each["temperature"]) for each in records if each["kind"] == "loop"]
    policies = ["off"] if mode == "off" else ["faser", "fixed:2"]
    assert played == [(policy, temperature) for policy in policies for temperature in (0.0, 1.0)]
    loops = [record for record in records if record["kind"] == "loop"]
    assert all(record["tokens_per_step"] >= 1 and record["tpot_ms"] > 0 for record in loops)
    if mode == "model":
        assert loops[-1]["tokens_per_step"] > 1, "its weights are the target's with a little noise"


def test_equal_is_played_at_the_lengths_of_vllm(made, folder):
    flags = ["--parts", "equal", "--modes", "eagle3,vllm:eagle3:1,vllm:eagle3:2", "--texts", "code"]
    records = play_mode(made, folder, "eagle3", *flags)
    assert [each["length"] for each in records if each["kind"] == "equal"] == [1, 2]


@pytest.mark.parametrize("head", PUBLISHED)
def test_published_heads_are_played_on_both_texts(made, folder, head):
    records = play_mode(made, folder, f"published:{head}")
    assert [(each["head"], each["text"]) for each in records] == [(head, "chat"), (head, "code")]
    assert records[0]["expected_tokens"] < records[1]["expected_tokens"]


@pytest.mark.parametrize("head", head_models.HEADS)
def test_steps_with_a_head_that_does_not_draft_take_turns_with_plain_ones(made, folder, head):
    (record,) = play_mode(made, folder, f"idle:{head}")
    assert [len(turns) for turns in record["turns_ms"]] == [1 + heads.TINY_LOOPS.idle_turns] * 2
    assert record["ratio"] == pytest.approx(record["step_ms"] / record["without_ms"], abs=0.01)


def test_vllm_is_given_the_same_head_and_graphs_for_its_batch(tmp_path):
    shape = Shape(max_running=256)
    given = heads.VllmHeadMode("vllm:eagle3:5").engine_args(tmp_path, shape, on_gpu=True)
    expected = {"method": "eagle3", "model": str(tmp_path / "eagle3"), "num_speculative_tokens": 5}
    assert given["speculative_config"] == expected
    assert given["async_scheduling"] is True
    assert given["compilation_config"] == {"max_cudagraph_capture_size": 256 * 6}
    assert not given["disable_log_stats"], "drafts are counted"
    model = heads.VllmHeadMode("vllm:model:3").engine_args(tmp_path, shape, on_gpu=True)
    assert model["speculative_config"]["method"] == "draft_model"
    assert "speculative_config" not in heads.VllmHeadMode("vllm:off").engine_args(tmp_path, shape, on_gpu=True)


def test_modes_and_parts_are_chosen_and_unknown_ones_refused(tmp_path, capsys):
    args = heads.parse_args([*TINY, "--parts", "off,published"])
    assert args.modes == [mode for mode in heads.OWN_MODES if mode.startswith(("idle:", "published:"))]
    bundled = heads.parse_args([*TINY, "--parts", "equal", "--vllm-bundle", str(tmp_path)])
    assert bundled.modes == ["eagle3", "vllm:eagle3:3", "vllm:eagle3:5"]
    for modes in ("vllm:eagle3", "vllm:medusa:3", "vllm:eagle3:0", "published:medusa"):
        with pytest.raises(SystemExit):
            heads.parse_args([*TINY, "--modes", modes])
        assert modes in capsys.readouterr().err


def test_a_mode_without_its_head_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        heads.parse_args(["--folder", str(tmp_path), "--modes", "off,eagle3,published:eagle3"])
    assert "error: eagle3: give --eagle3" in capsys.readouterr().err


# ── loops ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeLoops:
    """Answers at once; a draft of K tokens takes K milliseconds a token."""

    policies = ("faser", "fixed:1", "fixed:3", "fixed:5")

    def __init__(self):
        self.policy, self.total, self.most_open = "", heads.Counts(), 0

    def prepare(self, policy):
        self.policy = policy

    def counts(self):
        return self.total

    def loop(self, requests, size, seconds):
        self.most_open = max(self.most_open, size)
        answers = [Answer(0.0, [7] * each["max_tokens"], 0.0, self._seconds(each["max_tokens"])) for each in requests]
        tokens = sum(each["max_tokens"] for each in requests)
        half, before = tokens // 2, self.total
        self.total = heads.Counts(
            before.steps + half, before.tokens + tokens, before.drafts + half, before.accepted + half
        )
        return answers, 1.0

    def _seconds(self, tokens):
        return 1e-3 * (tokens - 1) * (1 if self.policy == "faser" else int(self.policy[-1]))


def test_longer_drafts_are_not_tried_where_a_shorter_one_is_hopeless(made, folder):
    args = heads.parse_args([*TINY, "--folder", str(made), "--only-mode", "eagle3", "--texts", "code"])
    journal = Journal(folder / "heads.jsonl", 1.0)
    player = FakeLoops()
    heads.measure_loops(args, journal, player)
    played = [each["policy"] for each in journal.read() if (each["batch"], each["temperature"]) == (2, 1.0)]
    assert played == ["faser", "fixed:1", "fixed:3"]
    first = journal.read()[0]
    assert first["tpot_ms"] == pytest.approx(1.0)
    assert first["tokens_per_step"] == first["tokens_per_draft"] == 2
    assert player.most_open == 2


def test_a_closed_loop_keeps_its_size_and_answers_every_request(made, folder):
    args = heads.parse_args([*TINY, "--folder", str(made)])
    player = heads.FaserLoops.load(args, "eagle3")
    player.prepare("fixed:2")
    requests = head_models.loop_requests(made, "code", 5, 4, 1.0)
    running = []
    step = player.engine.step
    player.engine.step = lambda: running.append(player.engine.scheduler.num_running) or step()
    answers, _ = player.loop(requests, 2, 60.0)
    assert [len(answer.token_ids) for answer in answers] == [4] * 5
    assert max(running) == 2
    counts = player.counts()
    assert counts.drafts > 0
    assert counts.tokens == 5 * 3, "the first tokens come from prompts"
    assert counts.steps == counts.tokens - counts.accepted
    with pytest.raises(TimeoutError):
        player.loop(requests, 2, 0.0)
    assert not player.engine.has_work


def test_wrong_numbers_of_tokens_fail_a_loop(made):
    class Short(FakeLoops):
        def loop(self, requests, size, seconds):
            return [Answer(0.0, [7], 0.0, 1.0) for _ in requests], 1.0

    args = heads.parse_args([*TINY, "--folder", str(made)])
    with pytest.raises(RuntimeError, match="wrong number of tokens"):
        heads.loop_figures(args, Short(), head_models.loop_requests(made, "code", 2, 4, 0.0), 2)


def test_drafts_of_vllm_are_counted_from_its_own_figures(monkeypatch):
    names = ("drafts", "accepted_tokens", "draft_tokens")
    metrics = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=10.0 * i) for i, name in enumerate(names, 1)]
    reader = SimpleNamespace(get_metrics_snapshot=lambda: metrics)
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.reader", reader)
    monkeypatch.setattr(heads.Player, "__init__", lambda self, *given: None)
    args = heads.parse_args(TINY)
    counts = heads.VllmLoops(args, heads.VllmHeadMode("vllm:eagle3:3")).counts()
    assert counts == heads.Counts(steps=10, tokens=30, drafts=10, accepted=20)
    assert counts.tokens_per_draft == counts.tokens_per_step == 3
    assert heads.VllmLoops(args, heads.VllmHeadMode("vllm:off")).counts() == heads.Counts()


# ── heads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("text", ["chat", "code"])
def test_chances_by_position_add_up_to_the_published_tokens(name, text):
    chances = PUBLISHED[name].chances(text)
    assert len(chances) == 7
    assert expected_tokens(chances) == pytest.approx(PUBLISHED[name].tokens[text], abs=1e-6)
    rise = chances[-1] - chances[0]
    assert rise == pytest.approx(0.21 if name == "eagle3" else 0.0, abs=1e-6)


def test_expected_tokens_are_the_bonus_and_what_is_accepted_with_all_before_it():
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5, 0.5]) == pytest.approx(1.75)


def test_heads_of_other_weights_are_made_anew(made, tmp_path):
    source = tmp_path / "head"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"one")
    before = head_models.fingerprint(source)
    (source / "model.safetensors").write_bytes(b"two")
    assert head_models.fingerprint(source) != before
    stamp = (made / "eagle3" / "config.json").stat().st_mtime_ns
    head_models.ensure_heads(heads.parse_args([*TINY, "--folder", str(made)]))
    assert (made / "eagle3" / "config.json").stat().st_mtime_ns == stamp, "the same heads are kept"


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ratios_stand_beside_their_aims():
    records = [
        loop("off", "off", 4.0), loop("model", "fixed:4", 2.6), loop("model", "faser", 2.4),
        loop("eagle3", "faser", 2.0), loop("eagle3", "fixed:4", 1.6), loop("block", "faser", 1.2),
        loop("vllm:off", "off", 4.4), loop("vllm:eagle3:3", "fixed:3", 2.0), loop("vllm:model:3", "fixed:3", 3.0),
    ]  # fmt: skip
    found = {aim.what: (aim.value, aim.holds) for aim in heads_report.aims(records)}
    assert found == {
        "best head over the draft model": (2.0, True),
        "EAGLE-3 over vLLM with the same head": (1.25, False),
        "best head over vLLM's best other mode": (2.5, None),
        "eagle3 under faser over off": (2.0, True),
        "block under faser over off": (3.3333, True),
    }


@pytest.mark.parametrize(("batch", "aim"), [(1, 1.25), (16, 1.25), (64, 1.1), (256, None)])
def test_the_aim_over_the_draft_model_depends_on_the_batch(batch, aim):
    records = [loop("model", "faser", 2.0, batch), loop("block", "faser", 1.0, batch)]
    assert aim_of(records, "best head over the draft model").at_least == aim


def test_published_speed_is_that_of_the_best_head_and_length():
    def published(head, policy, tpot):
        about = {"kind": "published", "session": 1.0, "head": head, "policy": policy, "text": "chat", "batch": 1}
        return about | {"tpot_ms": tpot}

    records = [published("eagle3", "fixed:2", 2.2), published("dspark2", "fixed:7", 1.5)]
    aim = aim_of(records, "ms a token at published acceptance")
    assert (aim.value, aim.at_most, aim.holds) == (1.5, 1.6, True)
    assert "dspark2 fixed:7" in aim.where


@pytest.mark.parametrize(("ours", "holds"), [(2.0, True), (2.05, True), (1.9, False), (2.1, False)])
def test_acceptance_equals_that_of_vllm_within_three_percent(ours, holds):
    def equal(mode, tokens):
        about = {"kind": "equal", "session": 1.0, "mode": mode, "text": "code", "length": 3}
        return about | {"tokens_per_draft": tokens}

    aim = aim_of([equal("eagle3", ours), equal("vllm:eagle3:3", 2.0)], "tokens a verification, ours over vLLM's")
    assert aim.holds is holds


@pytest.mark.parametrize(("ratio", "holds"), [(1.005, True), (1.02, False)])
def test_a_head_that_does_not_draft_costs_at_most_one_percent(ratio, holds):
    records = [{"kind": "idle", "session": 1.0, "mode": "idle:block", "batch": 1, "ratio": ratio}]
    assert aim_of(records, "a step with the head off over one without a draft").holds is holds


def test_later_figures_replace_earlier_ones_and_missing_ones_are_left_out():
    records = [loop("off", "off", 4.0), loop("off", "off", 3.0, session=2.0)]
    (found,) = heads_report.summarize(records)["loops"]
    assert found["ways"] == {"off off": [3.0, 2.0]}
    assert heads_report.aims(records) == []


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_runs_modes_in_processes_and_reports_them_again(made, folder, capsys):
    flags = ["--folder", str(made), "--parts", "loops", "--modes", "off", "--texts", "code", "--temperatures", "0"]
    assert heads.main([*TINY, *flags]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(each["batch"], list(each["ways"])) for each in document["loops"]] == [(1, ["off off"]), (2, ["off off"])]
    assert document["failed"] == []
    assert heads.main(["--report-only", str(made)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loops"] == document["loops"]


def test_what_fails_is_said_and_the_rest_goes_on(made, folder, capsys, monkeypatch):
    run = []

    def fail(self, process, until):
        run.append(process.name)
        if process.name == "eagle3":
            self.journal.add("failed", section="all", engine=process.name, why="ended with status 1")
        return process.name != "eagle3"

    monkeypatch.setattr(heads.Runner, "run", fail)
    assert heads.main([*TINY, "--folder", str(folder), "--parts", "loops", "--modes", "eagle3,block"]) == 1
    assert run == ["models", "eagle3", "block"]
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["failed"] == ["eagle3, all: ended with status 1"]


def test_a_part_that_fails_leaves_the_others_of_its_mode(made, folder, monkeypatch):
    def fail(*given):
        raise RuntimeError("no such graph")

    monkeypatch.setattr(heads, "measure_loops", fail)
    flags = ["--parts", "loops,equal", "--modes", "eagle3,vllm:eagle3:1", "--texts", "code"]
    records = play_mode(made, folder, "eagle3", *flags)
    assert [each["kind"] for each in records] == ["start", "failed", "equal"]
    assert records[1]["why"] == "RuntimeError: no such graph"
