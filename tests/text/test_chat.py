"""Templates render as in transformers, and what they refuse is reported to the caller."""

from __future__ import annotations

import pickle

import pytest

from faser.errors import InvalidRequest, ModelError
from faser.models import gguf, source
from faser.text.chat import ChatTemplate
from tests.text.templates import CHATML, MISTRAL, SEEING, TEXTS

USER = {"role": "user", "content": "What is 2 < 3 & 'why'? Größe 東京"}
TURNS = [USER, {"role": "assistant", "content": " True.\n"}, {"role": "user", "content": "Sure?"}]
SYSTEM = {"role": "system", "content": "Be brief."}

PARTS = [
    {"type": "image"},
    {"type": "text", "text": "and "},
    {"type": "video"},
    {"type": "image"},
    {"type": "text", "text": "What is it?"},
]


@pytest.fixture(scope="module")
def reference():
    """What transformers makes of a template and messages."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")

    def render(text, messages, add_generation_prompt):
        return tokenizer.apply_chat_template(
            messages, chat_template=text, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    return render


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("messages", [[USER], TURNS, [SYSTEM, USER], [SYSTEM, *TURNS]], ids=len)
@pytest.mark.parametrize("open_end", [True, False])
def test_a_template_renders_as_transformers_renders_it(name, messages, open_end, reference):
    template = ChatTemplate(TEXTS[name], "<s>", "</s>")
    before = template.render(messages, open_end)
    right = reference(TEXTS[name], messages, open_end)
    assert right in (before, template.render(messages, open_end)), "midnight may fall between two renderings"


def test_the_default_model_s_own_template_renders_as_transformers_renders_it(reference):
    template = source.open_target(None).chat_template()
    assert template is not None
    assert template.source == gguf.chat_template(source.default_target())
    assert (template.bos_token, template.eos_token) == ("<|im_start|>", "<|im_end|>")
    for messages in ([USER], [SYSTEM, *TURNS]):
        assert template.render(messages) == reference(template.source, messages, True)


def test_a_template_reads_the_parts_of_a_message_in_their_order(reference):
    messages = [SYSTEM, {"role": "user", "content": PARTS}, *TURNS[1:]]
    text = ChatTemplate(SEEING, "<s>", "</s>").render(messages)
    assert text == reference(SEEING, messages, True)
    places = [text.index(part) for part in ("<|image_pad|>", "and ", "<|video_pad|>", "What is it?")]
    assert places == sorted(places)
    assert text.count("<|image_pad|>") == 2


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([*TURNS, USER], "Conversation roles must alternate"),
        ([{"role": "tool", "content": "x"}], "send them as it asks"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_own_words(messages, says):
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(MISTRAL, "<s>", "</s>").render(messages)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ("hello", "got str; put it in a list"),
        (USER, "got dict; put it in a list"),
        (["hello"], r"messages\[0\].*got str"),
        ([USER, {"content": "x"}], r"messages\[1\]: role=None: expected a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]: text=None: expected a text"),
        ([USER, {"role": "user", "content": [{"type": "audio"}]}], r"messages\[1\].content\[0\]: type='audio'.*video"),
        ([{"role": "user", "content": ["hello"]}], r"messages\[0\].content\[0\]: type=None"),
        ([{"role": "user", "content": 7}], r"messages\[0\]: content=7: expected a text"),
        ([{"role": "user"}], "content=None"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused_by_their_number(messages, says):
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(CHATML, "", "").render(messages)


@pytest.mark.parametrize("text", ["{{ messages[7].content.strip() }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_runs_into_an_error_refuses_the_request_and_nothing_else(text):
    with pytest.raises(InvalidRequest, match=r"cannot render.*--chat-template"):
        ChatTemplate(text, "", "").render([USER])


def test_a_template_cannot_change_the_messages():
    messages = [dict(USER)]
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.append(1) }}", "", "").render(messages)
    assert messages == [USER]


def test_a_template_that_does_not_compile_is_the_model_s_fault():
    template = ChatTemplate("{% if %}", "", "")
    for attempt in (template.check, lambda: template.render([USER])):
        with pytest.raises(ModelError, match=r"line 1.*--chat-template"):
            attempt()


def test_a_template_travels_between_processes():
    template = ChatTemplate(CHATML, "<s>", "</s>")
    right = template.render([USER])
    copy = pickle.loads(pickle.dumps(template))
    assert copy == template
    assert copy.render([USER]) == right
