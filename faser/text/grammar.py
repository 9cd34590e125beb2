"""Grammars that an output must match, as masks over the vocabulary.

Knows JSON schemas and regular expressions, through llguidance, and which tokens may follow the output so far. A mask is
a function of the grammar and the output alone, so drafted and committed tokens get the same masks. Knows nothing of
models or sampling. Imports no torch: the HTTP process checks the grammars that the engine's process will run.

A hostile grammar must cost its own request and nothing else. llguidance's limits bound the work of a compilation and of
a mask. What they do not bound (the intersection of many patterns, large multipleOf, thousands of properties) is refused
before it is compiled.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from faser.arrays import IntArray
from faser.errors import EngineError, InvalidRequest
from faser.extras import install_hint
from faser.request import Grammar
from faser.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint8]  # one bit per token, the lowest first: [V / 8], rounded up to whole words

ANY_OBJECT = '{"type":"object"}'  # the schema of every JSON object

MAX_TEXT = 256 * 1024  # characters of a schema or an expression
MAX_KEYS = 4000  # of all objects of a schema together: two thousand properties take half a second to compile
MAX_MULTIPLE = 10_000  # the sum of all multipleOf, which takes 50 ms: digits are counted modulo each
MAX_INTERSECTED = 8  # patterns one string must satisfy at once: the work doubles with each
MAX_LEXER_STATES = 50_000  # of one request, 1 to 2 KiB each

# Unlimited white space would let a model emit nothing else until its last token. 20 characters indent nine levels.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,20}", "lenient": False}
_MAX_COMPILED = 64  # grammars kept; a compilation takes milliseconds
_MAX_MASKS = 33  # kept for one request: those of one step, the longest draft (32) and the bonus token
_MAX_REASON = 300  # characters of llguidance's message that an error repeats


def _library() -> Any:
    """llguidance, imported with the first grammar: an engine runs without it."""
    try:
        import llguidance
    except ImportError:
        raise InvalidRequest(f"no grammar can be checked: {install_hint('engine', ['llguidance'])}") from None
    return llguidance


class GrammarCompiler:
    """Compiles grammars for one tokenizer and one model's vocabulary. May be used from several threads.

    `end_ids` are the model's end tokens: never part of a text. The tokenizer is prepared on first use, which may take a
    second.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(i for i in end_ids if i < vocab_size)
        self._lock = Lock()
        self._prepared: LLTokenizer | None = None
        self._text_bits: Bits = np.zeros(0, np.uint8)  # ids that a mask may allow as text
        self._first_bits: Bits = np.zeros(0, np.uint8)  # ids that it may allow as the first token of the output
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # at the output's start; copied per request

    def check(self, grammar: Grammar, stop_ids: Iterable[int] = ()) -> None:
        """Raise InvalidRequest unless requests with this grammar and these further stop ids can be served."""
        try:
            self.matcher(grammar, stop_ids).mask(np.zeros(0, np.int64), self._vocab_size)
        except EngineError as error:
            raise _refusal(grammar.kind, str(error)) from error

    def matcher(self, grammar: Grammar, stop_ids: Iterable[int] = ()) -> Matcher:
        """A matcher at the start of the output. After a complete text it allows the stop ids and the end tokens."""
        stops = self._end_ids | {i for i in stop_ids if i < self._vocab_size}
        if not stops:
            raise InvalidRequest(
                "a grammar needs a token that ends the output, and the model names none; give stop_token_ids"
            )
        start = self._start(grammar)
        return Matcher(start, self._first_bits, self._text_bits, stops)

    def _start(self, grammar: Grammar) -> LLMatcher:
        """The compiled grammar. Compiles outside the lock, so that requests do not wait for each other's grammars."""
        with self._lock:
            prepared = self._prepare()
            found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar, prepared)
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar, prepared: LLTokenizer) -> LLMatcher:
        source = _json_source(grammar.text) if grammar.kind == "json_schema" else _regex_source(grammar.text)
        library = _library()
        limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        start: LLMatcher = library.LLMatcher(prepared, source, log_level=0, limits=limits)
        if not start.is_error():
            start.compute_bitmask()  # fails now if the grammar is empty or too complex; copies share the work
        if start.is_error():
            raise _refusal(grammar.kind, _shorten(start.get_error()))
        return start

    def _prepare(self) -> LLTokenizer:
        if self._prepared is None:
            num_tokens = self._tokenizer.vocab_size
            ends = sorted(i for i in self._end_ids if i < num_tokens)
            try:
                self._prepared = _library().LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=max(self._vocab_size, num_tokens), eos_token=ends or None
                )
            except ValueError as error:
                raise InvalidRequest(
                    f"grammars do not work with this model's tokenizer ({_shorten(str(error))}); leave the grammar out"
                ) from error
            text_ids = set(range(self._vocab_size)) - self._end_ids - set(self._prepared.eos_tokens)
            self._text_bits = _pack(text_ids, self._prepared.vocab_size)
            self._first_bits = self._text_bits & ~self._bits_that_lose_a_space(self._prepared)
        return self._prepared

    def _bits_that_lose_a_space(self, prepared: LLTokenizer) -> Bits:
        """The tokens that begin with a space, if the tokenizer (SentencePiece) drops it at the start of a text.

        The text would differ from what the grammar saw, so no output may begin with one of these tokens.
        """
        matcher = _library().LLMatcher
        bits = matcher(prepared, matcher.grammar_from_regex(r" (.|\n)*"), log_level=0).compute_bitmask()
        spaced: Bits = np.frombuffer(bits, np.uint8)[: len(self._text_bits)] & self._text_bits
        ids = np.flatnonzero(np.unpackbits(spaced, bitorder="little"))
        keeps = ids.size == 0 or self._tokenizer.decode([int(ids[0])]).startswith(" ")
        return np.zeros_like(spaced) if keeps else spaced


