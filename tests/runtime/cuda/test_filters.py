"""The device's filters keep the tokens that the CPU's sampler keeps, and log-probabilities are the same.

The oracle is faser.runtime.sampling, row by row. `apply` is plain torch: without a GPU the same code runs on the CPU.
Logits lie on a coarse grid, so that rows are full of ties and no two weights are a rounding apart.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the filters go with the kernels: pip install triton")

from faser.arrays import IntArray
from faser.request import SamplingParams
from faser.runtime.cuda import filters as module
from faser.runtime.cuda.filters import Filters, logprobs, unpack_logprobs
from faser.runtime.cuda.sampling import Choices, Slots, inverse_temperature, mixed_seed, sample
from faser.runtime.sampling import Sampler

INF, NAN = float("inf"), float("nan")
MAX_LEN = 40
STOPS = (2, 5, 60)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cpu") == torch.cuda.is_available():
        pytest.skip("the CPU serves where there is no CUDA device, and only there")
    return request.param


class Pair:
    """The CPU's sampler and the device's filters, with the same requests: slot i has parameters i."""

    def __init__(self, params: list[SamplingParams], vocab_size: int, device: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.num_prompt = rng.integers(1, MAX_LEN - 10, len(params))
        history = torch.from_numpy(rng.integers(0, 30, (len(params), MAX_LEN)))
        self.history = history
        self.sampler = Sampler(len(params), vocab_size, history)
        self.filters = Filters(len(params), vocab_size, device)
        self.slots = Slots.allocate(len(params), MAX_LEN, device)
        self.slots.history.copy_(history)
        self.device = device
        for slot, each in enumerate(params):
            self.sampler.admit(slot, each, 100 + slot, int(self.num_prompt[slot]), STOPS)
            self.filters.admit(slot, each, int(self.num_prompt[slot]), STOPS)
            self.slots.seeds[slot] = mixed_seed(100 + slot)
            self.slots.inverse_temperatures[slot] = inverse_temperature(each.temperature)

    def rows(self, rng: np.random.Generator, num_rows: int) -> tuple[IntArray, IntArray]:
        """Slots in any order, and positions among their outputs."""
        slots = rng.integers(0, len(self.num_prompt), num_rows)
        return slots, self.num_prompt[slots] + rng.integers(0, 10, num_rows)

    def apply(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> torch.Tensor:
        given = logits.to(self.device)
        before = given.clone()
        filtered = self.filters.apply(given, slots, positions, self.slots.history)
        assert torch.equal(given.view(torch.int32), before.view(torch.int32))
        return filtered.cpu()

    def expected(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> torch.Tensor:
        """The scores of the tokens the CPU's sampler keeps."""
        sampler, left = self.sampler, logits.clone()
        for row, (score, slot) in enumerate(zip(left.numpy(), slots.tolist(), strict=True)):
            sampler._adjust(score, slot, int(positions[row]))
            if sampler._kind[slot] == 2:
                token_ids, _ = sampler._filter(sampler._scale(score[None], slots[row : row + 1])[0], slot)
                score[np.setdiff1d(np.arange(len(score)), token_ids)] = -np.inf
        return left

    def sample(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> IntArray:
        filtered = self.apply(logits, slots, positions).to(self.device)
        who = torch.from_numpy(np.stack([slots, positions]).astype(np.int32)).to(self.device)
        count = torch.tensor([len(slots)], dtype=torch.int32, device=self.device)
        choices = Choices.allocate(len(slots), logits.shape[1], self.device)
        sample(filtered, who[0], who[1], count, self.slots, choices)
        return choices.tokens.cpu().numpy().astype(np.int64)


def make_logits(rng: np.random.Generator, num_rows: int, vocab_size: int, grid: float = 0.25) -> torch.Tensor:
    rough = np.round(rng.normal(0, 3, (num_rows, vocab_size)) / grid) * grid
    return torch.from_numpy(rough.astype(np.float32))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same tokens kept, with the same scores to the bit. A GPU's exp may move the cut of one row in a hundred."""
    differs = (ours == -INF) != (theirs == -INF)
    if torch.cuda.is_available():
        assert differs.any(-1).sum() <= len(ours) // 100
        assert differs.sum(-1).max() <= 1
    else:
        assert not differs.any()
    assert torch.equal(ours[~differs], theirs[~differs])


FILTERS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.7, 1.0, 30.0), (0, 1, 7, 50, 300), (1.0, 0.9, 0.5, 1e-6), (0.0, 0.05, 1.0)
    )
]
ADJUSTMENTS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": -0.5},
    {"frequency_penalty": 0.45},
    {"presence_penalty": 1.1, "frequency_penalty": -0.2, "repetition_penalty": 1.7},
    {"logit_bias": {3: 2.5, 59: -100.0, 9_999: 7.0}},
    {"min_tokens": 5},
    {"min_tokens": 9, "logit_bias": {5: 30.0}, "presence_penalty": 2.0, "repetition_penalty": 1.05},
]


