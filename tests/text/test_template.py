"""Hostile templates: what loops for ever or asks for memory without end is refused, and what is usual is not."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from faser.errors import InvalidRequest, ModelError
from faser.text import template
from faser.text.chat import MAX_TEMPLATE, ChatTemplate

USER = [{"role": "user", "content": "hello"}]
TEN_TIMES = "{% for i in range(100000) %}" * 4 + "{{ body }}" + "{% endfor %}" * 4


def growing(start: str, step: str) -> str:
    """A template that makes a value from itself a hundred times."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set n.x = {step} %}}{{% endfor %}}"


LOOPS = {
    "loops": TEN_TIMES.replace("{{ body }}", "x"),
    "loops without a text": TEN_TIMES.replace("{{ body }}", "{% set x = i %}"),
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "work on a large text": "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
}
LARGE = {
    "a text times a number": "{{ 'a' * 10000000000 }}",
    "a number times a text": "{{ 10000000000 * messages[0].content }}",
    "a list times a number": "{{ ([0] * 10000000000) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers of a power": growing("9", "n.x * n.x"),
    "a doubled text": growing("'a'", "n.x + n.x"),
    "a joined text": growing("'a'", "n.x ~ n.x"),
    "a joined list": growing("'a'", "[n.x, n.x] | join('b')"),
    "a doubled list": growing("[0]", "n.x + n.x"),
    "a block": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "replaced letters": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "replaced by a filter": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "replaced nothing": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "a wide format": "{{ '%2000000000d' % 1 }}",
    "a wide format of a filter": "{{ '%2000000000d' | format(1) }}",
    "a wide format of a method": "{{ '{:2000000000}'.format(1) }}",
    "a width in an argument": "{{ '{:{}}'.format(1, 2000000000) }}",
    "a wide filter": "{{ 'x' | center(2000000000) }}",
    "a wide method": "{{ 'x'.ljust(2000000000) }}",
    "an indent": "{{ messages | tojson(indent=2000000000) }}",
    "a batch": "{{ [1] | batch(2000000000, 'x') | list | length }}",
    "a text of a long list": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_works_for_ever_is_refused(name, monkeypatch):
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match=r"chat template worked for more than 0.05 s.*--chat-template FILE"):
        ChatTemplate(LOOPS[name], "", "").render(USER)


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_asks_for_memory_without_end_is_refused_before_it_gets_it(name, monkeypatch):
    monkeypatch.setattr(template, "MAX_SIZE", 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"chat template (makes|calls|writes|computes).*--chat-template FILE"):
            ChatTemplate(LARGE[name], "", "").render(USER)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_a_loop_that_calls_itself_without_end_is_refused():
    text = "{% for i in [9] recursive %}{{ loop([i]) }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="RecursionError"):
        ChatTemplate(text, "", "").render(USER)


def refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(text, "", "").render(USER)


def test_the_time_is_of_one_text_and_one_thread(monkeypatch):
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.5)
    hostile = threading.Thread(target=refused, args=(LOOPS["loops"],))
    hostile.start()
    harmless = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "", "")
    assert [harmless.render(USER) for _ in range(100)] == ["hello"] * 100
    hostile.join()
    assert harmless.render(USER) == "hello"


def test_a_template_of_absurd_size_is_refused_before_it_is_compiled():
    with pytest.raises(ModelError, match=rf"{MAX_TEMPLATE + 1} characters.*--chat-template"):
        ChatTemplate("x" * (MAX_TEMPLATE + 1), "", "").check()


@pytest.mark.parametrize("text", ["{{ " + "(" * 5000, "{{ " + "[" * 500 + "]" * 500 + " }}", "{% if 1 %}" * 3000])
def test_a_template_that_is_nested_too_deeply_does_not_compile(text):
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(text, "", "").check()


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{% macro m(obj, context) %}{{ obj }}{{ context }}{% endmacro %}{{ m(obj='x', context='y') }}", "xy"),
        ("{% set space = namespace(context='a', self='b') %}{{ space.context }}", "a"),
        ("{% macro m(n) %}{{ n }}{% endmacro %}{{ m(messages[0].at) }}", "1700000000"),
    ],
    ids=["macro", "namespace", "number"],
)
def test_calls_take_any_name_and_macros_any_number(text, rendered):
    assert ChatTemplate(text, "", "").render([{"role": "user", "content": "a", "at": 1_700_000_000}]) == rendered
