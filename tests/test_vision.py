"""The promise holds for prompts with pictures: the output does not depend on speculation, batches, caches or room.

Every run is compared, token for token, with each request served alone under policy off, nothing shared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.engine.vision import BLOCK_ROWS
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.vision import Grid, Vision
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import PARAMS, assert_equal, make_engine, reference, serve
from tests.tiny import VISION_CONFIGS, make_draft, make_grid, make_head, make_vision_model

ROW_BYTES = 32 * 4  # of the tiny models' hidden state


def make_prompt(parts: list[list[int] | Grid], spatial: bool) -> tuple[tuple[int, ...], Vision]:
    """A prompt of token ids and grids. Positions as M-RoPE has them: a picture is a block in height and width."""
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    grids, starts, following = [], [], 0
    for part in parts:
        if isinstance(part, Grid):
            grids.append(part)
            starts.append(len(token_ids))
            token_ids += [58] * part.num_tokens
            height, width = np.divmod(part.groups, part.width // part.merge_size)
            positions.append(following + np.stack([np.zeros_like(height), height, width], axis=1))
            following += max(part.height, part.width) // part.merge_size
        else:
            token_ids += part
            positions.append(np.repeat(following + np.arange(len(part))[:, None], 3, axis=1))
            following += len(part)
    vision = Vision(tuple(grids), np.array(starts), np.concatenate(positions) if spatial else None)
    return tuple(token_ids), vision


def make_requests(target: Transformer, seed: int = 0) -> list[Request]:
    """One request per set of parameters: with a picture, with several, with some groups of one, with text alone."""
    random = np.random.default_rng(seed)
    spatial = bool(target.config.rope.sections)
    shared = make_grid(seed=1)
    requests = []
    for number, (name, params) in enumerate(PARAMS.items()):
        text = random.integers(3, 58, size=int(random.integers(2, 14))).tolist()
        kept = np.sort(random.permutation(12)[:5])
        parts = [
            [text, shared, text[:2]],
            [[3, 4], shared, text, make_grid(6, 4, 1, seed=number)],
            [text, make_grid(6, 8, seed=number, kept=kept), [5], shared, [6, 7]],
            [text * 2],
        ][number % 4]
        token_ids, vision = make_prompt(parts, spatial)
        requests.append(
            Request(
                id=name,
                prompt_token_ids=token_ids,
                params=params,
                seed=1000 + number,
                stop_ids=params.stop_ids(target.config.eos_token_ids),
                vision=vision if vision.grids else None,
            )
        )
    return requests


@pytest.fixture(scope="module", params=VISION_CONFIGS)
def seeing(request):
    target = make_vision_model(request.param)
    requests = make_requests(target)
    return target, requests, reference(target, requests)


def test_what_is_seen_decides_the_output(seeing):
    target, _, _ = seeing
    outputs = []
    for seed in range(6):
        token_ids, vision = make_prompt([[5, 6], make_grid(seed=seed), [7]], bool(target.config.rope.sections))
        request = Request(
            id="r", prompt_token_ids=token_ids, params=SamplingParams(max_tokens=12), seed=1, vision=vision
        )
        outputs.append(tuple(serve(make_engine(target), [request]).tokens["r"]))
    assert len(set(outputs)) > 1


@pytest.mark.parametrize("policy", [lambda: Fixed(4), RandomLengths, RandomStops], ids=["fixed", "random", "stops"])
@pytest.mark.parametrize("draft_kind", ["model", "ngram", "eagle3", "dspark"])
def test_speculation_with_pictures_gives_the_tokens_of_plain_decoding(seeing, policy, draft_kind):
    target, requests, right = seeing
    if draft_kind == "model":
        draft = make_draft(replace_eyes(target))
    else:
        draft = draft_kind if draft_kind == "ngram" else make_head(target, draft_kind)
    outcome = serve(make_engine(target, draft, policy()), requests)
    assert_equal(outcome, right)
    assert outcome.total.drafted > 0
    if draft_kind == "model":
        assert outcome.total.accepted > 0


def replace_eyes(target: Transformer) -> Transformer:
    """The language model of a target, as a draft that reads text alone."""
    config = replace(target.config, vision=None, rope=replace(target.config.rope, sections=()))
    return Transformer(config, target.embedding, target.layers, target.final_norm, target.head, target.max_positions)


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_batch_tokens": 9},  # prompts in pieces, within pictures too
        {"num_pages": 22},  # preemption
        {"vision_memory": 2 * BLOCK_ROWS * ROW_BYTES},  # pictures push each other out
        {"vision_memory": 2 * BLOCK_ROWS * ROW_BYTES, "num_pages": 22, "max_batch_tokens": 16},
        {"prefix_caching": False},
        {"early_exit": "on"},
        {"overlap": "on"},
    ],
    ids=["pieces", "preemption", "little room", "all", "no cache", "early exit", "overlap"],
)
def test_sizes_and_mechanisms_do_not_change_the_output(seeing, sizes):
    target, requests, right = seeing
    engine = make_engine(target, make_draft(replace_eyes(target)), RandomLengths(seed=3), **sizes)
    assert_equal(serve(engine, requests, arrivals={r.id: i // 3 for i, r in enumerate(requests)}), right)
    if sizes.get("num_pages"):
        assert engine.scheduler.num_preemptions > 0
    again = serve(engine, requests)  # whatever is cached now
    assert_equal(again, right)


def test_windows_that_share_grids_answer_as_if_alone(seeing):
    """Encode once: each grid of a video is encoded for the first window that has it."""
    target, _, _ = seeing
    grids = [make_grid(4, 4, seed=i) for i in range(10)]
    spatial = bool(target.config.rope.sections)
    requests = []
    for first in range(0, 7, 2):
        token_ids, vision = make_prompt([[5], *grids[first : first + 4], [7, 8]], spatial)
        params = SamplingParams(max_tokens=10)
        requests.append(Request(id=str(first), prompt_token_ids=token_ids, params=params, seed=1, vision=vision))
    right = reference(target, requests)
    engine = make_engine(target)
    for request in requests:
        assert serve(engine, [request]).tokens == {request.id: right.tokens[request.id]}
    assert engine.stats.grids_encoded == 10
    assert engine.scheduler.vision.num_found == 6


def test_a_picture_is_seen_as_the_encoder_and_the_decoder_see_it():
    """The first token is that of a forward without pages over embeddings, with dense attention."""
    target = make_vision_model("qwen2_vl")
    grid = make_grid(4, 6, seed=3)
    token_ids, vision = make_prompt([[5, 6, 9], grid, [7]], spatial=True)
    config = target.config
    with torch.inference_mode():
        hidden = target.embed(torch.tensor(token_ids))
        hidden[3 : 3 + grid.num_tokens] = target.vision.encode([grid])
        cos, sin = (table.unsqueeze(1) for table in target.rotation(torch.from_numpy(vision.positions)))

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            query, key, value = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            query, key = _turned(query, cos, sin), _turned(key, cos, sin)
            fold = config.num_heads // config.num_kv_heads
            key, value = key.repeat_interleave(fold, dim=1), value.repeat_interleave(fold, dim=1)
            scores = torch.einsum("rhd,shd->hrs", query, key) * config.head_dim**-0.5
            scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
            return torch.einsum("hrs,shd->rhd", scores.softmax(-1), value).flatten(1)

        logits = target.logits(target.run_layers(hidden, attend)[-1:])
    params = SamplingParams(max_tokens=1, logprobs=5)
    request = Request(id="r", prompt_token_ids=token_ids, params=params, seed=1, vision=vision)
    outcome = serve(make_engine(target, max_batch_tokens=8), [request])
    top = torch.log_softmax(logits[0], -1).topk(5)
    (said,) = outcome.logprobs["r"]
    assert [token for token, _ in said.top] == top.indices.tolist()
    assert [logprob for _, logprob in said.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
