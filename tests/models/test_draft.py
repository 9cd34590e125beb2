"""A patch file gives back the draft it was written from, which shares the target's ends; elsewhere it is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError, MissingPackage, ModelError
from faser.models.draft import MATRICES, Patch, apply_patch, read_patch, ternary, write_patch
from faser.models.transformer import Layer, Transformer
from faser.policy import Fixed
from faser.runtime.cpu.drafter import ModelDrafter
from tests.models.reference import forward
from tests.oracle import RandomLengths
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import CONFIGS, VOCABULARY

gguf = pytest.importorskip("gguf", reason="the package gguf is missing: pip install gguf")

# Matrices of a multiple of 256 numbers, rows of 64 and 128: a block spans several rows.
WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_layers": 4}
FAMILIES = {name: replace(CONFIGS[name], **WIDE) for name in ("llama3", "qwen2", "qwen3")}  # tied, biased, untied
TOKEN_IDS = torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(1))
SHORT = torch.arange(0, VOCABULARY, 2)


def make_target(name: str = "llama3", **changes: Any) -> Transformer:
    return Transformer.random(replace(FAMILIES[name], **changes), seed=0, std=0.2)


def tensors_of(layer: Layer) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in vars(layer).items() if tensor is not None}


def zero(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape)


def shaken(tensor: Tensor) -> Tensor:
    return 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))


def make_patch(
    target: Transformer,
    difference: Callable[[Tensor], Tensor] = shaken,
    source_layers: tuple[int, ...] = (0, 1, 2, 3),
    vocabulary: Tensor | None = None,
) -> Patch:
    """The target's norms and biases, and a difference to each matrix."""
    layers = [tensors_of(target.layers[source]) for source in source_layers]
    return Patch(
        source_layers,
        tuple({name: difference(layer[name]) for name in MATRICES} for layer in layers),
        tuple({name: tensor for name, tensor in layer.items() if name not in MATRICES} for layer in layers),
        target.final_norm,
        vocabulary,
    )


def ternary_patch(target: Transformer, **changes: Any) -> Patch:
    return make_patch(target, lambda tensor: ternary(shaken(tensor)), **changes)


def written(path: Path, patch: Patch, target: Transformer, quant_type: str = "TQ2_0") -> Path:
    write_patch(path, patch, target.config, quant_type, "made by a test")
    return path


@pytest.fixture
def draft_file(tmp_path: Path) -> Path:
    target = make_target()
    return written(tmp_path / "draft.gguf", ternary_patch(target, source_layers=(0, 3)), target)


# ---- the file ----


