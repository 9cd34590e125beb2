"""What the distiller computes is what the engine computes, what it trains is what it stores, and it learns."""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faser.errors import ConfigError
from faser.models.draft import apply_patch, read_patch, write_patch
from faser.models.transformer import Transformer
from faser.runtime import sampling
from tests.models.reference import forward
from tests.tiny import CONFIGS, VOCABULARY, make_model
from tools import distill
from tools.distill import (
    Student,
    Writer,
    agreements,
    hidden_of,
    num_steps,
    sample_top_p,
    write_answers,
    write_sequences,
)

# Matrices of a multiple of 256 numbers.
WIDE = replace(CONFIGS["llama3"], hidden_size=64, head_dim=16, intermediate_size=128, num_layers=4)
PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 3, 20, 3, 20], [30, 31]]
SHORT = torch.arange(0, VOCABULARY, 2)


def make_target(**changes: Any) -> Transformer:
    return Transformer.random(replace(WIDE, **changes), seed=0, std=0.2)


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def greedy(logits: Tensor, position: int) -> Tensor:
    return logits.argmax(dim=-1)


# ---- the whole-sequence forward and the writer ----


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_whole_sequences_give_the_logits_of_the_models_own_layers(name):
    model, tokens = make_model(name), random_tokens(3, 24)
    logits = F.linear(hidden_of(model, tokens), model.head)
    for row in range(3):
        torch.testing.assert_close(logits[row], forward(model, tokens[row]), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_whole_sequences_apply_the_bias_behind_the_attention():
    model, tokens = make_target(qkv_bias=True, out_bias=True), random_tokens(1, 24)
    logits = F.linear(hidden_of(model, tokens), model.head)[0]
    torch.testing.assert_close(logits, forward(model, tokens[0]), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def continued(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy text, one whole forward a token."""
    text = list(prompt)
    while len(text) < num_tokens:
        hidden = hidden_of(model, torch.tensor([text]))
        text.append(int(F.linear(hidden[0, -1], model.head).argmax()))
    return text


@pytest.mark.parametrize("stretch", [4, 128])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_writer_continues_prompts_of_any_length_as_whole_forwards_do(name, stretch):
    model = make_model(name)
    with torch.inference_mode():
        writer = Writer(model, len(PROMPTS), 24, stretch)
        texts = write_sequences(writer, PROMPTS, 24, greedy)
    assert texts.tolist() == [continued(model, prompt, 24) for prompt in PROMPTS]


@torch.inference_mode()
def test_a_used_writer_writes_as_a_fresh_one_does():
    model = make_target()
    used, fresh = Writer(model, 4, 24, stretch=8), Writer(model, 4, 24, stretch=8)
    write_sequences(used, random_tokens(4, 20).tolist(), 24, greedy)
    assert torch.equal(write_sequences(used, PROMPTS, 24, greedy), write_sequences(fresh, PROMPTS, 24, greedy))


@torch.inference_mode()
def test_prompts_are_led_to_their_end_whatever_is_chosen():
    """Also those that are longer than the text."""
    prompts = [*PROMPTS, list(range(20))]
    texts = write_sequences(Writer(make_target(), 5, 12), prompts, 12, lambda logits, position: torch.full((5,), 60))
    for text, prompt in zip(texts.tolist(), prompts, strict=True):
        assert text == (prompt + [60] * 12)[:12]


def test_more_tokens_than_the_target_has_positions_are_refused():
    with pytest.raises(ConfigError, match="129 tokens a sequence: the target has 128 positions"):
        Writer(make_target(), 1, 129)


# ---- choosing tokens ----


def test_the_nucleus_is_never_left():
    """Against the textbook: the fewest best tokens that together reach top_p."""
    torch.manual_seed(0)
    temperature = torch.tensor([[0.3], [0.7], [1.0], [2.0]])
    logits = 3 * torch.randn(4, VOCABULARY)
    p, order = (logits / temperature).softmax(dim=-1).sort(descending=True)
    sizes = 1 + (p.cumsum(dim=-1) < 0.8).sum(dim=-1)
    choose = sample_top_p(temperature, top_p=0.8)
    chosen = torch.stack([choose(logits, 0) for _ in range(400)], dim=1)
    for row in range(4):
        nucleus = set(order[row, : sizes[row]].tolist())
        assert set(chosen[row].tolist()) <= nucleus
        assert len(set(chosen[row].tolist())) >= min(2, len(nucleus)), "and it is sampled, not maximised"


def test_only_the_best_tokens_are_ever_sampled():
    torch.manual_seed(0)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [4, 9, 33]] = 1.0
    choose = sample_top_p(torch.ones(1, 1), most=3)
    assert {int(choose(logits, 0)) for _ in range(100)} == {4, 9, 33}


def test_the_noise_on_a_device_is_the_samplers():
    seeds, positions = np.array([0, 1, 7, 2**40 + 3]), np.array([0, 5, 5, 8191])
    right = sampling.gumbel(seeds.astype(np.uint64), positions, 70_001)
    ours = distill.gumbel(torch.from_numpy(seeds), torch.from_numpy(positions), 70_001)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), right, rtol=1e-6, atol=1e-6)  # the last bit of a logarithm may differ
    assert (ours.numpy().argmax(axis=1) == right.argmax(axis=1)).all()


# ---- measuring ----


def slow_num_steps(agreed: list[bool], length: int) -> int:
    """Token by token: a step drafts up to `length`, ends at the first that is refused or after the bonus token."""
    steps, accepted, fresh = 0, 0, True
    for agrees in agreed:
        steps += fresh
        accepted = 0 if fresh else accepted
        fresh = not agrees or accepted == length
        accepted += 1
    return steps


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8))
def test_target_steps_are_those_of_a_token_by_token_simulation(agreed, length):
    assert num_steps(np.array(agreed), length) == slow_num_steps(agreed, length)


def test_target_steps_of_some_texts_are_known():
    assert num_steps(np.zeros(10, bool), 4) == 10
    assert num_steps(np.ones(10, bool), 4) == 2
    assert num_steps(np.ones(11, bool), 4) == 3
    assert num_steps(np.array([True, False, True, True, False]), 4) == 2


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def texts(request):
    """A target's answers, of 30 tokens or to the end token."""
    target = make_target()
    return target, write_answers(target, PROMPTS, 30, request.param), request.param


def test_answers_begin_with_their_prompt_and_stop_at_the_end_token(texts):
    target, answers, temperature = texts
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        output = answer.tolist()[len(prompt) :]
        assert answer.tolist()[: len(prompt)] == prompt
        assert not set(output[:-1]) & set(target.config.eos_token_ids)
        assert len(output) == 30 or output[-1] in target.config.eos_token_ids
    if temperature == 0:
        assert answers[2].tolist() == continued(target, PROMPTS[2], len(answers[2]))


def test_a_target_agrees_with_itself_at_every_token(texts):
    target, answers, temperature = texts
    for seed, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True)):
        agreed = agreements(target, answer, len(prompt), temperature, seed)
        assert len(agreed) == len(answer) - len(prompt)
        assert agreed.all()


def test_a_short_vocabulary_agrees_at_the_tokens_it_has(texts):
    """The target's own layers and noise: the best of all tokens is the best of some, if it is among them."""
    target, answers, temperature = texts
    student = Student(target, target.num_layers, SHORT)
    draft = apply_patch(target, student.patch(quantised=False))
    for seed, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True)):
        agreed = agreements(draft, answer, len(prompt), temperature, seed)
        assert agreed.tolist() == torch.isin(answer[len(prompt) :], SHORT).tolist()


