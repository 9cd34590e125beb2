"""An inflated head gives the small head's logits inside the inflated target, with dense operands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.models.heads import BLOCK, EAGLE3, BlockHead, DraftHead, Eagle3Head, HeadConfig
from faser.models.heads.config import read_head_config
from faser.models.heads.load import load_head, write_head
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.transformer import Transformer
from tests.tools.test_inflate import LARGE, LLAMA3_ROPE, SAME, SMALL, small_model, tokens
from tools.distill import features_of
from tools.heads import inflate as tool
from tools.heads.inflate import inflate_head
from tools.inflate import SHAPES, inflate, write_folder

EAGLE = HeadConfig(kind=EAGLE3, layers=replace(SMALL, num_layers=1), target_hidden_size=24, feature_layers=(0, 1, 2))
DSPARK = HeadConfig(
    kind=BLOCK,
    layers=replace(SMALL, family="qwen3", num_layers=2, qk_norm=True),
    target_hidden_size=24,
    feature_layers=(1, 2),
    num_drafts=3,
    mask_token_id=60,
    anchor_predicts=True,
    markov_rank=4,
    confidence=True,
    confidence_with_markov=True,
)
HEADS = {
    "eagle3": EAGLE,
    "eagle3 short": replace(EAGLE, draft_vocab_size=30),
    "eagle3 fc_norm": replace(EAGLE, fc_norm=True),
    "eagle3 norm_before_fc": replace(EAGLE, norm_before_fc=True),
    "dspark": DSPARK,
    "dspark short": replace(DSPARK, draft_vocab_size=30, confidence_with_markov=False),
    "dflash": replace(DSPARK, anchor_predicts=False, markov_rank=0, confidence=False, confidence_with_markov=False),
}


def random_head(config: HeadConfig, target: Transformer, **options: Any) -> DraftHead:
    make = Eagle3Head if config.kind == EAGLE3 else BlockHead
    head = make.random(config, target, seed=1, std=0.3, **options)
    for layer in head.layers:
        if layer.qk_norm is not None:  # one norm for all heads, as checkpoints have it
            layer.qk_norm[: config.layers.num_heads] = layer.qk_norm[0].clone()
            layer.qk_norm[config.layers.num_heads :] = layer.qk_norm[-1].clone()
    return head


@torch.inference_mode()
def drafts_of(head: DraftHead, target: Transformer, text: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits of three drafts behind every position [drafts, chains, output rows], and confidences."""
    features = features_of(target, text[None, :-1], head.head_config.feature_layers)[0][0]
    anchors = torch.arange(1, len(text) - 3)
    states = chain_states(head, text, features, anchors, 3)
    logits = [chain_logits(head, states[:, draft], text[anchors + draft]) for draft in range(3)]
    sure = head.confidence(states[:, 1], text[anchors + 1]) if isinstance(head, BlockHead) else None
    return torch.stack(logits), sure


def assert_same_drafts(small: DraftHead, target: Transformer, head: DraftHead, large: Transformer) -> None:
    text = tokens(target, 16)
    (expected, sure), (logits, large_sure) = drafts_of(small, target, text), drafts_of(head, large, text)
    assert expected.std() > 0.3  # a head that says nothing would agree with anything
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (sure is None) == (large_sure is None)
    if sure is not None:
        torch.testing.assert_close(large_sure, sure, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_grown_in_every_dimension_drafts_the_same(name: str, dense: bool) -> None:
    target = small_model()
    head, large = random_head(HEADS[name], target), inflate(target, LARGE, seed=5, dense=dense)
    grown = inflate_head(head, target, large, seed=5, dense=dense)
    assert_same_drafts(head, target, grown, large)
    assert grown.config.hidden_size == 60
    assert grown.num_layers == head.num_layers
    assert grown.owns_head


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 48}, {"num_layers": 7}, {"num_heads": 15, "num_kv_heads": 5}, {"head_dim": 16}],
    ids=str,
)
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_each_dimension_alone_drafts_the_same(name: str, change: dict[str, int]) -> None:
    target = small_model(rope=LLAMA3_ROPE)
    config = HEADS[name]
    head = random_head(replace(config, layers=replace(config.layers, rope=LLAMA3_ROPE)), target)
    large = inflate(target, replace(SAME, **({"hidden_size": 48} | change)))
    assert_same_drafts(head, target, inflate_head(head, target, large), large)


def test_own_embeddings_grow_too() -> None:
    target = small_model()
    large = inflate(target, LARGE)
    head = random_head(EAGLE, target, own_embedding=True, own_head=True)
    assert_same_drafts(head, target, inflate_head(head, target, large), large)
    block = random_head(DSPARK, target)
    assert isinstance(block, BlockHead)
    block.mask_embedding = torch.randn(24, generator=torch.Generator().manual_seed(3))
    assert_same_drafts(block, target, inflate_head(block, target, large), large)


def test_features_follow_their_layers() -> None:
    """Of three layers in five, the real ones are 0, 2 and 4."""
    target = small_model()
    head = inflate_head(random_head(EAGLE, target), target, inflate(target, LARGE))
    assert head.head_config.feature_layers == (0, 2, 4)


@pytest.mark.parametrize("name", ["eagle3 short", "dspark"])
def test_no_row_or_column_of_a_dense_head_is_zero(name: str) -> None:
    target = small_model()
    head = inflate_head(random_head(HEADS[name], target), target, inflate(target, LARGE))
    for weight in head.own_weights():
        assert (weight != 0).float().mean() > 0.999


# ---- refusals ----


@pytest.mark.parametrize("feature", ["norm_before_residual", "norm_output"])
def test_a_norm_that_returns_to_the_stream_is_refused_by_name(feature: str) -> None:
    target = small_model()
    head = random_head(replace(EAGLE, **{feature: True}), target)
    with pytest.raises(ConfigError, match=feature):
        inflate_head(head, target, inflate(target, LARGE))


def test_a_block_head_in_less_than_twice_its_width_is_refused() -> None:
    target = small_model()
    with pytest.raises(ConfigError, match="hidden_size=47: expected at least 48"):
        inflate_head(random_head(DSPARK, target), target, inflate(target, replace(SAME, hidden_size=47)))


def test_a_target_of_another_seed_is_refused() -> None:
    target = small_model()
    with pytest.raises(ConfigError, match="give the seed that made it"):
        inflate_head(random_head(EAGLE, target), target, inflate(target, LARGE, seed=1), seed=0)


# ---- the command ----


@pytest.mark.parametrize("name", HEADS)
def test_the_command_inflates_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "test", LARGE)
    target = small_model()
    head = random_head(HEADS[name], target)
    write_folder(target, tmp_path / "target")
    write_head(head, tmp_path / "head")
    paths = [str(tmp_path / "target"), str(tmp_path / "head"), "test", str(tmp_path / "large")]
    assert tool.main([*paths, "--dtype", "float32", "--device", "cpu", "--seed", "3"]) == 0
    large, config = inflate(target, LARGE, seed=3), read_head_config(tmp_path / "large")
    assert config is not None
    assert_same_drafts(head, target, load_head(tmp_path / "large", config, large, torch.float32), large)


def test_the_command_refuses_a_folder_that_is_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(small_model(), tmp_path / "target")
    assert tool.main([str(tmp_path / "target"), str(tmp_path / "target"), "llama-8b", str(tmp_path / "out")]) == 2
    assert "is no draft head" in capsys.readouterr().err