@pytest.mark.parametrize("vocabulary", [None, SHORT], ids=["whole", "short"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_ternary_patch_reads_back_bit_for_bit(tmp_path, name, vocabulary):
    target = make_target(name)
    patch = ternary_patch(target, source_layers=(0, 2, 3), vocabulary=vocabulary)
    again = read_patch(written(tmp_path / "draft.gguf", patch, target), target.config)
    assert again.source_layers == patch.source_layers
    for ours, theirs in zip((*again.differences, *again.norms), (*patch.differences, *patch.norms), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(again.final_norm, patch.final_norm)
    if vocabulary is None:
        assert again.vocabulary is None
    else:
        assert again.vocabulary.tolist() == vocabulary.tolist()
    assert torch.equal(forward(apply_patch(target, again), TOKEN_IDS), forward(apply_patch(target, patch), TOKEN_IDS))


@pytest.mark.parametrize(("quant_type", "levels", "steps"), [("Q8_0", 127, 0.6), ("Q4_0", 8, 1.01)])
def test_a_wider_patch_reads_back_within_its_quantisation_step(tmp_path, quant_type, levels, steps):
    """A step is the largest of 32 numbers over the levels; Q4_0 has one level less on one side, so may miss by one."""
    target = make_target()
    patch = make_patch(target)
    again = read_patch(written(tmp_path / "draft.gguf", patch, target, quant_type), target.config)
    for ours, theirs in zip(again.differences, patch.differences, strict=True):
        for name in MATRICES:
            right = theirs[name].reshape(-1, 32)
            step = right.abs().amax(dim=1, keepdim=True) / levels
            assert ((ours[name].reshape(-1, 32) - right).abs() <= steps * step).all()
            assert ours[name].shape == theirs[name].shape


def test_a_ternary_file_takes_about_two_bits_a_weight(tmp_path):
    target = make_target()
    sizes = [
        written(tmp_path / f"{quant_type}.gguf", ternary_patch(target), target, quant_type).stat().st_size
        for quant_type in ("TQ2_0", "Q4_0", "Q8_0")
    ]
    num_weights = sum(getattr(layer, name).numel() for layer in target.layers for name in MATRICES)
    assert sizes == sorted(sizes)
    assert sizes[2] - sizes[0] == pytest.approx(num_weights * (34 / 32 - 66 / 256), rel=0.02)


def test_an_unknown_quantisation_is_refused_with_those_that_are_known(tmp_path):
    target = make_target()
    with pytest.raises(ConfigError, match=r"Q5_K.*expected one of TQ2_0, Q4_0, Q8_0"):
        written(tmp_path / "draft.gguf", make_patch(target), target, "Q5_K")


def test_without_the_package_both_ways_name_the_command_that_installs_it(tmp_path, draft_file, monkeypatch):
    target = make_target()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackage, match=r"gguf is missing; install it with: pip install 'faser\[engine\]'"):
        read_patch(draft_file, target.config)
    with pytest.raises(MissingPackage, match=r"gguf is missing; install it with: pip install 'faser\[engine\]'"):
        written(tmp_path / "other.gguf", make_patch(target), target)


# ---- ternary ----

SHAPES_OF_BLOCKS = {
    "bell": lambda: shaken(torch.empty(64, 96)),
    "transposed": lambda: shaken(torch.empty(96, 64)).t(),
    "flat": lambda: torch.rand(8, 256, generator=torch.Generator().manual_seed(2)) - 0.5,
    "heavy-tailed": lambda: shaken(torch.empty(16, 256)) ** 3,
    "one spike": lambda: torch.eye(4, 256),
    "constant": lambda: torch.full((2, 256), -0.3),
    "zero": lambda: torch.zeros(2, 256),
    "below what a half can hold": lambda: 1e-9 * shaken(torch.empty(4, 256)),
}


@pytest.fixture(params=SHAPES_OF_BLOCKS)
def difference(request) -> Tensor:
    return SHAPES_OF_BLOCKS[request.param]()


def test_ternary_of_ternary_is_itself(difference):
    once = ternary(difference)
    assert torch.equal(ternary(once), once)


def test_ternary_has_one_magnitude_a_block(difference):
    for block in ternary(difference).reshape(-1, 256):
        assert len(block.abs().unique()) <= 2
        assert block.abs().unique()[0] == 0 or len(block.abs().unique()) == 1


def test_ternary_is_closer_than_zero_to_what_it_stands_for(difference):
    blocks, rounded = difference.reshape(-1, 256), ternary(difference).reshape(-1, 256)
    error, size = (blocks - rounded).square().sum(dim=1), blocks.square().sum(dim=1)
    moved = rounded.any(dim=1)
    assert (error[moved] < size[moved]).all()
    assert torch.equal(error[~moved], size[~moved])


def test_ternary_leaves_less_than_a_quarter_of_the_squared_error_of_a_bell():
    bell = shaken(torch.empty(64, 256))
    assert (ternary(bell) - bell).square().sum() < 0.25 * bell.square().sum()


# ---- the draft ----


@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_without_a_difference_are_the_target_itself(name):
    target = make_target(name)
    assert torch.equal(forward(apply_patch(target, make_patch(target, zero)), TOKEN_IDS), forward(target, TOKEN_IDS))


def test_a_draft_is_the_layers_it_names_in_the_order_it_names_them():
    target = make_target()
    layers = tuple(target.layers[source] for source in (3, 0))
    right = Transformer(replace(target.config, num_layers=2), target.embedding, layers, target.final_norm, target.head)
    draft = apply_patch(target, make_patch(target, zero, source_layers=(3, 0)))
    assert draft.num_layers == draft.config.num_layers == 2
    assert torch.equal(forward(draft, TOKEN_IDS), forward(right, TOKEN_IDS))


def test_each_matrix_of_a_draft_is_its_sources_plus_the_difference_and_the_rest_is_its_own():
    target = make_target("qwen2")
    patch = make_patch(target, source_layers=(0, 2))
    patch = replace(
        patch,
        norms=tuple({k: v + 0.5 for k, v in norms.items()} for norms in patch.norms),
        final_norm=2 * target.final_norm,
    )
    draft = apply_patch(target, patch)
    for index, source in enumerate(patch.source_layers):
        for name, tensor in tensors_of(draft.layers[index]).items():
            theirs = getattr(target.layers[source], name)
            right = theirs + patch.differences[index][name] if name in MATRICES else theirs + 0.5
            assert torch.equal(tensor, right), name
    assert torch.equal(draft.final_norm, 2 * target.final_norm)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_shares_the_targets_embedding_and_head(name):
    target = make_target(name)
    draft = apply_patch(target, make_patch(target))
    assert draft.embedding.data_ptr() == target.embedding.data_ptr()
    assert draft.head.data_ptr() == target.head.data_ptr()
    assert draft.vocabulary is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_short_vocabulary_copies_those_rows_of_the_head_and_nothing_else(name):
    target = make_target(name)
    draft = apply_patch(target, make_patch(target, zero, vocabulary=SHORT))
    assert draft.embedding.data_ptr() == target.embedding.data_ptr()
    assert draft.head.untyped_storage().nbytes() == len(SHORT) * target.config.hidden_size * 4
    assert torch.equal(draft.head, target.head[SHORT])
    torch.testing.assert_close(forward(draft, TOKEN_IDS), forward(target, TOKEN_IDS)[:, SHORT])


def test_making_a_draft_leaves_the_target_as_it_was():
    target = make_target()
    before = [weight.clone() for weight in target.weights()]
    draft = apply_patch(target, make_patch(target))
    theirs = {weight.data_ptr() for layer in target.layers for weight in tensors_of(layer).values()}
    assert all(torch.equal(*pair) for pair in zip(before, target.weights(), strict=True))
    assert all(weight.data_ptr() not in theirs for layer in draft.layers for weight in tensors_of(layer).values())


def test_a_draft_has_the_number_format_and_the_positions_of_its_target(draft_file):
    config = make_target().config
    target = Transformer.random(config, 0, torch.bfloat16, std=0.2, max_positions=40)
    draft = apply_patch(target, read_patch(draft_file, config))
    assert {weight.dtype for weight in draft.weights()} == {torch.bfloat16}
    assert draft.max_positions == 40
    assert forward(draft, TOKEN_IDS).isfinite().all()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_layers": 5}, r"draft for \[5, 64, 128, 61\].*not for \[4, 64, 128, 61\]"),
        ({"hidden_size": 128}, r"draft for \[4, 128, 128, 61\]"),
        ({"intermediate_size": 256}, r"draft for \[4, 64, 256, 61\]"),
        ({"vocab_size": 62}, r"draft for \[4, 64, 128, 62\]"),
        ({"num_kv_heads": 4}, r"blk\.0\.qkv of the target's shape \[192, 64\]"),
        ({"num_heads": 2}, r"blk\.0\.qkv of the target's shape \[96, 64\]"),
        ({"qkv_bias": True}, r"lacks blk\.0\.qkv_bias"),
        ({"qk_norm": True}, r"lacks blk\.0\.qk_norm"),
    ],
    ids=str,
)
def test_a_patch_for_another_target_is_refused_with_what_differs(draft_file, change, complaint):
    with pytest.raises(ModelError, match=complaint):
        read_patch(draft_file, replace(make_target().config, **change))


