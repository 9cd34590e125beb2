"""Loading: what is read equals what was saved, costs no second copy, and a broken folder is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.transformer import Transformer
from tests.models.reference import SIZES, forward, save_hf, small_config

TOKEN_IDS = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(3))
QWEN3 = Qwen3Config(**SIZES, head_dim=16, attention_bias=True)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Transformer:
    return weights.load(folder, ModelConfig.from_folder(folder), dtype, **options)


def same(left: Transformer, right: Transformer) -> bool:
    return all(torch.equal(*pair) for pair in zip(left.weights(), right.weights(), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small whole checkpoint, to break."""
    save_hf(tmp_path, LlamaConfig(**SIZES))
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint, or drop those given as None; names use __ for a dot."""
    tensors = load_file(folder / weights.SINGLE_FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / weights.SINGLE_FILE)


# ---- what is read ----


def test_a_sharded_checkpoint_loads_equal_to_the_single_one(tmp_path: Path) -> None:
    save_hf(tmp_path / "single", QWEN3)
    save_hf(tmp_path / "sharded", QWEN3, max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert same(load(tmp_path / "single"), load(tmp_path / "sharded"))


def test_reading_in_small_pieces_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder)
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1000)
    assert same(whole, load(folder))


def test_a_tied_head_is_held_once_even_where_the_file_has_a_copy(tmp_path: Path) -> None:
    save_hf(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=True))
    alone = load(tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.zeros(96, 48))
    beside = load(tmp_path)
    assert beside.head.data_ptr() == beside.embedding.data_ptr()
    assert same(alone, beside)
    stored = sum(
        tensor.nbytes for name, tensor in load_file(tmp_path / weights.SINGLE_FILE).items() if "lm_head" not in name
    )
    assert beside.num_bytes == stored


def test_matrices_are_stored_transposed_on_a_cpu_and_the_embedding_by_row(folder: Path) -> None:
    model = load(folder)
    layer = model.layers[0]
    for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down, model.head):
        assert matrix.t().is_contiguous()
    assert model.embedding.is_contiguous()


def test_a_bfloat16_checkpoint_loads_into_float32_and_into_bfloat16(tmp_path: Path) -> None:
    saved = save_hf(tmp_path / "float32", QWEN3)
    saved.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    narrow, wide = load(tmp_path / "bfloat16", torch.bfloat16), load(tmp_path / "bfloat16")
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert narrow.num_bytes * 2 == wide.num_bytes
    assert all(torch.equal(a.float(), b) for a, b in zip(narrow.weights(), wide.weights(), strict=True))
    logits = forward(narrow, TOKEN_IDS)
    assert logits.dtype is torch.float32
    exact = forward(wide, TOKEN_IDS)
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    before = load(folder)
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6))
    assert same(before, load(folder))


def test_progress_rises_to_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load(folder, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {model.num_bytes}
    assert seen[-1][0] == model.num_bytes


LOAD_AND_MEASURE = """
import sys, torch
from pathlib import Path
from faser.models import weights
from faser.models.config import ModelConfig

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
config = ModelConfig.from_folder(folder)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = status("VmRSS")
model = weights.load(folder, config, getattr(torch, sys.argv[2]))
print((status("VmHWM") - before) / model.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_below_one_and_a_fifth_times_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 12000}
    tensors = checkpoint(config_json := SIZES | sizes | {"architectures": ["LlamaForCausalLM"]})
    save_file(tensors, tmp_path / weights.SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 280e6
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert 0.95 < float(done.stdout) < 1.2, dtype


def checkpoint(data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint of ones for the config, in float32."""
    model = Transformer.empty(ModelConfig.from_dict(data), torch.float32, "meta")
    return {name: torch.ones(each.shape) for name, each in weights.destinations_of(model).items()}


# ---- what is refused ----


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_an_untied_head_that_is_missing_is_named(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(48))
    with pytest.raises(ModelError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.zeros(47))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[47\]; expected \[48\]"):
        load(folder)


def test_integer_weights_are_refused_by_dtype(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.zeros(48, dtype=torch.int8))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has the dtype I8"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / weights.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load(folder)


def test_a_garbled_file_is_named(folder: Path) -> None:
    (folder / weights.SINGLE_FILE).write_bytes(b"not safetensors " * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_hf(tmp_path, LlamaConfig(**SIZES), max_shard_size="50KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": {"a": "../elsewhere.safetensors"}}', '{"weight_map": {"a": 3}}']
)
def test_a_garbled_index_is_named(folder: Path, index: str) -> None:
    (folder / weights.SINGLE_FILE).unlink()
    (folder / weights.INDEX_FILE).write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder: Path) -> None:
    (folder / weights.SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"expected safetensors: convert with .*save_pretrained"):
        load(folder)


def test_a_folder_without_weights_is_explained(folder: Path) -> None:
    (folder / weights.SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match="no weights there"):
        load(folder)


# ---- names ----


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert weights.resolve(tmp_path) == tmp_path
    assert weights.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./org/name", "../name", "name", "a/b/c", "", "org/na me"])
def test_a_path_that_is_not_there_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such folder; expected an existing model folder or a hub name"):
        weights.resolve(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"is a file and no GGUF; expected a model folder"):
        weights.resolve(tmp_path / "model.bin")


def test_a_hub_name_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "org/name-1.5"
        assert not any("bin" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.resolve("org/name-1.5") == tmp_path


class _Response:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_errors.GatedRepoError("gated", response=_Response()), "accept its terms"),
        (hub_errors.RepositoryNotFoundError("404", response=_Response()), "check the spelling"),
        (hub_errors.LocalEntryNotFoundError("offline"), "check the network"),
        (OSError("no route\nto host"), "check the network"),
    ],
)
def test_what_the_hub_raises_becomes_a_remedy(error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="org/name: ") as complaint:
        weights.resolve("org/name")
    assert remedy in str(complaint.value)
    assert "\n" not in str(complaint.value)
    assert complaint.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_auto_is_float32_on_a_cpu_and_the_checkpoints_dtype_elsewhere(
    name: str, device: str, dtype: torch.dtype
) -> None:
    assert weights.resolve_dtype(name, small_config(dtype="bfloat16"), device) is dtype


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="dtype='int8': expected auto, float32, bfloat16, float16"):
        weights.resolve_dtype("int8", small_config(), "cpu")
