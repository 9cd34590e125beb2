"""Random heads of every public format, written, read back and run, against the reference on the same files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from faser.models.heads import BlockHead, Eagle3Head, HeadConfig, load_head, read_head_config, write_head
from faser.models.heads.load import MASK_FILE
from faser.models.transformer import Transformer
from tests.models.heads import reference, rig

NUM_TOKENS = 9
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target() -> Transformer:
    return rig.make_target()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def read(folder: Path, target: Transformer, expected: HeadConfig) -> Eagle3Head | BlockHead:
    config = read_head_config(folder)
    assert config is not None
    assert config == expected
    head = load_head(folder, config, target, torch.float32)
    assert isinstance(head, (Eagle3Head, BlockHead))
    return head


def check_eagle3(folder: Path, target: Transformer, expected: HeadConfig) -> None:
    head = read(folder, target, expected)
    assert isinstance(head, Eagle3Head)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(target.config.vocab_size, (NUM_TOKENS,), generator=generator)
    features = torch.randn(NUM_TOKENS, expected.feature_size, generator=generator)
    file = reference.Checkpoint(folder, target.embedding, target.head)
    theirs = reference.eagle3_drafts(file, token_ids, features, 4)
    for our_logits, their_logits in zip(rig.eagle3_drafts(head, token_ids, features, 4), theirs, strict=True):
        close(our_logits, their_logits)


def check_block(folder: Path, target: Transformer, expected: HeadConfig) -> None:
    head = read(folder, target, expected)
    assert isinstance(head, BlockHead)
    features = torch.randn(NUM_TOKENS, expected.feature_size, generator=torch.Generator().manual_seed(2))
    block_ids = torch.tensor([11] + [expected.mask_token_id] * (expected.num_block_rows - 1))
    mask_row = None
    if (folder / MASK_FILE).is_file():
        mask_row = torch.load(folder / MASK_FILE, weights_only=True)["embedding"]
    file = reference.Checkpoint(folder, target.embedding, target.head)
    tokens, logits, confidence = reference.block_drafts(file, features, block_ids, mask_row, expected.anchor_predicts)
    our_tokens, our_logits, our_confidence = rig.block_drafts(head, features, block_ids)
    assert our_tokens.tolist() == tokens.tolist()
    assert len(our_tokens) == expected.num_drafts
    close(our_logits, logits)
    assert (our_confidence is None) == (confidence is None)
    if our_confidence is not None and confidence is not None:
        close(our_confidence, confidence)


@pytest.mark.parametrize("flags", list(product((False, True), repeat=len(NORMS))))
@pytest.mark.parametrize("form", ["raw", "layers.0", "speculators"])
def test_eagle3_with_every_choice_of_norms(tmp_path, target, form, flags):
    config = rig.eagle3_config(**dict(zip(NORMS, flags, strict=True)))
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    if form != "raw":
        rig.rename_layer(tmp_path)
    if form == "speculators":
        rig.to_speculators(tmp_path, "eagle3")
    check_eagle3(tmp_path, target, config)


@pytest.mark.parametrize("short", [None, 20])
@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("form", ["raw", "speculators"])
def test_eagle3_with_its_own_or_the_targets_tokens(tmp_path, target, form, own_head, own_embedding, short):
    config = rig.eagle3_config(draft_vocab_size=short)
    head = Eagle3Head.random(config, target, seed=1, std=0.2, own_embedding=own_embedding, own_head=own_head)
    write_head(head, tmp_path)
    if form == "speculators":
        rig.to_speculators(tmp_path, "eagle3")
    check_eagle3(tmp_path, target, config)


def test_a_pickled_head_reads_like_any_other(tmp_path, target):
    config = rig.eagle3_config(draft_vocab_size=20)
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    head = read(tmp_path, target, config)
    rig.pickle(tmp_path)
    again = read(tmp_path, target, config)
    assert all(torch.equal(*pair) for pair in zip(head.weights(), again.weights(), strict=True))
    assert head.vocabulary is not None
    assert again.vocabulary is not None
    assert torch.equal(head.vocabulary, again.vocabulary)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle3_with_layers_of_either_family(tmp_path, target, family, bias):
    layers = rig.eagle3_config().layers
    layers = rig.replace(layers, family=family, qk_norm=family == "qwen3", qkv_bias=bias, out_bias=bias)
    config = rig.eagle3_config(layers=layers)
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    check_eagle3(tmp_path, target, config)


def test_eagle3_on_a_target_of_another_width(tmp_path):
    target = rig.make_target(rig.WIDE_TARGET)
    config = rig.eagle3_config(target_hidden_size=48, fc_norm=True, draft_vocab_size=20)
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2, own_embedding=True), tmp_path)
    check_eagle3(tmp_path, target, config)


@pytest.mark.parametrize("form", ["raw", "speculators"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eagle3_with_a_sliding_window(tmp_path, target, form, family):
    layers = rig.replace(rig.eagle3_config().layers, family=family, qk_norm=family == "qwen3")
    config = rig.eagle3_config(layers=layers)
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    rig.edit_config(tmp_path, layer_types=["sliding_attention"], sliding_window=4)
    if form == "speculators":
        rig.to_speculators(tmp_path, "eagle3")
    check_eagle3(tmp_path, target, rig.replace(config, layers=rig.replace(layers, windows=(4,))))


SLIDES = ["sliding_attention"]
SLIDING = {
    "all layers": (SLIDES * 2, {"sliding_window": 6, "use_sliding_window": True, "is_causal": False}, (6, 6)),
    "some layers": (["full_attention", *SLIDES], {"sliding_window": 6, "is_causal": False}, (0, 6)),
    "as DSpark says": ([*SLIDES, "full_attention"], {"use_sliding_window": False, "causal": False}, (6, 0)),
    "as DSpark says of all": (..., {}, (6, 6)),
}


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_heads_with_sliding_windows(tmp_path, target, kind, name):
    config = rig.block_config(**({} if kind == "dflash" else rig.DSPARK))
    write_head(BlockHead.random(config, target, seed=1, std=0.2), tmp_path)
    layer_types, changes, windows = SLIDING[name]
    rig.edit_config(tmp_path, layer_types=layer_types, **changes)
    if "DSpark" in name:
        rig.edit_dflash_config(tmp_path, use_swa=True, swa_window_size=6)
    check_block(tmp_path, target, rig.replace(config, layers=rig.replace(config.layers, windows=windows)))


def test_speculators_norm_before_the_residual_unless_they_say_otherwise(tmp_path, target):
    config = rig.eagle3_config(norm_before_residual=True)
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    rig.to_speculators(tmp_path, "eagle3")
    rig.edit_config(tmp_path, norm_before_residual=...)
    check_eagle3(tmp_path, target, config)


def test_raw_heads_norm_behind_the_residual_unless_they_say_otherwise(tmp_path, target):
    config = rig.eagle3_config()
    write_head(Eagle3Head.random(config, target, seed=1, std=0.2), tmp_path)
    rig.edit_config(tmp_path, norm_before_residual=...)
    check_eagle3(tmp_path, target, config)


BLOCKS = {
    "dflash": {},
    "dflash of a short vocabulary": {"draft_vocab_size": 20},
    "dspark": rig.DSPARK,
    "dspark of a short vocabulary": {**rig.DSPARK, "draft_vocab_size": 20},
    "dspark without a confidence head": {"anchor_predicts": True, "markov_rank": 6},
    "dspark without Markov inputs": {**rig.DSPARK, "confidence_with_markov": False},
    "dspark without a Markov head": {"anchor_predicts": True, "confidence": True},
    "dspark whose anchor predicts nothing": {**rig.DSPARK, "anchor_predicts": False},
}


@pytest.mark.parametrize("form", ["raw", "speculators"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads(tmp_path, target, name, form):
    config = rig.block_config(**BLOCKS[name])
    write_head(BlockHead.random(config, target, seed=1, std=0.2), tmp_path)
    if form == "speculators":
        rig.to_speculators(tmp_path, name.split()[0])
    check_block(tmp_path, target, config)


@pytest.mark.parametrize("bias", [False, True])
def test_block_heads_with_their_own_tokens_and_biases(tmp_path, target, bias):
    layers = rig.replace(rig.block_config().layers, qkv_bias=bias, out_bias=bias)
    config = rig.block_config(**rig.DSPARK, layers=layers)
    write_head(BlockHead.random(config, target, seed=1, std=0.2, own_embedding=True, own_head=True), tmp_path)
    check_block(tmp_path, target, config)


def test_a_separate_mask_embedding_takes_the_place_of_the_tokens(tmp_path, target):
    config = rig.block_config()
    head = BlockHead.random(config, target, seed=1, std=0.2)
    head.mask_embedding = torch.randn(32, generator=torch.Generator().manual_seed(3))
    write_head(head, tmp_path)
    check_block(tmp_path, target, config)


def test_old_dspark_configs_keep_their_fields_in_dflash_config(tmp_path, target):
    config = rig.block_config(**rig.DSPARK)
    write_head(BlockHead.random(config, target, seed=1, std=0.2), tmp_path)
    removed = dict.fromkeys(("mask_token_id", "target_layer_ids", "sample_from_anchor", "dspark_bonus_anchor"), ...)
    rig.edit_config(tmp_path, architectures=["DSparkDraftModel"], **removed)
    check_block(tmp_path, target, config)


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize("tensors", [False, True])
def test_dspark_heads_of_public_trainers_are_the_same_heads(tmp_path, target, tensors, architecture):
    """Their forms are SpecForge's and TensorRT-LLM's; the first may have a DFlash head's architecture."""
    config = rig.block_config(**rig.DSPARK)
    head = BlockHead.random(config, target, seed=1, std=0.2)
    write_head(head, tmp_path)
    rig.use_other_names(tmp_path, tensors)
    rig.edit_config(tmp_path, architectures=[architecture])
    again = read(tmp_path, target, config)
    for ours, theirs in zip(head.own_weights(), again.own_weights(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("num_tokens", "anchor_predicts"), [(4, False), (5, True), (3, True)])
def test_early_dspark_heads_of_speculators_tell_by_their_drafts_whether_the_anchor_predicts(
    tmp_path, target, num_tokens, anchor_predicts
):
    written = rig.block_config(**{**rig.DSPARK, "num_drafts": 5})
    write_head(BlockHead.random(written, target, seed=1, std=0.2), tmp_path)
    rig.to_speculators(tmp_path, "dspark")
    methods = [{"proposal_type": "greedy", "speculative_tokens": num_tokens}]
    rig.edit_config(tmp_path, sample_from_anchor=..., speculators_config={"proposal_methods": methods})
    expected = rig.replace(written, anchor_predicts=anchor_predicts, num_drafts=5 if anchor_predicts else 4)
    check_block(tmp_path, target, expected)


def test_the_features_may_be_the_default_ones(tmp_path, target):
    config = rig.eagle3_config(feature_layers=None)
    head = Eagle3Head.random(config, target, seed=1, std=0.2)
    assert head.head_config.feature_layers == (2, 4, 5)
    write_head(head, tmp_path)
    rig.edit_config(tmp_path, eagle_config=..., eagle_aux_hidden_state_layer_ids=..., num_aux_hidden_states=...)
    check_eagle3(tmp_path, target, config)


@pytest.mark.parametrize("make", ["eagle3", "block"])
def test_a_head_reads_back_as_it_was_written(tmp_path, target, make):
    if make == "eagle3":
        head = Eagle3Head.random(rig.eagle3_config(draft_vocab_size=20, fc_norm=True), target, seed=1)
    else:
        head = BlockHead.random(rig.block_config(**rig.DSPARK, draft_vocab_size=20), target, seed=1)
    write_head(head, tmp_path)
    again = read(tmp_path, target, head.head_config)
    for ours, theirs in zip(head.own_weights(), again.own_weights(), strict=True):
        assert torch.equal(ours, theirs)
    assert head.vocabulary is not None
    assert again.vocabulary is not None
    assert head.vocabulary.tolist() == again.vocabulary.tolist()
    assert again.embedding is target.embedding