@pytest.mark.parametrize("vocab_size", [61, 5000])
def test_many_rows_with_different_parameters_keep_what_the_cpu_keeps(device, vocab_size):
    params = [SamplingParams(**some, **ADJUSTMENTS[number % len(ADJUSTMENTS)]) for number, some in enumerate(FILTERS)]
    pair, rng = Pair(params, vocab_size, device), np.random.default_rng(vocab_size)
    for _ in range(4):
        slots, positions = pair.rows(rng, 150)
        logits = make_logits(rng, 150, vocab_size)
        assert_same(pair.apply(logits, slots, positions), pair.expected(logits, slots, positions))


@pytest.mark.parametrize("adjustment", range(len(ADJUSTMENTS)))
def test_any_adjustment_with_any_filter_alone_is_the_cpus(device, adjustment):
    """One set of parameters a call: filters that no row asks for are skipped."""
    rng = np.random.default_rng(adjustment)
    for some in FILTERS[adjustment % 3 :: 3]:
        pair = Pair([SamplingParams(**some, **ADJUSTMENTS[adjustment])], 61, device, adjustment)
        slots, positions = pair.rows(rng, 5)
        logits = make_logits(rng, 5, 61, 0.5)
        assert_same(pair.apply(logits, slots, positions), pair.expected(logits, slots, positions))


