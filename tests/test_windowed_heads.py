"""Draft heads that see a window: the tokens of plain decoding, and drafts of a forward that masks all other keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.errors import ConfigError
from faser.limits import KeyWindow
from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from tests.engine.test_windows import Pauses as LongPauses
from tests.oracle import RandomLengths, RandomStops
from tests.test_draft_window import LONG, SIZES, long_requests
from tests.test_exactness import assert_equal, make_engine, serve
from tests.test_heads import Drafts, Pauses, fused_features, spread
from tests.tiny import HEAD_KINDS, VOCABULARY, make_head

WINDOW = KeyWindow(64, 4)
SHORT = 100  # tokens that some heads are trained on


@pytest.fixture(scope="module")
def long():
    """A target, requests with long contexts, and what they get without drafts."""
    target, requests = Transformer.random(LONG, 0, std=0.3), long_requests()
    return target, requests, serve(make_engine(target, **SIZES), requests)


def trained_on(target: Transformer, num_positions: int, kind: str) -> DraftHead:
    """A head with a shorter context than its target."""
    config = replace(target.config, max_positions=num_positions)
    return make_head(Transformer(config, target.embedding, target.layers, target.final_norm, target.head), kind)


POLICIES = {
    "fixed": (lambda: Fixed(4), {}),
    "late": (lambda: LongPauses(12), {}),
    "stops anywhere": (RandomStops, {}),
    "short of pages": (RandomLengths, {"num_pages": 90}),
}


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_windowed_head_gives_the_tokens_of_plain_decoding(long, kind, policy):
    target, requests, right = long
    make, options = POLICIES[policy]
    engine = make_engine(target, make_head(target, kind), make(), draft_window=64, **{**SIZES, **options})
    assert engine.scheduler.limits.draft_window == WINDOW
    outcome = serve(engine, requests, {request.id: 3 * i for i, request in enumerate(requests)})
    assert_equal(outcome, right)
    assert outcome.total.drafted > 30
    assert engine.scheduler.draft_pages.num_held == 0


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_head_of_a_short_context_drafts_for_a_long_one(long, kind):
    target, requests, right = long
    engine = make_engine(target, trained_on(target, SHORT, kind), Fixed(3), draft_window="off", **SIZES)
    assert serve(engine, requests[:1]).total.drafted == 0, "the prompt is longer than what the head can see"
    engine = make_engine(target, trained_on(target, SHORT, kind), Fixed(3), **SIZES)
    assert engine.scheduler.limits.draft_window == KeyWindow(SHORT - 4, 4), "auto: there are longer contexts"
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    assert outcome.stats["0"].drafted > 30


# ── drafts against a forward without pages ───────────────────────────────────────────────────────────────────────────


Windows = tuple[KeyWindow, ...]  # by layer


def seen_by(head: DraftHead, windows: Windows, first: int, context: list[torch.Tensor] | None, causal: bool):
    """Attention of rows at positions from `first` on to the sinks and their windows.

    `context`: keys, not rotated, and values [layer][S, 2 * kv heads, d] of the positions before.
    """
    heads, kv_heads, dim = head.config.num_heads, head.config.num_kv_heads, head.config.head_dim

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x.clone(), head.cos[positions].unsqueeze(1), head.sin[positions].unsqueeze(1))

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        window = windows[layer]
        kv = qkv[:, heads:] if context is None else torch.cat((context[layer], qkv[:, heads:]))
        rows = first + torch.arange(len(qkv))
        keys = first + len(qkv) - len(kv) + torch.arange(len(kv))
        key = turned(kv[:, :kv_heads], keys).repeat_interleave(heads // kv_heads, 1)
        value = kv[:, kv_heads:].repeat_interleave(heads // kv_heads, 1)
        to_run = torch.einsum("qhd,khd->hqk", turned(qkv[:, :heads], rows), key)
        near = rows.clamp(max=window.sinks + window.size - 1)  # as if nothing lay between sinks and window
        to_sinks = torch.einsum("qhd,khd->hqk", turned(qkv[:, :heads], near), key)
        is_sink = keys < window.sinks
        seen = is_sink | (keys > rows[:, None] - window.size)
        if causal:
            seen &= keys <= rows[:, None]
        scores = torch.where(is_sink, to_sinks, to_run).masked_fill(~seen, -torch.inf) * dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)

    return attend


def eagle3_drafts(target: Transformer, head: Eagle3Head, windows: Windows, context: list[int], number: int):
    """The row of token r has the features of r - 1; later rows have the head's own states."""
    states, drafts = fused_features(target, head, torch.tensor(context[:-1])), []
    for _ in range(number):
        embedded = head.embed(torch.tensor([*context[1:], *drafts]))
        hidden = head.extend(embedded, states, seen_by(head, windows, 1, None, causal=True))
        drafts.append(int(spread(head, head.logits(hidden[-1:])[0]).argmax()))
        states = torch.cat((states, head.next_states(hidden[-1:])))
    return drafts


