"""What does a format cost in quality? The perplexity of models on a text.

The text is cut into windows; each token but the first of a window is predicted from those before it in the window. The
products are those of a CPU, or their plain twins on a GPU, so this says nothing of kernels, whose tests do.

    python3 -m benchmarks.perplexity TEXT MODEL [MODEL …] [--tokens 16384] [--window 512] [--quantised off]
        [--dtype float32] [--kv-dtype auto] [--round-rows] [--device cpu]

TEXT may be compressed by xz. MODEL is what `faser serve --model` takes, or `default`. Perplexities compare if models
share a tokenizer. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.config import KV_DTYPES
from faser.models.config import DTYPES
from faser.models.layers import rotate
from faser.models.quantised import folders
from faser.models.quantised.matrix import Weight
from faser.models.quantised.placement import Placement
from faser.models.source import FolderSource, GgufSource, open_target
from faser.models.transformer import Attend, Transformer
from faser.runtime.kv_cache import KvFormat, round_kv


def perplexity(model: Transformer, token_ids: Sequence[int], window: int, kv: KvFormat | None = None) -> float:
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[start : start + window], device=model.device)
        if len(ids) < 2:
            break
        logits = logits_of(model, ids, kv)[:-1]
        total += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


def logits_of(model: Transformer, token_ids: Tensor, kv: KvFormat | None = None) -> Tensor:
    """[rows, vocabulary] of one sequence."""
    return model.logits(model.run_layers(model.embed(token_ids), causal_attention(model, len(token_ids), kv)))


def causal_attention(model: Transformer, num_rows: int, kv: KvFormat | None = None) -> Attend:
    """Attention of one sequence to itself. With `kv` its keys and values are rounded as that says."""
    heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
    cos, sin = (each[:, None] for each in model.rotation(torch.arange(num_rows, device=model.device)))

    def attend(index: int, qkv: Tensor) -> Tensor:
        rotate(qkv[:, : heads + kv_heads], cos, sin)
        # [heads, rows, head_dim]
        queries, keys, values = (each.transpose(0, 1) for each in qkv.split((heads, kv_heads, kv_heads), 1))
        if kv is not None and kv.is_rounded:
            scales = kv.scales_of(index)
            keys, values = (
                (round_kv(each, scale).float() * scale).to(each.dtype)
                for each, scale in zip((keys, values), scales, strict=True)
            )
        keys, values = (each.repeat_interleave(heads // kv_heads, 0) for each in (keys, values))
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(0, 1).flatten(1)

    return attend


class _Kept(Placement):
    """Matrices as they are in the folder: plain twins multiply by them."""

    def place(self, weight: Weight) -> Weight:
        return weight.to(self.dtype) if isinstance(weight, Tensor) else weight


def load_rounding(source: FolderSource | GgufSource, dtype: torch.dtype) -> Transformer:
    """A folder of 8-bit floats whose products round rows to 8 bits, as those of a GPU do with `--quantised on`."""
    scheme = source.config.quantisation
    if not isinstance(source, FolderSource) or scheme is None or scheme.bits != 8:
        raise SystemExit(f"--round-rows: {source.path} is no folder of 8-bit floats")
    kept = _Kept(dtype, torch.device("cpu"), keeps=True)
    return folders.load(source.path, source.config, dtype, placement=kept)


def read_text(path: Path) -> str:
    return (lzma.open(path) if path.suffix == ".xz" else path.open("rb")).read().decode()


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    text, records = read_text(args.text), []
    for name in args.models:
        source = open_target(None if name == "default" else name)
        tokenizer = source.tokenizer()
        if tokenizer is None:
            raise SystemExit(f"{name} has no tokenizer; choose a folder or GGUF file that has one")
        token_ids = tokenizer.encode(text)[: args.tokens]
        dtype, window = getattr(torch, args.dtype), min(args.window, source.config.max_positions)
        if args.round_rows:
            model = load_rounding(source, dtype)
        else:
            model = source.load(dtype, source.config.max_positions, lambda *_: None, args.device, args.quantised)
        kv = KvFormat.rounded(model) if args.kv_dtype == "fp8" else KvFormat.of(model)
        started = time.perf_counter()
        value = perplexity(model, token_ids, window, kv)
        seconds = time.perf_counter() - started
        records.append(
            {"model": name, "perplexity": round(value, 4), "formats": list(model.formats), "kv": str(kv),
             "tokens": len(token_ids)}
        )  # fmt: skip
        formats = f"{', '.join(model.formats)}, KV {kv}"
        print(f"{value:9.4f}  {name}: {formats}; {len(token_ids)} tokens, {seconds:.0f} s", flush=True)
    print(json.dumps({"benchmark": "perplexity", "dtype": args.dtype, "window": args.window, "records": records}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT", type=Path)
    parser.add_argument("models", metavar="MODEL", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384, help="of the text that are read (16384)")
    parser.add_argument("--window", type=int, default=512, help="tokens (512)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES, help="round keys and values, too (auto: no)")
    parser.add_argument("--quantised", default="off", choices=("on", "off"), help="multiply by the stored codes (off)")
    parser.add_argument("--round-rows", action="store_true", help="8-bit floats: round the rows of products, too")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


if __name__ == "__main__":
    with torch.inference_mode():
        main()
