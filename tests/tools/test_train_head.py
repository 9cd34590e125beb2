"""A head learns from its target's text, goes on exactly where it stopped, and is written as it was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.errors import ConfigError, ModelError
from faser.models.config import Rope
from faser.models.heads import DraftHead
from faser.models.heads.config import read_head_config
from faser.models.heads.load import load_head, write_head
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.transformer import Transformer
from tests.tools.heads.toys import KINDS, TOY, make_head_module, make_toy, random_tokens, toy_text
from tools import distill
from tools import train_head as tool
from tools.distill import features_of, write_answers
from tools.heads.convert import serving_head
from tools.heads.loss import Judged
from tools.heads.modules import all_anchors
from tools.heads.simulate import matches, tabulate
from tools.train_head import Report, Settings, Training, fit, plan_head, rarest_token, spread_features, state_path

QUICK = {"batch": 16, "rate": 1e-2, "anchors": 12}


@pytest.fixture(scope="module")
def target() -> Transformer:
    return make_toy()


@pytest.fixture(scope="module")
def data(target) -> np.ndarray:
    return toy_text(target, 64, 24)


def quick(name: str, **changes: object) -> Settings:
    return replace(KINDS[name], **(QUICK | changes))


def trained(training: Training, num_steps: int, of: int) -> list[Judged]:
    """`num_steps` more of a training of `of` steps."""
    end, judged = training.num_steps + num_steps, []
    fit(training, lambda step: 1.0 if step >= end else step / of, lambda each, done: judged.append(each))
    return judged


def mean_overlap(judged: list[Judged]) -> torch.Tensor:
    """By position."""
    return torch.stack([each.overlap for each in judged]).mean(dim=0)


# ---- learning ----


@pytest.mark.parametrize("begin", ["target", "random"])
@pytest.mark.parametrize("name", KINDS)
def test_training_lowers_the_loss_and_raises_acceptance(target, data, name, begin):
    judged = trained(Training(target, data, quick(name, begin=begin)), 40, 40)
    early, late = judged[:5], judged[-5:]
    assert len(judged) == 40
    assert np.mean([j.loss for j in late]) < np.mean([j.loss for j in early])
    assert (mean_overlap(late) > mean_overlap(early) + 0.02).all(), "at every position"


@pytest.mark.parametrize("name", ["eagle3 short", "dspark"])
def test_a_trained_head_has_more_drafts_accepted_by_simulation(target, name):
    """On text that the training did not see, sampled with the noise that head and target share."""
    training = Training(target, toy_text(target, 256, 24, temperature=1.0), quick(name, batch=32, begin="random"))
    prompts = random_tokens(24, 3, seed=9).tolist()
    texts = write_answers(target, prompts, 20, 1.0)

    def tokens_per_verification() -> float:
        head = serving_head(training.module, target, torch.float32)
        matched = [matches(head, target, text, 3, 3, 1.0, seed) for seed, text in enumerate(texts)]
        return tabulate(matched, ["all"] * len(texts), [3])["all"]["tokens_3"]

    before = tokens_per_verification()
    trained(training, 60, 60)
    assert tokens_per_verification() > before + 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eagle3 short", "dspark"])
def test_training_in_bfloat16_on_a_gpu_raises_acceptance(data, name):
    """Losses do not tell: EAGLE-3's goes from divergence to total variation meanwhile."""
    model = Transformer.random(TOY, 0, torch.bfloat16, std=0.2, device="cuda")
    judged = trained(Training(model, data, quick(name)), 40, 40)
    assert (mean_overlap(judged[-5:]) > mean_overlap(judged[:5])).all(), "at every position"


