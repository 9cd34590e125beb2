"""What FASER cannot run or does not know is refused by name: fields before a weight is read, then tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.models.heads import BlockHead, Eagle3Head, load_head, read_head_config, write_head
from faser.models.heads.load import MASK_FILE
from faser.models.transformer import Transformer
from tests.models.heads import rig


@pytest.fixture(scope="module")
def target() -> Transformer:
    return rig.make_target()


@pytest.fixture(scope="module")
def written(target, tmp_path_factory):
    """A folder of each format."""
    names = ("eagle3", "speculators", "dflash", "spec dflash", "dspark")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    for name in ("eagle3", "speculators"):
        write_head(Eagle3Head.random(rig.eagle3_config(draft_vocab_size=20), target, seed=1), folders[name])
    rig.to_speculators(folders["speculators"], "eagle3")
    for name in ("dflash", "spec dflash"):
        write_head(BlockHead.random(rig.block_config(), target, seed=1), folders[name])
    rig.to_speculators(folders["spec dflash"], "dflash")
    write_head(BlockHead.random(rig.block_config(**rig.DSPARK), target, seed=1), folders["dspark"])
    return folders


@pytest.fixture
def folder(written, tmp_path):
    """A copy of a written folder, to be spoiled."""

    def copy(form: str):
        for path in written[form].iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copy


DFLASH = {"mask_token_id": 7, "target_layer_ids": [1, 2, 6]}

SLIDING = ["sliding_attention", "sliding_attention"]

UNSUPPORTED = [
    ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
    ("eagle3", {"bias": True}, "bias"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ("eagle3", {"eagle_config": {"new_trick": 1}}, "eagle_config: the field new_trick=1"),
    ("eagle3", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("eagle3", {"model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("eagle3", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("speculators", {"speculators_model_type": "peagle"}, "speculators_model_type='peagle'"),
    ("speculators", {"speculators_model_type": "mtp"}, "speculators_model_type='mtp'"),
    ("speculators", {"speculators_model_type": ...}, "speculators_model_type=None"),
    ("speculators", {"mask_token_id": 7}, "mask_token_id=7"),
    ("dflash", {"dflash_config": {**DFLASH, "causal": True}}, "causal"),
    ("dflash", {"is_causal": True}, "is_causal"),
    ("dflash", {"dflash_config": {**DFLASH, "use_swa": True, "swa_window_size": 128}}, "use_swa without sliding"),
    ("dflash", {"dflash_config": {**DFLASH, "attention_sink_bias": True}}, "attention_sink_bias"),
    ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "without a sliding_window that is in use"),
    ("dflash", {"layer_types": SLIDING, "sliding_window": 9, "use_sliding_window": False}, "that is in use"),
    ("dflash", {"layer_types": SLIDING, "sliding_window": 4, "is_causal": False}, "block_size=5 with sliding windows"),
    ("dflash", {"layer_types": SLIDING, "sliding_window": 9}, "without is_causal, for which programs differ"),
    ("dflash", {"layer_types": SLIDING, "sliding_window": 10**6}, "without is_causal, for which programs differ"),
    ("dflash", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types with chunked_attention"),
    ("dflash", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window without sliding_attention"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "without a sliding_window that is in use"),
    ("speculators", {"layer_types": ["sliding_attention"], "sliding_window": None}, "that is in use"),
    ("spec dflash", {"layer_types": SLIDING, "sliding_window": 9}, "sliding_attention in a dflash head of speculators"),
    ("spec dflash", {"layer_types": SLIDING, "sliding_window": 10**6}, "in a dflash head of speculators"),
    ("dflash", {"selector_top_k": 4}, "selector_top_k=4"),
    ("dflash", {"model_type": "gemma4_text"}, "model_type='gemma4_text'"),
    ("dflash", {"dflash_config": {**DFLASH, "projector_type": "domino"}}, "projector_type='domino'"),
    ("dflash", {"dflash_config": {**DFLASH, "attention_mode": "mla"}}, "attention_mode='mla'"),
    ("dspark", {"markov_head_type": "gated"}, "markov_head_type='gated'"),
    ("dspark", {"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
]


@pytest.mark.parametrize(("form", "changes", "named"), UNSUPPORTED, ids=[f"{f}-{n}" for f, _, n in UNSUPPORTED])
def test_an_unsupported_field_is_refused_by_name_before_a_weight_is_read(folder, form, changes, named):
    path = folder(form)
    rig.edit_config(path, **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel) as refusal:
        read_head_config(path)
    assert named in str(refusal.value)
    assert str(path / "config.json") in str(refusal.value)


WRONG = [
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 5]}, "eagle_aux_hidden_state_layer_ids"),
    ("eagle3", {"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [5, 2, 4]}, "ascending"),
    ("eagle3", {"num_aux_hidden_states": 4}, "num_aux_hidden_states=4"),
    ("eagle3", {"draft_vocab_size": 62}, "draft_vocab_size=62"),
    ("eagle3", {"norm_output": "yes"}, "norm_output='yes'"),
    ("eagle3", {"hidden_size": ...}, "hidden_size"),
    ("speculators", {"transformer_layer_config": ...}, "transformer_layer_config"),
    ("eagle3", {"layer_types": SLIDING, "sliding_window": 9}, "expected the types of 1 layers"),
    ("dflash", {"block_size": ...}, "block_size"),
    ("dflash", {"block_size": 1}, "block_size=1"),
    ("dflash", {"rope_theta": ...}, "rope_theta"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id=None"),
    ("dflash", {"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1]}}, "mask_token_id=61"),
    ("dflash", {"dflash_config": {"mask_token_id": 7}}, "target_layer_ids"),
    ("dflash", {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [-2, 1]}}, "target_layer_ids=[-2, 1]"),
    ("dflash", {"mask_token_id": 8}, "mask_token_id=7: expected 8"),
    ("dflash", {"dflash_config": {**DFLASH, "shift_label": True, "sample_from_anchor": False}}, "shift_label=True"),
    ("dspark", {"markov_rank": ...}, "markov_rank"),
    ("dspark", {"markov_rank": 0}, "confidence_head_with_markov"),
]


@pytest.mark.parametrize(("form", "changes", "named"), WRONG, ids=[f"{f}-{n}" for f, _, n in WRONG])
def test_a_wrong_field_is_named(folder, form, changes, named):
    path = folder(form)
    rig.edit_config(path, **changes)
    with pytest.raises(ModelError) as refusal:
        read_head_config(path)
    assert named in str(refusal.value)


def test_a_window_that_two_objects_give_differently_is_wrong(folder):
    path = folder("speculators")
    inner = json.loads((path / "config.json").read_text())["transformer_layer_config"]
    inner |= {"layer_types": ["sliding_attention"], "sliding_window": 8}
    rig.edit_config(path, transformer_layer_config=inner)
    head = read_head_config(path)
    assert head is not None
    assert head.layers.windows == (8,)
    rig.edit_config(path, sliding_window=9)
    with pytest.raises(ModelError, match="sliding_window=8: expected 9"):
        read_head_config(path)


def test_fields_that_switch_something_off_or_say_nothing_pass(folder):
    path = folder("dflash")
    before = read_head_config(path)
    rig.edit_config(
        path, new_trick=False, other=None, more=[], sliding_window=None, use_cache=True, _attn_implementation="sdpa"
    )
    assert read_head_config(path) == before


@pytest.mark.parametrize("content", ['{"architectures": ["LlamaForCausalLM"]}', '{"model_type": "qwen3"}', None])
def test_a_folder_without_a_head_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert read_head_config(tmp_path) is None


def load(path, target):
    config = read_head_config(path)
    assert config is not None
    return load_head(path, config, target, torch.float32)


TENSORS = [
    ("eagle3", {"fc.weight": None}, "lacks fc.weight"),
    ("eagle3", {"midlayer.hidden_norm.weight": None}, "lacks layers.0.hidden_norm.weight"),
    ("eagle3", {"lm_head.weight": None}, "lacks lm_head.weight"),
    ("eagle3", {"d2t": None}, "lacks d2t"),
    ("eagle3", {"d2t": torch.arange(20)[::2].contiguous()}, "d2t has the shape [10]"),
    ("eagle3", {"d2t": torch.full((20,), 60)}, "d2t leads to tokens twice or outside"),
    ("eagle3", {"d2t": 19 - torch.arange(20)}, "d2t leads to tokens twice or outside"),
    ("eagle3", {"mask_hidden": torch.zeros(32)}, "has mask_hidden"),
    ("eagle3", {"input_norm.weight": torch.ones(96)}, "has input_norm.weight"),
    ("eagle3", {"fc.weight": torch.zeros(32, 160)}, "fc.weight has the shape [32, 160]; expected [32, 96]"),
    ("eagle3", {"norm.weight": torch.zeros(32, dtype=torch.int32)}, "norm.weight has the dtype I32"),
    ("dflash", {"markov_head.markov_w1.weight": torch.zeros(61, 6)}, "has markov_head.markov_w1.weight"),
    ("dspark", {"markov_head.markov_w2.weight": torch.zeros(61, 5)}, "markov_w2.weight has the shape [61, 5]"),
    ("dspark", {"confidence_head.proj.bias": None}, "lacks confidence_head.proj.bias"),
    ("dspark", {"layers.1.self_attn.q_norm.weight": None}, "lacks layers.1.self_attn.q_norm.weight"),
]


@pytest.mark.parametrize(("form", "changes", "named"), TENSORS, ids=[f"{f}-{n}" for f, _, n in TENSORS])
def test_a_missing_unknown_or_misshapen_tensor_is_named(folder, target, form, changes, named):
    path = folder(form)
    rig.edit_tensors(path, **changes)
    with pytest.raises(ModelError) as refusal:
        load(path, target)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fc.weight": None}, "lacks fc.weight"),
        ({"fc.weight": torch.zeros(32, 64)}, "fc.weight has the shape [32, 64]"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int32)}, "norm.weight has the dtype torch.int32"),
        ({"mask_hidden": torch.zeros(32)}, "has mask_hidden"),
    ],
)
def test_tensors_of_a_pickled_head_are_named_too(folder, target, changes, named):
    path = folder("eagle3")
    rig.edit_tensors(path, **changes)
    rig.pickle(path)
    with pytest.raises(ModelError) as refusal:
        load(path, target)
    assert named in str(refusal.value)


@pytest.mark.parametrize("state", [pytest.raises, [torch.zeros(1)], {"fc.weight": 1}])
def test_a_pickled_file_of_anything_but_tensors_is_refused(folder, target, state):
    path = folder("eagle3")
    rig.pickle(path)
    torch.save(state, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pytorch_model"):
        load(path, target)


def test_tensors_that_no_head_needs_are_ignored(folder, target):
    path = folder("eagle3")
    rig.edit_tensors(path, t2d=None, **{"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(path, target)


def test_a_full_vocabulary_may_come_with_offsets_of_zero_only(folder, target):
    path = folder("dflash")
    rig.edit_tensors(path, d2t=torch.zeros(61, dtype=torch.int64))
    assert load(path, target).vocabulary is None
    rig.edit_tensors(path, d2t=60 - 2 * torch.arange(61))
    with pytest.raises(ModelError, match="reorders the whole vocabulary"):
        load(path, target)


@pytest.mark.parametrize(
    "state", [torch.zeros(31), {"embedding": torch.zeros(32), "mask_token_id": 8}, {"other": torch.zeros(32)}]
)
def test_a_mask_embedding_of_another_shape_or_token_is_refused(folder, target, state):
    path = folder("dflash")
    torch.save(state, path / MASK_FILE)
    with pytest.raises(ModelError, match=MASK_FILE):
        load(path, target)


def test_a_mask_embedding_that_would_run_code_is_refused(folder, target):
    path = folder("dflash")
    torch.save(pytest.raises, path / MASK_FILE)
    with pytest.raises(ModelError, match="cannot be read"):
        load(path, target)


OTHER_TARGETS = [
    ({"hidden_size": 48}, "target_hidden_size=32, but the target has 48"),
    ({"vocab_size": 62}, "vocab_size=61, but the target has 62"),
    ({"num_layers": 5}, "features of layers 2, 4, 5 with a target of 5 layers"),
]


@pytest.mark.parametrize(("changes", "named"), OTHER_TARGETS)
def test_a_head_of_another_target_is_refused(changes, named):
    with pytest.raises(ModelError, match=named):
        rig.eagle3_config().resolve(replace(rig.TARGET, **changes))


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5])
def test_default_features_need_a_target_with_three_such_layers(num_layers):
    with pytest.raises(ModelError, match="expected 3 numbers"):
        rig.eagle3_config(feature_layers=None).resolve(replace(rig.TARGET, num_layers=num_layers))


def test_a_head_of_another_width_needs_its_own_tokens():
    target = rig.make_target(rig.WIDE_TARGET)
    with pytest.raises(ModelError, match="its own embed_tokens and lm_head"):
        Eagle3Head(rig.eagle3_config(target_hidden_size=48), target, torch.float32)


def test_a_block_head_without_norms_of_queries_and_keys_is_not_written(tmp_path, target):
    layers = replace(rig.block_config().layers, family="llama", qk_norm=False)
    head = BlockHead.random(rig.block_config(layers=layers), target, seed=1)
    with pytest.raises(ModelError, match="norms of queries and keys"):
        write_head(head, tmp_path)


def test_norms_that_differ_from_head_to_head_are_not_written(tmp_path, target):
    head = BlockHead.random(rig.block_config(), target, seed=1)
    norms = head.layers[0].qk_norm
    assert norms is not None
    norms[0] += 1
    with pytest.raises(ModelError, match="differs from head to head"):
        write_head(head, tmp_path)


def test_a_rope_with_a_factor_per_frequency_is_not_written(tmp_path, target):
    config = rig.eagle3_config()
    config = replace(config, layers=replace(config.layers, rope=replace(config.layers.rope, factors=(1.0,) * 4)))
    with pytest.raises(ConfigError, match="factor for each frequency"):
        write_head(Eagle3Head.random(config, target, seed=1), tmp_path)
