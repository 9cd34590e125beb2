"""Are the 8B- and 1B-shaped models what they claim to be: the small pair, at the cost of a large one?

Speculation pays by two things: what a forward costs, and how often the draft is right. Random weights of a real shape
have the cost without the acceptance; a small pair has the acceptance without the cost. tools/inflate.py puts a small
pair into large shapes, where every matrix product runs at full size, with numbers that are not zero. In exact
arithmetic the function stays the same. In bfloat16 it need not: 8 bits of mantissa round every weight and activation
anew, in another basis, so tokens whose logits nearly tie may change places. Three questions, then:

  same function   Teacher-forced on the small target's own greedy texts (every n-th Spec-Bench prompt, as a chat, cut to
                  512 tokens), at what share of output positions do the 8B shape and the small model choose the same
                  token? Where they do not, how far apart were the small model's best two logits? The noise to judge
                  this by, where nothing was inflated: the small model in bfloat16 against itself in float32, and
                  against its own text, which other kernels wrote.
  acceptance      At those positions, how often is the draft's token the target's, for the small pair and for the
                  inflated pair (16 layers as a 1B shape, with an embedding and a head of its own), and how many tokens
                  does a step at length 4 emit?
  vLLM            Is the folder written for it an ordinary checkpoint? vLLM continues some of the prompts from it,
                  greedily; its texts are compared with those the 8B shape writes here, up to the first end token. One
                  near-tie parts two texts for good, so what counts is the share of vLLM's tokens that the 8B shape
                  ranks first on vLLM's own text.

    python3 -m benchmarks.scale_models TARGET.gguf DRAFT.gguf --prompts specbench.jsonl.xz [--stride 4] [--output 128]
        [--folder /tmp/scale-8b [--vllm-python-path DIR --vllm-trace vllm_trace.py]]

--folder needs 15 GB of disk, --vllm-python-path the unpacked bundle of the peer. Takes a GPU with 40 GB, vLLM one with
80, and a few minutes. A section that fails is printed and reported, and the others still run.

Targets: same token at 0.97 of positions, acceptance within 0.03, vLLM's tokens ranked first at 0.97.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.draft import apply_patch, read_patch
from faser.models.transformer import Transformer
from tools.distill import chat_prompt, hidden_of, load_target, num_steps, read_jsonl, write_answers
from tools.inflate import SHAPES, Shape, inflate, write_folder

MOST_PROMPT, LENGTH = 512, 4
VLLM_PROMPTS, VLLM_MODEL_LEN, VLLM_SECONDS = 24, 2048, 240
SMALL, EXACT, DRAFT, LARGE, LARGE_DRAFT = "small", "small float32", "small draft", "8B shape", "1B-shape draft"
LEAST_SAME, MOST_ACCEPTANCE_CHANGE, LEAST_FIRST = 0.97, 0.03, 0.97

Figures = dict[str, Any]


@dataclass(frozen=True)
class Greedy:
    """What a model says, teacher-forced, at each output position of one text; all [outputs]."""

    best: np.ndarray  # token ids
    second: np.ndarray
    gap: np.ndarray  # between their logits
    text_gap: np.ndarray  # between the logits of the best and of the token the text has; 0: first, or tied for it


@dataclass
class Study:
    """What the sections build up; a section that needs what an earlier one failed to make fails with its name."""

    target: Path
    draft: Path
    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, Shape]  # of target and draft
    models: dict[str, Transformer] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[Tensor] = field(default_factory=list)  # the small target's, prompt included
    greedy: dict[str, list[Greedy]] = field(default_factory=dict)  # by model, one for each text
    figures: Figures = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def section(self, name: str) -> Iterator[Figures]:
        """Time what is inside and keep the figures it fills in; print what it raises and go on."""
        figures: Figures = {}
        self.figures[name] = figures
        started = time.perf_counter()
        try:
            yield figures
            free_memory()  # waits for the GPU, so it raises what went wrong there
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        figures["seconds"] = round(time.perf_counter() - started, 1)
        shown = json.dumps(figures) if name not in self.failed else f"FAILED: {self.failed[name]}"
        print(f"{time.perf_counter() - self.started:7.1f} s  {name}: {shown}", flush=True)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ---- the models and the texts ----


def load_small(study: Study, prompts_file: str, stride: int) -> None:
    """The small pair, the target again in float32, and the prompts."""
    target, tokenizer = load_target(str(study.target), study.dtype, study.device)
    study.models[SMALL] = target
    rows = read_jsonl(prompts_file)[::stride]
    questions = [str(row["turns"][0]) for row in rows]  # type: ignore[index]
    study.prompts = [tokenizer.encode(chat_prompt(question))[:MOST_PROMPT] for question in questions]
    study.models[DRAFT] = apply_patch(target, read_patch(study.draft, target.config))
    study.models[EXACT] = load_target(str(study.target), torch.float32, study.device)[0]


def inflate_into(study: Study, small: str, large: str, shape: Shape) -> Figures:
    """Inflate one model and say what it is. The inflated draft shares nothing with the inflated target."""
    study.models[large] = model = inflate(study.models[small], shape, dtype=study.dtype, device=study.device)
    num_parameters = sum(weight.numel() for weight in model.weights())
    return {"parameters": num_parameters, "gigabytes": round(model.num_bytes / 1e9, 3), "layers": model.num_layers}


@torch.inference_mode()
def greedy_tokens(model: Transformer, text: Tensor, num_prompt: int) -> Greedy:
    """text [tokens], of which the first num_prompt are given. Logits only where an output token comes next."""
    hidden = hidden_of(model, text[None, :-1])[0, num_prompt - 1 :]
    # logits [outputs, vocabulary]
    logits = F.linear(hidden, model.head).float()
    best, ids = logits.topk(2, dim=-1)
    if model.vocabulary is not None:
        ids = model.vocabulary.to(ids.device)[ids]
        text_gap = torch.full_like(best[:, 0], torch.nan)
    else:
        text_gap = best[:, 0] - logits.gather(1, text[num_prompt:, None])[:, 0]
    # topk and argmax may break a tie differently; the greedy token is argmax's, as in every sampler
    first = logits.argmax(dim=-1)
    first = first if model.vocabulary is None else model.vocabulary.to(ids.device)[first]
    second = torch.where(ids[:, 1] == first, ids[:, 0], ids[:, 1])
    return Greedy(*(x.cpu().numpy() for x in (first, second, best[:, 0] - best[:, 1], text_gap)))


def greedy_texts(model: Transformer, texts: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> list[Greedy]:
    """One text at a time: a batch would need padding, and the whole takes seconds."""
    return [
        greedy_tokens(model, text.to(model.device), len(prompt)) for text, prompt in zip(texts, prompts, strict=True)
    ]


def outputs_of(texts: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [text[len(prompt) :].cpu().numpy() for text, prompt in zip(texts, prompts, strict=True)]


# ---- the same function ----


def same_function(study: Study) -> Figures:
    small, large = study.greedy[SMALL], study.greedy[LARGE]
    texts = outputs_of(study.texts, study.prompts)
    figures = {
        "positions": sum(map(len, texts)),
        "same_as_small": same_share(best_of(large), best_of(small)),
        "small_same_as_its_text": same_share(best_of(small), texts),
        "where_they_differ": differences(small, large),
    }
    return figures | (beside_float32(small, large, study.greedy[EXACT]) if EXACT in study.greedy else {})


def beside_float32(small: Sequence[Greedy], large: Sequence[Greedy], exact: Sequence[Greedy]) -> Figures:
    """The file's own weights as a third party: what rounding alone does to the small model, and to the large one."""
    return {
        "same_as_float32": same_share(best_of(large), best_of(exact)),
        "small_same_as_float32": same_share(best_of(small), best_of(exact)),
        "where_it_differs_from_float32": differences(exact, large),
        "where_small_differs_from_float32": differences(exact, small),
    }


