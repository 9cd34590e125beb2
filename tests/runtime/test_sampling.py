"""The sampler draws from the distribution it promises, and each row from nothing but its own inputs.

Distributions are tested by chi-square against plain float64 code, on fixed seeds, with a control that must fail.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.request import Grammar, SamplingParams
from faser.runtime.sampling import Sampler, gumbel, gumbel_of

NUM_DRAWS = 12_000
VOCAB = 24


def p_value(counts: IntArray, expected: FloatArray) -> float:
    """Chi-square: the chance of a misfit at least this large. Cells expecting under 5 are pooled."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    if degrees == 0:
        return 1.0
    return torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)).item()


# --- noise ---------------------------------------------------------------------------------------------------------


def uniform_of(noise: np.ndarray) -> FloatArray:
    """The inverse of the Gumbel transformation."""
    return -np.expm1(-np.exp(-noise.astype(np.float64)))


def as_seeds(*seeds: int) -> np.ndarray:
    return np.array([seed % 2**64 for seed in seeds], np.uint64)


def test_noise_of_a_row_does_not_depend_on_the_other_rows() -> None:
    seeds, positions = as_seeds(1, 2, 2, 2**63, -1), np.array([0, 5, 6, 7, 2**40])
    for num_tokens in (1, 7, 64, 1000, 70_001):
        together = gumbel(seeds, positions, num_tokens)
        for i in range(len(seeds)):
            assert np.array_equal(together[i], gumbel(seeds[i : i + 1], positions[i : i + 1], num_tokens)[0])


def test_noise_of_a_small_vocabulary_is_the_beginning_of_that_of_a_large_one() -> None:
    seeds, positions = as_seeds(3, 4), np.array([10, 11])
    large = gumbel(seeds, positions, 70_001)
    for num_tokens in (1, 15, 16, 17, 333, 49_152, 65_536, 65_537):
        assert np.array_equal(gumbel(seeds, positions, num_tokens), large[:, :num_tokens])


def test_noise_of_some_tokens_equals_that_of_all() -> None:
    seeds, positions = as_seeds(3, 4, 5), np.array([10, 11, 12])
    rng = np.random.default_rng(0)
    rows, token_ids = rng.integers(0, 3, 1001), rng.integers(0, 5000, 1001)
    assert np.array_equal(gumbel_of(seeds, positions, rows, token_ids), gumbel(seeds, positions, 5000)[rows, token_ids])


def test_noise_never_changes_between_versions() -> None:
    """Recorded: another generator would change every seeded answer ever given."""
    noise = gumbel(as_seeds(0, 1234567890123456789), np.array([0, 42]), 4)
    recorded = [[-1.3865397, 1.8466649, -0.2560604, -0.3060035], [2.0100706, 0.3781326, 1.4536451, 1.0239849]]
    np.testing.assert_allclose(noise, recorded, rtol=1e-5)


def test_noise_is_always_finite_and_has_the_shape_of_a_gumbel() -> None:
    noise = gumbel(as_seeds(*range(64)), np.arange(64), 16_384).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


# each gives [10_000, 2] uniforms that should be independent of each other
NEIGHBOURS = {
    "tokens": lambda: gumbel(as_seeds(*range(100)), np.zeros(100, np.int64), 200).reshape(-1, 2),
    "far tokens": lambda: gumbel(as_seeds(*range(20)), np.zeros(20, np.int64), 1000).reshape(-1, 2, 500).swapaxes(1, 2),
    "positions": lambda: gumbel(np.full(200, 9, np.uint64), np.arange(200), 100).reshape(-1, 2, 100).swapaxes(1, 2),
    "seeds": lambda: gumbel(as_seeds(*range(200)), np.zeros(200, np.int64), 100).reshape(-1, 2, 100).swapaxes(1, 2),
    "high seed bits": lambda: (
        gumbel(as_seeds(*(i << 32 for i in range(200))), np.zeros(200, np.int64), 100)
        .reshape(-1, 2, 100)
        .swapaxes(1, 2)
    ),
    "seed and position": lambda: (
        gumbel(as_seeds(*range(200)), np.arange(200)[::-1], 100).reshape(-1, 2, 100).swapaxes(1, 2)
    ),
}


