"""Structured output: it belongs to the grammar, and it is the same with speculation as without, token for token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from faser import LLM
from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.errors import EngineError, InvalidRequest
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.overlap import Overlap
from faser.request import FinishReason, Grammar, Request, SamplingParams
from faser.text.grammar import MAX_INTERSECTED, MAX_TEXT, GrammarCompiler, Matcher, shared_compiler
from faser.text.tokenizer import Tokenizer
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import Outcome, assert_equal, serve
from tests.tiny import CONFIGS, make_draft

VOCABULARY = 320  # of the model; the tokenizer has 300
ENDS = (2, 1)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = {"type": "array", "items": {"enum": ["fox", "dog", None, 1.5]}, "minItems": 1, "maxItems": 4}

JSON = {
    "person": json.dumps(PERSON),
    "choices": json.dumps(CHOICES),
    "any object": '{"type": "object"}',
}
REGEXES = {
    "digits": r"[0-9]{2,6}",
    "words": r"(the|quick|brown|fox)( (the|quick|brown|fox)){1,4}",
    "open": r"[a-f ]+",
    "characters": r"東京|naïve|Größe",
    "slashes": r"a/ \| /b\\\n?",
}


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


GRAMMARS = {name: schema(text) for name, text in JSON.items()} | {name: regex(text) for name, text in REGEXES.items()}


def fits(name: str, text: str) -> bool:
    if name in REGEXES:
        return re.fullmatch(REGEXES[name], text) is not None
    value = json.loads(text)
    if name == "person":
        return set(value) == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99
    if name == "choices":
        return 1 <= len(value) <= 4 and all(item in ("fox", "dog", None, 1.5) for item in value)
    return isinstance(value, dict)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return shared_compiler(tokenizer, VOCABULARY, ENDS)


@pytest.fixture(scope="module")
def target() -> Transformer:
    config = replace(CONFIGS["llama3"], vocab_size=VOCABULARY, eos_token_ids=ENDS, max_positions=160)
    return Transformer.random(config, 0, std=0.3)


WAYS = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "logit_bias": {2: -1.0}},
}


def make_requests(tokenizer: Tokenizer) -> list[Request]:
    """Every grammar in every way of sampling, among requests without one. Prompts hold text that breaks grammars."""
    requests = []
    for number, (way, values) in enumerate(WAYS.items()):
        for index, name in enumerate([*GRAMMARS, "free"]):
            prompt = tokenizer.encode('{"name": "fox", "age": 12} the quick 1234 fox'[number : 30 + index] * 2)
            params = SamplingParams(max_tokens=90, grammar=GRAMMARS.get(name), **values)
            requests.append(
                Request(
                    id=f"{name}, {way}",
                    prompt_token_ids=tuple(prompt[:60]),
                    params=params,
                    seed=7 * number + index,
                    stop_ids=frozenset(ENDS),
                )
            )
    return requests


def make_engine(target: Transformer, tokenizer: Tokenizer | None, draft=None, policy=None, **sizes) -> Engine:
    options = {"max_running": 16, "max_batch_tokens": 128, "max_step_ms": 0, "page_size": 4, "num_pages": 900, **sizes}
    return build_engine(target, draft, EngineOptions(policy=policy, **options), tokenizer)


def reference(target: Transformer, tokenizer: Tokenizer, requests) -> Outcome:
    """Each request alone, no speculation, no sharing."""
    whole = Outcome()
    for request in requests:
        alone = serve(make_engine(target, tokenizer, prefix_caching=False, max_running=1), [request])
        for name in ("tokens", "reasons", "stats"):
            getattr(whole, name).update(getattr(alone, name))
    return whole


@pytest.fixture(scope="module")
def right(target, tokenizer):
    requests = make_requests(tokenizer)
    return requests, reference(target, tokenizer, requests)


# --- the output belongs to the grammar -------------------------------------------------------------------------------


def test_every_output_that_ends_by_itself_belongs_to_its_grammar(right, tokenizer):
    requests, outcome = right
    ended = set()
    for request in requests:
        name = request.id.split(", ")[0]
        tokens = outcome.tokens[request.id]
        if name == "free" or outcome.reasons[request.id] is not FinishReason.STOP:
            continue
        ended.add(name)
        assert tokens[-1] in ENDS
        assert fits(name, tokenizer.decode(tokens[:-1])), (request.id, tokenizer.decode(tokens))
    assert ended >= {"person", "choices", "digits", "words", "characters", "slashes"}


def test_an_output_cut_at_its_length_is_the_beginning_of_a_text_of_the_grammar(right, compiler):
    requests, outcome = right
    cut = [r for r in requests if r.params.grammar and outcome.reasons[r.id] is FinishReason.LENGTH]
    assert cut
    for request in cut:
        matcher = compiler.matcher(request.params.grammar)
        tokens = np.array(outcome.tokens[request.id])
        assert matcher.num_valid(tokens[:0], tokens) == len(tokens)


def test_both_end_tokens_may_end_a_whole_text_and_neither_a_part_of_one(compiler, tokenizer):
    matcher = compiler.matcher(regex("ab+"))
    for text, expected in (("", False), ("a", False), ("ab", True), ("abb", True)):
        allowed = allowed_ids(matcher, ids_of(tokenizer, text))
        assert all((end in allowed) is expected for end in ENDS)


def test_a_text_that_cannot_go_on_may_only_end(compiler, tokenizer):
    matcher = compiler.matcher(regex("ab"), [7])
    assert allowed_ids(matcher, ids_of(tokenizer, "ab")) == {*ENDS, 7}


def test_padded_and_special_ids_are_never_allowed(compiler):
    allowed = allowed_ids(compiler.matcher(regex(r"(.|\n)*")), np.zeros(0, np.int64))
    assert max(allowed) < 300
    assert 0 not in allowed


def test_an_end_token_that_is_also_text_ends_and_is_never_text(tokenizer):
    letter = tokenizer.encode("a")[0]
    matcher = GrammarCompiler(tokenizer, VOCABULARY, [letter]).matcher(regex("b?a?"))
    assert letter in allowed_ids(matcher, np.zeros(0, np.int64))
    strict = GrammarCompiler(tokenizer, VOCABULARY, [letter]).matcher(regex("a?b"))
    assert letter not in allowed_ids(strict, np.zeros(0, np.int64))


def test_a_model_vocabulary_smaller_than_the_tokenizers_allows_nothing_beyond_itself(tokenizer):
    matcher = GrammarCompiler(tokenizer, 280, [2]).matcher(regex(".*"))
    assert max(np.flatnonzero(matcher.mask(np.zeros(0, np.int64), 280)).tolist()) < 280


def test_a_model_cannot_emit_white_space_for_ever(compiler, tokenizer):
    matcher = compiler.matcher(schema({"type": "object"}))
    space = ids_of(tokenizer, " ")
    assert matcher.num_valid(ids_of(tokenizer, "{"), np.repeat(space, 100)) == 20


def sentence_piece() -> Tokenizer:
    """As Llama 2's: a space is ▁, and the one at the start of a text is dropped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh", "▁a", "▁b", "ab"]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    backend = Backend(model)
    backend.add_special_tokens(names[:3])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return Tokenizer(backend)