def test_another_seed_is_another_text():
    target = make_target()
    answer = write_answers(target, PROMPTS[:1], 30, 1.0)[0]
    assert not agreements(target, answer, 1, 1.0, seed=5).all()


def test_a_table_counts_by_category_and_over_all():
    agreed = [np.ones(6, bool), np.zeros(4, bool), np.array([True, False])]
    table = distill.tabulate(agreed, ["chat", "maths", "chat"])
    assert list(table) == ["chat", "maths", "all"]
    assert table["chat"]["requests"] == 2
    assert table["chat"]["agreement"] == pytest.approx(7 / 8)
    assert table["maths"]["tokens_4"] == 1
    assert table["all"]["tokens_2"] == pytest.approx(12 / (2 + 4 + 1))


# ---- training ----


def options(**changes: Any) -> argparse.Namespace:
    given = {"batch": 16, "rate": 1e-2, "quant": "TQ2_0", "full_share": 0.5, "every": 1000, "seed": 0}
    return argparse.Namespace(**(given | changes))


@pytest.fixture(scope="module")
def data() -> np.ndarray:
    """The target's own text, as `write_data` stores it."""
    torch.manual_seed(0)
    with torch.inference_mode():
        choose = sample_top_p(torch.full((64, 1), 0.8))
        texts = write_sequences(Writer(make_target(), 64, 24), random_tokens(64, 2).tolist(), 24, choose)
    return texts.numpy().astype(np.uint16)