@pytest.mark.parametrize("which", NEIGHBOURS)
def test_neighbouring_noise_is_uniform_and_independent(which: str) -> None:
    u = uniform_of(NEIGHBOURS[which]().reshape(-1, 2))
    # 16 x 16 cells of the unit square, then the same of the low bits, which only a good mixer scrambles
    for fraction in (u, (u * 4096) % 1):
        cells = (fraction * 16).astype(np.int64) @ [16, 1]
        assert p_value(np.bincount(cells, minlength=256), np.full(256, len(u) / 256)) > 1e-3


def test_the_tail_that_wins_is_finely_resolved() -> None:
    """Of a large vocabulary the best noise is near u = 1 / V, where a 24-bit uniform would show ties."""
    noise = gumbel(as_seeds(*range(40)), np.zeros(40, np.int64), 49_152)
    best = np.sort(noise, axis=None)[-2000:]
    assert len(np.unique(best)) == len(best)
    maxima = uniform_of(noise.max(axis=-1))  # V times this is exponential
    assert (maxima * 49_152).mean() == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize(
    ("one", "other"), [((1, 5), (2, 5)), ((1, 5), (1, 6)), ((7, 5), (7 + (1 << 32), 5)), ((-1, 0), (1, 0))]
)
def test_another_seed_or_position_is_other_noise(one: tuple[int, int], other: tuple[int, int]) -> None:
    noise = gumbel(as_seeds(one[0], other[0]), np.array([one[1], other[1]]), 1000)
    assert (noise[0] == noise[1]).sum() == 0
    assert abs(np.corrcoef(noise)[0, 1]) < 0.1


# --- distributions -------------------------------------------------------------------------------------------------


GRAMMAR = Grammar("regex", "a")


class Turns:
    """A compiler with one grammar: an odd token after an even number of outputs, else one of the last ten."""

    def matcher(self, grammar: Grammar, stop_ids: Sequence[int] = ()) -> "Turns":
        return self

    def mask(self, tokens: IntArray, vocab_size: int) -> NDArray[np.bool_]:
        ids = np.arange(vocab_size)
        return (ids % 2 == 1) if len(tokens) % 2 == 0 else (ids >= VOCAB - 10)

    def num_valid(self, tokens: IntArray, drafted: IntArray) -> int:
        return min(1, len(drafted))