@pytest.mark.parametrize("text", ["(a| b){2,5}", "[ab]{2} b", "é東{1,3}h"])
def test_a_tokenizer_that_drops_the_first_space_breaks_no_grammar(text):
    tokenizer = sentence_piece()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])
    for seed in range(20):
        random, tokens = np.random.default_rng(seed), np.zeros(0, np.int64)
        matcher = compiler.matcher(regex(text))
        while (allowed := matcher.mask(tokens, tokenizer.vocab_size)) is not None:
            tokens = np.append(tokens, random.choice(np.flatnonzero(allowed)))
        assert re.fullmatch(text, tokenizer.decode(tokens.tolist()))
    with pytest.raises(InvalidRequest, match="no token of the model"):
        compiler.check(regex(" b"))


# --- the output does not depend on speculation -----------------------------------------------------------------------

POLICIES = {"fixed:1": lambda: Fixed(1), "fixed:4": lambda: Fixed(4), "random": lambda: RandomStops(most=6, seed=1)}


def make_any_draft(kind: str, target: Transformer):
    if kind == "short vocabulary":
        return shortened(target, range(0, VOCABULARY, 2))
    return make_draft(target, noise=0.02) if kind == "model" else kind


def shortened(target: Transformer, token_ids: Iterable[int]) -> Transformer:
    """The target itself, able to propose some tokens only."""
    ids = torch.tensor(sorted(token_ids))
    positions = target.max_positions
    return Transformer(
        target.config, target.embedding, target.layers, target.final_norm, target.head[ids], positions, ids
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["model", "short vocabulary", "ngram"])
def test_speculation_in_a_mixed_batch_gives_the_tokens_of_plain_decoding(target, tokenizer, right, kind, policy):
    requests, expected = right
    engine = make_engine(target, tokenizer, make_any_draft(kind, target), POLICIES[policy]())
    outcome = serve(engine, requests)
    assert_equal(outcome, expected)
    assert 0 < outcome.total.accepted < outcome.total.verified
    for name, stats in outcome.stats.items():
        assert stats.steps + stats.accepted == len(outcome.tokens[name]), "every step emits accepted + 1 bonus"
        if name.startswith("free"):
            assert stats.pruned == 0


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["model", "short vocabulary"])
def test_overlap_in_a_mixed_batch_gives_the_tokens_of_plain_decoding(target, tokenizer, right, kind, policy, leads):
    requests, expected = right
    engine = make_engine(target, tokenizer, make_any_draft(kind, target), POLICIES[policy](), overlap="on")
    engine.scheduler.overlap = Overlap(leads=leads)
    assert_equal(serve(engine, requests), expected)
    assert 0 < engine.stats.hits < engine.stats.chunks


