"""Jinja for chat templates: in its sandbox, with texts that are traced, and with bounds on work and size.

Knows Jinja's syntax tree and its hooks. Knows nothing of messages. A template is code from outside: it may loop for
ever or ask for memory without end. So every turn of a loop and every call of a macro looks at the clock, and whatever
makes a text or a list is checked before or after, so that memory at most doubles beyond the bound.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import local
from time import thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from faser.text.traced import Traced, joined

RENDER_SECONDS = 5.0  # of one thread's work on one text; templates take milliseconds
MAX_SIZE = 2**25  # characters of a text, or items of a list
MAX_ARGUMENT = 10**6  # a number that a function or a filter is called with: widths, counts
MAX_BITS = 4096  # of a number
_WIDE = re.compile(r"\d{7}")  # a width or a precision in a format

_work = local()  # .end: when the work of this thread on its text must be done


class TooMuch(Exception):
    """A template works too long, or makes something too large."""


@contextmanager
def working() -> Iterator[None]:
    """Around the work on one text."""
    _work.end = thread_time() + RENDER_SECONDS
    try:
        yield
    finally:
        del _work.end


def _tick() -> None:
    if thread_time() > _work.end:
        raise TooMuch(f"worked for more than {RENDER_SECONDS:g} s")


def _check_size(number: int) -> None:
    if number > MAX_SIZE:
        raise TooMuch(f"makes something of more than {MAX_SIZE} characters or items")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Texts that a template holds are traced, and so is what it joins of them."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters |= {"tojson": _to_json, "join": _join}
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.own_texts: list[Traced] = []
        self.tick = _tick

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        tree = super().parse(source, name, filename)
        return _Rewriting(self.own_texts).visit(tree).set_environment(self)  # type: ignore[no-any-return]

    @staticmethod
    def concat(texts: Iterable[str]) -> Traced:
        return joined(_counted(texts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, Macro) and obj is not Namespace:  # these make nothing of a number
            _check_arguments((*args, *kwargs.values()))
        _check_method(obj, args)
        return _checked(super().call(context, obj, *args, **kwargs))


def _counted(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        size += len(text)
        _check_size(size)
        yield text


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Before work whose result can be any size: the result of + at most doubles."""
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        raise TooMuch("writes a text of too great a width")
    if operator not in ("*", "**"):
        return
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > MAX_BITS:
            raise TooMuch(f"computes a number of more than {MAX_BITS} bits")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _check_size(len(sequence) * times)


def _check_arguments(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_ARGUMENT for value in values):
        raise TooMuch(f"calls a function with a number beyond {MAX_ARGUMENT}")


def _check_method(function: Any, arguments: tuple[Any, ...]) -> None:
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
    text = getattr(method, "__self__", None)
    if isinstance(text, str):
        _check_text_call(method.__name__, (text, *arguments))


def _check_text_call(name: str, texts: tuple[Any, ...]) -> None:
    """What can make a long text of short ones."""
    if name in ("format", "format_map") and _WIDE.search(texts[0]):
        raise TooMuch("writes a text of too great a width")
    if name == "replace":
        _check_replacement(*texts[:3])


def _check_replacement(text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + text.count(old) * len(new))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with bounds on its arguments and its result."""

    @functools.wraps(function)  # which marks of Jinja it needs to be called with
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        _check_arguments(values[1:])
        texts = tuple(value for value in values if isinstance(value, str))
        if texts:
            _check_text_call(function.__name__.removeprefix("do_"), texts)
        return _checked(function(*args, **kwargs))

    return bounded


class _Rewriting(NodeTransformer):
    """Makes the texts in a template entries of `own_texts`, since compiled code holds plain texts alone; adds ticks."""

    def __init__(self, own_texts: list[Traced]) -> None:
        self._own_texts = own_texts

    def visit_TemplateData(self, node: nodes.TemplateData) -> Node:  # noqa: N802
        return self._entry(node.data, node.lineno)

    def visit_Const(self, node: nodes.Const) -> Node:  # noqa: N802
        return self._entry(node.value, node.lineno) if isinstance(node.value, str) else node

    def visit_Getitem(self, node: nodes.Getitem) -> Node:  # noqa: N802
        """The name of a field is no text to show."""
        if isinstance(node.arg, nodes.Const):
            node.node = self.visit(node.node)
            return node
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> Node:  # noqa: N802
        """a ~ b as [a, b] | join: the code of ~ is Jinja's own."""
        items = nodes.List([self.visit(item) for item in node.nodes], lineno=node.lineno)
        return nodes.Filter(items, "join", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> Node:  # noqa: N802
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> Node:  # noqa: N802
        return self._ticking(node)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> Node:
        """Looks at the clock before each turn."""
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def _entry(self, text: str, line: int) -> Node:
        self._own_texts.append(Traced.by_template(text))
        texts = nodes.EnvironmentAttribute("own_texts", lineno=line)
        return nodes.Getitem(texts, nodes.Const(len(self._own_texts) - 1, lineno=line), "load", lineno=line)


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} mark the assistant's text for training; here they do nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _join(environment: TemplateEnvironment, values: Iterable[Any], sep: Any = "", attribute: Any = None) -> Traced:
    """Jinja's own filter loses the trace."""
    found = values if attribute is None else map(make_attrgetter(environment, attribute), values)
    texts = [str(value) for value in found]
    _check_size(sum(map(len, texts)) + len(str(sep)) * len(texts))
    return joined(texts, str(sep))