@dataclass(frozen=True)
class Case:
    """One request with a fixed prefix, and what its next token should look like."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 2, 3)
    outputs: tuple[int, ...] = (3, 5, 5, 5, 8)
    stop_ids: tuple[int, ...] = (0, 4)
    temperature_of_logits: float = 1.5

    @property
    def logits(self) -> FloatArray:
        return (
            np.random.default_rng(5).normal(size=VOCAB).astype(np.float32).astype(np.float64)
            * self.temperature_of_logits
        )


def expected_scores(case: Case) -> FloatArray:
    """Bias, penalties and ban, one token at a time."""
    params, prefix, counts = case.params, {*case.prompt, *case.outputs}, Counter(case.outputs)
    scores = case.logits.copy()
    for token in range(VOCAB):
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prefix:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        if token in counts:
            scores[token] -= params.presence_penalty + params.frequency_penalty * counts[token]
        if token in case.stop_ids and len(case.outputs) < params.min_tokens:
            scores[token] = -math.inf
        if params.grammar is not None and not Turns().mask(np.array(case.outputs), VOCAB)[token]:
            scores[token] = -math.inf
    return scores


def expected_distribution(case: Case) -> FloatArray:
    """Temperature, then each filter on the renormalised survivors of the one before."""
    params = case.params
    p = np.exp(expected_scores(case) / params.temperature)
    p /= p.sum()
    if params.top_k:
        kth = sorted(p, reverse=True)[min(params.top_k, VOCAB) - 1]
        p[p < kth] = 0
        p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for token in sorted(range(VOCAB), key=lambda token: -p[token]):
            if mass >= params.top_p:
                p[token] = 0
            mass += p[token]
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def draw(case: Case, num_draws: int = NUM_DRAWS) -> IntArray:
    """Sample one position with many seeds: the slot of each row has a seed of its own."""
    prefix = torch.tensor([*case.prompt, *case.outputs, 9, 9])  # what lies behind the prefix must not matter
    num_slots = 200
    sampler = Sampler(num_slots, VOCAB, prefix.expand(num_slots, -1).contiguous(), Turns())  # type: ignore[arg-type]
    logits = torch.tensor(case.logits, dtype=torch.float32).expand(num_slots, -1)
    slots, positions = np.arange(num_slots), np.full(num_slots, len(prefix) - 2)
    drawn = []
    for start in range(0, num_draws, num_slots):
        for slot in range(num_slots):
            sampler.admit(slot, case.params, start + slot, len(case.prompt), case.stop_ids)
        drawn.append(sampler.sample(logits, slots, positions))
    return np.concatenate(drawn)


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **values})  # type: ignore[arg-type]


CASES = {
    "temperature 1": Case(params()),
    "temperature 0.6": Case(params(temperature=0.6)),
    "temperature 3": Case(params(temperature=3.0)),
    "top_k": Case(params(top_k=5)),
    "top_k of more than there are": Case(params(top_k=1000)),
    "top_p": Case(params(top_p=0.8)),
    "a tiny top_p": Case(params(top_p=1e-9)),
    "top_p of nearly everything": Case(params(top_p=0.999999)),
    "min_p": Case(params(min_p=0.2)),
    "min_p 1": Case(params(min_p=1.0)),
    "bias": Case(params(logit_bias={0: 2.0, 7: -100.0, 9: 1.5, 500: 3.0})),
    "presence": Case(params(presence_penalty=1.5)),
    "frequency": Case(params(frequency_penalty=-0.7)),
    "repetition": Case(params(repetition_penalty=1.8)),
    "repetition reversed": Case(params(repetition_penalty=0.6)),
    "ban": Case(params(min_tokens=6)),
    "ban that has ended": Case(params(min_tokens=5)),
    "grammar": Case(params(grammar=GRAMMAR)),
    "grammar at an even number of outputs": Case(params(grammar=GRAMMAR), outputs=(3, 5, 5, 5)),
    "grammar and filters": Case(params(grammar=GRAMMAR, temperature=1.7, top_k=6, top_p=0.9, min_p=0.05)),
    "grammar and the rest": Case(
        params(grammar=GRAMMAR, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={15: 1.0, 2: 50.0})
    ),
    "filters": Case(params(temperature=1.7, top_k=12, top_p=0.9, min_p=0.08)),
    "everything": Case(
        params(temperature=1.4, top_k=15, top_p=0.93, min_p=0.02, presence_penalty=0.4, frequency_penalty=0.3,
               repetition_penalty=1.2, logit_bias={3: 1.0, 11: -2.0}, min_tokens=20)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    case = CASES[name]
    expected = expected_distribution(case)
    counts = np.bincount(draw(case), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a forbidden token was drawn"
    assert p_value(counts, expected * NUM_DRAWS) > 1e-3


def test_the_chi_square_test_rejects_a_wrong_distribution() -> None:
    counts = np.bincount(draw(CASES["temperature 1"]), minlength=VOCAB)
    for wrong in (Case(params(temperature=1.15)), Case(params(logit_bias={9: 0.2})), Case(params(min_p=0.01))):
        assert p_value(counts, expected_distribution(wrong) * NUM_DRAWS + 1e-6) < 1e-6


def test_draws_over_positions_follow_the_distribution_too() -> None:
    case = Case(params(temperature=0.9, top_p=0.9))
    sampler = Sampler(1, VOCAB, torch.zeros(1, NUM_DRAWS, dtype=torch.int64))
    sampler.admit(0, case.params, 77, 0, ())
    logits = torch.tensor(case.logits, dtype=torch.float32).expand(NUM_DRAWS, -1)
    drawn = sampler.sample(logits, np.zeros(NUM_DRAWS, np.int64), np.arange(NUM_DRAWS))
    assert p_value(np.bincount(drawn, minlength=VOCAB), expected_distribution(case) * NUM_DRAWS) > 1e-3
    follower = np.bincount(drawn[:-1] * VOCAB + drawn[1:], minlength=VOCAB * VOCAB)  # successive draws are independent
    p = expected_distribution(case)
    assert p_value(follower, np.outer(p, p).ravel() * (NUM_DRAWS - 1)) > 1e-3


# --- one row at a time ---------------------------------------------------------------------------------------------


class Bench:
    """A sampler with random histories, and calls of one line."""

    def __init__(self, num_slots: int = 1, vocab: int = VOCAB, length: int = 64) -> None:
        rng = np.random.default_rng(0)
        self.history = torch.tensor(rng.integers(0, vocab, (num_slots, length)))
        self.sampler = Sampler(num_slots, vocab, self.history)

    def admit(self, slot: int = 0, num_prompt: int = 4, stop_ids: tuple[int, ...] = (), **values: object) -> None:
        self.sampler.admit(slot, SamplingParams(**values), slot + 1, num_prompt, stop_ids)  # type: ignore[arg-type]

    def one(self, logits: object, position: int = 10, slot: int = 0) -> int:
        row = torch.as_tensor(logits, dtype=torch.float32)[None]
        return int(self.sampler.sample(row, np.array([slot]), np.array([position]))[0])


def test_greedy_is_the_argmax_and_the_first_of_ties() -> None:
    bench = Bench(8)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    for slot in range(8):
        bench.admit(slot)
    assert np.array_equal(bench.sampler.sample(logits, np.arange(8), np.arange(8)), logits.argmax(-1).numpy())
    assert bench.one([0.0, 2.0, 1.0, 2.0]) == 1


def test_greedy_takes_the_best_after_bias_penalties_and_ban() -> None:
    bench = Bench(vocab=4)
    bench.history[0, :10] = torch.tensor([2, 2, 2, 2, 1, 1, 1, 1, 1, 1])
    for values, expected in [
        ({}, 1),
        ({"logit_bias": {3: 100.0}}, 3),
        ({"presence_penalty": 2.0}, 2),
        ({"repetition_penalty": 50.0}, 0),
        ({"min_tokens": 64, "stop_ids": (1, 2)}, 0),
    ]:
        bench.admit(**values)  # type: ignore[arg-type]
        assert bench.one([1.0, 4.0, 3.0, 0.5]) == expected


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 9.0}]
)
def test_penalties_see_drafted_tokens_below_their_position_only(penalty: dict[str, float]) -> None:
    bench = Bench(vocab=4)
    bench.history[0, :8] = torch.tensor([3, 3, 3, 3, 2, 1, 2, 2])  # four of the prompt, then outputs and drafts
    bench.admit(num_prompt=4, **penalty)
    logits = [1.0, 2.0, 1.5, 0.0]
    assert [bench.one(logits, position) for position in (4, 5, 6, 8)] == [1, 1, 0, 0], "1 stands at position 5"
    assert bench.one(logits, 5) == 1, "nothing is remembered when drafts are dropped"
    bench.history[0, 5] = 0
    assert bench.one(logits, 6) == 1, "nor when they are overwritten"


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    bench = Bench(vocab=4)
    bench.history[0, :5] = torch.tensor([1, 1, 1, 1, 3])
    for values, expected in [
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, 1),
        ({"repetition_penalty": 9.0}, 2),
    ]:
        bench.admit(num_prompt=4, **values)
        assert bench.one([1.0, 2.0, 1.5, 0.0], 5) == expected


def test_frequency_counts_each_time_and_presence_once() -> None:
    bench = Bench(vocab=3)
    bench.history[0, :6] = torch.tensor([0, 2, 1, 1, 1, 2])
    for values, expected in [({"presence_penalty": 1.0}, 1), ({"frequency_penalty": 1.0}, 2)]:
        bench.admit(num_prompt=1, **values)
        assert bench.one([-9.0, 2.0, 1.5], 6) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_ban_on_stop_ids_ends_after_min_tokens_outputs(temperature: float) -> None:
    bench = Bench()
    bench.admit(num_prompt=4, min_tokens=3, stop_ids=(5, 6), temperature=temperature)
    logits = np.full(VOCAB, -50.0)
    logits[5], logits[6], logits[7] = 50, 20, 10
    assert [bench.one(logits, position) for position in range(4, 9)] == [7, 7, 7, 5, 5]


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8, 1e-3])
def test_a_temperature_near_zero_is_greedy_and_does_not_overflow(temperature: float, values: dict[str, float]) -> None:
    bench = Bench()
    bench.admit(temperature=temperature, **values)
    logits = np.linspace(-80, 80, VOCAB)
    logits[3] = 95
    assert [bench.one(logits, position) for position in range(5)] == [3] * 5


def test_top_k_keeps_ties_and_top_p_the_lower_ids_of_ties() -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 0.0]
    bench = Bench(vocab=5)
    bench.admit(temperature=1.0, top_k=2)
    assert {bench.one(logits, position) for position in range(64)} == {1, 2, 3}
    bench.admit(temperature=1.0, top_p=0.5)
    assert {bench.one(logits, position) for position in range(64)} == {1, 2}
    bench.admit(temperature=1.0, min_p=1.0)
    assert {bench.one(logits, position) for position in range(64)} == {1, 2, 3}


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=40), st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: list[int], top_p: float) -> None:
    from faser.runtime.sampling import _keep_top_p

    score = np.array(logits, np.float32) - np.float32(max(logits))
    kept, kept_score = _keep_top_p((np.arange(len(score)), score), top_p)
    p = np.exp(score.astype(np.float64)) / np.exp(score.astype(np.float64)).sum()
    assert np.array_equal(kept_score, score[kept])
    assert p[kept].sum() >= top_p - 1e-6
    assert p[kept].sum() - p[kept].min() < top_p + 1e-6
    order = sorted(range(len(p)), key=lambda token: (-score[token], token))
    assert sorted(order[: len(kept)]) == kept.tolist()


def test_logits_are_left_as_they_were() -> None:
    bench = Bench()
    bench.admit(temperature=0.5, top_p=0.9, presence_penalty=1.0, logit_bias={1: 4.0}, min_tokens=64, stop_ids=(2,))
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    bench.sampler.sample(logits, np.array([0]), np.array([20]))
    assert torch.equal(logits, before)


def test_a_released_slot_keeps_nothing_of_its_request() -> None:
    bench = Bench()
    bench.admit(temperature=2.0, logit_bias={1: 50.0}, min_tokens=64, stop_ids=(5,), logprobs=3, presence_penalty=2.0)
    bench.sampler.release(0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1
    assert bench.one(logits[0]) == 5
    assert bench.sampler.logprobs(logits, np.array([0]), np.array([5])) == []


# --- independence --------------------------------------------------------------------------------------------------

MIXED: list[dict[str, object]] = [
    {},
    {"logit_bias": {1: 2.0}},
    {"temperature": 0.7},
    {"temperature": 1.3, "min_tokens": 64, "stop_ids": (1, 2, 3)},
    {"temperature": 1.0, "top_k": 10},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.3, "min_tokens": 64, "stop_ids": (4,)},
    {"temperature": 1e-3},
]


def mixed_batch(vocab: int, num_rows: int) -> tuple[Bench, torch.Tensor, IntArray, IntArray]:
    bench = Bench(len(MIXED), vocab, 64)
    for slot, values in enumerate(MIXED):
        bench.admit(slot, **values)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(size=(num_rows, vocab)) * 2, dtype=torch.float32)
    return bench, logits, rng.permutation(num_rows) % len(MIXED), rng.integers(4, 64, num_rows)


@pytest.mark.parametrize("vocab", [37, 5003])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    bench, logits, slots, positions = mixed_batch(vocab, 4 * len(MIXED))
    together = bench.sampler.sample(logits, slots, positions)
    rng = np.random.default_rng(4)
    for size in (1, 2, 3, 7, 20, len(slots)):
        rows = rng.permutation(len(slots))[:size]
        alone = bench.sampler.sample(logits[torch.from_numpy(rows)], slots[rows], positions[rows])
        assert np.array_equal(alone, together[rows])
    for row in range(len(slots)):
        assert bench.one(logits[row], int(positions[row]), int(slots[row])) == together[row]


def test_without_rows_there_are_no_tokens() -> None:
    none = np.empty(0, np.int64)
    assert Bench().sampler.sample(torch.empty(0, VOCAB), none, none).shape == (0,)


def test_a_draft_with_a_smaller_vocabulary_uses_the_same_noise() -> None:
    """Where the target gives the tokens the draft lacks no chance, both choose alike, whatever the parameters."""
    small, large = 301, 400
    bench, logits, slots, positions = mixed_batch(large, 6 * len(MIXED))
    logits[:, small:] = -torch.inf
    wide = bench.sampler.sample(logits, slots, positions)
    assert np.array_equal(bench.sampler.sample(logits[:, :small], slots, positions), wide)


def test_ids_a_small_vocabulary_lacks_are_skipped() -> None:
    bench = Bench(vocab=50)
    bench.history[0] = 49
    bench.admit(logit_bias={40: 50.0}, repetition_penalty=2.0, frequency_penalty=1.0, min_tokens=64, stop_ids=(45, 1))
    assert bench.one([1.0, 2.0, 1.5]) == 2


# --- grammar -------------------------------------------------------------------------------------------------------


def constrained(vocab: int = VOCAB, num_slots: int = 1) -> Bench:
    bench = Bench(num_slots, vocab)
    bench.sampler = Sampler(num_slots, vocab, bench.history, Turns())  # type: ignore[arg-type]
    return bench


def test_the_mask_is_that_of_the_outputs_before_the_position() -> None:
    bench = constrained()
    bench.admit(num_prompt=4, grammar=GRAMMAR)
    logits = np.zeros(VOCAB)
    logits[[2, 5, 20]] = 9, 7, 8
    assert [bench.one(logits, position) for position in (4, 5, 6, 7)] == [5, 20, 5, 20]


def test_a_row_without_an_allowed_token_says_why_and_touches_no_other() -> None:
    bench = constrained(num_slots=2)
    bench.admit(0, num_prompt=4, grammar=GRAMMAR, temperature=1.0, min_p=0.5)
    bench.admit(1)
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 2] = 1.0
    tokens = bench.sampler.sample(logits, np.array([0, 1]), np.array([4, 4]))
    assert tokens[1] == 2
    assert list(bench.sampler.failed_rows) == [0]
    bench.sampler.sample(logits[1:], np.array([1]), np.array([5]))
    assert bench.sampler.failed_rows == {}


def test_drafts_are_counted_valid_by_the_grammar_of_those_who_have_one() -> None:
    bench = constrained(num_slots=3)
    slots, num_tokens, num_drafted = np.arange(3), np.full(3, 6), np.array([4, 4, 0])
    assert bench.sampler.num_valid(slots, num_tokens, num_drafted) is num_drafted
    bench.admit(1, grammar=GRAMMAR)
    bench.admit(2, grammar=GRAMMAR)
    assert bench.sampler.num_valid(slots, num_tokens, num_drafted).tolist() == [4, 1, 0]
    bench.sampler.release(1)
    bench.sampler.release(2)
    assert bench.sampler.num_valid(slots, num_tokens, num_drafted) is num_drafted


# --- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_raw_log_softmax_of_those_who_asked() -> None:
    bench = Bench(4)
    bench.admit(0, logprobs=3, temperature=0.3, logit_bias={2: 9.0})
    bench.admit(1)
    bench.admit(2, logprobs=0)
    bench.admit(3, logprobs=20)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    token_ids = np.array([5, 6, 7, 8])
    first, second, third, fourth = bench.sampler.logprobs(logits, np.arange(4), token_ids)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert second is None
    for row, answer, count in ((0, first, 3), (2, third, 0), (3, fourth, 20)):
        assert answer is not None
        assert answer.token_id == token_ids[row]
        assert answer.logprob == pytest.approx(expected[row, token_ids[row]], abs=1e-5)
        best = np.argsort(-expected[row])[:count]
        assert [token for token, _ in answer.top] == best.tolist()
        assert [value for _, value in answer.top] == pytest.approx(expected[row, best].tolist(), abs=1e-5)


def test_equal_logprobs_are_listed_by_id() -> None:
    bench = Bench(vocab=6)
    bench.admit(logprobs=4)
    (answer,) = bench.sampler.logprobs(torch.tensor([[0.0, 1.0, 2.0, 1.0, 1.0, 1.0]]), np.array([0]), np.array([2]))
    assert answer is not None
    assert [token for token, _ in answer.top] == [2, 1, 3, 4]


@pytest.mark.gpu
def test_the_device_of_the_logits_does_not_matter() -> None:
    bench, logits, slots, positions = mixed_batch(5003, 2 * len(MIXED))
    on_device = bench.sampler.sample(logits.cuda(), slots, positions)
    assert np.array_equal(on_device, bench.sampler.sample(logits, slots, positions))
