"""The device judges drafts as the CPU's verifier does."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="the kernels are written in Triton: pip install triton")

from faser.arrays import IntArray
from faser.runtime.cpu.verifier import _leading_matches
from faser.runtime.cuda.rows import Requests
from faser.runtime.cuda.sampling import Choices, Slots
from faser.runtime.cuda.verifier import FIRST_TOKEN, HIT, IS_BROKEN, NUM_ACCEPTED, chances_by_position, judge
from tests.runtime.cuda.test_sampling import ints


@dataclass
class Step:
    """A step to judge: the target's token for each row, and the history with the drafts."""

    requests: Requests
    cu_wanted: torch.Tensor
    slots: Slots
    choices: Choices
    num_drafted: IntArray  # [B] of the real requests
    planned: IntArray  # [B] of which fewer may have been made
    samples: NDArray[np.bool_]  # [B]
    num_tokens: IntArray  # [B]

    def judge(
        self, width: int, num_bucket: int, acceptance: torch.Tensor | None = None, overlaps: bool = False
    ) -> IntArray:
        packed = torch.full((num_bucket, FIRST_TOKEN + width), -9, dtype=torch.int32, device=self.cu_wanted.device)
        judge(self.choices, self.requests, self.cu_wanted, self.slots, packed, overlaps=overlaps, acceptance=acceptance)
        return packed.cpu().numpy()


def make_step(device: str, rng: np.random.Generator, num: int, num_bucket: int, max_length: int, chance: float) -> Step:
    """Drafted tokens agree with a probability of `chance` each; some rows are broken, some requests do not sample."""
    slots = Slots.allocate(num_bucket + 3, 200, device)
    slots.history.copy_(torch.from_numpy(rng.integers(0, 50, slots.history.shape)))
    slots.seeds.copy_(torch.from_numpy(rng.integers(-(2**62), 2**62, num_bucket + 3)))
    samples = rng.random(num) < 0.8
    num_drafted = np.where(samples, rng.integers(0, max_length + 1, num), 0)
    planned = num_drafted + np.where(samples, rng.integers(0, 2, num), 0)
    requests = Requests.allocate(num_bucket, device)
    start, num_rows = rng.integers(0, 90, num), rng.integers(1, 60, num)
    for buffer, values in (
        (requests.slots, rng.permutation(num_bucket + 3)[:num]), (requests.start, start), (requests.num_rows, num_rows),
        (requests.num_drafted, num_drafted), (requests.samples, samples), (requests.num_requests, [num]),
        (requests.planned, planned),
    ):  # fmt: skip
        buffer[: len(values)] = ints(values, device)
    judged = np.where(samples, num_drafted + 1, 0)
    cu_wanted = np.concatenate([[0], np.cumsum(judged), np.full(num_bucket - num, judged.sum())])
    choices = Choices.allocate(int(cu_wanted[-1]) + 5, 8, device)
    history, owners = slots.history.cpu().numpy(), requests.slots.cpu().numpy()
    said = np.concatenate([history[owners[i], s : s + j] for i, (s, j) in enumerate(zip(start + num_rows, judged))])  # noqa: B905
    said = np.where(rng.random(said.size) < chance, said, said + 1)
    choices.tokens[: said.size] = ints(said, device)
    choices.broken[: said.size] = ints(rng.random(said.size) < 0.1, device)
    return Step(requests, ints(cu_wanted, device), slots, choices, num_drafted, planned, samples, start + num_rows)