def best_of(greedy: Sequence[Greedy]) -> list[np.ndarray]:
    return [each.best for each in greedy]


def same_share(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return round(float((np.concatenate(left) == np.concatenate(right)).mean()), 5)


def differences(small: Sequence[Greedy], large: Sequence[Greedy]) -> Figures:
    """How near a tie the small model was where the large one chose another token, beside its gap anywhere."""
    gap = np.concatenate([each.gap for each in small])
    chosen = np.concatenate(best_of(large))
    differ = chosen != np.concatenate(best_of(small))
    second = chosen == np.concatenate([each.second for each in small])
    return {
        "positions": int(differ.sum()),
        "small_gap_median": summary(np.median, gap[differ]),
        "small_gap_p90": summary(lambda x: np.quantile(x, 0.9), gap[differ]),
        "small_gap_max": summary(np.max, gap[differ]),
        "small_gap_median_anywhere": summary(np.median, gap),
        "share_small_second_choice": summary(np.mean, second[differ]),
    }


def summary(of: Callable[[np.ndarray], Any], values: np.ndarray) -> float | None:
    return round(float(of(values)), 4) if len(values) else None


# ---- acceptance ----


def acceptance(study: Study) -> Figures:
    small = agreement(study.greedy[DRAFT], study.greedy[SMALL])
    large = agreement(study.greedy[LARGE_DRAFT], study.greedy[LARGE])
    return {
        "small": pair_figures(small),
        "inflated": pair_figures(large),
        "change": round(float(np.concatenate(large).mean() - np.concatenate(small).mean()), 5),
    }


def agreement(draft: Sequence[Greedy], target: Sequence[Greedy]) -> list[np.ndarray]:
    """Per text, where the draft would have proposed the target's token. [outputs] each."""
    return [guess.best == right.best for guess, right in zip(draft, target, strict=True)]


def pair_figures(agreed: Sequence[np.ndarray]) -> Figures:
    steps = sum(num_steps(each, LENGTH) for each in agreed)
    return {
        "agreement": round(float(np.concatenate(agreed).mean()), 5),
        f"tokens_per_step_{LENGTH}": round(sum(map(len, agreed)) / steps, 4),
    }


# ---- vLLM ----


def pick_evenly(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Prompts lie by category: an even choice has some of each."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


def write_workload(path: Path, prompts: Sequence[list[int]], num_output: int) -> None:
    lines = [{"arrival": 0.0, "prompt_token_ids": prompt, "max_tokens": num_output} for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run_vllm(python_path: str, trace: str, folder: Path, workload: Path) -> list[list[int]]:
    """vLLM's greedy output for each line of the workload. Its own output goes to a file, shown where it fails."""
    out, log = workload.with_suffix(".out.jsonl"), workload.with_suffix(".log")
    command = [sys.executable, trace, "--model", str(folder), "--workload", str(workload), "--out", str(out)]
    command += ["--max-model-len", str(VLLM_MODEL_LEN)]
    environment = os.environ | {"PYTHONPATH": python_path, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    out.unlink(missing_ok=True)  # of an earlier run
    with log.open("w") as file:
        status = run_group(command, environment, file, VLLM_SECONDS)
    if status != 0 or not out.is_file():
        raise RuntimeError(f"vLLM ended with {status}; the end of {log}:\n{log.read_text(errors='replace')[-4000:]}")
    return [record["token_ids"] for record in read_jsonl(str(out))]  # type: ignore[misc]


def run_group(command: Sequence[str], environment: dict[str, str], log: Any, seconds: float) -> int | None:
    """Run a command and end it with its children; None where it took too long. vLLM's engine is a child of its own."""
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it and its children are gone
    process.wait()


def cut_at_end(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end token, with it, as write_answers cuts."""
    stops = [index for index, token in enumerate(token_ids) if token in ends]
    return token_ids[: stops[0] + 1] if stops else token_ids


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def compare_texts(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Figures:
    prefixes = [common_prefix(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "texts": len(ours),
        "identical": sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True)),
        "mean_common_prefix": round(float(np.mean(prefixes)), 1),
        "mean_length": round(float(np.mean([len(text) for text in theirs])), 1),
    }


def ranked_first(model: Transformer, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Figures:
    """How the model judges texts that others wrote. In bfloat16 best logits often tie; a tied token is first, too."""
    texts = [torch.tensor(prompt + output) for prompt, output in zip(prompts, outputs, strict=True)]
    greedy = greedy_texts(model, texts, prompts)
    text_gap = np.concatenate([each.text_gap for each in greedy])
    return {
        "tokens": len(text_gap),
        "first": same_share(best_of(greedy), [np.array(output) for output in outputs]),
        "first_or_tied": round(float((text_gap == 0).mean()), 5),
        "gap_max": summary(np.max, text_gap),
    }


def compare_with_vllm(
    study: Study, prompts: Sequence[list[int]], ours: Sequence[list[int]], theirs: Sequence[list[int]], figures: Figures
) -> None:
    """Fill in the figures, the one that counts first. The model was freed for vLLM; the same seed makes it again."""
    inflate_into(study, SMALL, LARGE, study.shapes[0])
    model = study.models[LARGE]
    theirs = [cut_at_end(token_ids, model.config.eos_token_ids) for token_ids in theirs]
    figures["our_model_on_vllm_text"] = ranked_first(model, prompts, theirs)
    figures["our_model_on_its_own_text"] = ranked_first(model, prompts, ours)
    figures |= compare_texts(ours, theirs)


# ---- the whole ----


def study_models(study: Study, prompts_file: str, stride: int, num_output: int) -> None:
    """Sections 1 to 4: everything that needs neither a folder nor vLLM."""
    with study.section("load") as figures:
        load_small(study, prompts_file, stride)
        figures |= {"prompts": len(study.prompts), "longest_prompt": max(map(len, study.prompts))}
    with study.section("answers") as figures:
        study.texts = write_answers(study.models[SMALL], study.prompts, num_output, 0.0)
        figures["tokens"] = sum(map(len, outputs_of(study.texts, study.prompts)))
    for small, large, shape in ((SMALL, LARGE, study.shapes[0]), (DRAFT, LARGE_DRAFT, study.shapes[1])):
        with study.section(f"inflate {large}") as figures:
            figures |= inflate_into(study, small, large, shape)
    for name, model in study.models.items():
        with study.section(f"greedy {name}"):
            study.greedy[name] = greedy_texts(model, study.texts, study.prompts)
    with study.section("same function") as figures:
        figures |= same_function(study)
    with study.section("acceptance") as figures:
        figures |= acceptance(study)


def study_folder(study: Study, folder: Path, num_output: int, python_path: str | None, trace: str | None) -> None:
    """Section 5: the folder, and what vLLM makes of it."""
    prompts, ours, theirs = pick_evenly(study.prompts, VLLM_PROMPTS), [], []
    with study.section("write folder") as figures:
        write_folder(study.models[LARGE], folder)
        figures["gigabytes"] = round(sum(path.stat().st_size for path in folder.iterdir()) / 1e9, 2)
    if python_path is None or trace is None:
        return
    with study.section("own texts"):
        texts = write_answers(study.models[LARGE], prompts, num_output, 0.0)
        ours = [output.tolist() for output in outputs_of(texts, prompts)]
    for name in (LARGE, LARGE_DRAFT, EXACT):
        study.models.pop(name, None)
    with study.section("free") as figures:
        free_memory()
        figures["gigabytes_left"] = round(torch.cuda.memory_allocated() / 1e9, 2) if study.device == "cuda" else 0.0
    with study.section("run vLLM"):
        workload = folder.with_name(folder.name + "-workload.jsonl")
        write_workload(workload, prompts, num_output)
        theirs = run_vllm(python_path, trace, folder, workload)
    if "run vLLM" in study.failed:
        return
    with study.section("vLLM") as figures:
        compare_with_vllm(study, prompts, ours, theirs, figures)


@dataclass(frozen=True)
class Line:
    """A row of the table: where the figure is, and what it must be."""

    label: str
    section: str
    path: tuple[str, ...]
    target: str = ""
    meets: Callable[[float], bool] | None = None

    def value(self, figures: Figures) -> Any:
        found: Any = figures.get(self.section, {})
        for key in self.path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def verdict(self, value: Any) -> str:
        if self.meets is None:
            return ""
        if value is None:
            return "NOT MEASURED"
        return "PASS" if self.meets(value) else "MISS"


_SAME, _DIFFER, _STEP = "same function", "where_they_differ", f"tokens_per_step_{LENGTH}"
LINES = (
    Line("same token: 8B shape, small", _SAME, ("same_as_small",), f">= {LEAST_SAME}", lambda x: x >= LEAST_SAME),
    Line("same token: 8B shape, small float32", _SAME, ("same_as_float32",)),
    Line("same token: small, small float32", _SAME, ("small_same_as_float32",)),
    Line("same token: small, its own text", _SAME, ("small_same_as_its_text",)),
    Line("small's logit gap where they differ: median", _SAME, (_DIFFER, "small_gap_median")),
    Line("                                    largest", _SAME, (_DIFFER, "small_gap_max")),
    Line("                           anywhere: median", _SAME, (_DIFFER, "small_gap_median_anywhere")),
    Line("acceptance: small pair", "acceptance", ("small", "agreement")),
    Line("acceptance: inflated pair", "acceptance", ("inflated", "agreement")),
    Line(
        "acceptance: change", "acceptance", ("change",),
        f"within {MOST_ACCEPTANCE_CHANGE}", lambda x: abs(x) <= MOST_ACCEPTANCE_CHANGE,
    ),
    Line(f"tokens a step, length {LENGTH}: small pair", "acceptance", ("small", _STEP)),
    Line(f"tokens a step, length {LENGTH}: inflated pair", "acceptance", ("inflated", _STEP)),
)  # fmt: skip
VLLM_LINES = (
    Line(
        "vLLM's tokens the 8B shape ranks first", "vLLM", ("our_model_on_vllm_text", "first"),
        f">= {LEAST_FIRST}", lambda x: x >= LEAST_FIRST,
    ),
    Line("                      first or tied for it", "vLLM", ("our_model_on_vllm_text", "first_or_tied")),
    Line("its own tokens the 8B shape ranks first", "vLLM", ("our_model_on_its_own_text", "first")),
    Line("texts compared", "vLLM", ("texts",)),
    Line("identical texts", "vLLM", ("identical",)),
    Line("common prefix: mean tokens", "vLLM", ("mean_common_prefix",)),
    Line("length: mean tokens", "vLLM", ("mean_length",)),
)  # fmt: skip


def report(study: Study, lines: Sequence[Line]) -> None:
    print(f"\n{'':45}{'figure':>10}  {'target':14}")
    for line in lines:
        value = line.value(study.figures)
        shown = "none" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        print(f"{line.label:45}{shown:>10}  {line.target:14}{line.verdict(value)}")
    for name, reason in study.failed.items():
        print(f"FAILED {name}: {reason}")
    verdicts = {line.label: line.verdict(line.value(study.figures)) for line in lines if line.meets is not None}
    seconds = round(time.perf_counter() - study.started, 1)
    sections = {"sections": study.figures, "failed": study.failed, "seconds": seconds}
    print(json.dumps({"benchmark": "scale_models", "verdicts": verdicts, **sections}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET.gguf", help="the small target")
    parser.add_argument("draft", type=Path, metavar="DRAFT.gguf", help="its draft, a patch made by tools/distill.py")
    parser.add_argument("--prompts", required=True, help="JSONL with `turns`, plain or .xz")
    parser.add_argument("--stride", type=int, default=4, help="use every n-th prompt (4)")
    parser.add_argument("--output", type=int, default=128, help="most tokens of an answer (128)")
    parser.add_argument("--folder", type=Path, help="new folder for the 8B shape, 15 GB; kept")
    parser.add_argument("--vllm-python-path", metavar="DIR", help="vLLM, unpacked")
    parser.add_argument("--vllm-trace", metavar="FILE", help="the peer's vllm_trace.py")
    args = parser.parse_args()
    refuse(parser, args)
    return args


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything that would otherwise fail after minutes on a GPU."""
    asks_vllm = args.vllm_python_path is not None
    if asks_vllm != (args.vllm_trace is not None) or (asks_vllm and args.folder is None):
        parser.error("vLLM takes --folder, --vllm-python-path and --vllm-trace together")
    for path in (args.target, args.draft, args.prompts, args.vllm_python_path, args.vllm_trace):
        if path is not None and not Path(path).exists():
            parser.error(f"{path}: no such file")
    if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder}: expected a new or an empty folder; remove it or choose another")
    if not torch.cuda.is_available():
        parser.error("an 8B shape takes a CUDA GPU; none is here")


def main() -> None:
    args = parse_args()
    shapes = (SHAPES["llama-8b"], SHAPES["llama-1b"])
    study = Study(args.target, args.draft, "cuda", torch.bfloat16, shapes)
    study_models(study, args.prompts, args.stride, args.output)
    if args.folder is not None:
        study_folder(study, args.folder, args.output, args.vllm_python_path, args.vllm_trace)
    report(study, LINES + (VLLM_LINES if args.vllm_python_path is not None else ()))


if __name__ == "__main__":
    main()
