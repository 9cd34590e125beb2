"""Text one token at a time equals text all at once, for every kind of decoder the served models use."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from faser.errors import InvalidRequest, ModelError
from faser.text.tokenizer import ByteTextStream, StopChecker, TextStream, Tokenizer, make_text_stream

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.  Two spaces, then a tab\tand a line\n\nEND of it.",
    "def add(a, b):\n    return a + b\n",
    "naïve café, Ünïcödé, e\u0301 combined; 你好，世界。 Привет мир.",
    "emoji 😀😃 family 👨‍👩‍👧 flag 🇩🇪 and 𝔘𝔫𝔦",
]
HALF = "\ufffd"


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Like sentencepiece: ▁ for a space, one token per byte for characters it does not know (Chinese, emoji)."""
    words = ["▁the", "▁quick", "▁do", "g", "▁fo", "x", "END", "of", "▁", "▁▁", "ï", "é", "\u0301", "\n"]
    letters = [chr(c) for c in range(33, 127)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(words + letters)]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "▁")], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    return backend


def llama_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


TOKENIZERS = {
    "byte level": Tokenizer(byte_level()),
    "byte fallback": Tokenizer(byte_fallback(llama_decoder())),
    "metaspace": Tokenizer(byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))),
}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)
# texts out of pieces that occur, and out of any character there is
texts = st.one_of(
    st.lists(st.sampled_from(SENTENCES + list("aé你😀 \n") + ["END"]), max_size=8).map("".join), st.text()
)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids at all, some of them outside the vocabulary, with runs of single bytes made likely."""
    any_id = st.integers(0, tokenizer.vocab_size + 5)
    return st.lists(st.one_of(any_id, st.integers(0, 260)), max_size=40)


def stream_pieces(tokenizer: Tokenizer, token_ids: Sequence[int], make=make_text_stream) -> list[str]:
    stream = make(tokenizer)
    return [*(stream.push(i) for i in token_ids), stream.finish()]


# --- Tokenizer -----------------------------------------------------------------------------------------------------


@kinds
@given(text=texts)
def test_what_was_encoded_decodes_to_itself(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    expected = text.lstrip(" ") if kind == "metaspace" else text  # its decoder drops all spaces of the first token
    assert tokenizer.decode(tokenizer.encode(text)).endswith(expected)


def test_the_post_processor_alone_decides_on_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert tokenizer.encode("dog") == [0, *tokenizer.encode("dog", add_special_tokens=False)]
    assert TOKENIZERS["byte fallback"].encode("dog")[0] != 0


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert tokenizer.decode(tokenizer.encode("dog")) == "dog"
    assert tokenizer.decode(tokenizer.encode("dog"), skip_special_tokens=False) == "<s>dog"


def test_a_text_without_tokens_is_an_empty_list() -> None:
    assert TOKENIZERS["byte level"].encode("", add_special_tokens=False) == []


def test_half_a_surrogate_pair_is_refused_with_a_reason() -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 2"):
        TOKENIZERS["byte level"].encode("ab\ud83d")


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(SENTENCES[0]) == TOKENIZERS["byte level"].encode(SENTENCES[0])
    assert tokenizer.encode("dog") == TOKENIZERS["byte level"].encode("dog")
    assert tokenizer.vocab_size == TOKENIZERS["byte level"].vocab_size


def test_a_folder_without_tokenizer_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json there"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", json.dumps({"model": {"type": "Nonsense"}})])
def test_a_garbled_tokenizer_is_a_readable_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_text_needs_no_torch() -> None:
    code = "import faser.text.tokenizer, faser.engine.lookup, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- TextStream ----------------------------------------------------------------------------------------------------


@kinds
@given(data=st.data())
def test_any_tokens_streamed_give_the_text_of_all_of_them(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(ids_of(tokenizer))
    assert "".join(stream_pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)
    assert "".join(stream_pieces(tokenizer, token_ids, TextStream)) == tokenizer.decode(token_ids)


def test_tokens_that_are_bytes_take_the_cheap_stream() -> None:
    assert [type(make_text_stream(each)) for each in TOKENIZERS.values()] == [ByteTextStream, TextStream, TextStream]


@kinds
@given(text=texts)
def test_no_piece_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = text.replace(HALF, "")
    pieces = stream_pieces(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert HALF not in "".join(pieces)


@kinds
def test_plain_text_is_streamed_at_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("the quick  dog\nEND", add_special_tokens=False)
    pieces = stream_pieces(tokenizer, token_ids)
    for n in range(len(token_ids) + 1):
        assert "".join(pieces[:n]) == tokenizer.decode(token_ids[:n])


def test_an_emoji_appears_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = tokenizer.encode("🫠", add_special_tokens=False)  # not in the training text: several tokens
    assert len(token_ids) > 1
    assert stream_pieces(tokenizer, token_ids) == [""] * (len(token_ids) - 1) + ["🫠", ""]


def test_a_special_token_does_not_split_a_character() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    first, *rest = (3 + byte for byte in "你".encode())
    token_ids = [first, 2, *rest]  # </s> in the middle
    assert "".join(stream_pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "你"


@kinds
def test_the_cost_per_token_does_not_grow_with_the_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    num_decoded = 0

    def counting(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return Tokenizer.decode(tokenizer, token_ids)

    monkeypatch.setattr(tokenizer, "decode", counting)
    stray = 3 + 0x80 if tokenizer.is_byte(3) else byte_level().token_to_id("Ģ")  # byte 0x80, no character by itself
    words = tokenizer.encode("the quick dog ", add_special_tokens=False) * 100
    for token_ids in (words, [stray] * 1000, [stray] * 1000 + words):
        num_decoded = 0
        stream_pieces(tokenizer, token_ids)
        assert num_decoded <= 12 * len(token_ids)


# --- StopChecker ---------------------------------------------------------------------------------------------------


def push_all(checker: StopChecker, token_ids: Sequence[int]) -> int | None:
    """How many tokens it took to stop."""
    return next((n for n, token_id in enumerate(token_ids, 1) if checker.push(token_id)), None)


def slow_stop(
    tokenizer: Tokenizer, stop: Sequence[str], num_ignored: int, token_ids: Sequence[int]
) -> tuple[int | None, str]:
    """Decode everything after every token; look at every place a stop string could be."""
    num_seen = 0
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n]).rstrip(HALF)
        ends = range(num_seen + 1, len(text) + 1)
        starts = [end - len(s) for end in ends for s in stop if end >= len(s) and text[end - len(s) : end] == s]
        if starts and n > num_ignored:
            return n, text[: min(starts)]
        num_seen = max(num_seen, len(text))
    return None, tokenizer.decode(token_ids)


@kinds
@given(data=st.data())
def test_stopping_equals_the_slow_version(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.one_of(ids_of(tokenizer), texts.map(tokenizer.encode)).filter(lambda ids: len(ids) < 60))
    text = tokenizer.decode(token_ids)
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda cut: text[cut[0] : sum(cut)])
    stop = data.draw(st.lists(st.one_of(cuts, st.sampled_from(["END", "\n\n", "你", "o"])), max_size=3))
    stop = [s for s in stop if s and HALF not in s]
    num_ignored = data.draw(st.integers(0, 6))
    checker = StopChecker(tokenizer, stop, num_ignored)
    num_tokens = push_all(checker, token_ids)
    assert (num_tokens, checker.text) == slow_stop(tokenizer, stop, num_ignored, token_ids)


@kinds
@given(data=st.data())
def test_what_is_not_held_back_is_never_taken_back(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    checker = StopChecker(tokenizer, ["END of", "\n\n", "你好", "aab"], 0)
    sent = ""
    for token_id in data.draw(st.one_of(ids_of(tokenizer), texts.map(tokenizer.encode))):
        stopped = checker.push(token_id)
        ready = checker.text[: len(checker.text) - checker.num_held()]
        assert ready.startswith(sent)
        sent = ready
        if stopped:
            break
    assert checker.text.startswith(sent)


@kinds
def test_a_stop_string_may_span_tokens_and_is_cut_off(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("the dog END of it", add_special_tokens=False)
    checker = StopChecker(tokenizer, ["END of"], 0)
    num_tokens = push_all(checker, token_ids)
    assert checker.text == "the dog "
    assert num_tokens is not None
    assert tokenizer.decode(token_ids[:num_tokens]).endswith("END of")
    assert checker.push(token_ids[-1]), "it stays stopped"
    assert checker.text == "the dog "


def test_of_two_stop_strings_the_one_that_begins_first_cuts() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    checker = StopChecker(tokenizer, ["ND", "END"], 0)
    push_all(checker, tokenizer.encode("do END"))  # END is one token
    assert checker.text == "do "


def test_a_stop_string_completed_by_an_ignored_token_does_not_count() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = tokenizer.encode("a b a b", add_special_tokens=False)
    first = push_all(StopChecker(tokenizer, ["b"], 0), token_ids)
    assert first is not None
    assert push_all(StopChecker(tokenizer, ["b"], first - 1), token_ids) == first
    second = push_all(StopChecker(tokenizer, ["b"], first), token_ids)
    assert second is not None
    assert second > first
    late = StopChecker(tokenizer, ["b"], first)
    push_all(late, token_ids)
    assert late.text == "a b a "


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    checker = StopChecker(tokenizer, ["abcd", "cx"], 0)
    held = []
    for token_id in tokenizer.encode("zabcab", add_special_tokens=False)[1:]:
        checker.push(token_id)
        held.append(checker.num_held())
    assert held == [0, 1, 2, 3, 1, 2]
