"""Can a middle layer tell which drafts will be refused? The default pair, layer by layer.

The target writes its own greedy answers to Spec-Bench prompts; at every position of them the draft guesses the next
token from the same text, as it does in a draft whose tokens before were accepted. The guess is refused where it is
not the target's token. After each layer the target's final norm and head are applied to the hidden row (the paper's
untrained rule), and the candidates that score above the guess are counted: its rank there. By layer:

  K          the smallest that keeps 99 % of the guesses that are accepted: those with rank K or more are dropped
  found      of the refused guesses, the share dropped by that K
  accuracy   of all guesses, dropped and refused or kept and accepted (the paper speaks of 95 % from middle layers)
  AUC        how well ranks order refused above accepted guesses, whatever K: 0.5 is chance
  score      found by a score fitted to rank, margin, the draft's confidence at equal retention, on the other half of
             the prompts; `confidence` is that of the draft's confidence alone, which costs nothing

    .venv/bin/python -m benchmarks.exit_accuracy [--count 48] [--tokens 96] [--keep 0.99]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cpu_speculation import chat_prompts
from faser import LLM, SamplingParams
from faser.arrays import FloatArray, IntArray
from faser.build import load_pair
from faser.config import EngineOptions
from faser.models.transformer import Transformer
from faser.runtime.cpu.runner import CpuAttention, Rows
from faser.runtime.kv_cache import bytes_per_page, pages_over
from faser.traffic.prompts import SHIPPED

PAGE = 16


@dataclass(frozen=True)
class Guesses:
    """Of one text: what the draft said at each of n positions, and how each of the target's L layers ranks it."""

    accepted: IntArray  # [n]
    confidence: FloatArray  # [n]
    rank: IntArray  # [L, n]
    margin: FloatArray  # [L, n] the best candidate's logit less the guess's


class Texts:
    """Whole texts through a model, without a batch."""

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        num_pages = -(-max_tokens // PAGE)
        self.model = model
        memory = torch.zeros(num_pages * bytes_per_page(model.config, PAGE, model.dtype), dtype=torch.uint8)
        self._pages = pages_over(memory, model.config, PAGE, model.dtype)
        self._table = np.arange(num_pages)[None]

    def hidden_by_layer(self, token_ids: IntArray):
        """The rows of a text out of each layer, one after the other."""
        one = np.array([token_ids.size])
        attend = CpuAttention(self.model, self._pages, self._table, Rows.of(np.zeros(1, int), np.zeros(1, int), one))
        hidden = self.model.embed(torch.from_numpy(token_ids))
        for index in range(self.model.num_layers):
            hidden = self.model.run_layers(hidden, attend, index, index + 1)
            yield hidden


@torch.inference_mode()
def guess(target: Texts, draft: Texts, prompt: IntArray, answer: IntArray) -> Guesses:
    text = np.concatenate((prompt, answer))[:-1]
    first = prompt.size - 1
    *_, last = draft.hidden_by_layer(text)
    chances, best = draft.model.logits(last[first:]).softmax(-1).max(-1)
    vocabulary = draft.model.vocabulary
    said = best if vocabulary is None else vocabulary[best]
    ranks, margins = [], []
    for hidden in target.hidden_by_layer(text):
        logits = target.model.logits(hidden[first:])
        own = logits.gather(1, said[:, None])
        ranks.append((logits > own).sum(1).numpy())
        margins.append((logits.max(1).values - own[:, 0]).double().numpy())
    return Guesses((said.numpy() == answer).astype(int), chances.double().numpy(), np.array(ranks), np.array(margins))


def threshold(values: FloatArray, accepted: IntArray, keep: float) -> float:
    """The smallest value whose reaching may drop a guess, so that `keep` of the accepted ones stay."""
    kept = np.sort(values[accepted == 1])
    return float(kept[min(kept.size - 1, int(np.ceil(keep * kept.size)) - 1)])


def found_by(values: FloatArray, accepted: IntArray, limit: float) -> float:
    return float((values[accepted == 0] > limit).mean())


def auc(values: FloatArray, accepted: IntArray) -> float:
    order = np.argsort(values, kind="stable")
    places = np.empty(values.size)
    places[order] = np.arange(1, values.size + 1)
    refused = accepted == 0
    count = refused.sum()
    return float((places[refused].sum() - count * (count + 1) / 2) / (count * (~refused).sum()))


def features(rank: IntArray, margin: FloatArray, confidence: FloatArray) -> FloatArray:
    sure = np.clip(confidence, 1e-4, 1 - 1e-4)
    return np.stack((np.ones(rank.size), np.log1p(rank), margin, np.log(sure / (1 - sure))), axis=1)


def fit(x: FloatArray, refused: IntArray) -> FloatArray:
    """Logistic regression by Newton's steps."""
    weights = np.zeros(x.shape[1])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-x @ weights))
        gram = (x * (chance * (1 - chance))[:, None]).T @ x + 1e-3 * np.eye(x.shape[1])
        weights += np.linalg.solve(gram, x.T @ (refused - chance) - 1e-3 * weights)
    return weights


def report(texts: list[Guesses], keep: float) -> list[dict[str, float]]:
    accepted, confidence = (
        np.concatenate([getattr(each, name) for each in texts]) for name in ("accepted", "confidence")
    )
    half = np.concatenate([np.full(each.accepted.size, i % 2 == 0) for i, each in enumerate(texts)])
    unsure = 1 - confidence
    alone = found_by(unsure[~half], accepted[~half], threshold(unsure[half], accepted[half], keep))
    lines = []
    for layer in range(texts[0].rank.shape[0]):
        rank, margin = (np.concatenate([getattr(each, name)[layer] for each in texts]) for name in ("rank", "margin"))
        limit = threshold(rank, accepted, keep)
        dropped = rank > limit
        x = features(rank, margin, confidence)
        score = x @ fit(x[half], 1 - accepted[half])
        lines.append(
            {
                "layer": layer + 1,
                "k": int(limit) + 1,
                "found": found_by(rank, accepted, limit),
                "accuracy": float((dropped == (accepted == 0)).mean()),
                "auc": auc(rank.astype(float), accepted),
                "score": found_by(score[~half], accepted[~half], threshold(score[half], accepted[half], keep)),
                "confidence": alone,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--keep", type=float, default=0.99)
    args = parser.parse_args()
    pair = load_pair(None, None, EngineOptions())
    assert isinstance(pair.draft, Transformer)
    assert pair.tokenizer is not None
    prompts = [pair.tokenizer.encode(text) for text in chat_prompts(SHIPPED["specbench"], args.count)]
    llm = LLM(pair.target, policy="off", max_running=16, max_model_len=2048)
    answers = llm.generate(prompts, SamplingParams(max_tokens=args.tokens, ignore_eos=True))
    target, draft = (Texts(model, 2048) for model in (pair.target, pair.draft))
    texts = [
        guess(target, draft, np.array(prompt), np.array(answer.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    accepted = float(np.concatenate([each.accepted for each in texts]).mean())
    print(f"{sum(each.accepted.size for each in texts):,} guesses, {accepted:.3f} accepted; keep {args.keep}")
    print("layer       K   found  accuracy    AUC   score  confidence")
    lines = report(texts, args.keep)
    for line in lines:
        print(
            f"{line['layer']:5d}  {line['k']:6d}  {line['found']:6.3f}  {line['accuracy']:8.3f}  {line['auc']:5.3f}"
            f"  {line['score']:6.3f}  {line['confidence']:10.3f}"
        )
    print(json.dumps({"accepted": accepted, "keep": args.keep, "layers": lines}))


if __name__ == "__main__":
    main()
