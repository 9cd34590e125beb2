"""The device samples as the CPU does: the same noise bits, the same tokens.

The reference is faser.runtime.sampling. In the interpreter shapes are tiny; a GPU runs the same tests at real sizes.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

triton = pytest.importorskip("triton", reason="the kernels are written in Triton: pip install triton")
tl = triton.language

from faser.arrays import IntArray  # noqa: E402
from faser.request import SamplingParams  # noqa: E402
from faser.runtime.cuda import sampling  # noqa: E402
from faser.runtime.cuda.sampling import TILE, Choices, Slots, inverse_temperature, sample  # noqa: E402
from faser.runtime.sampling import Sampler, gumbel, noise_keys  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy warns where a kernel computes infinity

SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, 1234567890123456789]
MAX_SLOTS = 12
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def device(place):
    """For tests without logits: one dtype is enough."""
    if place[1] != torch.float32:
        pytest.skip("the dtype of the logits does not matter here")
    return place[0]


@dataclass
class Case:
    """Rows to sample, and the device's buffers for them."""

    logits: torch.Tensor  # [R, V]
    row_slots: IntArray  # [R]
    positions: IntArray  # [R]
    temperatures: list[float]  # by slot
    seeds: list[int]  # by slot
    device: str

    def __post_init__(self) -> None:
        self.slots = Slots.allocate(MAX_SLOTS, 64, self.device)
        self.slots.seeds.copy_(torch.tensor([sampling.mixed_seed(seed) for seed in self.seeds]))
        self.slots.inverse_temperatures.copy_(torch.tensor([inverse_temperature(t) for t in self.temperatures]))
        self.choices = Choices.allocate(self.logits.shape[0], self.logits.shape[1], self.device)

    def sample(self, num_rows: int | None = None, **options: object) -> IntArray:
        """The device's tokens; rows from num_rows on are padding."""
        count = len(self.row_slots) if num_rows is None else num_rows
        sample(
            self.logits.to(self.device), ints(self.row_slots, self.device), ints(self.positions, self.device),
            ints([count], self.device), self.slots, self.choices, **options,
        )  # fmt: skip
        return self.choices.tokens.cpu().numpy()

    def expected(self, logits: torch.Tensor | None = None) -> IntArray:
        logits = self.logits if logits is None else logits
        sampler = Sampler(MAX_SLOTS, logits.shape[1], torch.zeros(MAX_SLOTS, 64, dtype=torch.int64))
        for slot, (temperature, seed) in enumerate(zip(self.temperatures, self.seeds, strict=True)):
            sampler.admit(slot, SamplingParams(temperature=temperature), seed, 0, ())
        return sampler.sample(logits.float(), self.row_slots, self.positions)

    def gaps(self) -> NDArray[np.float64]:
        """How much the best score of each row exceeds the second best, in float64: [R]"""
        gaps = []
        for row, slot in enumerate(self.row_slots.tolist()):
            score = self.logits[row].double().numpy()
            if self.temperatures[slot] > 0:
                seeds = np.array([self.seeds[slot] % 2**64], np.uint64)
                score = score / self.temperatures[slot] + gumbel(seeds, self.positions[row : row + 1], len(score))[0]
            second, first = np.partition(score, -2)[-2:]
            gaps.append(first - second)
        return np.array(gaps)


def ints(values: object, device: str) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)


def make_case(device: str, dtype: torch.dtype, num_rows: int, num_columns: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 4, (num_rows, num_columns)).astype(np.float32)).to(dtype)
    temperatures = [0.0, 0.3, 1.0, 2.0] * 3
    seeds = [SEEDS[i % len(SEEDS)] for i in range(MAX_SLOTS)]
    row_slots = rng.integers(0, MAX_SLOTS, num_rows)
    return Case(logits, row_slots, rng.integers(0, 60, num_rows), temperatures, seeds, device)


# --- noise ---------------------------------------------------------------------------------------------------------


