"""Lags, rows and the draft loop against a draft that shows every wrong KV entry."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from faser.vllm.drafting.graphs import max_splits  # noqa: E402
from faser.vllm.drafting.lag import DraftBatch, DraftLag  # noqa: E402
from faser.vllm.drafting.loop import DraftLoop  # noqa: E402
from faser.vllm.drafting.rows import LagPiece, Paging, host_rows, plan_catch_up  # noqa: E402
from tests.vllm.paged_draft import PagedDraft, greedy  # noqa: E402

BLOCK = 4
MAX_REQUESTS = 4
LENGTH = 96


def array(*values):
    return np.array(values, dtype=np.int64)


def test_catch_up_leaves_the_last_tokens_to_the_first_pass():
    assert plan_catch_up(array(1, 2, 7), width=2, max_rows=100) == [[LagPiece(owner=2, rows=5, end=2)]]


def test_long_lags_are_cut_into_forwards_in_order():
    passes = plan_catch_up(array(12, 5), width=2, max_rows=8)
    assert passes == [[LagPiece(0, 8, 4)], [LagPiece(0, 2, 2), LagPiece(1, 3, 2)]]


def test_rows_count_down_to_the_end_of_their_piece():
    owners, backs = host_rows([LagPiece(owner=3, rows=2, end=2), LagPiece(owner=0, rows=3, end=4)])
    assert owners.tolist() == [3, 3, 0, 0, 0]
    assert backs.tolist() == [4, 3, 7, 6, 5]


def test_a_draft_that_kept_up_lacks_one_token_or_two():
    lag = DraftLag(MAX_REQUESTS, BLOCK)
    lag.begin("a", [1, 2, 3, 4], 0)
    first = DraftBatch(["a"], array(0), array(5), array(0), np.array([True]))
    assert lag.lags(first).tolist() == [6]
    lag.drafted(first, depth=3)
    assert lag.lags(DraftBatch(["a"], array(5), array(4), array(3), np.array([True]))).tolist() == [2]
    assert lag.lags(DraftBatch(["a"], array(5), array(3), array(2), np.array([True]))).tolist() == [1]


def test_a_pause_adds_its_tokens_to_the_lag():
    lag = DraftLag(MAX_REQUESTS, BLOCK)
    lag.begin("a", [1, 2, 3, 4], 0)
    lag.drafted(DraftBatch(["a"], array(0), array(5), array(0), np.array([True])), depth=1)
    for computed in (5, 6, 7):
        batch = DraftBatch(["a"], array(computed), array(1), array(0), np.array([True]))
        lag.skipped(batch)
    assert lag.lags(DraftBatch(["a"], array(8), array(1), array(0), np.array([True]))).tolist() == [10 - 6]


def test_a_block_without_draft_entries_is_not_taken_for_one_that_has_them():
    lag = DraftLag(MAX_REQUESTS, BLOCK)
    lag.begin("seen", [1, 2, 3], 0)
    lag.drafted(DraftBatch(["seen"], array(0), array(9), array(0), np.array([True])), depth=1)
    lag.begin("unseen", [5, 6, 7], 0)
    lag.skipped(DraftBatch(["unseen"], array(0), array(9), array(0), np.array([True])))
    assert lag.begin("after seen", [1, 2, 8], 8) == 8
    assert lag.begin("after unseen", [5, 6, 9], 8) == 0
    lag.end("seen")
    lag.end("after seen")
    lag.begin("other", [1, 10], 0)  # block 1 is given out again
    assert lag.begin("late", [1, 2, 11], 8) == 0


@dataclass
class Served:
    """One request of the made-up engine."""

    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    computed: int = 0  # by the target
    drafts: list[int] = field(default_factory=list)
    rejected: int = 0  # in its last step, which a host that plans ahead does not know yet


class Engine:
    """Steps of a target that accepts a random number of drafts, over one DraftLag and one DraftLoop."""

    def __init__(self, seed: int, max_rows: int = 16, limit: int = LENGTH, plans_ahead: bool = False) -> None:
        self.plans_ahead = plans_ahead
        self.random = random.Random(seed)
        self.free = list(range(1, 200))
        self.random.shuffle(self.free)
        self.running: dict[str, Served] = {}
        self.cached: dict[tuple[int, ...], int] = {}  # full prefixes to their last block
        self.draft = PagedDraft(200, BLOCK)
        self.history = torch.zeros(MAX_REQUESTS, LENGTH, dtype=torch.int32)
        self.table = torch.zeros(MAX_REQUESTS, LENGTH // BLOCK, dtype=torch.int32)
        self.lag = DraftLag(MAX_REQUESTS, BLOCK)
        paging = Paging(self.history, self.table, BLOCK, limit)
        self.loop = DraftLoop(self.draft, paging, max_requests=MAX_REQUESTS, max_rows=max_rows, max_depth=4)

    def admit(self, name: str, tokens: list[int]) -> None:
        blocks: list[int] = []
        while (prefix := tuple(tokens[: (len(blocks) + 1) * BLOCK])) in self.cached and len(prefix) < len(tokens):
            blocks.append(self.cached[prefix])
        num_cached = len(blocks) * BLOCK
        self.running[name] = Served(tokens, len(tokens), blocks, num_cached)
        seen = self.lag.begin(name, blocks, num_cached)
        slot = self.lag.slots([name])[0]
        self.history[slot, seen:num_cached] = torch.tensor(tokens[seen:num_cached], dtype=torch.int32)

    def leave(self, name: str) -> None:
        """Finished or preempted; its blocks are not given out again, they stay in the cache."""
        del self.running[name]
        self.lag.end(name)

    def step(self, depth: int) -> dict[str, list[int]]:
        """One step of all requests, then drafts of `depth`; returns those of requests that sampled."""
        names = list(self.running)
        self.random.shuffle(names)
        scheduled, verified, samples, computed, lengths = [], [], [], [], []
        for name in names:
            served = self.running[name]
            computed.append(served.computed + served.rejected * self.plans_ahead)
            rest = len(served.tokens) - served.computed
            drafts = served.drafts[: self.random.randint(0, len(served.drafts))] if rest == 1 else []
            rows = min(rest, 7) + len(drafts)
            scheduled.append(rows)
            verified.append(len(drafts))
            samples.append(rest <= 7)
            taken = self.random.randint(0, len(drafts))
            served.rejected = len(drafts) - taken
            self._target(name, served, rows, drafts, taken, rest <= 7)
            lengths.append(served.computed + 1)
        batch = DraftBatch(names, np.array(computed), np.array(scheduled), np.array(verified), np.array(samples))
        return self._propose(batch, torch.tensor(lengths), depth)

    def _target(self, name, served, rows, drafts, taken, samples) -> None:
        start, slot = served.computed, self.lag.slots([name])[0]
        needed = -(-(start + rows + 6) // BLOCK)
        new = [self.free.pop() for _ in range(needed - len(served.blocks))]
        served.blocks += new
        self.lag.extend(name, new)
        inputs = (served.tokens + drafts)[start : start + rows]
        self.history[slot, start : start + rows] = torch.tensor(inputs, dtype=torch.int32)
        if samples:
            served.tokens = served.tokens + drafts[:taken] + [self.random.randrange(997)]
            served.computed = len(served.tokens) - 1
        else:
            served.computed += rows
        newest = served.tokens[-1]  # vLLM gives a made-up token where none is sampled
        self.history[slot, served.computed] = newest
        for index in range(served.computed // BLOCK):
            self.cached.setdefault(tuple(served.tokens[: (index + 1) * BLOCK]), served.blocks[index])

    def _propose(self, batch: DraftBatch, lengths, depth: int) -> dict[str, list[int]]:
        for served in self.running.values():
            served.drafts = []
        for row, name in enumerate(batch.request_ids):
            blocks = self.running[name].blocks
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if not depth:
            self.lag.skipped(batch)
            return {}
        lags = self.lag.lags(batch)
        slots = torch.from_numpy(self.lag.slots(batch.request_ids))
        self.loop.load(lengths, slots)
        drafts = self.loop.draft(lags, depth).tolist()
        self.lag.drafted(batch, depth)
        told = {name: own for name, own, one in zip(batch.request_ids, drafts, batch.samples, strict=True) if one}
        for name, own in told.items():
            self.running[name].drafts = own
        return told


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_drafts_after_any_pause_are_those_of_a_draft_that_never_paused(seed, plans_ahead):
    engine, drawn, checked = Engine(seed, plans_ahead=plans_ahead), random.Random(seed), 0
    prompts = [[drawn.randrange(997) for _ in range(drawn.randint(1, 30))] for _ in range(3)]
    depth = 2
    for number in range(60):
        if len(engine.running) < MAX_REQUESTS and drawn.random() < 0.5:
            prompt = drawn.choice(prompts)
            engine.admit(str(number), [*prompt[: drawn.randint(1, len(prompt))], drawn.randrange(997)])
        for name, served in list(engine.running.items()):
            if len(served.tokens) > LENGTH - 16 or drawn.random() < 0.03:
                engine.leave(name)
        if not engine.running:
            continue
        if drawn.random() < 0.3:
            depth = drawn.choice((0, 0, 1, 3, 4))
        for name, drafts in engine.step(depth).items():
            assert drafts == greedy(engine.running[name].tokens, depth)
            checked += 1
    assert checked > 10


def test_a_steady_draft_computes_one_or_two_rows_a_request():
    engine = Engine(0)
    engine.admit("a", list(range(10)))
    engine.admit("b", list(range(50, 60)))
    for _ in range(3):
        engine.step(3)
    engine.draft.rows.clear()
    engine.step(3)
    assert engine.draft.rows in ([4, 2, 2], [2, 2, 2])


def test_nothing_runs_where_nobody_drafts():
    engine = Engine(0)
    engine.admit("a", list(range(10)))
    engine.step(3)
    engine.draft.rows.clear()
    for _ in range(5):
        engine.step(0)
    assert engine.draft.rows == []
    engine.step(1)
    assert 5 <= sum(engine.draft.rows) <= 14


def test_padding_writes_no_entry():
    engine = Engine(0)
    engine.table[:] = 3  # stale rows
    engine.admit("a", [1, 2, 3])
    engine.step(2)
    before = engine.draft.entries.clone()
    engine.loop.run_first(2, MAX_REQUESTS)
    engine.loop.run_next(MAX_REQUESTS)
    own = set(engine.running["a"].blocks)
    changed = (before != engine.draft.entries).any(dim=1).nonzero().flatten().tolist()
    assert {slot // BLOCK for slot in changed} <= own


def test_positions_beyond_the_limit_of_the_draft_are_not_written():
    engine = Engine(0, limit=12)
    engine.admit("a", list(range(11)))
    for _ in range(6):
        engine.step(4)
    assert engine.draft.entries[:, 1].max() <= 11


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_outlive_the_next_ones(depth):
    """vLLM reads them in the step after; a batch of one, and a draft of one token, must be copied too."""
    engine = Engine(0)
    engine.admit("a", list(range(10)))
    engine.step(depth)
    first = engine.loop.draft(np.array([1]), depth)
    kept = first.tolist()
    engine.loop.drafts.fill_(-1)
    assert first.tolist() == kept


def test_only_captured_forwards_bound_the_splits_of_a_context():
    assert max_splits(1, 2) == max_splits(32, 1) == 16
    assert max_splits(33, 2) == 1
    assert max_splits(1, 4096) == 0  # by row and part memory would be taken