def verdict_of_the_cpu(step: Step) -> tuple[list[list[int]], list[int], list[int], list[bool], IntArray]:
    """Emitted tokens, accepted counts, broken flags, hits and history, computed request by request as on the CPU."""
    history = step.slots.history.cpu().numpy().astype(np.int64)
    said_all, broken_all = step.choices.tokens.cpu().numpy(), step.choices.broken.cpu().numpy()
    emitted, accepted, broken, hits = [], [], [], []
    for i, first in enumerate(step.cu_wanted.tolist()[: len(step.samples)]):
        if not step.samples[i]:
            emitted.append([]), accepted.append(0), broken.append(0), hits.append(False)
            continue
        judged = int(step.num_drafted[i]) + 1
        slot, offsets = int(step.requests.slots[i]), np.arange(judged)
        said = said_all[first : first + judged].astype(np.int64)
        drafted = history[slot, step.num_tokens[i] + offsets]
        count = int(_leading_matches(said, drafted, offsets, np.array([judged]), np.array([0]))[0])
        hits.append(count == judged - 1 and bool(said[-1] == drafted[-1]))
        history[slot, step.num_tokens[i] + offsets[: count + 1]] = said[: count + 1]
        emitted.append(said[: count + 1].tolist())
        accepted.append(count)
        broken.append(int(broken_all[first : first + count + 1].max()))
    return emitted, accepted, broken, hits, history


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("num", "num_bucket", "max_length"), [(1, 1, 3), (5, 8, 0), (9, 12, 4), (256, 256, 7)])
def test_the_verdict_is_the_cpu_verifiers(device, num, num_bucket, max_length, chance):
    if num > 100 and device == "cpu":
        pytest.skip("slow in Triton's interpreter: `make test-gpu` runs these on a GPU")
    for seed in range(4):
        step = make_step(device, np.random.default_rng(seed), num, num_bucket, max_length, chance)
        emitted, accepted, broken, hits, history = verdict_of_the_cpu(step)
        packed = step.judge(max_length + 1, num_bucket, overlaps=seed % 2 == 1)
        assert packed[:num, NUM_ACCEPTED].tolist() == accepted
        assert packed[:num, IS_BROKEN].tolist() == broken
        owners, made = step.requests.slots[:num], step.num_drafted
        assert packed[:num, HIT].tolist() == hits
        assert step.slots.missed[owners].tolist() == [not hit for hit in hits]
        assert step.slots.refused[owners].tolist() == (step.planned - accepted).tolist()
        assert step.slots.short[owners].tolist() == ((made < step.planned) & (made == accepted)).tolist()
        for row, tokens in zip(packed[:num, FIRST_TOKEN:].tolist(), emitted, strict=True):
            assert row == tokens + [-1] * (max_length + 1 - len(tokens))
        assert (packed[num:] == -9).all()
        assert np.array_equal(step.slots.history.cpu().numpy(), history)


def test_synthetic_acceptance_accepts_the_first_token_of_a_chunk_at_its_rate(device):
    """With overlap the token behind the last judged one is a draft, too."""
    num = 24 if device == "cpu" else 256
    step = make_step(device, np.random.default_rng(0), num, num, 3, 0.5)
    before = step.slots.history.cpu().numpy().copy()
    packed = step.judge(5, num, torch.tensor([1.0, 1.0, 0.5, 0.5], device=device), overlaps=True)
    hits, whole = packed[:, HIT] == 1, packed[:, NUM_ACCEPTED] == step.num_drafted
    assert hits[step.samples & (step.num_drafted < 2)].all()
    assert not hits[~step.samples | ~whole].any()
    uncertain = step.samples & whole & (step.num_drafted >= 2)
    assert 0 < hits[uncertain].mean() < 1
    for i in np.flatnonzero(hits).tolist():
        slot, place = int(step.requests.slots[i]), int(step.num_tokens[i] + step.num_drafted[i])
        assert packed[i, FIRST_TOKEN + step.num_drafted[i]] == before[slot, place] == step.slots.history[slot, place]


def test_synthetic_acceptance_accepts_drafts_at_its_rate_whatever_they_are(device):
    num = 24 if device == "cpu" else 256
    acceptance = torch.tensor([1.0, 0.5, 0.0, 1.0], device=device)
    counts = []
    for seed in range(3):
        step = make_step(device, np.random.default_rng(seed), num, num, 4, 0.5)
        before = step.slots.history.cpu().numpy().copy()
        said = step.choices.tokens.cpu().numpy()
        packed = step.judge(5, num, acceptance)
        for i in np.flatnonzero(step.samples).tolist():
            first, slot = int(step.cu_wanted[i]), int(step.requests.slots[i])
            accepted = packed[i, NUM_ACCEPTED]
            drafts = before[slot, step.num_tokens[i] : step.num_tokens[i] + accepted].tolist()
            emitted = [*drafts, int(said[first + accepted])]
            assert packed[i, FIRST_TOKEN : FIRST_TOKEN + accepted + 1].tolist() == emitted
            after = step.slots.history[slot, step.num_tokens[i] : step.num_tokens[i] + accepted + 1]
            assert after.tolist() == emitted
            assert accepted >= min(1, step.num_drafted[i])
            if step.num_drafted[i] >= 2:
                counts.append(int(accepted))
        assert np.array_equal(packed, step.judge(5, num, acceptance))  # a function of seed and position
    assert set(counts) == {1, 2}
    assert 0.25 < np.mean(np.array(counts) == 2) < 0.75


@pytest.mark.parametrize(
    ("acceptance", "chances"), [(0.5, [0.5, 0.5, 0.5]), ((0.9, 0.25), [0.9, 0.25, 0.25]), ((0, 1, 0, 1), [0, 1, 0])]
)
def test_synthetic_acceptance_is_given_for_all_positions_or_by_position(acceptance, chances):
    assert chances_by_position(acceptance, 3) == chances