def test_off_in_a_batch_gives_the_tokens_of_each_alone(target, tokenizer, right):
    requests, expected = right
    assert_equal(serve(make_engine(target, tokenizer), requests), expected)


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_preemption_and_chunked_prefill_change_nothing(target, tokenizer, right, kind):
    requests, expected = right
    engine = make_engine(
        target, tokenizer, make_any_draft(kind, target), RandomLengths(seed=2), num_pages=90, max_batch_tokens=40
    )
    assert_equal(serve(engine, requests), expected)
    assert engine.scheduler.num_preemptions > 0


def test_drafts_that_break_the_grammar_are_pruned(target, tokenizer, right):
    requests, expected = right
    outcome = serve(make_engine(target, tokenizer, "ngram", Fixed(4)), requests)
    assert_equal(outcome, expected)
    assert outcome.total.pruned > 0


def test_a_perfect_draft_is_accepted_up_to_the_end_of_the_output(target, tokenizer, right):
    """It samples under the same mask with the same noise; what it drafts behind an end token is pruned."""
    requests, expected = right
    outcome = serve(make_engine(target, tokenizer, target, Fixed(4)), requests)
    assert_equal(outcome, expected)
    for request in requests:
        stats = outcome.stats[request.id]
        if outcome.reasons[request.id] is FinishReason.LENGTH:
            assert stats.accepted == stats.verified == stats.drafted


def test_a_draft_with_a_short_vocabulary_drafts_nothing_where_the_grammar_leaves_it_nothing(target, tokenizer, right):
    requests, expected = right
    letters = [i for i in range(3, 300) if tokenizer.decode([i]).strip().isalpha()]
    draft = shortened(target, letters)
    outcome = serve(make_engine(target, tokenizer, draft, Fixed(4)), requests)
    assert_equal(outcome, expected)
    assert outcome.stats["words, greedy"].drafted > 0
    assert outcome.stats["digits, greedy"].drafted == outcome.stats["digits, greedy"].pruned == 0


# --- the mask is a function of the tokens ----------------------------------------------------------------------------


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text) if text else [], np.int64)


def allowed_ids(matcher: Matcher, tokens: np.ndarray) -> set[int]:
    allowed = matcher.mask(tokens, VOCABULARY)
    assert allowed is not None
    return set(np.flatnonzero(allowed).tolist())


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_does_not_depend_on_what_was_asked_before(compiler, name):
    """A walk with guesses, returns and jumps gives the masks of matchers that go straight there."""
    random = np.random.default_rng(5)
    grammar, walked = GRAMMARS[name], compiler.matcher(GRAMMARS[name])
    tokens = np.zeros(0, np.int64)
    for _ in range(120):
        allowed = compiler.matcher(grammar).mask(tokens, VOCABULARY)
        if allowed is None:
            tokens = tokens[: random.integers(len(tokens) + 1)]
            continue
        assert np.array_equal(walked.mask(tokens, VOCABULARY), allowed)
        guesses = random.integers(0, 300, size=3)
        num_valid = walked.num_valid(tokens, guesses)
        if num_valid < 3:
            reached = np.concatenate((tokens, guesses[:num_valid]))
            after = compiler.matcher(grammar).mask(reached, VOCABULARY)
            assert after is None or not after[guesses[num_valid]]
        tokens = np.append(tokens, random.choice(np.flatnonzero(allowed)))
        if random.random() < 0.15:
            tokens = tokens[: random.integers(len(tokens) + 1)]