def test_every_parameter_is_trained_and_the_target_stays(target, data):
    before = [weight.clone() for weight in target.weights()]
    for name in ("eagle3 short", "dspark short"):
        training = Training(target, data, quick(name))
        starts = [parameter.detach().clone() for parameter in training.module.parameters()]
        trained(training, 2, 10)
        assert not any(torch.equal(*pair) for pair in zip(starts, training.module.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(before, target.weights(), strict=True))


# ---- going on ----


@pytest.mark.parametrize("name", ["eagle3", "dspark short"])
def test_a_resumed_training_ends_as_one_without_a_break(target, data, tmp_path, name):
    whole = Training(target, data, quick(name))
    losses = [j.loss for j in trained(whole, 6, 6)]
    first = Training(target, data, quick(name))
    begun = [j.loss for j in trained(first, 3, 6)]
    first.seconds = 12.5
    first.save(tmp_path / "state")
    second = Training(target, data, quick(name))
    second.restore(tmp_path / "state")
    assert second.num_steps == 3
    assert second.seconds == 12.5
    begun += [j.loss for j in trained(second, 3, 6)]
    assert begun == losses
    assert all(map(torch.equal, whole.module.parameters(), second.module.parameters()))


def test_a_training_goes_on_only_with_the_settings_and_data_it_began(target, data, tmp_path):
    Training(target, data, quick("dspark")).save(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"was begun with block=4, rate=0\.01;"):
        Training(target, data, quick("dspark", block=3, rate=0.02)).restore(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"was begun with data=\(64, 24\)"):
        Training(target, data[:32], quick("dspark")).restore(tmp_path / "state")


def test_progress_is_printed_every_few_seconds_and_saved_every_minute(target, data, tmp_path, capsys):
    training = Training(target, data, quick("eagle3"))
    training.seconds = 60.0
    now = 0.0
    report = Report(training, tmp_path / "state", minutes=3, clock=lambda: now)
    capsys.readouterr()
    lines, saved = [], []
    for second in range(0, 130, 2):
        now = float(second)
        report(Judged(torch.tensor(0.5), torch.tensor([0.25, 1.0]), torch.tensor([0.5, 0.125])), done=0.5)
        lines += capsys.readouterr().out.splitlines()
        if (tmp_path / "state").exists():
            saved.append(second)
            (tmp_path / "state").unlink()
    assert len(lines) == 21
    assert "loss 0.5000  greedy .500 .125  temperature 1 .250 1.00  256 tokens/s  1.5 minutes left" in lines[0]
    assert saved == [60, 120]
    assert training.seconds == 180


# ---- what is planned ----


def test_the_mask_is_a_token_that_does_not_occur():
    assert rarest_token(np.array([3, 0, 5, 0, 1])) == 3


def test_features_are_spread_as_dflash_spreads_them():
    """Its numbers for 36 layers are 1, 9, 17, 25, 33; inputs of layers are one higher."""
    assert spread_features(36) == (2, 10, 18, 26, 34)
    assert spread_features(6) == (2, 3, 4)


def test_default_features_of_eagle3_come_from_the_target():
    config = plan_head(replace(TOY, num_layers=30), np.ones(61), Settings(kind="eagle3", short_vocabulary=0))
    assert config.feature_layers == (2, 15, 27)
    assert config.layers.num_layers == 1
    assert config.draft_vocab_size is None


def test_features_that_the_target_does_not_have_are_refused():
    with pytest.raises(ModelError, match="features of layers 1, 9"):
        plan_head(TOY, np.ones(61), Settings(kind="dflash", features=(1, 9)))


def test_a_rope_that_config_json_cannot_hold_is_refused_before_the_training():
    target = replace(TOY, rope=Rope(factors=(1.0, 1.5, 4.0, 8.0)))
    with pytest.raises(ConfigError, match="a factor for each frequency"):
        plan_head(target, np.ones(61), KINDS["eagle3"])


# ---- the written folder ----


def loaded(folder: Path, target: Transformer) -> DraftHead:
    config = read_head_config(folder)
    assert config is not None
    return load_head(folder, config, target, torch.float32)


@pytest.mark.parametrize("name", KINDS)
def test_the_head_that_is_read_back_is_the_head_that_was_trained(target, tmp_path, name):
    module, tokens = make_head_module(name, target), random_tokens(1, 14)
    write_head(serving_head(module, target, torch.float32), tmp_path / "head")
    head = loaded(tmp_path / "head", target)
    assert head.head_config.feature_layers == module.head_config.feature_layers
    features, _ = features_of(target, tokens, head.head_config.feature_layers)
    anchors = all_anchors(1, 14, module.num_drafts, target.device)
    with torch.inference_mode():
        states = module.states(tokens, features, anchors)[0]
        served = chain_states(head, tokens[0], features[0, :-1], anchors[0], module.num_drafts)
        for draft in range(module.num_drafts):
            before = tokens[0, anchors[0] + draft]
            expected, logits = module.logits(states[:, draft], before), chain_logits(head, served[:, draft], before)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    if module.vocabulary is not None:
        assert head.vocabulary.tolist() == module.vocabulary.tolist()


# ---- the commands ----


@pytest.fixture
def written(folder, tmp_path, monkeypatch) -> Path:
    """Text of the tiny checkpoint."""
    monkeypatch.setattr(distill, "SYSTEM", "")  # the tiny tokenizer spells it in more tokens than the model knows
    model, _ = distill.load_target(str(folder), torch.float32, "cpu")
    np.save(tmp_path / "data.npy", toy_text(model, 8, 24))
    return tmp_path / "data.npy"


Run = Callable[..., int]


@pytest.fixture
def run(folder, written, tmp_path) -> Run:
    def call(*more: object) -> int:
        sizes = ("--batch", 2, "--block", 3, "--features", "0,1", "--short-vocabulary", 100, "--device", "cpu")
        return tool.main([str(each) for each in (folder, written, tmp_path / "head", *sizes, *more)])

    return call


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_train_resume_and_evaluate_follow_one_another(folder, run, tmp_path, capsys, kind):
    options = ("--kind", kind, "--layers", 1, "--markov-rank", 4, "--dtype", "float32")
    assert run(*options, "--minutes", 0.002) == 0
    first = torch.load(state_path(tmp_path / "head"), weights_only=True)["num_steps"]
    assert run(*options, "--minutes", 0.02, "--resume") == 0
    assert torch.load(state_path(tmp_path / "head"), weights_only=True)["num_steps"] > first
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text], "category": text}) + "\n" for text in ("a fox", "dog")))
    capsys.readouterr()
    lengths = ("--lengths", "3", "1", "--output", "8", "--device", "cpu")
    assert tool.main(["evaluate", str(folder), str(tmp_path / "head"), "--prompts", str(prompts), *lengths]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == ["head at temperature 0", "head at temperature 1"]
    for table in report.values():
        assert list(table) == ["a fox", "dog", "all"]
        assert 1 <= table["all"]["tokens_1"] <= 2
        assert len(table["all"]["acceptance"]) == 3


def test_a_folder_in_use_and_a_missing_state_are_refused(run, tmp_path, capsys):
    assert run("--kind", "dflash", "--resume") == 2
    assert "head.training: no such file" in capsys.readouterr().err
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").touch()
    assert run("--kind", "dflash") == 2
    assert "expected a new or an empty folder" in capsys.readouterr().err


def test_texts_and_layers_that_do_not_fit_are_refused(run, capsys):
    assert run("--kind", "dflash", "--block", 23) == 2
    assert "sequences of 24 tokens" in capsys.readouterr().err
    assert run("--kind", "dflash", "--layers", 3) == 2
    assert "--layers 3: expected 1 to 2" in capsys.readouterr().err


def test_lengths_beyond_a_block_are_refused(target, tmp_path):
    write_head(serving_head(make_head_module("dflash", target), target, torch.float32), tmp_path / "head")
    with pytest.raises(ConfigError, match=r"--lengths 4: .* drafts 3 tokens"):
        tool.open_head(str(tmp_path / "head"), target, 4)


def test_a_folder_that_is_no_head_is_refused(folder, tmp_path, written, capsys):
    (tmp_path / "prompts.jsonl").write_text("")
    assert tool.main(["evaluate", str(folder), str(folder), "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert "is no draft head" in capsys.readouterr().err
