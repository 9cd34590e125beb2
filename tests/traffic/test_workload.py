import json
import lzma
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from faser.errors import ConfigError, InvalidRequest
from faser.traffic.document import Item, Workload
from faser.traffic.prompts import enclosing_tokens, read_texts
from faser.traffic.traces import SHIPPED, Timing, TraceRow, parse_arrivals, read_trace, retime
from faser.traffic.workload import (
    Load,
    Vocabulary,
    WorkloadOptions,
    at_rate,
    check_tokens,
    load_workload,
    make_workload,
    mean_rate,
    own_rate,
    save_workload,
)

AROUND = ([1, 2], [3])
WORDS = Vocabulary(5000, 400, lambda text: [10 + len(word) for word in text.split()], AROUND)


def generator():
    return np.random.default_rng(0)


def make(load=None, vocabulary=WORDS, **options):
    timing = Timing(**{name: options.pop(name) for name in ("start", "duration", "span", "scale") if name in options})
    return make_workload(WorkloadOptions(timing=timing, **options), load or Load(), vocabulary)


# ── traces ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "count", "seconds"), [("azure-conv", 19366, 3501.7), ("azure-code", 8819, 3435.9)])
def test_the_shipped_traces_are_complete(name, count, seconds):
    rows = read_trace(name)
    assert len(rows) == count
    assert rows[0].arrival == 0
    assert rows[-1].arrival == pytest.approx(seconds, abs=0.1)
    assert all(row.num_prompt >= 1 and row.num_output >= 1 for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                  "2023-11-16 18:15:47.1805900,396,109\n"),
        ("b.csv", "arrival,prompt_tokens,output_tokens\n3,374,44\n3.5,396,109\n"),
        ("c.csv", "\ufeffArrival, Prompt_Tokens,output_tokens,user\n3,374,44,x\n3.5,396,109,y\n"),
        ("d.jsonl", '{"timestamp": 3, "input_length": 374, "output_length": 44}\n\n'
                    '{"timestamp": 3.5, "input_length": 396, "output_length": 109}\n'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("compressed", [False, True])
def test_traces_are_read_with_the_usual_column_names(tmp_path, name, text, compressed):
    path = tmp_path / (name + ".xz" if compressed else name)
    path.write_bytes(lzma.compress(text.encode()) if compressed else text.encode())
    rows = read_trace(str(path))
    assert [(row.num_prompt, row.num_output) for row in rows] == [(374, 44), (396, 109)]
    assert [row.arrival for row in rows] == pytest.approx([0.0, 0.5], abs=1e-3)


HEAD = "arrival,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"time,in,out\n1,2,3\n", "line 2: no column arrival or timestamp; its columns are: time, in, out"),
        ("a.csv", (HEAD + "2,5,5\n1,5,5\n").encode(), "line 3: it arrives before the line above; sort"),
        ("a.csv", (HEAD + "-2,5,5\n").encode(), "line 2: arrival '-2': expected seconds"),
        ("a.csv", (HEAD + "2,-5,5\n").encode(), "line 2: prompt length '-5'"),
        ("a.csv", (HEAD + "2,5,many\n").encode(), "line 2: output length 'many'"),
        ("a.csv", (HEAD + "soon,5,5\n").encode(), "arrival 'soon'"),
        ("a.csv", (HEAD + "2,5\n").encode(), "no column output_tokens"),
        ("a.csv", HEAD.encode(), "holds no request"),
        ("a.csv", b"", "holds no request"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read"),
        ("a.csv.xz", b"no xz at all", "cannot be read"),
        ("a.csv.xz", SHIPPED["azure-conv"].read_bytes()[:9999], "cannot be read .*is it complete"),
        ("a.jsonl", b"1,2,3\n", "line 1 is no JSON|line 1: expected an object"),
        ("a.jsonl", b"[1]\n", "line 1: expected an object"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_line_and_the_reason(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_trace(str(tmp_path / name))


@pytest.mark.parametrize("wanted", [150, 1000])
def test_a_rate_above_the_traces_repeats_requests_if_allowed(wanted):
    rows = [replace(row, arrival=row.arrival**2 / 99) for row in ROWS]  # ever fewer
    timing = Timing(duration=100, span=50, rate=wanted / 50)
    with pytest.raises(ConfigError, match="that part of the trace has 100"):
        retime(rows, timing, generator())
    again = retime(rows, replace(timing, repeats=True), generator())
    assert len(again) == wanted
    arrivals = [row.arrival for row in again]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] <= 50
    counts = np.bincount([row.num_prompt - 10 for row in again])
    assert set(counts.tolist()) <= {wanted // 100, -(-wanted // 100)}
    early = sum(arrival < 12.5 for arrival in arrivals) / wanted  # as in the trace: half of it comes in a quarter
    assert early == pytest.approx(0.5, abs=0.06)


def test_a_missing_trace_is_refused_with_the_names_of_the_shipped_ones():
    with pytest.raises(ConfigError, match="azure-conv, azure-code"):
        read_trace("azure-chat")


ROWS = [TraceRow(float(second), 10 + second, 5) for second in range(100)]


def test_a_trace_is_clipped_in_its_own_time():
    rows = retime(ROWS, Timing(start=10, duration=20), generator())
    assert [row.num_prompt for row in rows] == list(range(20, 40))
    assert rows[0].arrival == 0
    with pytest.raises(ConfigError, match="no request between second 200"):
        retime(ROWS, Timing(start=200), generator())


@pytest.mark.parametrize("timing", [Timing(duration=100, rate=4.0), Timing(duration=100, scale=4.0)])
def test_a_rate_alone_changes_the_time(timing):
    rows = retime(ROWS, timing, generator())
    assert len(rows) == 100
    assert rows[-1].arrival == pytest.approx(99 / 4)


def test_with_a_span_a_rate_leaves_requests_out():
    fast = retime(ROWS, Timing(duration=100, span=10, rate=6.0), generator())
    slow = retime(ROWS, Timing(duration=100, span=10, rate=3.0), generator())
    assert (len(fast), len(slow)) == (60, 30)
    assert max(row.arrival for row in fast) < 10
    assert set(slow) < set(fast)
    assert fast == sorted(fast, key=lambda row: row.arrival)
    with pytest.raises(ConfigError, match="are 200 requests; that part of the trace has 100"):
        retime(ROWS, Timing(duration=100, span=10, rate=20.0), generator())


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("poisson:4", 4),
        ("gamma:4:0.5", 4),
        ("gamma:4:8", 4),
        ("square:1:9:20", 5),
        ("ramp:0:10", 5),
        ("steps:2:8:5", 5),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_arrival_processes_have_their_mean_rate(text, mean, factor):
    arrivals = parse_arrivals(text)
    times = arrivals.times(2000.0, generator(), factor)
    assert arrivals.mean_rate(2000.0) == pytest.approx(mean, rel=1e-3)
    assert len(times) == pytest.approx(mean * factor * 2000, rel=0.06)
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] <= times[-1] < 2000
    assert (times == arrivals.times(2000.0, generator(), factor)).all()


def test_bursts_squares_and_ramps_have_their_shape():
    def spread(text):
        gaps = np.diff(parse_arrivals(text).times(2000.0, generator()))
        return gaps.std() / gaps.mean()

    assert spread("gamma:4:0.25") > 1.5 > spread("poisson:4") > 0.8 > spread("gamma:4:8")
    square = parse_arrivals("square:1:9:20").times(2000.0, generator()) % 20
    assert 7 < (square >= 10).sum() / (square < 10).sum() < 11
    ramp = parse_arrivals("ramp:0:10").times(2000.0, generator())
    assert 2.7 < (ramp >= 1000).sum() / (ramp < 1000).sum() < 3.4
    steps = parse_arrivals("steps:1:4:0:2").times(400.0, generator())
    assert np.histogram(steps, 4, (0, 400))[0] == pytest.approx([100, 400, 0, 200], rel=0.3)


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:1:2", "gamma:1", "gamma:1:0", "steady:1",
             "square:1:2:0", "square:0:0:5", "ramp:0:0", "steps", "steps:0:0", "poisson:inf", "poisson:nan"],
)  # fmt: skip
def test_a_wrong_process_is_refused(text):
    with pytest.raises(ConfigError, match="expected poisson:RATE"):
        parse_arrivals(text)


# ── whole workloads ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_gives_the_same_workload_and_another_another():
    options = {"arrivals": "gamma:5:0.5", "duration": 20.0, "prompt_len": (20, 90), "output_len": (1, 30)}
    assert make(**options) == make(**options)
    assert make(**options).items != make(**options, seed=1).items


def test_another_rate_brings_the_same_prompts_at_other_times():
    slow, fast = (make(Load(rate), trace="azure-conv", duration=60.0, max_prompt=50) for rate in (2.0, 4.0))
    assert [item.prompt_token_ids for item in slow.items] == [item.prompt_token_ids for item in fast.items]
    assert mean_rate(fast.items) == pytest.approx(2 * mean_rate(slow.items))


def test_prompts_have_the_length_and_the_template_of_a_chat():
    workload = make(arrivals="poisson:20", duration=10.0, prompt_len=(1, 300))
    random = np.random.default_rng([0, 1])
    wanted = [(int(random.integers(1, 301)), random.integers(64, 65))[0] for _ in workload.items]
    assert [len(item.prompt_token_ids) for item in workload.items] == wanted
    for item in workload.items:
        if len(item.prompt_token_ids) > 3:
            assert item.prompt_token_ids[:2] == (1, 2)
            assert item.prompt_token_ids[-1] == 3
    assert len({item.category for item in workload.items}) == 13
    assert workload.items[0].arrival == 0


def test_a_short_text_is_preceded_by_others_of_its_category_and_a_long_one_is_cut(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("a bb ccc\n\ndddd eeeee ffffff\n\n\n")
    items = make(arrivals="poisson:9", prompts=str(path), prompt_len=(8, 8)).items
    assert {item.prompt_token_ids for item in items} == {
        (1, 2, 15, 16, 11, 12, 13, 3),
        (1, 2, 12, 13, 14, 15, 16, 3),
    }
    assert {item.category for item in items} == {"mine"}
    items = make(arrivals="poisson:9", prompts=str(path), prompt_len=(5, 5)).items
    assert {item.prompt_token_ids for item in items} == {(1, 2, 11, 12, 3), (1, 2, 14, 15, 3)}


def test_lengths_are_scaled_then_cut_to_the_user_and_the_model():
    whole = make(trace="azure-conv", duration=30.0, prompts="random")
    assert all(len(i.prompt_token_ids) + i.max_tokens <= 400 for i in whole.items)
    cut = make(trace="azure-conv", duration=30.0, length_scale=0.1, max_prompt=60, max_output=9, prompts="random")
    rows = read_trace("azure-conv")
    assert [(len(item.prompt_token_ids), item.max_tokens) for item in cut.items] == [
        (min(60, round(row.num_prompt / 10)), min(9, max(1, round(row.num_output / 10))))
        for row in rows[: len(cut.items)]
    ]


def test_random_prompts_need_no_tokenizer_and_text_does():
    bare = replace(WORDS, encode=None)
    items = make(vocabulary=bare, prompts="random").items
    assert {item.category for item in items} == {"random"}
    assert all(0 <= token < 5000 for item in items for token in item.prompt_token_ids)
    with pytest.raises(ConfigError, match="no tokenizer"):
        make(vocabulary=bare)


def test_a_closed_loop_takes_lengths_of_a_trace_in_turn():
    workload = make(Load(concurrency=5), trace="azure-code", start=60.0, max_prompt=40)
    assert workload.concurrency == 5
    assert len(workload.items) == 20
    assert {item.arrival for item in workload.items} == {0.0}
    assert len(make(Load(concurrency=5), requests=7).items) == 7


def test_the_rate_of_a_source_is_known():
    assert own_rate(WorkloadOptions(trace="azure-conv")) == pytest.approx(19366 / 3501.7, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": 0}, "--requests 0"),
        ({"length_scale": -1.0}, "--length-scale -1"),
        ({"duration": 0.0}, "--duration 0"),
        ({"start": -1.0}, "--start -1"),
        ({"scale": float("inf")}, "--scale inf"),
        ({"prompt_len": (5, 4)}, "--prompt-len 5..4"),
        ({"output_len": (0, 4)}, "--output-len 0..4"),
        ({"arrivals": "poisson:1", "span": 3.0}, "--start and --span"),
        ({"prompts": "novels"}, "specbench, mtbench, gsm8k, random"),
        ({"arrivals": "poisson:0.001", "duration": 0.1}, "no request arrives"),
        ({"trace": "azure-conv", "start": 1e6}, "no request between"),
    ],
)
def test_options_that_make_no_workload_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        make(**options)


def test_the_shipped_texts_are_there():
    assert len(read_texts("specbench")) == 13
    assert {name: len(texts) for name, texts in read_texts("mtbench,gsm8k").items()}["gsm8k"] == 1000


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.jsonl", "{}\n"), ("a.jsonl", "x\n"), ("a.jsonl", '{"turns": []}\n')]
)
def test_a_wrong_file_of_prompts_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="--prompts"):
        read_texts(str(tmp_path / name))