def block_drafts(target: Transformer, head: BlockHead, windows: Windows, context: list[int], number: int):
    config, last = head.head_config, len(context) - 1
    fused = fused_features(target, head, torch.tensor(context[:-1]))
    kv = [head.context_kv(layer, fused) for layer in range(head.num_layers)]
    tokens = torch.tensor([context[-1]] + [config.mask_token_id] * (config.num_block_rows - 1))
    hidden = head.run_block(head.embed(tokens), seen_by(head, windows, last, kv, causal=False))
    drafts: list[int] = []
    for row in head.logits(hidden)[0 if config.anchor_predicts else 1 :][:number]:
        bias = head.markov_bias(torch.tensor([drafts[-1] if drafts else context[-1]]))
        drafts.append(int((row if bias is None else row + bias[0]).argmax()))
    return drafts


@torch.inference_mode()
def assert_masked(target: Transformer, head: DraftHead, windows: Windows, found: Drafts) -> None:
    """All drafts are those of a forward that masks what the head does not see."""
    drafts_of = eagle3_drafts if isinstance(head, Eagle3Head) else block_drafts
    contexts = [context for context in found.seen if len(context) > min(window.span for window in windows)]
    assert len(contexts) > 10
    for context in contexts:
        drafted = found.seen[context]
        assert drafts_of(target, head, windows, list(context), len(drafted)) == drafted


def drafted_by(target: Transformer, head: DraftHead, pattern: list[bool], **options: object) -> Drafts:
    """What a head drafts behind two long contexts, in the steps of a pattern."""
    random, params = np.random.default_rng(5), SamplingParams(max_tokens=min(100, 30 * len(pattern)), ignore_eos=True)
    prompts = [random.integers(3, VOCABULARY, size).tolist() for size in (150, 90)]
    requests = [Request(id=str(i), prompt_token_ids=tuple(p), params=params, seed=i) for i, p in enumerate(prompts)]
    engine = make_engine(target, head, Pauses(pattern, 4), **{**SIZES, **options})
    found = Drafts(engine)
    serve(engine, requests)
    return found


STEADY, RESTED = [True], [False] * 9 + [True]


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("pattern", [STEADY, RESTED])
def test_drafts_are_those_of_a_forward_that_masks_all_other_keys(long, kind, pattern):
    """Whether the head kept up, or began again: its keys follow from features, wherever it began."""
    target, _, _ = long
    head = trained_on(target, SHORT, kind)
    assert_masked(target, head, (WINDOW,) * head.num_layers, drafted_by(target, head, pattern, draft_window=64))


# ── heads with windows of their own ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("pattern", [STEADY, RESTED])
@pytest.mark.parametrize("sizes", [(70, 70), (20, 20), (90, 20), (20, 0)])
def test_a_head_attends_as_its_config_says(long, kind, pattern, sizes):
    target, _, _ = long
    head = make_head(target, kind) if sizes != (70, 70) else trained_on(target, SHORT, kind)
    sizes = sizes[: head.num_layers]
    head.config = replace(head.config, windows=sizes)
    found = drafted_by(target, head, pattern)
    scheduler, begins_again = found.engine.scheduler, sizes in [(70, 70), (70,), (90,)]
    assert scheduler.limits.draft_window == (KeyWindow(sizes[0]) if begins_again else None)
    assert scheduler.draft_pages.window == (None if 0 in sizes else KeyWindow(max(sizes)))
    assert_masked(target, head, tuple(KeyWindow(size or 256) for size in sizes), found)


def test_a_head_with_a_window_of_its_own_has_no_other(long):
    target, _, _ = long
    head = make_head(target)
    head.config = replace(head.config, windows=(70,))
    with pytest.raises(ConfigError, match="the draft head has windows of its own"):
        make_engine(target, head, draft_window=80, **SIZES)
