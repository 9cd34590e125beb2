"""Prompt lookup on a GPU: the kernel against the plan's own arithmetic, and two guessers against the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.build import WithLookup
from faser.cost.profiled_cost import MAX_STEADY_LAG
from faser.engine.pages import NO_WRITES
from faser.models.transformer import Transformer
from faser.request import Request, SamplingParams
from faser.step import LookupDrafts, Settling, StepPlan
from tests.oracle import RandomGuesses
from tests.runtime.cuda.test_executor import make_engine, on
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS

pytest.importorskip("triton")

from faser.runtime.cuda.lookup import CudaLookupDrafter, write_found
from faser.runtime.cuda.sampling import RECENT, Slots


def make_plan(unsettled: list[bool]) -> StepPlan:
    """Four requests with 10 tokens, of which the last 3 may be void. The third looks nothing up."""
    slots, four = np.array([5, 2, 0, 3]), np.full(4, 10)
    lengths = np.array([4, 2, 3, 1])
    token_ids = np.arange(100, 132).reshape(4, 8)
    lookup = LookupDrafts(np.array([True, True, False, True]), four - 4, token_ids)
    none = np.zeros(4, dtype=np.int64)
    return StepPlan(
        (), (), slots, four, four - 1, none + 1, lengths, none, none, np.array(unsettled), NO_WRITES, NO_WRITES,
        lookup=lookup,
    )  # fmt: skip


@pytest.mark.parametrize("unsettled", [[False] * 4, [True, False, True, True]])
def test_tokens_are_written_where_the_settled_plan_has_them(device, unsettled):
    slots = Slots.allocate(8, 20, device)
    refused = torch.tensor([9, 9, 1, 3, 9, 2, 9, 9], dtype=torch.int32)
    slots.refused.copy_(refused)
    slots.recent_confidence.fill_(0.5)
    plan = make_plan(unsettled)
    write_found(plan, slots)
    never = np.zeros(4, dtype=np.bool_)
    settled = plan.settle(Settling(refused.numpy()[plan.slots], never, never))
    where, positions, token_ids = settled.found_tokens()
    expected = np.zeros((8, 20), dtype=np.int32)
    expected[where, positions] = token_ids
    assert slots.history.cpu().numpy().tolist() == expected.tolist()
    unknown = np.isnan(slots.recent_confidence.cpu().numpy())
    assert np.argwhere(unknown).tolist() == sorted(np.column_stack([where, positions % RECENT]).tolist())


def test_the_kernel_is_compiled_before_the_first_request(device):
    slots = Slots.allocate(2, 8, device)
    for run in CudaLookupDrafter(None, slots).dry_runs():
        run()
    assert not slots.history.any(), "a dry run writes no token"


def make_repeating(device: str) -> Transformer:
    """A target whose layers say little: mostly it says its last token again."""
    config = replace(CONFIGS["llama3"], head_dim=16, num_layers=1 if device == "cpu" else 3)
    target = Transformer.random(config, 0, std=0.3)
    for layer in target.layers:
        layer.out.mul_(0.2)
        layer.down.mul_(0.2)
    return target


@pytest.mark.parametrize(("beside", "ahead"), [(False, True), (True, False), (True, True)])
def test_two_guessers_get_the_tokens_of_the_cpu(device, beside, ahead):
    """Planned ahead too: tokens are found before it is known which tokens the step before emits.

    The draft is the target: it is right wherever it drafts, if it caught up with what it did not draft itself.
    """
    target = make_repeating(device)
    ways = {"greedy": {}, "sampled": {"temperature": 0.3}, "filtered": {"temperature": 0.3, "top_k": 5}}
    requests = [
        Request(
            id=name,
            prompt_token_ids=(5, 6, 7, 5, 6, 7 + number),
            params=SamplingParams(max_tokens=9 if device == "cpu" else 40, ignore_eos=True, **way),
            seed=number,
        )
        for number, (name, way) in enumerate(ways.items())
        # drafts of a filtered request are not planned ahead, and with a draft it nearly always has some
        if name != "filtered" or (device == "cuda" and not (beside and ahead))
    ]
    draft = WithLookup(on(target, device)) if beside else "ngram"
    engine = make_engine(device, target, draft, RandomGuesses(most=3, seed=2), ahead=ahead)
    plans: list[StepPlan] = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: (submit(plan), plans.append(plan))
    outcome = serve(engine, requests)
    assert outcome.tokens == reference(target, requests).tokens
    found = [plan.unsettled & (plan.looked_up > 0) for plan in plans]
    assert any(each.any() for each in found) == ahead, "found while drafts were in flight"
    stats = engine.stats
    assert stats.lookup_accepted > 0
    own = stats.drafted - stats.looked_up
    assert (own > 0) == beside
    assert stats.accepted - stats.lookup_accepted == own
    if ahead and beside:
        late = [plan.unsettled & (plan.draft_rows > MAX_STEADY_LAG) & (plan.lengths > 0) for plan in plans]
        assert any(each.any() for each in late), "a draft catches up behind drafts in flight"