def test_a_template_that_refuses_leaves_prompts_plain():
    def refuses(messages):
        raise InvalidRequest("no")

    assert enclosing_tokens(refuses, list) == ([], [])
    assert enclosing_tokens(lambda messages: f"<{messages[0]['content']}>", list) == (["<"], [">"])


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_workload_survives_its_file(tmp_path):
    workload = make(arrivals="poisson:5")
    save_workload(workload, tmp_path / "new" / "w.jsonl")
    loaded = load_workload(tmp_path / "new" / "w.jsonl")
    assert loaded.items == workload.items
    check_tokens(loaded, 5000)
    with pytest.raises(ConfigError, match="the model has 10 tokens; it was made for another"):
        check_tokens(loaded, 10)


def test_a_saved_workload_has_the_fields_that_scripts_for_other_systems_read(tmp_path):
    workload = make(requests=3)
    save_workload(workload, tmp_path / "w.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "w.jsonl").read_text().splitlines()]
    for line, item in zip(lines, workload.items, strict=True):
        assert line["arrival"] == item.arrival
        assert line["prompt_token_ids"] == list(item.prompt_token_ids)
        assert line["max_tokens"] == item.max_tokens


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "line 1: "),
        ("{}", "line 1: no 'arrival'"),
        ('{"arrival": -1, "prompt_token_ids": [1], "max_tokens": 1}', "arrival -1"),
        ('{"arrival": 0, "prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids"),
        ('{"arrival": 0, "prompt_token_ids": [-1], "max_tokens": 1}', "prompt_token_ids"),
        ('{"arrival": 0, "prompt_token_ids": ["a"], "max_tokens": 1}', "prompt_token_ids"),
        ('{"arrival": 0, "prompt_token_ids": [1], "max_tokens": 0}', "max_tokens 0"),
        ("[]", "line 1: "),
        ("", "holds no request"),
    ],
)
def test_a_wrong_workload_file_is_refused(tmp_path, line, says):
    (tmp_path / "w.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=says):
        load_workload(tmp_path / "w.jsonl")


def test_an_unsorted_workload_file_is_refused(tmp_path):
    rows = [{"arrival": arrival, "prompt_token_ids": [1], "max_tokens": 1} for arrival in (1, 0)]
    (tmp_path / "w.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="line 2: it arrives before"):
        load_workload(tmp_path / "w.jsonl")


def test_a_file_can_be_played_faster():
    workload = Workload(tuple(Item(float(i), (1,), 1) for i in range(5)))
    fast = at_rate(workload, Load(rate=4.0))
    assert all(b.arrival - a.arrival == pytest.approx(0.25) for a, b in pairwise(fast.items))
    assert at_rate(workload, Load(concurrency=2)).concurrency == 2
    with pytest.raises(ConfigError, match="all at once"):
        at_rate(Workload((Item(0.0, (1,), 1),)), Load(rate=1.0))


# ── prompts that hold nothing ────────────────────────────────────────────────────────────────────────────────────────


BLANK = Vocabulary(1, 400, None, is_blank=True)


@pytest.mark.parametrize("prompts", ["specbench", "gsm8k", "random"])
def test_blank_prompts_have_the_lengths_and_categories_of_real_ones(prompts):
    options = {"prompt_len": (1, 60), "requests": 40, "arrivals": "poisson:10", "prompts": prompts}
    real, blank = make(**options), make(vocabulary=BLANK, **options)
    told = [[(i.arrival, i.category, i.max_tokens, len(i.prompt_token_ids)) for i in w.items] for w in (real, blank)]
    assert told[0] == told[1]
    assert real.about == blank.about


def test_a_blank_prompt_is_zeros_that_take_no_memory():
    prompts = [item.prompt_token_ids for item in make(vocabulary=BLANK, prompt_len=(50, 52), requests=30).items]
    assert len({id(prompt) for prompt in prompts}) <= 3
    array = np.asarray(prompts[0], dtype=np.int64)
    assert array.strides == (0,)
    assert array.tolist() == list(prompts[0]) == [0] * len(prompts[0])
    assert len(prompts[0][3:5]) == 2
    with pytest.raises(IndexError):
        prompts[0][60]
