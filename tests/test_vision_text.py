"""Greedy text about pictures and videos equals that of transformers: a folder, a chat, odd sizes, text between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser import LLM, MediaPrompt, SamplingParams
from faser.media.limits import MediaLimits
from faser.media.media import Media
from faser.media.options import VideoOptions
from faser.media.prepare import picture_media, video_media
from faser.vision import VisionSettings
from tests.media.clips import clip, picture
from tests.server.seeing import EYES_OF, PLACEHOLDERS, write_seeing_checkpoint

IMAGE, VIDEO = PLACEHOLDERS
MEAN, STD = (
    np.array(each, dtype=np.float32).reshape(3, 1, 1, 1)
    for each in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=EYES_OF)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), num_pages=128) as llm:
        yield llm


def image(settings: VisionSettings, width: int, height: int) -> Media:
    return picture_media(picture(width=width, height=height), settings, MediaLimits())


def video(settings: VisionSettings, num_frames: int) -> Media:
    data = clip(
        num_frames, size=(64, 80), draw=lambda i, h, w: np.random.default_rng(i).integers(0, 256, (h, w, 3), "u1")
    )
    return video_media(data, settings, MediaLimits(), VideoOptions(num_frames=num_frames))


def pixel_values(media: list[Media]) -> torch.Tensor | None:
    """Rows as transformers' processors give them."""
    rows = []
    for grid in (grid for medium in media for grid in medium.grids):
        normalised = (grid.patches.astype(np.float32) / 255 - MEAN) / STD
        rows.append(np.broadcast_to(normalised, (len(normalised), 3, 2, 14, 14)).reshape(len(normalised), -1))
    return torch.from_numpy(np.concatenate(rows)) if rows else None


def sizes(media: list[Media]) -> torch.Tensor | None:
    """[media, 3] grids, height, width."""
    found = [[len(each.grids), each.grids[0].height, each.grids[0].width] for each in media]
    return torch.tensor(found) if found else None


@torch.inference_mode()
def their_tokens(theirs, settings: VisionSettings, token_ids: list[int], media: list[Media]) -> list[int]:
    images = [each for each in media if each.kind == "image"]
    videos = [each for each in media if each.kind == "video"]
    ids = torch.tensor([token_ids])
    kinds = (ids == settings.image_token_id) * 1 + (ids == settings.video_token_id) * 2
    given = {
        "pixel_values": pixel_values(images), "image_grid_thw": sizes(images),
        "pixel_values_videos": pixel_values(videos), "video_grid_thw": sizes(videos), "mm_token_type_ids": kinds.int(),
    }  # fmt: skip
    if videos and settings.positions_per_second is not None:
        given["second_per_grid_ts"] = torch.tensor([each.seconds_per_grid for each in videos])
    given = {name: value for name, value in given.items() if value is not None}
    out = theirs.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, **given,
    )  # fmt: skip
    return out[0, len(token_ids) :].tolist()


CASES = {
    "a picture": ("Look: " + IMAGE + " what is it?", lambda s: [image(s, 61, 47)]),
    "two pictures of odd sizes": (IMAGE + " and " + IMAGE + "?", lambda s: [image(s, 100, 33), image(s, 29, 90)]),
    "a video": ("In " + VIDEO + " who moves", lambda s: [video(s, 6)]),
    "a picture, text, a video": (IMAGE + " then " + VIDEO + " end", lambda s: [image(s, 57, 57), video(s, 4)]),
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(llm, theirs, case):
    text, make = CASES[case]
    media = make(llm.vision_settings)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate(MediaPrompt(text, media), params)
    right = their_tokens(theirs, llm.vision_settings, output.prompt_token_ids, media)
    assert output.token_ids == right
    assert sum(each.num_tokens for each in media) < len(output.prompt_token_ids)


def test_pictures_in_one_batch_change_no_text(llm):
    prompts = [MediaPrompt(text, make(llm.vision_settings)) for text, make in CASES.values()]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    together = [output.token_ids for output in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
    assert len({tuple(each) for each in together}) > 1