@pytest.mark.parametrize("vocabulary", [None, SHORT], ids=["whole", "short"])
@pytest.mark.parametrize("quant", ["TQ2_0", "Q4_0"])
def test_training_on_the_targets_own_text_lowers_the_loss(data, quant, vocabulary):
    student = Student(make_target(), 2, vocabulary)
    losses = distill.fit(student, data, options(quant=quant), lambda step: step / 60)
    assert len(losses) == 60
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:8])


def test_the_same_seed_trains_the_same_draft(data):
    runs = [distill.fit(Student(make_target(), 2, None), data, options(), lambda step: step / 4) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "out_bias": True}, {"qk_norm": True}], ids=str)
def test_the_draft_that_is_stored_is_the_draft_that_was_trained(tmp_path, data, changes):
    target = make_target(**changes)
    student = Student(target, 3, SHORT)
    distill.fit(student, data, options(full_share=0.0), lambda step: step / 6)
    write_patch(tmp_path / "draft.gguf", student.patch(quantised=True), target.config, "TQ2_0", "made by a test")
    draft = apply_patch(target, read_patch(tmp_path / "draft.gguf", target.config))
    tokens = random_tokens(2, 20)
    with torch.inference_mode():
        trained = F.linear(student.hidden(tokens, quantised=True), student.head)
        for row in range(2):
            torch.testing.assert_close(forward(draft, tokens[row]), trained[row], rtol=1e-4, atol=1e-4)
            assert not torch.allclose(forward(target, tokens[row])[:, SHORT], trained[row], atol=1e-2)


def test_training_changes_every_weight_of_the_student_and_none_of_the_target(data):
    target = make_target(qkv_bias=True, qk_norm=True)
    before = [weight.clone() for weight in target.weights()]
    student = Student(target, 2, None)
    starts = [parameter.detach().clone() for parameter in student.parameters()]
    distill.fit(student, data, options(full_share=0.0), lambda step: step / 3)
    assert all(torch.equal(*pair) for pair in zip(before, target.weights(), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(starts, student.parameters(), strict=True))


def test_an_untrained_student_of_all_layers_is_the_target():
    target = make_target()
    loss, agreement = distill.backward(Student(target, target.num_layers, None), random_tokens(2, 20), quantised=True)
    assert abs(loss) < 1e-5
    assert agreement == 1


def test_first_and_last_layer_are_kept_and_an_even_choice_between():
    target = make_target(num_layers=7)
    assert Student(target, 2, None).source_layers == (0, 6)
    assert Student(target, 3, None).source_layers == (0, 3, 6)
    assert Student(target, 4, None).source_layers == (0, 2, 4, 6)
    assert Student(target, 7, None).source_layers == tuple(range(7))


@pytest.mark.parametrize("num_layers", [0, 1, 5])
def test_a_number_of_layers_that_cannot_be_is_refused(num_layers):
    with pytest.raises(ConfigError, match=f"layers={num_layers}: expected 2 to 4"):
        Student(make_target(), num_layers, None)


def test_a_target_whose_matrices_do_not_fill_blocks_is_refused_before_the_training():
    with pytest.raises(ConfigError, match=r"down is \[64, 130\]: expected a multiple of 256 numbers"):
        Student(make_target(intermediate_size=130), 2, None)


def rows_of(target: Transformer, seed: int) -> Tensor:
    return torch.randn(10, target.config.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [3, 10, 64])
def test_the_loss_is_the_divergence_whatever_the_chunk(chunk):
    target = make_target()
    hidden, right = rows_of(target, 1).requires_grad_(True), rows_of(target, 2)
    guess, label = F.linear(hidden, target.head).log_softmax(-1), F.linear(right, target.head).log_softmax(-1)
    expected = F.kl_div(guess, label, log_target=True, reduction="batchmean")
    (gradient,) = torch.autograd.grad(expected, hidden)
    loss, agreement = distill.distil_loss(Student(target, 2, None), hidden, right, chunk)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert agreement == pytest.approx((guess.argmax(-1) == label.argmax(-1)).float().mean().item())
    torch.testing.assert_close(hidden.grad, gradient)


def test_a_short_vocabulary_of_all_tokens_is_the_whole_one():
    target = make_target()
    results = []
    for vocabulary in (None, torch.arange(VOCABULARY)):
        hidden = rows_of(target, 1).requires_grad_(True)
        loss = distill.distil_loss(Student(target, 2, vocabulary), hidden, rows_of(target, 2))
        results.append((*loss, hidden.grad))
    assert results[0][:2] == pytest.approx(results[1][:2], rel=1e-5)
    torch.testing.assert_close(results[0][2], results[1][2])


def test_a_short_vocabulary_counts_a_row_by_the_mass_it_keeps():
    """Per row: the mass, times the divergence between the two distributions cut to the vocabulary."""
    target = make_target()
    hidden, right = rows_of(target, 1).requires_grad_(True), rows_of(target, 2)
    p = F.linear(right, target.head).softmax(-1)[:, SHORT]
    mass = p.sum(dim=-1, keepdim=True)
    q = F.linear(hidden.detach(), target.head[SHORT]).softmax(-1)
    expected = (mass * (p / mass) * (p / mass / q).log()).sum(dim=-1).mean()
    loss, agreement = distill.distil_loss(Student(target, 2, SHORT), hidden, right)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    best = F.linear(right, target.head).argmax(-1)
    assert agreement == pytest.approx((SHORT[q.argmax(-1)] == best).float().mean().item())


def test_every_pass_over_the_data_sees_every_sequence_once():
    data = np.arange(12, dtype=np.uint16).reshape(12, 1)
    feed = distill.batches(data, 4, np.random.default_rng(0))
    passes = [[next(feed) for _ in range(3)] for _ in range(2)]
    for batches in passes:
        assert sorted(np.concatenate(batches).ravel().tolist()) == list(range(12))
        assert batches[0].dtype == np.int64
    assert not np.array_equal(passes[0], passes[1])


def test_fewer_sequences_than_a_batch_are_refused():
    with pytest.raises(ConfigError, match="a batch of 16: the data have 3 sequences"):
        next(distill.batches(np.zeros((3, 8), np.uint16), 16, np.random.default_rng(0)))


def test_the_learning_rate_warms_up_and_falls_to_a_fiftieth():
    assert distill.rate_share(0, 0.0) == pytest.approx(0.01)
    assert distill.rate_share(99, 0.0) == pytest.approx(1)
    assert distill.rate_share(10_000, 1.0) == pytest.approx(0.02)
    shares = [distill.rate_share(1000, done / 10) for done in range(11)]
    assert shares == sorted(shares, reverse=True)


# ---- the commands ----


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["distill", *map(str, arguments), "--device", "cpu"])
    monkeypatch.setattr(distill, "SYSTEM", "")  # the tiny tokenizer spells it in more tokens than the model knows
    distill.main()