_compilers: WeakValueDictionary[tuple[int, int, tuple[int, ...]], GrammarCompiler] = WeakValueDictionary()


def shared_compiler(tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> GrammarCompiler:
    """One compiler per tokenizer and vocabulary: the check of a grammar and its use share the work."""
    key = (id(tokenizer), vocab_size, tuple(end_ids))  # an id is not reused while the compiler holds its tokenizer
    compiler = _compilers.get(key)
    if compiler is None:
        compiler = _compilers[key] = GrammarCompiler(tokenizer, vocab_size, end_ids)
    return compiler


class Matcher:
    """One request's position in its grammar. Moves to any output it is asked about, and keeps recent masks."""

    def __init__(self, start: LLMatcher, first_bits: Bits, text_bits: Bits, stop_ids: frozenset[int]) -> None:
        self._start = start
        self._first_bits = first_bits
        self._text_bits = text_bits
        self._stop_ids = stop_ids
        self._stop_bits = _pack(stop_ids, 8 * text_bits.size)
        self._matcher = start.deep_copy()
        self._consumed: IntArray = np.zeros(0, np.int64)  # tokens the matcher has consumed; never a stop id
        self._masks: dict[int, Bits] = {}  # by the number of consumed tokens

    def mask(self, tokens: IntArray, vocab_size: int) -> NDArray[np.bool_] | None:
        """[vocab_size] which ids may follow the output `tokens`.

        None after a stop id: the output has ended, and later tokens are never seen. EngineError if the tokens do not
        match the grammar, if no token can follow, or if the grammar became too complex.
        """
        reached = self._move_to(tokens)
        if reached == len(tokens):
            return np.unpackbits(self._bits(reached), count=vocab_size, bitorder="little").view(np.bool_)
        if int(tokens[reached]) in self._stop_ids:
            return None
        raise EngineError(f"output token {reached} ({int(tokens[reached])}) does not belong to the grammar")

    def num_valid(self, tokens: IntArray, drafted: IntArray) -> int:
        """How many of the drafted tokens match the grammar, up to the first that does not.

        A stop id is the last that counts. 0 if the grammar becomes too complex on the way.
        """
        everything = np.concatenate((tokens, drafted))
        try:
            reached = self._move_to(everything)
            if len(tokens) <= reached < len(everything) and self._ends_with(int(everything[reached]), reached):
                reached += 1
        except EngineError:
            return 0
        return max(0, reached - len(tokens))

    def _ends_with(self, token: int, num_tokens: int) -> bool:
        """Whether a token is a stop id that may follow the consumed tokens."""
        return token in self._stop_ids and bool(self._bits(num_tokens)[token // 8] >> (token % 8) & 1)

    def _move_to(self, tokens: IntArray) -> int:
        """Consume `tokens`, up to a stop id or the first that does not match; returns how many.

        If more was consumed before and the mask after `tokens` is known, the position stays: drafting returns to it.
        """
        common = _num_equal(self._consumed, tokens)
        if common == len(tokens) and common in self._masks:
            return common
        self._roll_back(common)
        rest = tokens[common:].tolist()
        stop = next((i for i, token in enumerate(rest) if token in self._stop_ids), len(rest))
        num_consumed = self._matcher.try_consume_tokens(rest[:stop])
        self._require_sound(common + num_consumed)
        self._consumed = tokens[: common + num_consumed].copy()
        return common + num_consumed

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens == len(self._consumed):
            return
        self._matcher.rollback(len(self._consumed) - num_tokens)
        self._require_sound(num_tokens)
        self._consumed = self._consumed[:num_tokens]
        self._masks = {number: bits for number, bits in self._masks.items() if number <= num_tokens}

    def _bits(self, num_tokens: int) -> Bits:
        """The mask after the first `num_tokens` consumed tokens: kept, or computed if these are all of them."""
        bits = self._masks.get(num_tokens)
        if bits is None:
            assert num_tokens == len(self._consumed)
            bits = self._masks[num_tokens] = self._compute_bits()
            if len(self._masks) > _MAX_MASKS:
                del self._masks[min(self._masks)]
        return bits

    def _compute_bits(self) -> Bits:
        text_bits = self._text_bits if len(self._consumed) else self._first_bits
        # llguidance's masks are longer than the vocabulary
        bits: Bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(text_bits)] & text_bits
        self._require_sound(len(self._consumed))
        if self._matcher.is_accepting():
            bits |= self._stop_bits
        if not bits.any():
            raise EngineError(
                f"no token of the model continues the grammar after {len(self._consumed)} output tokens; "
                "use characters the model's tokenizer has"
            )
        return bits

    def _require_sound(self, num_tokens: int) -> None:
        """A matcher never recovers from an error: restart it, so that a bad draft does not fail the request."""
        if self._matcher.is_error():
            reason = _shorten(self._matcher.get_error())
            self._restart()
            raise EngineError(
                f"the grammar became too complex at output token {num_tokens} ({reason}); give a simpler one"
            )

    def _restart(self) -> None:
        self._matcher = self._start.deep_copy()
        self._consumed, self._masks = self._consumed[:0], {}


def _num_equal(left: IntArray, right: IntArray) -> int:
    """Length of the common prefix."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if differs.size else shorter


def _pack(token_ids: Iterable[int], num_tokens: int) -> Bits:
    """A set of ids as bits, in whole 32-bit words as llguidance writes them."""
    flags = np.zeros(-(-num_tokens // 32) * 32, np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little")


# ---- from the user's text to llguidance's grammar ----


def _regex_source(text: str) -> str:
    _require_size("regex", text)
    source: str = _library().LLMatcher.grammar_from_regex(text)
    return source


def _json_source(text: str) -> str:
    _require_size("json_schema", text)
    try:
        schema = json.loads(text)
        _refuse_costly(schema)
        num_intersected = _PatternCount(schema).most()
    except json.JSONDecodeError as error:
        raise _refusal("json_schema", f"not JSON: {error}") from error
    except ValueError as error:
        raise _refusal("json_schema", str(error)) from error
    except RecursionError as error:
        raise _refusal("json_schema", "nested too deeply") from error
    if num_intersected > MAX_INTERSECTED:
        met = f"{num_intersected} patterns, formats or lengths may meet in one string"
        raise _refusal("json_schema", f"{met}; expected at most {MAX_INTERSECTED}")
    if not isinstance(schema, dict):
        raise _refusal("json_schema", f"expected an object, not {_shorten(json.dumps(schema))}")
    if "x-guidance" in schema:
        raise _refusal("json_schema", "the key x-guidance is not taken; remove it")
    source: str = _library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    return source


def _require_size(kind: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise _refusal(kind, f"{len(text)} characters; expected {MAX_TEXT} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(kind, f"half of a surrogate pair at character {error.start}") from error


def _refusal(kind: str, reason: str) -> InvalidRequest:
    advice = {
        "regex": "give a simpler expression; the syntax is that of Rust's regex, without look-around",
        "json_schema": "give a simpler JSON Schema",
    }
    return InvalidRequest(f"grammar of kind {kind}: {reason}; {advice[kind]}")


def _shorten(error: str) -> str:
    """llguidance's message in one line: the line that begins with "error:", else the first."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()] or ["no reason"]
    if lines[0].startswith("NoExtension"):
        return "no text matches it"
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " …"


def _refuse_costly(schema: object) -> None:
    """Raise ValueError for what takes llguidance seconds in spite of its limits."""
    num_keys, multiples = 0, 0.0
    open_parts = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            num_keys += len(part)
            multiple = part.get("multipleOf")
            multiples += abs(multiple) if isinstance(multiple, int | float) else 0
            open_parts += part.values()
        elif isinstance(part, list):
            open_parts += part
    if num_keys > MAX_KEYS:
        raise ValueError(f"{num_keys} keys in all; expected {MAX_KEYS} at most")
    if multiples > MAX_MULTIPLE:
        raise ValueError(f"the multipleOf values add up to more than {MAX_MULTIPLE}")


class _PatternCount:
    """An upper bound on the patterns a schema intersects for one string.

    Constraints on the same value add up: allOf, a $ref, alternatives. Constraints on values below it do not, but a
    merge of objects merges them too; so a schema counts as much as its worst place. A property may have a keyword's
    name, and a reference may not be resolvable here: then the bound is too high, never too low.
    """

    _BESIDE = ("allOf", "anyOf", "oneOf", "$ref")
    _OWN = (("pattern",), ("format",), ("minLength", "maxLength"))

    def __init__(self, schema: object) -> None:
        self._root = schema
        self._by_reference: dict[str, int] = {}

    def most(self) -> int:
        return self._count(self._root)

    def _count(self, schema: object) -> int:
        if isinstance(schema, list):
            return max(map(self._count, schema), default=0)
        if not isinstance(schema, dict):
            return 0
        if schema is not self._root and isinstance(schema.get("$id"), str):
            raise ValueError("an $id below the root is not taken; refer to definitions as #/$defs/…")
        own = sum(any(key in schema for key in keys) for keys in self._OWN)
        below = max((self._count(value) for key, value in schema.items() if key not in self._BESIDE), default=0)
        return max(own, below) + sum(self._count_beside(key, schema[key]) for key in self._BESIDE if key in schema)

    def _count_beside(self, key: str, value: object) -> int:
        if key == "allOf" and isinstance(value, list):
            return sum(map(self._count, value))
        if key == "$ref" and isinstance(value, str):
            return self._count_reference(value)
        return self._count(value)

    def _count_reference(self, reference: str) -> int:
        if reference not in self._by_reference:
            self._by_reference[reference] = 0  # a definition inside itself constrains another value
            self._by_reference[reference] = self._count(_resolve(self._root, reference))
        return self._by_reference[reference]


def _resolve(root: Any, reference: str) -> object:
    """What #/a/b points at; the whole document if the reference has another form or points nowhere."""
    if not reference.startswith("#/"):
        return root
    found = root
    for step in reference.split("/")[1:]:
        try:
            found = found[int(step)] if isinstance(found, list) else found[step.replace("~1", "/").replace("~0", "~")]
        except (KeyError, IndexError, ValueError, TypeError):
            return root
    return found
