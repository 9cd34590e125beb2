"""Heads in memory: what they share with their target, their sizes, and how users' names lead to them."""

from __future__ import annotations

import huggingface_hub
import pytest
import torch
import transformers

from faser.errors import ConfigError, ModelError
from faser.models import source
from faser.models.heads import BlockHead, Eagle3Head, write_head
from faser.models.transformer import Transformer
from faser.runtime.weights_home import own_weights
from tests.models.heads import rig
from tests.models.reference import save_hf


@pytest.fixture(scope="module")
def target() -> Transformer:
    return rig.make_target()


def test_a_head_shares_the_targets_embedding_and_output(target):
    head = Eagle3Head.random(rig.eagle3_config(), target, seed=1)
    assert head.embedding is target.embedding
    assert head.head is target.head
    assert [id(weight) for weight in own_weights(head, target)] == [id(weight) for weight in head.own_weights()]
    assert head.num_bytes == sum(weight.nbytes for weight in head.own_weights()) + 2 * target.embedding.nbytes


def test_a_tied_output_counts_once():
    target = rig.make_target(rig.replace(rig.TARGET, tie_embeddings=True))
    head = Eagle3Head.random(rig.eagle3_config(), target, seed=1)
    assert len([weight for weight in head.weights() if weight is target.embedding]) == 1


def test_every_weight_is_counted_once(target):
    for head in (
        Eagle3Head.random(
            rig.eagle3_config(norm_before_fc=True, fc_norm=True), target, 1, own_embedding=True, own_head=True
        ),
        BlockHead.random(rig.block_config(**rig.DSPARK), target, 1, own_embedding=True, own_head=True),
    ):
        held = {id(value) for value in vars(head).values() if isinstance(value, torch.Tensor)} - {
            id(head.cos),
            id(head.sin),
        }
        held |= {id(tensor) for layer in head.layers for tensor in layer.tensors().values()}
        assert {id(weight) for weight in head.weights()} == held
        assert len(list(head.weights())) == len(held)


def test_random_weights_depend_on_the_seed_alone_and_leave_the_target_alone(target):
    before = target.embedding.clone()
    first, again, other = (BlockHead.random(rig.block_config(), target, seed) for seed in (1, 1, 2))
    assert all(torch.equal(*pair) for pair in zip(first.weights(), again.weights(), strict=True))
    assert not torch.equal(first.fc, other.fc)
    assert torch.equal(target.embedding, before)


def test_positions_are_those_of_the_head_or_fewer(target):
    layers = rig.replace(rig.eagle3_config().layers, max_positions=64)
    config = rig.eagle3_config(layers=layers)
    assert Eagle3Head(config, target, torch.float32, max_positions=100).max_positions == 64
    assert Eagle3Head(config, target, torch.float32, max_positions=10).cos.shape == (10, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_keep_their_inputs_and_the_dtype(dtype):
    target = Transformer.random(rig.TARGET, seed=5, dtype=dtype)
    norms = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    eagle3 = Eagle3Head.random(rig.eagle3_config(**norms), target, seed=1, dtype=dtype)
    block = BlockHead.random(rig.block_config(**rig.DSPARK), target, seed=1, dtype=dtype)
    token_ids = torch.arange(5)
    for head in (eagle3, block):
        features = torch.randn(5, head.head_config.feature_size).to(dtype)
        copy = features.clone()
        fused = head.fuse(features)
        assert torch.equal(features, copy)
        embedded = head.embed(token_ids)
        states, inputs = fused.clone(), embedded.clone()
        cache = rig.DenseCache(head)
        if isinstance(head, Eagle3Head):
            hidden = head.extend(embedded, fused, cache.causal(torch.arange(5)))
            assert head.next_states(hidden).dtype == dtype
        else:
            assert head.context_kv(0, fused).dtype == dtype
            hidden = head.run_block(embedded, cache.block(torch.arange(5)))
        assert torch.equal(fused, states)
        assert torch.equal(embedded, inputs)
        assert hidden.dtype == fused.dtype == dtype
        assert head.logits(hidden).dtype == torch.float32
    bias, confidence = block.markov_bias(token_ids), block.confidence(hidden, token_ids)
    assert bias is not None
    assert confidence is not None
    assert bias.dtype == confidence.dtype == torch.float32


# ---- names that users give ----


@pytest.fixture
def pair(tmp_path):
    """Folders of a target and of a head for it."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    save_hf(tmp_path / "target", config)
    write_head(Eagle3Head.random(rig.eagle3_config(), rig.make_target(), seed=1), tmp_path / "head")
    return tmp_path / "target", tmp_path / "head"


def test_a_head_is_found_by_its_config_and_loaded(pair):
    target_source = source.open_target(str(pair[0]))
    draft = source.open_draft(str(pair[1]), target_source)
    assert isinstance(draft, source.HeadSource)
    assert draft.head_config.feature_layers == (2, 4, 5)
    target = target_source.load(torch.float32, 64, lambda *_: None, "cpu")
    seen: list[tuple[int, int]] = []
    head = draft.load(target, torch.float32, 64, lambda done, total: seen.append((done, total)))
    assert isinstance(head, Eagle3Head)
    assert head.max_positions == 64
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_model_is_still_a_draft_model(pair):
    target_source = source.open_target(str(pair[0]))
    assert isinstance(source.open_draft(str(pair[0]), target_source), source.FolderSource)


def test_a_head_is_checked_against_its_target_before_a_weight_is_read(pair):
    target_source = source.open_target(str(pair[0]))
    (pair[1] / "model.safetensors").unlink()
    rig.edit_config(pair[1], target_hidden_size=64)
    with pytest.raises(ModelError, match="target_hidden_size=64, but the target has 32"):
        source.open_draft(str(pair[1]), target_source)


def test_a_head_is_no_target(pair):
    with pytest.raises(ConfigError, match="is a draft head and no model of its own"):
        source.open_target(str(pair[1]))


def test_the_hub_is_asked_for_a_pickled_file_only_if_a_head_has_no_other(pair, monkeypatch):
    target_source = source.open_target(str(pair[0]))
    rig.pickle(pair[1])
    asked: list[bool] = []

    def download(name, allow_patterns, **_):
        asked.append("pytorch_model.bin" in allow_patterns)
        return str(pair[0] if name == "org/model" else pair[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert isinstance(source.open_draft("org/head", target_source), source.HeadSource)
    assert asked == [False, True]
    asked.clear()
    assert isinstance(source.open_draft("org/model", target_source), source.FolderSource)
    assert not any(asked)
