"""Draft heads in the engine: the output is that of plain decoding, and drafts depend on the context alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.build import build_engine, load_pair
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.models.heads.load import write_head
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from faser.policy import BatchView, Fixed, Policy
from faser.request import Request, SamplingParams
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import HEAD_KINDS, VOCABULARY, make_head, make_model
from tools.inflate import write_folder

POLICIES = {"fixed:1": lambda: Fixed(1), "fixed:4": lambda: Fixed(4), "random": RandomLengths, "stops": RandomStops}


@pytest.fixture(scope="module")
def served():
    target = make_model()
    requests = make_requests(target.config)
    return target, requests, reference(target, requests)


@pytest.fixture(params=HEAD_KINDS)
def kind(request) -> str:
    return request.param


# ── exactness ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", POLICIES)
def test_heads_in_a_mixed_batch_give_the_tokens_of_plain_decoding(served, kind, policy):
    target, requests, right = served
    outcome = serve(make_engine(target, make_head(target, kind), POLICIES[policy]()), requests)
    assert_equal(outcome, right)
    assert outcome.total.drafted > 50


@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3"])
def test_heads_of_every_family_give_the_tokens_of_plain_decoding(kind, family):
    target = make_model(family)
    requests = make_requests(target.config)
    assert_equal(serve(make_engine(target, make_head(target, kind), Fixed(3)), requests), reference(target, requests))


def test_with_few_pages_preemption_changes_no_token(served, kind):
    target, requests, right = served
    engine = make_engine(target, make_head(target, kind), RandomLengths(), num_pages=30)
    assert_equal(serve(engine, requests), right)
    assert engine.scheduler.num_preemptions > 0


def test_cached_prompts_change_no_token(served, kind):
    target, requests, right = served
    engine = make_engine(target, make_head(target, kind), Fixed(3))
    assert_equal(serve(engine, requests), right)
    again = serve(engine, requests)
    assert_equal(again, right)
    assert engine.scheduler.prefixes.num_hits > 0
    assert again.total.drafted > 0


# ── drafts depend on the context alone ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Drafts:
    """Records what a head drafts behind each context."""

    engine: Engine = field(repr=False)
    seen: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        drafter, history = self.engine.executor.drafter, self.engine.executor._history
        inner = drafter.draft

        def draft(plan):
            drafts = inner(plan)
            for slot, size, number in zip(plan.slots, plan.num_tokens, drafts.num_tokens, strict=True):
                if number:
                    context = tuple(history[slot, :size].tolist())
                    drafted = history[slot, size : size + number].tolist()
                    known = self.seen.setdefault(context, drafted)
                    shared = min(len(known), len(drafted))
                    assert known[:shared] == drafted[:shared], "the same context has other drafts"
                    self.seen[context] = max(known, drafted, key=len)
            return drafts

        drafter.draft = draft

    def agree_with(self, others: Drafts) -> int:
        """How many contexts both have seen; their drafts must be equal as far as both go."""
        common = self.seen.keys() & others.seen.keys()
        for context in common:
            ours, theirs = self.seen[context], others.seen[context]
            shared = min(len(ours), len(theirs))
            assert ours[:shared] == theirs[:shared]
        return len(common)


class Pauses(Policy):
    """Drafts only in some steps."""

    name = "pauses"

    def __init__(self, pattern: list[bool], length: int = 3) -> None:
        self.pattern, self.length, self.step = pattern, length, 0

    def lengths(self, view: BatchView):
        self.step += 1
        drafts = self.pattern[self.step % len(self.pattern)]
        return np.full(view.num_requests, self.length if drafts else 0)


def greedy(count: int, max_tokens: int = 20, size: int = 11) -> list[Request]:
    random = np.random.default_rng(5)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [random.integers(3, VOCABULARY, size=size).tolist() for _ in range(count)]
    return [Request(id=str(i), prompt_token_ids=tuple(p), params=params, seed=i) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def steady():
    """What heads draft in every step, for requests that are never disturbed."""
    target, found = make_model(), {}
    for name in HEAD_KINDS:
        engine = make_engine(target, make_head(target, name), Fixed(3))
        found[name] = Drafts(engine)
        serve(engine, greedy(3))
    return target, found


@settings(max_examples=12)
@given(pattern=st.lists(st.booleans(), min_size=2, max_size=9).filter(any), rows=st.sampled_from([6, 9, 64]))
@pytest.mark.parametrize("name", HEAD_KINDS)
def test_after_a_pause_drafts_are_as_without_it(steady, name, pattern, rows):
    target, found = steady
    engine = make_engine(target, make_head(target, name), Pauses(pattern), max_batch_tokens=rows, max_running=4)
    paused = Drafts(engine)
    serve(engine, greedy(3))
    paused.agree_with(found[name])


def test_a_head_that_rested_drafts_as_one_that_never_did(steady, kind):
    target, found = steady
    engine = make_engine(target, make_head(target, kind), Pauses([False] * 5 + [True]))
    rested = Drafts(engine)
    serve(engine, greedy(3))
    assert rested.agree_with(found[kind]) > 5


def test_after_preemptions_and_cache_hits_drafts_are_as_without_them(steady, kind):
    target, found = steady
    engine = make_engine(target, make_head(target, kind), Fixed(3), num_pages=14)
    disturbed = Drafts(engine)
    for turn in "ab":
        serve(engine, [replace(request, id=request.id + turn) for request in greedy(3)])
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefixes.num_hits > 0
    assert disturbed.agree_with(found[kind]) > 20


# ── drafts against a forward without pages ───────────────────────────────────────────────────────────────────────────


def dense(model: Transformer | DraftHead, context: torch.Tensor | None, positions: torch.Tensor, causal: bool):
    """Attention over all rows at once. `context`: keys and values [layer][S, 2 * kv heads, d] that come before."""
    config = model.config

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = qkv.clone()
        rotate(qkv[:, : heads + kv_heads], model.cos[positions].unsqueeze(1), model.sin[positions].unsqueeze(1))
        kv = qkv[:, heads:] if context is None else torch.cat((context[layer], qkv[:, heads:]))
        key, value = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in kv.split(kv_heads, 1))
        query, rows = qkv[:, :heads].transpose(0, 1), qkv.shape[0]
        mask = torch.ones(rows, kv.shape[0], dtype=torch.bool)
        mask = mask.tril(kv.shape[0] - rows) if causal else mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1).reshape(rows, -1)

    return attend


def fused_features(target: Transformer, head: DraftHead, tokens: torch.Tensor) -> torch.Tensor:
    attend = dense(target, None, torch.arange(len(tokens)), causal=True)
    features = [target.run_layers(target.embed(tokens), attend, 0, layer) for layer in head.head_config.feature_layers]
    return head.fuse(torch.cat(features, -1))


def spread(head: DraftHead, logits: torch.Tensor) -> torch.Tensor:
    if head.vocabulary is None:
        return logits
    return torch.full((VOCABULARY,), -torch.inf).index_copy_(0, head.vocabulary, logits)


def eagle3_drafts(target: Transformer, head: Eagle3Head, context: list[int], number: int) -> list[int]:
    """Row t has token t + 1 and the features of t; later rows have the head's own states."""
    fused, drafts = fused_features(target, head, torch.tensor(context[:-1])), []
    for _ in range(number):
        tokens = torch.tensor([*context[1:], *drafts])
        states = fused
        while len(states) < len(tokens):
            hidden = head.extend(head.embed(tokens[: len(states)]), states, rows_before(head, len(states)))
            states = torch.cat((states, head.next_states(hidden[-1:])))
        hidden = head.extend(head.embed(tokens), states, rows_before(head, len(tokens)))
        drafts.append(int(spread(head, head.logits(hidden[-1:])[0]).argmax()))
    return drafts