def write(monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path, *more: object) -> np.ndarray:
    run(monkeypatch, "write", folder, path, "--tokens", 200, "--batch", 2, "--length", 60, *more)
    return np.load(path)


def test_the_same_seed_writes_the_same_data(folder, tmp_path, monkeypatch):
    first, again, other = (
        write(monkeypatch, folder, tmp_path / f"{number}.data", "--seed", seed) for number, seed in enumerate((3, 3, 4))
    )
    assert first.shape == (4, 60)
    assert first.dtype == np.uint16
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_questions_of_a_file_lead_a_fifth_of_the_user_turns(tmp_path):
    path = tmp_path / "questions.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"question": "Why?"}\n{"question": "Who\xe2\x80\xa8am I?"}\n'))
    questions = distill.read_questions(str(path))
    assert questions == ["Why?", "Who\u2028am I?"]
    random = np.random.default_rng(0)
    openings = [distill.pick_opening(random, questions) for _ in range(2000)]
    asked = [opening for opening in openings if opening.endswith("<|im_start|>assistant\n")]
    assert 0.15 < len(asked) / len(openings) < 0.25
    assert all(opening in distill.OPENINGS for opening in openings if opening not in asked)
    assert distill.read_questions(None) == []


@pytest.mark.parametrize("vocabulary", [0, 100])
def test_write_train_and_evaluate_follow_one_another(folder, tmp_path, monkeypatch, capsys, vocabulary):
    write(monkeypatch, folder, tmp_path / "data.npy")
    path = tmp_path / "draft.gguf"
    sizes = ("--layers", 2, "--batch", 2, "--every", 1, "--vocabulary", vocabulary)
    run(monkeypatch, "train", folder, tmp_path / "data.npy", path, "--minutes", 0.002, *sizes)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text], "category": text}) + "\n" for text in ("a", "dog")))
    capsys.readouterr()
    run(monkeypatch, "evaluate", folder, path, "--prompts", prompts, "--output", 8)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == ["draft.gguf at temperature 0", "draft.gguf at temperature 1"]
    for table in report.values():
        assert list(table) == ["a", "dog", "all"]
        assert table["all"]["requests"] == 2
        assert 0 <= table["all"]["agreement"] <= 1
        assert 1 <= table["all"]["tokens_2"] <= 3
