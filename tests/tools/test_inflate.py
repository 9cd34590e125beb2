"""An inflated model computes what the small one does, with dense operands, and reads back from an ordinary folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from faser.errors import ConfigError
from faser.models import weights
from faser.models.config import ModelConfig, Rope
from faser.models.transformer import Transformer
from faser.text.tokenizer import TOKENIZER_FILE
from tests.models.reference import forward
from tests.tiny import CONFIGS, make_model
from tools import inflate as tool
from tools.inflate import SHAPES, Shape, inflate, inflated_config, load_source, write_folder

LLAMA3_ROPE = CONFIGS["llama3"].rope

# 6 heads on 2 KV heads: groups of 3.
SMALL = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    norm_eps=1e-3,  # large enough that a wrong one shows
    max_positions=128,
    rope=Rope(1000.0),
    eos_token_ids=(2, 3),
    bos_token_id=1,
)
SAME = Shape(**{name: getattr(SMALL, name) for name in asdict(SHAPES["llama-8b"])})
LARGE = Shape(hidden_size=60, num_layers=5, num_heads=20, num_kv_heads=5, head_dim=16, intermediate_size=99)

SMOLLM2 = replace(
    SMALL, vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, norm_eps=1e-5, max_positions=8192, rope=Rope(100_000.0), tie_embeddings=True,
)  # fmt: skip


def small_model(**changes: Any) -> Transformer:
    return Transformer.random(replace(SMALL, **changes), seed=0, std=0.3)


def tokens(model: Transformer, num: int = 32) -> Tensor:
    return torch.randint(model.config.vocab_size, (num,), generator=torch.Generator().manual_seed(1))


def assert_same_function(small: Transformer, large: Transformer) -> None:
    token_ids = tokens(small)
    expected = forward(small, token_ids)
    assert expected.std() > 0.3  # a model that says nothing would agree with anything
    torch.testing.assert_close(forward(large, token_ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_grown_in_every_dimension_computes_the_same(dense: bool, tied: bool) -> None:
    small = small_model(tie_embeddings=tied)
    large = inflate(small, LARGE, dense=dense)
    assert_same_function(small, large)
    assert large.config == inflated_config(small.config, LARGE, torch.float32)
    assert not large.config.tie_embeddings


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hidden_size": 57},
        {"num_layers": 4},
        {"num_layers": 8},
        {"num_heads": 8},
        {"num_heads": 15, "num_kv_heads": 5},
        {"num_heads": 8, "num_kv_heads": 4},  # groups of 2 for groups of 3: a KV head is served by two
        {"num_heads": 8, "num_kv_heads": 8},
        {"head_dim": 16},
        {"intermediate_size": 41},
    ],
    ids=str,
)
def test_each_dimension_alone_computes_the_same(change: dict[str, int], dense: bool) -> None:
    small = small_model()
    assert_same_function(small, inflate(small, replace(SAME, **change), dense=dense))


@pytest.mark.parametrize(
    "rope", [LLAMA3_ROPE, Rope(1000.0, "linear", 4.0), Rope(1000.0, factors=(1.0, 1.5, 4.0, 8.0))], ids=str
)
def test_scaled_rope_follows_its_pairs_to_the_doubled_head(rope: Rope) -> None:
    small = small_model(rope=rope)
    assert_same_function(small, inflate(small, LARGE))


def test_a_rope_whose_frequencies_move_with_the_head_dimension_is_refused() -> None:
    yarn = Rope(500.0, "yarn", 4.0, 64)
    small = small_model(rope=yarn)
    with pytest.raises(ConfigError, match="yarn rope"):
        inflate(small, LARGE)
    assert_same_function(small, inflate(small, replace(LARGE, head_dim=8)))


def test_a_mistral_without_biases_is_a_llama() -> None:
    small = make_model("mistral")
    large = inflate(small, replace(LARGE, num_heads=6, num_kv_heads=3))
    assert large.config.family == "llama"
    assert_same_function(small, large)


def test_a_short_vocabulary_stays_short(tmp_path: Path) -> None:
    owner = small_model()
    small = Transformer.shared(owner, owner.config, short_vocabulary=torch.tensor([3, 14, 15]))
    for layer, theirs in zip(small.layers, owner.layers, strict=True):
        for name in ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down"):
            getattr(layer, name).copy_(getattr(theirs, name))
    small.final_norm.copy_(owner.final_norm)
    large = inflate(small, LARGE)
    assert_same_function(small, large)
    assert large.vocabulary is not None
    assert large.vocabulary.tolist() == [3, 14, 15]
    with pytest.raises(ConfigError, match="short vocabulary"):
        write_folder(large, tmp_path)


def test_greedy_tokens_are_the_same_at_a_hundred_positions() -> None:
    small = small_model()
    token_ids = tokens(small, 100)
    assert torch.equal(forward(inflate(small, LARGE), token_ids).argmax(-1), forward(small, token_ids).argmax(-1))


def test_no_row_or_column_of_a_dense_model_is_zero() -> None:
    for weight in inflate(small_model(), LARGE).weights():
        assert (weight != 0).float().mean() > 0.999
        if weight.dim() == 2:
            assert weight.norm(dim=0).min() > 0
            assert weight.norm(dim=1).min() > 0


def test_all_heads_and_neurons_of_a_real_layer_write_alike_when_dense() -> None:
    # what each head or neuron writes, [heads] and [neurons]
    layer = inflate(small_model(), replace(LARGE, num_layers=3)).layers[1]
    heads = layer.out.unflatten(1, (LARGE.num_heads, -1)).norm(dim=(0, 2))
    neurons = layer.down.norm(dim=0)
    assert heads.min() > heads.max() / 20
    assert neurons.min() > neurons.max() / 20


def test_a_plain_model_keeps_zeros_where_nothing_may_be_added() -> None:
    small = small_model()
    large = inflate(small, LARGE, dense=False)
    written = [int((layer.down.norm(dim=0) > 0).sum()) for layer in large.layers]
    assert written == [40, 0, 40, 0, 40]


def test_extra_layers_stand_evenly_between_the_real_ones() -> None:
    extra = [place for place, (_, real) in enumerate(tool._layer_sources(30, 32)) if not real]
    assert extra == [7, 23]
    for small, large in [(30, 32), (16, 28), (30, 64), (16, 16), (1, 7), (3, 4)]:
        sources = tool._layer_sources(small, large)
        assert [source for source, real in sources if real] == list(range(small))
        assert len(sources) == large


def test_a_seed_gives_one_model_and_another_seed_another() -> None:
    small = small_model()
    first, again, other = (inflate(small, LARGE, seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, first.weights(), again.weights()))
    assert not torch.equal(first.embedding, other.embedding)


def test_the_source_is_left_alone_and_dtype_and_positions_are_kept() -> None:
    small = Transformer.random(SMALL, seed=0, dtype=torch.bfloat16, max_positions=50)
    before = [weight.clone() for weight in small.weights()]
    large = inflate(small, LARGE)
    assert all(map(torch.equal, before, small.weights()))
    assert large.dtype is torch.bfloat16
    assert large.max_positions == 50
    assert inflate(small, LARGE, dtype=torch.float32).config.dtype == "float32"


def test_bfloat16_costs_an_inflated_model_no_more_than_the_small_one() -> None:
    small = small_model()
    token_ids = tokens(small)
    expected = forward(small, token_ids)

    def error(model: Transformer) -> float:
        return (forward(model, token_ids) - expected).square().mean().sqrt().item()

    rounded = Transformer.empty(SMALL, torch.bfloat16)
    for into, weight in zip(rounded.weights(), small.weights(), strict=True):
        into.copy_(weight)
    assert error(inflate(small, LARGE, dtype=torch.bfloat16)) < 1.5 * error(rounded)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 23}, "hidden_size=23: expected at least 24"),
        ({"num_layers": 2}, "num_layers=2: expected at least 3"),
        ({"num_heads": 4}, "num_heads=4: expected at least 6"),
        ({"num_kv_heads": 1}, "num_kv_heads=1: expected at least 2"),
        ({"intermediate_size": 39}, "intermediate_size=39: expected at least 40"),
        ({"head_dim": 12}, "head_dim=12: expected the model's 8 or twice that"),
        ({"num_heads": 7}, "num_heads=7: expected a multiple"),
        ({"num_heads": 6, "num_kv_heads": 3}, "num_kv_heads=3 with 2 query heads each.* takes 4"),
    ],
)
def test_a_shape_that_cannot_hold_the_model_is_refused(change: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        inflated_config(SMALL, replace(SAME, **change), torch.float32)


@pytest.mark.parametrize("feature", ["qkv_bias", "out_bias", "qk_norm"])
def test_what_a_llama_does_not_have_is_refused_by_name(feature: str) -> None:
    with pytest.raises(ConfigError, match=feature):
        inflated_config(replace(SMALL, **{feature: True}), SAME, torch.float32)


@pytest.mark.parametrize(
    ("num_layers", "shape"),
    [(30, "llama-8b"), (30, "qwen-32b"), (16, "llama-1b"), (16, "qwen-0.6b"), (16, "llama-3b")],
)
def test_the_default_pair_fits_the_named_shapes(num_layers: int, shape: str) -> None:
    config = replace(SMOLLM2, num_layers=num_layers)
    inflated_config(config, SHAPES[shape], torch.bfloat16)
    assert set(tool._head_sources(config, SHAPES[shape])) == set(range(9))


# ---- folders ----


def test_a_written_folder_means_the_same_to_transformers_and_to_faser(tmp_path: Path) -> None:
    small = small_model(tie_embeddings=True, rope=LLAMA3_ROPE)
    large = inflate(small, LARGE)
    write_folder(large, tmp_path, shard_bytes=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    token_ids = tokens(small)
    expected = forward(small, token_ids)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = theirs(token_ids[None]).logits[0].float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    ours = load_source(tmp_path)
    assert ours.config == large.config
    assert all(map(torch.equal, ours.weights(), large.weights()))


@pytest.mark.parametrize(
    "rope",
    [Rope(1000.0), Rope(1000.0, "linear", 4.0), LLAMA3_ROPE, Rope(1000.0, "yarn", 4.0, 32, attention_factor=1.1)],
    ids=lambda rope: rope.kind,
)
def test_a_written_config_reads_back_whole(rope: Rope, tmp_path: Path) -> None:
    model = small_model(rope=rope)
    write_folder(model, tmp_path)
    assert ModelConfig.from_folder(tmp_path) == model.config
    assert (tmp_path / weights.SINGLE_FILE).is_file()


def test_a_rope_that_config_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a factor for each frequency"):
        write_folder(small_model(rope=Rope(factors=(1.0, 1.5, 4.0, 8.0))), tmp_path)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (source / name).write_text(f"{name} of the source")
    write_folder(small_model(), tmp_path / "out", tokenizer_files_from=source)
    copied = {path.name for path in (tmp_path / "out").iterdir() if "of the source" in path.read_text(errors="ignore")}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").touch()
    with pytest.raises(ConfigError, match="an empty folder"):
        write_folder(small_model(), tmp_path)


def test_the_command_inflates_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "test", LARGE)
    small = small_model()
    write_folder(small, tmp_path / "small")
    (tmp_path / "small" / TOKENIZER_FILE).write_text("{}")
    arguments = [str(tmp_path / "small"), "test", str(tmp_path / "large"), "--dtype", "float32", "--device", "cpu"]
    assert tool.main(arguments) == 0
    assert "layer 5 of 5" in capsys.readouterr().out
    assert (tmp_path / "large" / TOKENIZER_FILE).is_file()
    assert_same_function(small, load_source(tmp_path / "large"))
    assert tool.main(arguments) == 2
    assert "an empty folder" in capsys.readouterr().err