def test_a_patch_with_weights_the_target_has_not_is_refused(tmp_path):
    biased = make_target("qwen2")
    path = written(tmp_path / "draft.gguf", make_patch(biased), biased)
    with pytest.raises(ModelError, match=r"no blk\.0\.qkv_bias, which the target does not have"):
        read_patch(path, replace(biased.config, qkv_bias=False))


def test_a_patch_that_names_a_layer_or_a_token_the_target_has_not_is_refused(tmp_path):
    target = make_target()
    patch = replace(make_patch(target), source_layers=(0, 1, 2, 4))
    with pytest.raises(ModelError, match=r"source_layers from 0 to 3"):
        read_patch(written(tmp_path / "layer.gguf", patch, target), target.config)
    patch = make_patch(target, vocabulary=torch.tensor([3, VOCABULARY]))
    with pytest.raises(ModelError, match=r"vocabulary from 0 to 60"):
        read_patch(written(tmp_path / "token.gguf", patch, target), target.config)


def test_a_foreign_gguf_is_refused_by_its_architecture(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "llama.gguf"), "llama")
    writer.add_tensor("output_norm", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"expected a faser-draft file, not 'llama'; make one with tools/distill\.py"):
        read_patch(tmp_path / "llama.gguf", make_target().config)


def test_a_file_that_is_no_gguf_or_is_not_there_is_refused(tmp_path):
    (tmp_path / "draft.gguf").write_bytes(b"not a draft at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_patch(tmp_path / "draft.gguf", make_target().config)
    with pytest.raises(ModelError, match="cannot be read"):
        read_patch(tmp_path / "missing.gguf", make_target().config)


def test_a_file_cut_anywhere_is_refused(draft_file):
    whole, config = draft_file.read_bytes(), make_target().config
    padding = 32  # behind the last tensor, and no loss
    for length in [*range(5, 400, 23), *range(400, len(whole) - padding, len(whole) // 20), len(whole) - padding]:
        draft_file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            read_patch(draft_file, config)


# ---- in the engine ----


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A target whose draft may propose every second token."""
    target = make_target(request.param)
    requests = make_requests(target.config)
    return target, apply_patch(target, make_patch(target, vocabulary=SHORT)), requests, reference(target, requests)


@pytest.fixture
def proposed(monkeypatch) -> list[int]:
    """Every token that a model drafts."""
    seen: list[int] = []
    draft = ModelDrafter.draft

    def spy(self: ModelDrafter, plan: Any) -> Any:
        made = draft(self, plan)
        for slot, start, length in zip(plan.slots, plan.num_tokens, made.num_tokens, strict=True):
            seen.extend(self._history[slot, start : start + length].tolist())
        return made

    monkeypatch.setattr(ModelDrafter, "draft", spy)
    return seen


@pytest.mark.parametrize("policy", [lambda: Fixed(4), RandomLengths], ids=["fixed", "random"])
def test_a_short_vocabulary_changes_no_token_and_proposes_none_outside_itself(pair, proposed, policy):
    """Greedy, sampled, filtered, penalised and biased requests in one batch, against each alone under policy off."""
    target, draft, requests, right = pair
    outcome = serve(make_engine(target, draft, policy()), requests)
    assert_equal(outcome, right)
    assert 0 < outcome.total.accepted < outcome.total.drafted == len(proposed)
    assert set(proposed) <= set(SHORT.tolist())
    for name in ("greedy", "sampled"):
        assert outcome.stats[name].accepted > 0


def test_a_short_vocabulary_agrees_wherever_the_targets_token_is_in_it(proposed):
    """With the target's own layers and noise a draft is refused only for want of the right token."""
    target = make_target()
    requests = [request for request in make_requests(target.config) if request.id in ("greedy", "sampled")]
    draft = apply_patch(target, make_patch(target, zero, vocabulary=SHORT))
    outcome = serve(make_engine(target, draft, Fixed(1)), requests)
    accepted = sum(stats.accepted for stats in outcome.stats.values())
    emitted = [token for tokens in outcome.tokens.values() for token in tokens]
    known = sum(token in set(SHORT.tolist()) for token in emitted)
    refused = len(proposed) - accepted
    assert accepted > 0
    assert accepted <= known
    assert refused <= len(emitted) - known


def test_a_patch_without_a_difference_is_accepted_whole(tmp_path):
    target = make_target("qwen3")
    requests = make_requests(target.config)
    path = written(tmp_path / "draft.gguf", make_patch(target, zero), target)
    outcome = serve(make_engine(target, apply_patch(target, read_patch(path, target.config)), Fixed(4)), requests)
    assert_equal(outcome, reference(target, requests))
    assert outcome.total.accepted == outcome.total.drafted > 0