def rows_before(head: DraftHead, count: int):
    return dense(head, None, torch.arange(count), causal=True)


def block_drafts(target: Transformer, head: BlockHead, context: list[int], number: int) -> list[int]:
    config, last = head.head_config, len(context) - 1
    fused = fused_features(target, head, torch.tensor(context[:-1]))
    positions = torch.arange(last)
    kv = []
    for layer in range(head.num_layers):
        entry = head.context_kv(layer, fused)
        kv_heads = head.config.num_kv_heads
        rotate(entry[:, :kv_heads], head.cos[positions].unsqueeze(1), head.sin[positions].unsqueeze(1))
        kv.append(entry)
    tokens = torch.tensor([context[-1]] + [config.mask_token_id] * (config.num_block_rows - 1))
    attend = dense(head, kv, last + torch.arange(config.num_block_rows), causal=False)
    logits = head.logits(head.run_block(head.embed(tokens), attend))[0 if config.anchor_predicts else 1 :]
    drafts: list[int] = []
    for row in logits[:number]:
        bias = head.markov_bias(torch.tensor([drafts[-1] if drafts else context[-1]]))
        drafts.append(int((row if bias is None else row + bias[0]).argmax()))
    return drafts


@torch.inference_mode()
def test_drafts_are_those_of_a_forward_without_pages(steady, kind):
    target, found = steady
    head = make_head(target, kind)
    drafts_of = eagle3_drafts if isinstance(head, Eagle3Head) else block_drafts
    assert len(found[kind].seen) > 30
    for context, drafted in list(found[kind].seen.items())[::4]:
        assert drafts_of(target, head, list(context), len(drafted)) == drafted


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_of_one_token_and_a_full_context_are_served(served, kind):
    target, _, _ = served
    params = SamplingParams(max_tokens=target.max_positions - 1, ignore_eos=True)
    request = Request(id="a", prompt_token_ids=(5,), params=params, seed=0)
    outcome = serve(make_engine(target, make_head(target, kind), Fixed(4)), [request])
    assert_equal(outcome, reference(target, [request]))


@pytest.mark.parametrize(("option", "message"), [("early_exit", "whole verifications"), ("overlap", "no draft model")])
def test_what_a_head_cannot_do_is_refused(served, option, message):
    target, _, _ = served
    with pytest.raises(ConfigError, match=message):
        make_engine(target, make_head(target), Fixed(2), **{option: "on"})


def test_a_folder_with_a_head_is_loaded_as_a_draft(served, kind, tmp_path):
    target, requests, right = served
    write_folder(target, tmp_path / "target")
    write_head(make_head(target, kind), tmp_path / "head")
    options = EngineOptions(policy=Fixed(3), max_running=8, max_step_ms=0, page_size=4, num_pages=400, dtype="float32")
    pair = load_pair(str(tmp_path / "target"), str(tmp_path / "head"), options)
    outcome = serve(build_engine(pair.target, pair.draft, options), requests)
    assert_equal(outcome, right)
    assert outcome.total.drafted > 50
