"""The eyes compute what transformers computes, learn, go on exactly where they stopped, and are written as trained."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from faser.errors import ConfigError, MissingPackage
from faser.models import weights
from faser.models.source import open_target, recommended_sampling
from faser.models.transformer import Transformer
from faser.models.vision import packed
from faser.text.tokenizer import Tokenizer
from faser.vision import Grid
from tests.tiny import CONFIGS
from tools import train_watch as tool
from tools.distill import hidden_of
from tools.train_watch import Judged, Report, Settings, Training, fit, state_path
from tools.watch import codec, evaluate, export, pack
from tools.watch.dense import WORDS, labels_by_target, probe_accuracy, word_loss
from tools.watch.questions import QUESTIONS, Question
from tools.watch.reader import BEGINNING, Branches, Prompts, Reader, branch_text
from tools.watch.scenes import SceneSettings, plan_scene, render
from tools.watch.tally import Tally
from tools.watch.targets import TARGETS
from tools.watch.vit import Eyes, EyesConfig, begin, patches_of
from tools.watch.windows import EVALUATION, KIND_NAMES, evaluation_keys, load, training_keys

TINY = EyesConfig(depth=2, embed_dim=32, num_heads=2, hidden_size=32)
QUICK = Settings(
    side=56, frames=(4,), things=3, depth=2, width=32, heads=2, batch=4, questions=2, rate=5e-3, average=0.9
)
WORDS_OF_ANSWERS = sorted(
    {answer for _, answers, _ in QUESTIONS.values() for answer in answers} | {w for ws in WORDS.values() for w in ws}
)


class ToyTokenizer:
    """A token a word: answers and words of cells have ids of their own, other words share the rest."""

    def encode(self, text: str) -> Sequence[int]:
        words = text.replace("<|im_end|>", " <end> ").split()
        known = {word: index for index, word in enumerate(["<end>", *WORDS_OF_ANSWERS])}
        return [known.get(word, len(known) + sum(word.encode()) % 8) for word in words]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(replace(CONFIGS["llama3"], max_positions=256, vocab_size=61), 0, std=0.1)


def make_training(model: Transformer, **changes: object) -> Training:
    return Training(model, ToyTokenizer(), replace(QUICK, **changes))


def trained(training: Training, num_steps: int, of: int) -> list[Judged]:
    """`num_steps` more of a training of `of` steps."""
    end, judged = training.num_steps + num_steps, []
    fit(training, lambda step: 1.0 if step >= end else step / of, lambda each, done: judged.append(each))
    return judged


def shaken_eyes(config: EyesConfig = TINY) -> Eyes:
    eyes = begin(Eyes(config), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in eyes.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return eyes


# ---- the eyes ----


def test_the_eyes_compute_what_transformers_computes():
    eyes = shaken_eyes()
    fields = {name: value for name, value in TINY.to_dict().items() if name != "model_type"}
    oracle = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**fields)).eval()
    oracle.load_state_dict(eyes.state_dict())
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 4, 56, 84, 3), dtype=np.uint8))
    patches = patches_of(frames, TINY)  # two windows of two grids of 4 × 6 patches
    with torch.no_grad():
        theirs = oracle(patches.flatten(0, 1), grid_thw=torch.tensor([[2, 4, 6], [2, 4, 6]])).pooler_output
        ours = eyes(patches, 4, 6)
    assert (ours.flatten(0, 1) - theirs).abs().max() < 1e-5


def test_patches_are_in_the_order_of_groups():
    frames = torch.zeros(1, 2, 56, 56, 3, dtype=torch.uint8)
    frames[0, 1, 14:28, 28:42, 2] = 255  # second frame, patch row 1, patch column 2, blue
    patches = patches_of(frames, TINY)
    changed = (patches - patches_of(torch.zeros_like(frames), TINY)).abs().view(16, 3, 2, 14, 14) > 0
    # Group (0, 1) has patches 4 to 7; row 1 and column 0 of it is the third.
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [6]
    assert changed[6, 2, 1].all()
    assert changed[6].sum() == 14 * 14


def test_a_pair_of_frames_encoded_alone_gives_the_same_tokens():
    eyes = shaken_eyes()
    frames = torch.from_numpy(render(plan_scene(SceneSettings(side=56, num_frames=4), 0)))[None]
    with torch.no_grad():
        both, last = (eyes(patches_of(each, TINY), 4, 4) for each in (frames, frames[:, 2:]))
    # products of other sizes may sum in another order: 1.7e-6 on a Xeon, less on an EPYC
    torch.testing.assert_close(both[1], last[0], rtol=0, atol=1e-5)


# ---- prompts and answers ----


def test_a_branch_reads_as_a_prompt_with_one_question(model):
    """Two questions behind a window give each answer the logits that it has alone."""
    prompts = Prompts(ToyTokenizer())
    reader = Reader(model, prompts)
    questions = [Question("count", "How many things are there?", "3"), Question("zone", "Is anything there?", "no")]
    seen = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    ids, at = prompts.branches(questions)
    both = reader.answer_logits(seen, Branches(ids[None], at[None]))
    for index in range(2):
        alone = reader.answer_logits(seen, Branches(ids[None, index : index + 1], at[None, index : index + 1]))
        torch.testing.assert_close(both[:, index : index + 1], alone)


def test_a_branch_without_eyes_is_the_plain_language_model(model):
    tokenizer, question = ToyTokenizer(), Question("count", "How many things are there?", "3")
    prompts = Prompts(tokenizer)
    reader = Reader(model, prompts)
    ids, at = prompts.branches([question])
    ours = reader.answer_logits(torch.zeros(1, 0, 32), Branches(ids[None], at[None]))[0, 0]
    tokens = [*tokenizer.encode(BEGINNING), *tokenizer.encode(branch_text(question.text)), prompts.answer_ids["3"]]
    hidden = hidden_of(model, torch.tensor([tokens]))
    torch.testing.assert_close(ours, hidden[0, -2:] @ model.head.T)
    assert reader.right_ids(Branches(ids[None], at[None])).tolist() == [[[prompts.answer_ids["3"], prompts.end]]]


def test_windows_are_functions_of_their_keys_and_evaluation_has_keys_of_its_own(model):
    windows = make_training(model).windows()
    first, again = windows[5, 4], windows[5, 4]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["frames"].shape == (4, 56, 56, 3)
    assert windows[5, 8]["frames"].shape == (8, 56, 56, 3)
    steps = list(itertools.islice(training_keys(2, (4, 8), 255, 3), 3))
    assert [[frames for _, frames in keys] for keys in steps] == [[8, 8], [4, 4], [8, 8]]
    assert max(seed for keys in steps for seed, _ in keys) < EVALUATION
    assert [len(keys) for keys in evaluation_keys(5, 2, 4)] == [2, 2, 1]


def test_processes_draw_the_same_windows(model):
    windows = make_training(model).windows()
    keys = evaluation_keys(4, 2, 4)
    here, there = (list(load(windows, keys, workers, False)) for workers in (0, 1))
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# ---- learning ----


def test_the_dense_stage_lowers_its_loss(model):
    losses = [judged.loss.item() for judged in trained(make_training(model, dense=1.0, rounded=0.0), 60, 60)]
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:5])


def test_answers_lower_their_loss_through_the_frozen_model(model):
    before = [weight.clone() for weight in model.weights()]
    training = make_training(model, dense=0.0, rounded=0.0, kinds=("count",), rate=3e-2)
    judged = trained(training, 40, 40)
    losses = [each.loss.item() for each in judged]
    assert np.mean(losses[-8:]) < 0.9 * np.mean(losses[:4])
    assert all(each.is_right is not None and each.is_right.shape == (4, 2) for each in judged)
    assert all(torch.equal(old, new) for old, new in zip(before, model.weights(), strict=True))


def test_stages_follow_the_share_of_the_time(model):
    training = make_training(model, dense=0.4, rounded=0.25)
    assert [training.stage(done) for done in (0, 0.39, 0.4, 0.74, 0.75, 1)] == [
        "dense", "dense", "answers", "answers", "rounded", "rounded",
    ]  # fmt: skip


def test_a_resumed_training_is_the_same_to_the_bit(model, tmp_path):
    """Over all three stages, stopped within each."""
    whole, path = make_training(model), tmp_path / "state"
    trained(whole, 9, 9)
    part = make_training(model)
    for num_steps in (2, 3, 4):
        trained(part, num_steps, 9)
        part.save(path)
        part = make_training(model)
        part.restore(path)
    assert part.num_steps == whole.num_steps == 9
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, part.module.state_dict()[name]), name
    assert all(torch.equal(tensor, part.average[name]) for name, tensor in whole.average.items())


def test_other_settings_are_refused_by_name_on_resume(model, tmp_path):
    make_training(model).save(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"batch=4"):
        make_training(model, batch=8).restore(tmp_path / "state")


def test_a_pause_ends_the_loop_before_the_training_is_done(model):
    training = make_training(model)
    assert not fit(training, lambda step: 0.0, lambda judged, done: None, lambda: training.num_steps == 2)
    assert training.num_steps == 2


def test_the_report_shows_accuracy_beside_chance_and_saves(model, tmp_path, capsys):
    training, clock = make_training(model, dense=0.5, rounded=0.0), itertools.count(0, 6)
    report = Report(training, tmp_path / "state", 1.0, lambda: float(next(clock)))
    fit(training, lambda step: step / 4, report)
    lines = capsys.readouterr().out.splitlines()
    assert "dense" in lines[0]
    assert "probes kind" in lines[0]
    assert "answers" in lines[-1]
    assert any(f"{kind} " in lines[-1] for kind in KIND_NAMES)
    report.save()
    assert (tmp_path / "state").is_file()


def test_a_tally_counts_by_kind_beside_the_most_common_answer():
    tally = Tally()
    tally.add(torch.tensor([[0, 0, 1], [0, 0, 1]]), torch.tensor([[7, 7, 5], [7, 8, 5]]), torch.eye(3)[:2].bool())
    assert tally.table()[KIND_NAMES[0]] == {"questions": 4, "accuracy": 0.5, "chance": 0.75}
    assert tally.table()[KIND_NAMES[1]] == {"questions": 2, "accuracy": 0.0, "chance": 1.0}


def test_words_of_a_cell_have_no_loss_and_balanced_probes_count_classes_alike():
    labels = {name: torch.tensor([[0, 1, 1, 1]]) for name in TARGETS}
    table = {name: torch.randn(10, 6, generator=torch.Generator().manual_seed(3)) for name in WORDS}
    tokens = torch.stack([table[name][labels[name]] for name in WORDS]).sum(0)
    assert word_loss(tokens, labels, table) == 0
    assert word_loss(torch.zeros_like(tokens), labels, table) == pytest.approx(1)
    always_first = {"kind": torch.tensor([1.0, 0.0]).expand(1, 4, 2)}
    assert probe_accuracy(always_first, labels) == {"kind": 0.5}


def test_labels_of_windows_line_up_with_tokens_of_grids():
    labels = torch.arange(2 * len(TARGETS) * 3 * 4).view(2, len(TARGETS), 3, 2, 2)
    flat = labels_by_target(labels)
    assert torch.equal(flat["motion"][4], labels[1, 1, 1].flatten())


# ---- codec ----


def test_a_coarser_step_loses_more_and_zero_loses_nothing():
    frames = torch.from_numpy(render(plan_scene(SceneSettings(side=56, num_frames=4), 2)))[None].repeat(3, 1, 1, 1, 1)
    coded = codec.degrade(frames, torch.tensor([0.0, 4.0, 40.0]))
    lost = (coded.int() - frames.int()).abs().float().mean((1, 2, 3, 4)).tolist()
    assert lost[0] == 0 < lost[1] < lost[2] < 30


def test_blocks_without_change_are_copied_from_the_frame_before():
    picture = torch.randint(0, 256, (1, 1, 16, 16, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    frames = picture.repeat(1, 3, 1, 1, 1)
    frames[:, 2, 8:, 8:] = 255 - frames[:, 2, 8:, 8:]
    coded = codec.degrade(frames, torch.tensor([30.0]))
    assert torch.equal(coded[:, 1], coded[:, 0])
    differs = (coded[0, 2] != coded[0, 1]).any(-1)
    assert differs[8:, 8:].any()
    assert not differs[:8].any()
    assert not differs[:, :8].any()


def test_x264_keeps_size_and_loses_more_at_lower_quality():
    pytest.importorskip("av")
    frames = render(plan_scene(SceneSettings(side=56, num_frames=4), 2))
    fine, coarse = (codec.x264(frames, crf) for crf in (10, 45))
    assert fine.shape == coarse.shape == frames.shape
    fine_lost, coarse_lost = (np.abs(each.astype(int) - frames).mean() for each in (fine, coarse))
    assert fine_lost < coarse_lost


def test_a_missing_pyav_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackage, match="pip install"):
        codec.x264(np.zeros((2, 56, 56, 3), np.uint8), 23)


# ---- packing and folders ----


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_those_that_are_unpacked(bits):
    tensor = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    name = "merger.mlp.2.weight" if bits == 8 else "blocks.0.mlp.fc1.weight"
    assert pack.bits_of(name, tensor) == bits
    unpacked = packed.unpack(pack.pack({name: tensor}), {name: tensor.shape})[name]
    assert torch.equal(unpacked, pack.rounded(tensor, bits))
    assert (unpacked - tensor).abs().max() <= tensor.abs().max() / 2 ** (bits - 1)
    assert torch.equal(pack.rounded(torch.zeros(1, 32), bits), torch.zeros(1, 32))


def test_rounding_lets_gradients_pass():
    tensor = torch.randn(2, 32, requires_grad=True)
    pack.rounded(tensor, 4).sum().backward()
    assert torch.equal(tensor.grad, torch.ones_like(tensor))


def test_the_default_eyes_take_less_than_12_megabytes():
    eyes = Eyes(EyesConfig())
    num_bytes = sum(tensor.nbytes for tensor in pack.pack(eyes.state_dict()).values())
    assert sum(parameter.numel() for parameter in eyes.parameters()) == 17_904_960
    assert 10e6 < num_bytes < 12e6


def test_a_packed_folder_gives_back_the_rounded_eyes(model, tmp_path):
    eyes = shaken_eyes()
    size = export.write_eyes(eyes, model, tmp_path / "eyes")
    assert size == sum(file.stat().st_size for file in (tmp_path / "eyes").iterdir())
    again = export.read_eyes(tmp_path / "eyes")
    assert again.config == eyes.config
    for name, tensor in eyes.state_dict().items():
        assert torch.equal(again.state_dict()[name], pack.rounded(tensor, pack.bits_of(name, tensor))), name


def toy_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[])))


def test_a_full_folder_has_public_names_and_both_models(tmp_path):
    config = replace(CONFIGS["llama2"], tie_embeddings=True)
    model = Transformer.random(config, 0)
    export.write_eyes(shaken_eyes(), model, tmp_path / "eyes")
    full = tmp_path / "full"
    export.write_full(tmp_path / "eyes", model, toy_tokenizer(), full)
    tensors = load_file(full / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], model.embedding)
    assert tensors["visual.patch_embed.proj.weight"].shape == (32, 3, 2, 14, 14)
    public = ("blocks.1.norm1.weight", "blocks.1.attn.qkv.bias", "blocks.0.mlp.fc2.weight", "merger.ln_q.weight")
    assert all(f"visual.{name}" in tensors for name in (*public, "merger.mlp.0.weight", "merger.mlp.2.bias"))
    description = json.loads((full / "config.json").read_text())
    assert description["architectures"] == [export.ARCHITECTURE]
    assert description["text_config"]["architectures"] == ["LlamaForCausalLM"]
    assert EyesConfig.from_dict(description["vision_config"]) == TINY
    assert set(weights.destinations_of(model)) < set(tensors)
    with pytest.raises(ConfigError, match="empty folder"):
        export.write_full(tmp_path / "eyes", model, toy_tokenizer(), full)


def test_both_folders_recommend_greedy_answers(tmp_path):
    model, eyes, full = Transformer.random(CONFIGS["llama2"], 0), tmp_path / "eyes", tmp_path / "full"
    export.write_eyes(shaken_eyes(), model, eyes)
    export.write_full(eyes, model, toy_tokenizer(), full)
    for folder in (eyes, full):
        recommended = recommended_sampling(str(folder), "auto")
        assert recommended.values == {"temperature": 0.0}
        assert not recommended.ignored
    assert open_target(str(full)).config.eos_token_ids == model.config.eos_token_ids


def test_faser_loads_a_full_folder_and_sees_what_the_trained_eyes_see(tmp_path):
    model = Transformer.random(replace(CONFIGS["llama2"], tie_embeddings=True), 0)
    export.write_eyes(shaken_eyes(), model, tmp_path / "eyes")
    export.write_full(tmp_path / "eyes", model, toy_tokenizer(), tmp_path / "full")
    source = open_target(str(tmp_path / "full"))
    served = source.load(torch.float32, 64, lambda done, total: None, "cpu")
    settings = source.vision_settings()
    assert settings is not None
    assert (settings.image_token_id, settings.video_token_id) == (export.IMAGE_TOKEN_ID, export.VIDEO_TOKEN_ID)
    assert not settings.has_spatial_positions
    assert torch.equal(served.embedding, model.embedding)

    frames = torch.from_numpy(render(plan_scene(SceneSettings(side=56, num_frames=4), 0)))
    pixels = frames.view(2, 2, 2, 2, 14, 2, 2, 14, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # by grid, group and patch
    patches = pixels.reshape(2, 16, 3, 2, 14, 14).contiguous().numpy()
    assert served.vision is not None
    with torch.inference_mode():
        theirs = served.vision.encode([Grid(each, 4, 4, 2) for each in patches])
        ours = evaluate.see(export.read_eyes(tmp_path / "eyes"), frames[None])[0]
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_the_chat_template_writes_the_prompt_that_was_trained():
    jinja2 = pytest.importorskip("jinja2")
    render_chat = jinja2.Environment().from_string(export.CHAT_TEMPLATE).render
    parts = [{"type": "video_url"}, {"type": "text", "text": "What is moving?"}]
    shown = render_chat(messages=[{"role": "user", "content": parts}], add_generation_prompt=True)
    assert shown == BEGINNING + export.VIDEO_TOKEN + branch_text("What is moving?")
    plain = render_chat(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert plain == BEGINNING + "Hello<|im_end|>\n<|im_start|>assistant\n"


# ---- evaluation ----


def test_an_evaluation_counts_every_question_beside_chance_and_the_blind(model):
    training = make_training(model)
    windows = training.windows()
    keys = evaluation_keys(6, 3, 4)
    table = evaluate.evaluate_set(training.reader, training.trained_eyes(), load(windows, keys, 0, False), False)
    assert sum(row["questions"] for row in table.values()) == 12
    for row in table.values():
        assert 0 < row["chance"] <= 1
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["without eyes"] <= 1


def test_the_blind_choose_among_the_answers_of_the_kind(model):
    """On yes-or-no questions a chooser between two is right about half of the time, also with random weights."""
    training = make_training(model, kinds=("zone",), questions=8)
    batch = next(load(training.windows(), evaluation_keys(24, 24, 4), 0, False))
    share = evaluate.guess(training.reader, batch).float().mean()
    assert 0.2 < share < 0.8


def test_coded_scenes_come_back_as_x264_left_them(tmp_path, monkeypatch):
    pytest.importorskip("av")
    coded = {}  # x264 may give other bytes for the same frames

    def code_once(frames, quality, x264=codec.x264):
        key = frames.tobytes(), quality
        return coded[key] if key in coded else coded.setdefault(key, x264(frames, quality))

    monkeypatch.setattr(evaluate, "x264", code_once)
    scene = SceneSettings(side=56, num_frames=4, held_out=True)
    evaluate.write_coded(tmp_path / "coded", scene, 2)
    again, frames = evaluate.read_coded(tmp_path / "coded")
    assert again == scene
    for index in range(2):
        drawn = render(plan_scene(scene, EVALUATION + index))
        assert np.array_equal(frames[index], code_once(drawn, evaluate.QUALITIES[index]))
    assert len(coded) == 2
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="expected a file that"):
        evaluate.read_coded(tmp_path / "other")


# ---- the command ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"side": 60}, "multiple of 56"),
        ({"frames": (5,)}, "even numbers"),
        ({"width": 36}, "multiple of four times"),
        ({"frames": (256,)}, "positions"),
        ({"dense": 0.9}, "sum up to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_first_step(model, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        tool.refuse(tmp_path / "new", model, replace(QUICK, **changes), resume=False)


def test_a_full_folder_and_a_missing_state_are_refused(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="empty folder"):
        tool.refuse(tmp_path, model, QUICK, resume=False)
    with pytest.raises(ConfigError, match="without --resume"):
        tool.refuse(tmp_path / "none", model, QUICK, resume=True)


def test_the_command_trains_pauses_resumes_and_writes(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "load_target", lambda path, dtype, device: (model, ToyTokenizer()))
    flags = shlex.split("--side 56 --frames 4 --things 2 --depth 1 --width 16 --heads 2 --batch 2 --questions 1")
    folder = tmp_path / "eyes"
    assert tool.main(["model", str(folder), *flags, "--minutes", "1", "--pause", "0"]) == 0
    assert "--resume goes on" in capsys.readouterr().out
    assert state_path(Path(folder)).is_file()
    assert tool.main(["model", str(folder), *flags, "--minutes", "0.005", "--resume"]) == 0
    assert export.read_eyes(folder).config.depth == 1
    assert tool.main(["model", str(folder), *flags, "--side", "57"]) == 2
    assert "error:" in capsys.readouterr().err


def test_the_evaluation_command_ends_in_one_json_line(model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("av")
    monkeypatch.setattr(evaluate, "load_target", lambda path, dtype, device: (model, ToyTokenizer()))
    export.write_eyes(shaken_eyes(), model, tmp_path / "eyes")
    coded, sizes = str(tmp_path / "coded"), shlex.split("--side 56 --frames 4 --windows 3")
    assert evaluate.main(["code", coded, *sizes]) == 0
    assert evaluate.main(["model", str(tmp_path / "eyes"), "--questions", "2", "--coded", coded, *sizes]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == ["new scenes", "held-out sprites, backgrounds and words", "held out, through x264"]
    assert all(sum(row["questions"] for row in table.values()) == 6 for table in report.values())
    assert evaluate.main(["model", str(tmp_path / "none")]) == 2


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(SystemExit):
        tool.train_parser().parse_args(["model", "folder", "--kinds", "colour"])