def test_there_is_no_mask_after_a_stop_id_and_an_error_after_a_token_that_does_not_match(compiler, tokenizer):
    matcher = compiler.matcher(regex("ab+"), [9])
    whole = ids_of(tokenizer, "ab")
    for stop in (*ENDS, 9):
        assert matcher.mask(np.append(whole, stop), VOCABULARY) is None
        assert matcher.mask(np.append(whole, [stop, 5, 6]), VOCABULARY) is None
    with pytest.raises(EngineError, match="does not belong"):
        matcher.mask(ids_of(tokenizer, "ax"), VOCABULARY)
    assert allowed_ids(matcher, ids_of(tokenizer, "a")) == set(ids_of(tokenizer, "b").tolist()), "and it recovers"


def test_drafts_are_valid_up_to_an_end_token_and_not_after_it(compiler, tokenizer):
    matcher = compiler.matcher(regex("ab+"))
    a, b = ids_of(tokenizer, "a"), ids_of(tokenizer, "b")
    end = np.array([ENDS[1]])
    assert matcher.num_valid(a, np.concatenate((b, b, end, b))) == 3
    assert matcher.num_valid(a, np.concatenate((end, b))) == 0, "the text is not whole"
    assert matcher.num_valid(a, np.concatenate((b, a, b))) == 1
    assert matcher.num_valid(a[:0], a[:0]) == 0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex("(ab"), "unclosed group"),
        (regex("a(?=b)"), "look-ahead"),
        (regex("[z-a]"), "invalid character class range"),
        (regex("a" * (MAX_TEXT + 1)), "characters; expected"),
        (regex("\ud800"), "surrogate"),
        (schema("{"), "not JSON"),
        (schema('{"type": "object"}, "lark_grammar": "start: /a/"'), "not JSON"),
        (schema([]), "expected an object"),
        (schema({"type": "objekt"}), "objekt"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "string", "pattern": "(a"}), "unclosed group"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (schema({"$ref": "#"}), "no text matches it"),
        (
            schema({"allOf": [{"anyOf": [{"properties": {f"{n}{m}": {}}} for n in range(4)]} for m in range(10)]}),
            "large",
        ),
        (schema({"$ref": "https://example.org/schema"}), "not present"),
        (schema({"type": "object", "x-guidance": {"lenient": True}}), "x-guidance"),
        (schema('{"items":' * 50_000 + "{}" + "}" * 50_000), "characters; expected"),
        (schema('{"items":' * 20_000 + "{}" + "}" * 20_000), "nested too deeply"),
        (schema({"allOf": [{"pattern": f"a.{{{n}}}"} for n in range(40)]}), f"expected at most {MAX_INTERSECTED}"),
        (schema({"$defs": {"a": {"$id": "https://example.org/a"}}}), r"\$id"),
    ],
)
def test_a_grammar_that_cannot_be_served_is_refused_with_its_reason(compiler, grammar, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.check(grammar)
    assert f"grammar of kind {grammar.kind}" in str(caught.value)
    assert "give a" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_patterns_that_meet_in_one_string_are_counted_wherever_they_hide(compiler):
    patterns = [{"type": "string", "pattern": f"a.{{{n}}}"} for n in range(MAX_INTERSECTED + 2)]
    chain: dict = {"type": "string"}
    for pattern in patterns:
        chain = {**pattern, "anyOf": [chain]}
    definitions = {f"d{n}": {**pattern, "$ref": f"#/$defs/d{n + 1}"} for n, pattern in enumerate(patterns)}
    definitions[f"d{len(patterns)}"] = {"type": "string"}
    for hidden in (
        chain,
        {"$defs": definitions, "$ref": "#/$defs/d0"},
        {"allOf": [{"properties": {"x": pattern}} for pattern in patterns]},
        {"properties": {"allOf": {"allOf": patterns}}},
        {"$defs": {"all": patterns}, "allOf": [{"$ref": f"#/$defs/all/{n}"} for n in range(len(patterns))]},
    ):
        with pytest.raises(InvalidRequest, match="may meet in one string"):
            compiler.check(schema(hidden))
    compiler.check(schema({"type": "object", "properties": {f"k{n}": p for n, p in enumerate(patterns)}}))
    compiler.check(schema({"anyOf": patterns}))


@pytest.mark.parametrize("values", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_a_grammar_with_what_forbids_its_end_is_refused(values):
    with pytest.raises(InvalidRequest, match=r"=.* cannot be combined with a grammar.*; remove it"):
        SamplingParams(grammar=regex("a"), **values)


def test_a_model_without_an_end_token_needs_stop_ids(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [])
    with pytest.raises(InvalidRequest, match="give stop_token_ids"):
        compiler.check(regex("a"))
    matcher = compiler.matcher(regex("a"), [50])
    assert allowed_ids(matcher, ids_of(tokenizer, "a")) == {50}


def test_llm_refuses_a_bad_grammar_before_anything_runs(folder):
    llm = LLM(str(folder), dtype="float32")
    good, bad = SamplingParams(grammar=regex("[a-z]{3}")), SamplingParams(grammar=regex("(ab"))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        llm.generate(["the", "fox"], [good, bad])
    assert llm.stats.steps == 0
    (output,) = llm.generate("the", good)
    assert re.fullmatch("[a-z]{3}", output.text)
    assert output.finish_reason is FinishReason.STOP


def test_llm_without_a_tokenizer_refuses_a_grammar(target):
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        LLM(target).generate([5, 6, 7], SamplingParams(grammar=regex("a")))


@pytest.mark.parametrize(("with_tokenizer", "reason"), [(False, "needs a tokenizer"), (True, "unclosed group")])
def test_an_unchecked_grammar_fails_its_own_request_and_no_other(target, tokenizer, with_tokenizer, reason):
    def request(name: str, **values) -> Request:
        params = SamplingParams(max_tokens=8, **values)
        return Request(id=name, prompt_token_ids=(5, 6, 7), params=params, seed=1, stop_ids=frozenset(ENDS))

    bad, good = request("bad", grammar=regex("(ab")), request("good")
    expected = serve(make_engine(target, None), [good]).tokens["good"]
    engine = make_engine(target, tokenizer if with_tokenizer else None, target, Fixed(2))
    engine.add(bad)
    engine.add(good)
    items = [item for _ in range(20) if engine.has_work for item in engine.step()]
    ends = {item.request_id: item.finish for item in items if item.finish is not None}
    assert ends["bad"].reason is FinishReason.FAILED
    assert reason in ends["bad"].error
    assert [token for item in items if item.request_id == "good" for token in item.token_ids] == expected


def test_a_grammar_that_becomes_too_complex_ends_its_request_with_the_reason(target, tokenizer, compiler):
    """Behind the first brace any of a thousand keys may come, in a thousand states of the parser."""
    grammar = schema({"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(1000)}})
    compiler.check(grammar)
    bad = Request(
        id="bad",
        prompt_token_ids=(5, 6, 7),
        params=SamplingParams(max_tokens=20, grammar=grammar),
        seed=1,
        stop_ids=frozenset(ENDS),
    )
    good = replace(bad, id="good", params=SamplingParams(max_tokens=20, grammar=GRAMMARS["words"]))
    expected = serve(make_engine(target, tokenizer), [good]).tokens["good"]
    for draft, policy in ((None, None), (make_draft(target), Fixed(4)), ("ngram", Fixed(4))):
        outcome = serve(make_engine(target, tokenizer, draft, policy), [bad, good])
        assert outcome.reasons["bad"] is FinishReason.FAILED
        assert outcome.tokens["good"] == expected


def test_an_error_after_a_rejected_draft_does_not_fail_the_request(target, tokenizer, monkeypatch):
    """Masks fail from the fifth token on; a request that ends before is not touched by the drafts that reach it."""
    compute, trouble = Matcher._compute_bits, 4

    def fail_later(self: Matcher):
        if len(self._consumed) >= trouble:
            self._restart()
            raise EngineError("the grammar became too complex; give a simpler one")
        return compute(self)

    monkeypatch.setattr(Matcher, "_compute_bits", fail_later)
    params = SamplingParams(max_tokens=trouble + 1, grammar=regex("[a-z]{2,3}"))
    request = Request(id="one", prompt_token_ids=(5, 6, 7), params=params, seed=1, stop_ids=frozenset(ENDS))
    plain, drafted = (
        serve(make_engine(target, tokenizer, draft, policy), [request])
        for draft, policy in ((None, None), (make_draft(target), Fixed(4)))
    )
    assert plain.reasons["one"] is FinishReason.STOP
    assert_equal(drafted, plain)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999979},
        {"anyOf": [{"type": "integer", "multipleOf": 3001 + i} for i in range(20)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    ],
)
def test_what_would_take_seconds_to_compile_is_refused_before_it_is_tried(schema, folder):
    compiler = GrammarCompiler(Tokenizer.from_folder(folder), 320, [2])
    with pytest.raises(InvalidRequest, match=r"multipleOf|keys in all"):
        compiler.check(Grammar("json_schema", json.dumps(schema)))
