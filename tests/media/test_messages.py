"""Messages in OpenAI's form: what the template gets, what is fetched, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.load import load_media
from faser.media.messages import Reference, num_characters, split_messages
from faser.media.options import VideoOptions
from tests.server.seeing import data_url, image_part, picture, settings, text_part, video_part

SETTINGS = settings(300, 301)
NOWHERE = MediaAccess()


def user(*parts) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def load(*urls, access=NOWHERE, limits=None, options=None):
    references = [Reference("image", url, f"messages[0].content[{i}]") for i, url in enumerate(urls)]
    return load_media(references, SETTINGS, access, limits or MediaLimits(), options or VideoOptions())


def test_media_are_listed_in_the_order_of_the_messages_with_their_places():
    messages = [
        {"role": "system", "content": "Be brief."},
        user(image_part("data:1"), text_part("and"), video_part("data:2")),
        user(text_part("then"), image_part("data:3")),
    ]
    plain, references = split_messages(messages)
    assert references == [
        Reference("image", "data:1", "messages[1].content[0]"),
        Reference("video", "data:2", "messages[1].content[2]"),
        Reference("image", "data:3", "messages[2].content[1]"),
    ]
    assert plain[0] == messages[0]
    assert plain[1]["content"] == [{"type": "image"}, text_part("and"), {"type": "video"}]


def test_a_message_of_texts_becomes_one_text():
    plain, references = split_messages([user(text_part("the"), text_part("fox"))])
    assert (plain, references) == ([{"role": "user", "content": "the\nfox"}], [])


@pytest.mark.parametrize("messages", ["hello", {"role": "user"}, [7], [{"role": "user", "content": [7]}], [user()]])
def test_what_has_another_shape_is_left_to_the_template_s_check(messages):
    assert split_messages(messages) == (messages, [])


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url"}, r"content\[0\]: expected .*image_url"),
        ({"type": "image_url", "image_url": "data:"}, r"content\[0\]: expected .*url"),
        ({"type": "video_url", "video_url": {"url": 7}}, r"content\[0\]: expected .*video_url"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}, "detail='low': expected auto"),
        ({"type": "image_url", "image_url": {"url": "data:", "crop": 1}}, "unknown field 'crop'"),
        ({"type": "image_url", "image_url": {"url": "data:"}, "uuid": "x"}, "unknown field 'uuid'"),
    ],
)
def test_a_wrong_part_is_refused_by_its_place(part, says):
    with pytest.raises(InvalidRequest, match=says):
        split_messages([user(part)])


def test_the_characters_of_a_conversation_are_those_of_its_texts_roles_and_names():
    messages = [{"role": "system", "content": "four"}, user({"type": "image"}, text_part("six..."))]
    assert num_characters(messages) == 10 + len("system" + "user")
    assert num_characters([{"role": "user", "content": "four", "name": "Bob"}]) == 11


def test_media_are_loaded_in_order():
    small, large = load(data_url(picture(56, 56)), data_url(picture(112, 56)))
    assert (small.kind, small.num_tokens, small.num_patches) == ("image", 4, 16)
    assert (large.num_tokens, large.grids[0].width) == (8, 8)


def test_a_medium_that_cannot_be_loaded_is_refused_by_its_place():
    good = data_url(picture())
    with pytest.raises(InvalidRequest, match=r"^messages\[0\].content\[1\]: .*base64"):
        load(good, "data:image/png;base64,???")
    with pytest.raises(InvalidRequest, match=r"^messages\[0\].content\[0\]: .*network"):
        load("https://example.com/a.png")
    with pytest.raises(InvalidRequest, match="2 pictures and videos: expected at most 1"):
        load(good, good, limits=MediaLimits(max_media=1))


def test_files_are_read_from_allowed_folders_alone(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    assert load(str(tmp_path / "a.png"), access=MediaAccess(allowed_folders=(tmp_path,)))[0].num_tokens == 4
    with pytest.raises(InvalidRequest, match="allowed"):
        load(str(tmp_path / "a.png"))


def test_sizes_follow_the_options():
    url = data_url(picture(112, 112))
    assert load(url)[0].num_tokens == 16
    assert load(url, options=VideoOptions(max_pixels=56 * 56))[0].num_tokens == 4
