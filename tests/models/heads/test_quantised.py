"""Quantised heads: their matrices are dequantised when they are loaded, in every layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.errors import ModelError, UnsupportedModel
from faser.models.heads import BlockHead, Eagle3Head, load_head, read_head_config, write_head
from faser.models.heads.load import destinations_of
from tests.models.heads import rig
from tests.models.quantised.layouts import LAYOUTS

QUANTISED = ("fc.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
# The other matrices are plain. Groups of 32 columns do not divide all of them.
IGNORED = ["lm_head", "markov_head.markov_w2", "confidence_head.proj", "re:.*(up|down|gate)_proj"]


@pytest.fixture(scope="module")
def target():
    return rig.make_target()


def make_head(kind, target):
    if kind == "dspark":
        return BlockHead.random(rig.block_config(**rig.DSPARK), target, seed=1)
    return Eagle3Head.random(rig.eagle3_config(draft_vocab_size=20), target, seed=1)


def write_quantised(folder, kind, target, layout):
    """Write a head, some of its matrices with random codes; the weights that the codes stand for, by name."""
    write_head(make_head(kind, target), folder)
    (described, store), random = LAYOUTS[layout], torch.Generator().manual_seed(3)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(QUANTISED):
            tensors[name] = tensor
            continue
        stored = store(*tensor.shape, random)
        weights[name.replace("midlayer.", "layers.0.")] = stored.weight
        module = name.removesuffix("weight")
        tensors |= {module + suffix: stored.contiguous() for suffix, stored in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    if kind == "speculators":
        rig.to_speculators(folder, "eagle3")
    ignored = "ignored_layers" if described["quant_method"] == "fp8" else "ignore"
    rig.edit_config(folder, quantization_config={**described, ignored: IGNORED})
    return weights


@pytest.mark.parametrize("layout", ["fp8 blocks", "compressed fp8", "compressed int4 zeros"])
@pytest.mark.parametrize("kind", ["eagle3", "speculators", "dspark"])
def test_a_quantised_head_has_the_weights_that_its_codes_stand_for(tmp_path, target, kind, layout):
    weights = write_quantised(tmp_path, kind, target, layout)
    loaded = destinations_of(load_head(tmp_path, read_head_config(tmp_path), target, torch.float32))
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= weights.keys()
    for name, plain in destinations_of(make_head(kind, target)).items():
        assert torch.allclose(loaded[name].tensor, weights.get(name, plain.tensor), rtol=1e-6)


def test_names_in_the_config_are_those_of_the_file(tmp_path, target):
    """A raw EAGLE-3 head calls its layer midlayer."""
    write_quantised(tmp_path, "eagle3", target, "fp8 blocks")
    ignored = [*IGNORED, "midlayer.self_attn.o_proj"]
    scheme = {**LAYOUTS["fp8 blocks"][0], "ignored_layers": ignored}
    rig.edit_tensors(tmp_path, **{
        "midlayer.self_attn.o_proj.weight": torch.ones(32, 32), "midlayer.self_attn.o_proj.weight_scale_inv": None,
    })  # fmt: skip
    rig.edit_config(tmp_path, quantization_config=scheme)
    head = load_head(tmp_path, read_head_config(tmp_path), target, torch.float32)
    assert torch.equal(head.layers[0].out, torch.ones(32, 32))


def test_a_tensor_that_a_quantised_head_lacks_is_named(tmp_path, target):
    write_quantised(tmp_path, "eagle3", target, "fp8 blocks")
    rig.edit_tensors(tmp_path, **{"fc.weight_scale_inv": None})
    with pytest.raises(ModelError, match=r"lacks fc\.weight_scale_inv"):
        load_head(tmp_path, read_head_config(tmp_path), target, torch.float32)


def test_a_pickled_head_is_not_quantised(tmp_path, target):
    write_quantised(tmp_path, "eagle3", target, "fp8 blocks")
    rig.pickle(tmp_path)
    with pytest.raises(UnsupportedModel, match="pickled and quantised"):
        load_head(tmp_path, read_head_config(tmp_path), target, torch.float32)
