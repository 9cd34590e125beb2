"""Draft heads on the GPU's code: the output of plain decoding, and the drafts of the CPU's code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.heads import DraftHead
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.cuda.block import BlockLaunch
from faser.runtime.cuda.device import CudaDevice
from faser.runtime.cuda.drafter import ModelDraft
from tests.engine.test_windows import Pauses as LongPauses
from tests.oracle import RandomLengths, RandomStops
from tests.runtime.cuda.test_executor import on
from tests.test_exactness import make_engine, reference, serve
from tests.test_heads import Drafts, Pauses
from tests.tiny import CONFIGS, HEAD_KINDS, VOCABULARY, make_head


def head_on(head: DraftHead, target: Transformer) -> DraftHead:
    """The same head for a target on a device, in the storage order of a GPU."""
    moved = type(head)(head.head_config, target, head.dtype, None, head.owns_embedding, head.owns_head)
    for mine, theirs in zip(moved.own_weights(), head.own_weights(), strict=True):
        mine.copy_(theirs)
    if head.vocabulary is not None:
        moved.vocabulary.copy_(head.vocabulary)
    if target.device.type == "cpu":
        for name, value in vars(moved).items():
            if isinstance(value, torch.Tensor):
                setattr(moved, name, value.contiguous())
        moved.layers = tuple(
            type(layer)(**{name: None if w is None else w.contiguous() for name, w in vars(layer).items()})
            for layer in moved.layers
        )
    return moved


@pytest.fixture(scope="module")
def small() -> Transformer:
    return Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)


def requests(count: int = 3, max_tokens: int = 8) -> list[Request]:
    random = np.random.default_rng(3)
    return [
        Request(
            id=str(number),
            prompt_token_ids=tuple(random.integers(3, VOCABULARY, size=1 if number == 2 else 5 + 4 * number).tolist()),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=2.0 * (number % 2)),
            seed=number,
        )
        for number in range(count)
    ]


def engine_of(
    small: Transformer, kind: str | DraftHead, device: str, policy, *, ahead: bool = False, head_dim: int = 16, **sizes
):
    target = on(small, device)
    place = CudaDevice()
    place.runs_ahead = ahead
    options = {"max_running": 4, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 64, **sizes}
    head = make_head(small, kind, head_dim=head_dim) if isinstance(kind, str) else kind
    head = head_on(head, target)
    return build_engine(target, head, EngineOptions(policy=policy, **options), device=place)


@pytest.mark.parametrize(
    ("kind", "policy", "ahead"),
    [
        ("eagle3", lambda: Fixed(3), True),
        ("eagle3.1", RandomLengths, True),
        ("eagle3", lambda: Pauses([True, False, False]), True),
        ("dspark", RandomStops, False),
        ("dflash", RandomLengths, True),
    ],
)
def test_the_output_is_that_of_plain_decoding(small, device, kind, policy, ahead):
    outcome = serve(engine_of(small, kind, device, policy(), ahead=ahead), requests())
    assert outcome.tokens == reference(small, requests()).tokens
    assert outcome.total.drafted > 10


@pytest.fixture
def drafted(monkeypatch):
    """What the GPU's code drafts behind each context."""
    seen: dict[tuple[int, ...], list[int]] = {}
    kinds = {kind: kind.extend for kind in (ModelDraft, BlockLaunch)}

    def watched(draft, num_sms=0):
        if not kinds[type(draft)](draft, num_sms):
            return False
        model, num_active = draft._model, draft.requests.size
        history, requests = model.slots.history.cpu(), model.requests
        ends = (requests.start + requests.num_rows).tolist()
        for slot, end in zip(requests.slots.tolist()[:num_active], ends, strict=False):
            tokens = history[slot, : end + draft._depth].tolist()
            seen[tuple(tokens[:end])] = tokens[end:]
        return True

    for kind in kinds:
        monkeypatch.setattr(kind, "extend", watched)
    return seen


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_drafts_are_those_of_the_cpu(small, device, kind, drafted):
    assert_drafts_of_the_cpu(small, device, kind, drafted)