@triton.jit
def _noise_kernel(seeds, positions, tokens, words, noise, num_tokens, block: tl.constexpr):
    row = tl.program_id(0)
    key0, key1 = sampling.noise_keys(tl.load(seeds + row), tl.load(positions + row))
    column = tl.program_id(1) * block + tl.arange(0, block)
    word = sampling.noise_word(tl.load(tokens + column, mask=column < num_tokens, other=0), key0, key1)
    place = row * num_tokens + column
    tl.store(words + place, word.to(tl.int32, bitcast=True), mask=column < num_tokens)
    tl.store(noise + place, -tl.log(sampling.exponential(word)), mask=column < num_tokens)


def device_noise(device: str, seeds: list[int], positions: IntArray, tokens: IntArray):
    shape = (len(seeds), len(tokens))
    words = torch.zeros(shape, dtype=torch.int32, device=device)
    noise = torch.zeros(shape, dtype=torch.float32, device=device)
    mixed = torch.tensor([sampling.mixed_seed(seed) for seed in seeds], device=device)
    _noise_kernel[(shape[0], triton.cdiv(shape[1], 1024))](
        mixed, ints(positions, device), ints(tokens, device), words, noise, shape[1], block=1024
    )
    return words.cpu().numpy().view(np.uint32), noise.cpu().numpy()


def host_words(seeds: list[int], positions: IntArray, tokens: IntArray) -> NDArray[np.uint32]:
    """h = mix32(mix32(v * WEYL + key0) ^ key1), in Python's integers."""

    def mix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
        return x ^ x >> 15

    keys = zip(*noise_keys(np.array([seed % 2**64 for seed in seeds], np.uint64), positions), strict=True)
    weyl, tokens = 0x9E3779B1, tokens.tolist()
    words = [[mix32(mix32((v * weyl + int(key0)) % 2**32) ^ int(key1)) for v in tokens] for key0, key1 in keys]
    return np.array(words, np.uint32)


def test_the_noise_has_the_hosts_bits_for_every_seed_position_and_token(device):
    positions = np.array([0, 1, 2, 41, 42, 1000, 2**16, 2**20, 131_071, 2**31 - 1])
    tokens = np.concatenate([np.arange(300), np.arange(128_000, 128_256), [151_935, 2**31 - 1]])
    for shift in range(0, len(SEEDS), 3):
        moved = np.roll(positions, shift)
        words, _ = device_noise(device, SEEDS, moved, tokens)
        assert np.array_equal(words, host_words(SEEDS, moved, tokens))


def test_the_noise_is_the_hosts_to_a_few_units_in_the_last_place(device):
    num_tokens = 5_000 if device == "cpu" else 150_000
    positions = np.arange(len(SEEDS)) * 3
    _, noise = device_noise(device, SEEDS, positions, np.arange(num_tokens))
    expected = gumbel(np.array([seed % 2**64 for seed in SEEDS], np.uint64), positions, num_tokens)
    np.testing.assert_allclose(noise, expected, rtol=0, atol=6e-6)


def test_a_seed_is_mixed_as_the_host_mixes_it():
    """Position 0 of the stream is the mixed seed, mixed once more: one constant apart from the mixed seed's own mix."""
    keys0, keys1 = noise_keys(np.array([seed % 2**64 for seed in SEEDS], np.uint64), np.zeros(len(SEEDS), np.int64))
    for seed, key0, key1 in zip(SEEDS, keys0.tolist(), keys1.tolist(), strict=True):
        assert sampling.mixed_seed(sampling.mixed_seed(seed)) % 2**64 == key1 << 32 | key0


# --- sampling ------------------------------------------------------------------------------------------------------


def sizes(device: str) -> list[tuple[int, int]]:
    """(rows, columns): one tile and less, several with a rest, and at last several tiles per block."""
    return [(3, 100), (2, TILE), (6, 5000)] if device == "cpu" else [(1, 128_256), (16, 49_152), (24, 151_936)]