@settings(max_examples=150)
@given(st.data())
def test_equal_logits_at_the_edge_of_a_filter_are_kept_as_the_cpu_keeps_them(data):
    """Few distinct values: top_k keeps all ties, top_p the lower ids. Also if it reads only the best tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, -4.0, -INF]), min_size=12, max_size=12))
    if max(values) == -INF:
        values[3] = 0.0
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.5, 1.0, 100.0])),
        top_k=data.draw(st.integers(0, 13)),
        top_p=data.draw(st.sampled_from([1.0, 0.999, 0.75, 0.5, 0.25, 0.1])),
        min_p=data.draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    pair = Pair([params], 12, device)
    logits, slots, positions = torch.tensor([values]), np.zeros(1, np.int64), pair.num_prompt + 1
    assert_same(pair.apply(logits, slots, positions), pair.expected(logits, slots, positions))


def test_top_p_of_the_best_tokens_alone_is_top_p_of_all(device, monkeypatch):
    """If top_k is small the row is not sorted; more tokens tie with the k-th best than are read."""
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p) for k in (1, 5, 20, 40) for p in (0.3, 0.8, 0.99)]
    pair, rng = Pair(params, 2000, device), np.random.default_rng(3)
    slots, positions = pair.rows(rng, 60)
    logits = make_logits(rng, 60, 2000, 2.0)
    narrow = pair.apply(logits, slots, positions)
    monkeypatch.setattr(module, "SMALL_TOP_K", 0)
    assert_same(pair.apply(logits, slots, positions), narrow)
    assert_same(narrow, pair.expected(logits, slots, positions))
    assert ((narrow > -INF).sum(-1) > 40).any()


def test_on_smooth_logits_the_sets_differ_by_a_rounding_at_most(device):
    """The tokens that only one of the two keeps have no mass."""
    params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t in (0.6, 1.0) for p in (0.9, 0.99) for k in (0, 64)]
    num_tokens = 5000 if device == "cpu" else 128_256
    pair, rng = Pair(params, num_tokens, device), np.random.default_rng(1)
    slots, positions = pair.rows(rng, 24)
    logits = torch.from_numpy(rng.normal(0, 3, (24, num_tokens)).astype(np.float32))
    ours, theirs = pair.apply(logits, slots, positions), pair.expected(logits, slots, positions)
    differs = (ours == -INF) != (theirs == -INF)
    assert differs.sum(-1).max() <= 2
    assert differs.any(-1).sum() <= 1


@pytest.mark.parametrize("vocab_size", [61, 3000])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's word where a kernel means infinity
def test_the_kernel_chooses_the_cpus_tokens_from_what_is_left(device, vocab_size):
    params = [
        SamplingParams(**some, **ADJUSTMENTS[number % len(ADJUSTMENTS)]) for number, some in enumerate(FILTERS[::3])
    ]
    pair, rng = Pair(params, vocab_size, device), np.random.default_rng(7)
    num_rows = 40 if vocab_size == 61 else 8
    slots, positions = pair.rows(rng, num_rows)
    logits = make_logits(rng, num_rows, vocab_size)
    assert np.array_equal(pair.sample(logits, slots, positions), pair.sampler.sample(logits, slots, positions))


def test_a_rows_result_does_not_depend_on_the_rows_beside_it(device):
    params = [SamplingParams(**some, **ADJUSTMENTS[number % 8]) for number, some in enumerate(FILTERS[::11])]
    pair, rng = Pair(params, 500, device), np.random.default_rng(5)
    slots, positions = pair.rows(rng, 30)
    logits = make_logits(rng, 30, 500)
    together = pair.apply(logits, slots, positions)
    for row in range(30):
        some = slice(row, row + 1)
        assert_same(pair.apply(logits[some], slots[some], positions[some]), together[some])


def test_a_slot_given_to_another_request_keeps_nothing_of_the_last(device):
    first = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.4, min_p=0.3, presence_penalty=1, repetition_penalty=2, min_tokens=20,
        max_tokens=20, logit_bias={1: 5.0}, logprobs=2,
    )  # fmt: skip
    pair = Pair([first], 61, device)
    slots, positions = np.zeros(3, np.int64), pair.num_prompt[[0, 0, 0]] + np.arange(3)
    assert pair.filters.changes(slots, positions).all()
    pair.filters.admit(0, SamplingParams(temperature=1.0), 3, STOPS)
    assert not pair.filters.is_special[0]
    assert not pair.filters.changes(slots, positions).any()
    logits = make_logits(np.random.default_rng(0), 3, 61)
    assert torch.equal(pair.apply(logits, slots, positions), logits)


def test_only_rows_below_min_tokens_are_changed_by_a_ban(device):
    pair = Pair([SamplingParams(min_tokens=4), SamplingParams(logprobs=1)], 61, device)
    slots = np.array([0] * 6 + [1])
    positions = np.concatenate([pair.num_prompt[0] + np.arange(6), pair.num_prompt[1:]])
    assert pair.filters.changes(slots, positions).tolist() == [True] * 4 + [False] * 3
    assert pair.filters.is_special.tolist() == [True, True]
    banned = pair.apply(torch.zeros(7, 61), slots, positions) == -INF
    assert banned.nonzero().tolist() == [[row, stop] for row in range(4) for stop in STOPS]


def test_ids_in_the_history_that_the_vocabulary_lacks_count_for_nothing(device):
    """A draft may have more tokens than its target."""
    pair = Pair([SamplingParams(presence_penalty=1, repetition_penalty=1.5)], 20, device)
    slots, positions = np.zeros(1, np.int64), pair.num_prompt + 9
    logits = make_logits(np.random.default_rng(0), 1, 20)
    assert (pair.history[0, : positions[0]] >= 20).any()
    assert_same(pair.apply(logits, slots, positions), pair.expected(logits, slots, positions))


def test_a_broken_row_breaks_no_other(device):
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=0.8, min_p=0.01, presence_penalty=1) for k in (0, 9)]
    pair, rng = Pair(params, 61, device), np.random.default_rng(2)
    slots, positions = pair.rows(rng, 8)
    logits = make_logits(rng, 8, 61)
    whole = pair.apply(logits, slots, positions)
    logits[1, 3], logits[2, 5], logits[5] = NAN, INF, -INF
    after = pair.apply(logits, slots, positions)
    good = [0, 3, 4, 6, 7]
    assert_same(after[good], whole[good])


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [4.0, 0.25, 1e-6])
def test_logprobs_are_the_cpus_best_first_and_ties_by_id(device, grid):
    counts = [None, 0, 1, 3, 20]
    pair = Pair([SamplingParams(logprobs=count) for count in counts], 700, device)
    rng = np.random.default_rng(4)
    slots, _ = pair.rows(rng, 30)
    logits, chosen = make_logits(rng, 30, 700, grid), rng.integers(0, 700, 30)
    theirs = [answer for answer in pair.sampler.logprobs(logits, slots, chosen) if answer is not None]
    asking = np.flatnonzero(pair.filters.num_logprobs[slots] >= 0)
    counts = pair.filters.num_logprobs[slots[asking]]
    tokens = torch.from_numpy(chosen[asking].astype(np.int32)).to(device)
    packed = logprobs(logits[torch.from_numpy(asking)].to(device), tokens, int(counts.max()))
    ours = unpack_logprobs(packed.cpu().numpy(), counts)
    if device == "cpu":
        assert ours == theirs
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.token_id == right.token_id
        assert mine.logprob == pytest.approx(right.logprob, abs=1e-5)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in right.top], abs=1e-5)
        assert list(mine.top) == sorted(mine.top, key=lambda item: (-item[1], item[0]))
        if grid > 1e-6:
            assert [token for token, _ in mine.top] == [token for token, _ in right.top]


def test_logprobs_of_certain_and_impossible_tokens(device):
    logits = torch.full((1, 9), -INF)
    logits[0, [4, 7]] = torch.tensor([0.0, 200.0])
    packed = logprobs(logits.to(device), torch.tensor([4], dtype=torch.int32, device=device), 4)
    (answer,) = unpack_logprobs(packed.cpu().numpy(), np.array([4]))
    assert answer.token_id == 4
    assert answer.logprob == -200.0
    assert answer.top == ((7, 0.0), (4, -200.0), (0, -math.inf), (1, -math.inf))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    params = [SamplingParams(**some, **ADJUSTMENTS[number % 8]) for number, some in enumerate(FILTERS)]
    pair, rng = Pair(params, 5000, "cuda"), np.random.default_rng(6)
    slots, positions = pair.rows(rng, 60)
    logits = make_logits(rng, 60, 5000).cuda()
    chosen = torch.zeros(60, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        pair.filters.apply(logits, slots, positions, pair.slots.history)
        logprobs(logits, chosen, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