def test_heads_of_any_size_draft_as_on_the_cpu(device, drafted):
    """Public EAGLE-3 heads have a head_dim of 80, and Phi-3 has one of 96."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=96, num_layers=2), 0, std=0.3)
    assert_drafts_of_the_cpu(target, device, "eagle3", drafted, head_dim=80)


def assert_drafts_of_the_cpu(target, device, kind, drafted, head_dim=16):
    engine = make_engine(target, make_head(target, kind, head_dim=head_dim), Fixed(3), max_running=4)
    expected = Drafts(engine)
    plain = serve(engine, requests())
    outcome = serve(engine_of(target, kind, device, Fixed(3), ahead=True, head_dim=head_dim), requests())
    assert outcome.tokens == plain.tokens
    common = expected.seen.keys() & drafted.keys()
    assert len(common) > 8
    for context in common:
        both = zip(expected.seen[context], drafted[context], strict=False)  # near its end a request drafts less
        assert all(ours == theirs for ours, theirs in both)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_drafts_of_windowed_heads_are_those_of_the_cpu(small, device, kind, drafted):
    """A window of 64 in a context of 85 tokens: the head computes the sinks, then begins again at its window."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    long = [Request(id="long", prompt_token_ids=tuple(range(3, 43)) * 2, params=params, seed=0)]
    sizes = {"max_running": 2, "max_batch_tokens": 128, "num_pages": 60, "draft_window": 64}
    engine = make_engine(small, make_head(small, kind), Fixed(2), **sizes)
    expected = Drafts(engine)
    serve(engine, long)
    engine = engine_of(small, kind, device, Fixed(2), **sizes)
    assert engine.scheduler.limits.draft_window is not None
    assert serve(engine, long).tokens == reference(small, long).tokens
    assert len(expected.seen) > 1
    assert {context: drafted[context] for context in expected.seen} == expected.seen


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_windows_change_no_token_where_steps_are_planned_ahead(small, device, kind):
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    prompts = [tuple(range(3, 43)) * 2, tuple(range(5, 15))]
    some = [Request(id=str(i), prompt_token_ids=each, params=params, seed=i) for i, each in enumerate(prompts)]
    sizes = {"max_running": 2, "max_batch_tokens": 128, "num_pages": 60, "draft_window": 64}
    outcome = serve(engine_of(small, kind, device, LongPauses(2, 2), ahead=True, **sizes), some)
    assert outcome.tokens == reference(small, some).tokens
    assert outcome.stats["0"].drafted > 0


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_heads_with_sliding_windows_draft_as_on_the_cpu(small, device, kind, drafted):
    head = make_head(small, kind)
    layers = replace(head.config, windows=(9, 0)[: head.num_layers])
    head.head_config, head.config = replace(head.head_config, layers=layers), layers
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    some = [Request(id="a", prompt_token_ids=tuple(range(3, 27)), params=params, seed=0)]
    expected = Drafts(make_engine(small, head, Fixed(2), max_running=2))
    serve(expected.engine, some)
    serve(engine_of(small, head, device, Fixed(2), max_running=2), some)
    assert len(expected.seen) > 1
    assert {context: drafted[context] for context in expected.seen} == expected.seen


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_preemptions_and_cached_prompts_change_no_token(small, device, kind):
    engine, some = engine_of(small, kind, device, Fixed(3), ahead=True, num_pages=8), requests(3, 5)
    right = reference(small, some).tokens
    for turn in "ab":
        outcome = serve(engine, [replace(each, id=each.id + turn) for each in some])
        assert {name[:-1]: tokens for name, tokens in outcome.tokens.items()} == right
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefixes.num_hits > 0


@pytest.mark.gpu
def test_a_graph_captured_between_two_tokens_changes_no_draft(small, drafted):
    """A forward runs when a graph is captured, and must leave no state to the next token."""
    serve(engine_of(small, "eagle3", "cuda", Fixed(3)), requests(2))
    expected = dict(drafted)
    drafted.clear()
    engine = engine_of(small, "eagle3", "cuda", Fixed(3))
    (model,) = engine.executor.drafter.models
    launch = model.launch

    def launch_anew(shape):
        model._graphs.pop(shape, None)
        launch(shape)

    model.launch = launch_anew
    serve(engine, requests(2))
    assert drafted == expected