@pytest.mark.parametrize("confidence", [False, True])
def test_tokens_are_those_of_the_cpu_unless_two_scores_are_a_rounding_apart(place, confidence):
    device, dtype = place
    for num_rows, num_columns in sizes(device):
        case = make_case(device, dtype, num_rows, num_columns, num_rows)
        differs = case.sample(confidence=confidence) != case.expected()
        assert np.all(case.gaps()[differs] < 1e-4)
        assert differs.sum() <= num_rows // 50
        assert not case.choices.broken.any()


def test_many_tiles_per_block_give_the_same_tokens(place, monkeypatch):
    device, dtype = place
    num_rows, num_columns = (5, 6_100) if device == "cpu" else (12, 128_256)
    case = make_case(device, dtype, num_rows, num_columns, 5)
    few = case.sample().copy()
    monkeypatch.setattr(sampling, "FEW_TILES", 0)
    assert np.array_equal(case.sample(), few)
    monkeypatch.setattr(sampling, "MANY_BLOCKS", num_rows * -(-num_columns // TILE) // 4)
    assert np.array_equal(case.sample(), few)


def test_a_rows_token_does_not_depend_on_the_rows_beside_it(place):
    device, dtype = place
    num_rows, num_columns = (4, 3000) if device == "cpu" else (24, 128_256)
    case = make_case(device, dtype, num_rows, num_columns, 2)
    together = case.sample().copy()
    for row in range(0, num_rows, max(1, num_rows // 4)):
        slots, positions = case.row_slots[row : row + 1], case.positions[row : row + 1]
        alone = Case(case.logits[row : row + 1], slots, positions, case.temperatures, case.seeds, device)
        assert alone.sample()[0] == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_equal_logits_go_to_the_lowest_id_and_a_cold_row_is_greedy_between_unequal_ones(place, temperature):
    device, dtype = place
    logits = torch.zeros(4, 4 * TILE)
    logits[0, [5, 9, TILE + 1]] = 2.0
    logits[1, [TILE - 1, TILE, 3 * TILE]] = 2.0
    logits[2] = -INF
    logits[2, 3 * TILE :] = -7.0
    case = Case(logits.to(dtype), np.zeros(4, np.int64), np.arange(4), [temperature] * MAX_SLOTS, [3] * 12, device)
    tokens = case.sample()
    if temperature == 0:
        assert tokens.tolist() == [5, TILE - 1, 3 * TILE, 0]
    assert np.array_equal(tokens, case.expected())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in rows that are given up
def test_a_row_with_nan_or_without_a_finite_best_is_broken_and_its_neighbours_are_not(place):
    device, dtype = place
    case = make_case(device, dtype, 8, 2 * TILE + 100, 3)
    whole = case.expected()
    case.logits[1, 7] = NAN
    case.logits[2, 2 * TILE + 99] = NAN
    case.logits[3, TILE] = INF
    case.logits[4] = -INF
    case.logits[5, :-1] = -INF  # one token left is enough
    case.logits[6, : 2 * TILE] = -INF
    whole[5] = 2 * TILE + 99
    tokens = case.sample(confidence=True)
    assert case.choices.broken.tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert tokens[[1, 2, 3, 4]].tolist() == [0] * 4
    assert np.array_equal(tokens[[0, 5, 7]], whole[[0, 5, 7]])
    assert tokens[6] == case.expected()[6]
    confidence = case.choices.confidence.cpu()
    assert confidence[[1, 2, 3, 4]].tolist() == [0.0] * 4
    assert confidence[5] == 1.0


def test_padding_rows_are_left_alone_and_the_scratch_memory_is_ready_for_the_next_call(place):
    device, dtype = place
    case = make_case(device, dtype, 6, 2500)
    case.choices.tokens.fill_(-5)
    case.choices.broken.fill_(-5)
    case.choices.confidence.fill_(-5)
    case.row_slots[4:] = -1  # nobody's
    tokens = case.sample(num_rows=4, confidence=True, write=True)
    case.row_slots[4:] = 0
    assert np.array_equal(tokens[:4], case.expected()[:4])
    for output in (case.choices.tokens, case.choices.broken, case.choices.confidence):
        assert output[4:].tolist() == [-5, -5]
    assert not case.choices.arrived.any()
    assert np.array_equal(case.sample(num_rows=4), tokens)
    assert case.sample(num_rows=0)[0] == tokens[0]


def test_the_columns_of_a_short_vocabulary_are_sampled_as_the_tokens_they_stand_for(place):
    device, dtype = place
    num_tokens, num_columns = (4000, 1500) if device == "cpu" else (128_256, 32_000)
    case = make_case(device, dtype, 8, num_columns, 9)
    rng = np.random.default_rng(1)
    vocabulary = torch.from_numpy(np.sort(rng.choice(num_tokens, num_columns, replace=False)))
    spread = torch.full((8, num_tokens), -INF)
    spread[:, vocabulary] = case.logits.float()
    tokens = case.sample(vocabulary=vocabulary.to(device, torch.int32))
    assert np.array_equal(tokens, case.expected(spread))


def test_logits_may_be_a_slice_of_wider_ones(place):
    device, dtype = place
    case = make_case(device, dtype, 4, 3000)
    wide = case.logits.to(device)
    case.logits = case.logits[:, :2100]
    expected = case.expected()
    sample(
        wide[:, :2100], ints(case.row_slots, device), ints(case.positions, device), ints([4], device),
        case.slots, case.choices,
    )  # fmt: skip
    assert np.array_equal(case.choices.tokens.cpu().numpy(), expected)


def test_confidence_is_the_chosen_tokens_probability(place):
    device, dtype = place
    for num_rows, num_columns in sizes(device):
        case = make_case(device, dtype, num_rows, num_columns)
        tokens = torch.from_numpy(case.sample(confidence=True)).long()
        temperatures = torch.tensor([case.temperatures[slot] or 1.0 for slot in case.row_slots.tolist()])
        log_p = torch.log_softmax(case.logits.double() / temperatures[:, None], dim=-1)
        expected = log_p[torch.arange(num_rows), tokens].exp()
        torch.testing.assert_close(case.choices.confidence.cpu().double(), expected, rtol=1e-4, atol=1e-9)


def test_sampled_tokens_are_written_at_their_positions_and_nowhere_else(place):
    device, dtype = place
    case = make_case(device, dtype, 6, 1200)
    case.row_slots, case.positions = np.array([3, 1, 3, 0, 7, 7]), np.array([5, 0, 6, 63, 2, 9])
    tokens = case.sample(num_rows=5, write=True)
    history = case.slots.history
    expected = np.zeros(history.shape, np.int32)
    expected[case.row_slots[:5], case.positions[:5]] = tokens[:5]
    assert np.array_equal(history.cpu().numpy(), expected)


@pytest.mark.gpu
def test_one_captured_graph_serves_every_smaller_batch(place):
    device, dtype = place
    if device == "cpu":
        pytest.skip("the interpreter has no graphs")
    case = make_case(device, dtype, 24, 49_152, 4)
    logits, slots = torch.zeros_like(case.logits, device=device), ints(case.row_slots, device)
    positions, num_rows = ints(case.positions, device), ints([24], device)
    sample(logits, slots, positions, num_rows, case.slots, case.choices)  # compiles, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, slots, positions, num_rows, case.slots, case.choices)
    logits.copy_(case.logits)
    expected = case.expected()
    for count in (24, 1, 0, 7):
        case.choices.tokens.fill_(-5)
        num_rows.fill_(count)
        graph.replay()
        tokens = case.choices.tokens.cpu().numpy()
        assert np.array_equal(tokens[:count], expected[:count])
        assert (tokens[count:] == -5).all()
