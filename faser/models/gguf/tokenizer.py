"""The tokenizer that the metadata of a GGUF file describe: byte-level BPE or SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from faser.errors import ModelError
from faser.models.fields import optional_id
from faser.models.gguf.reader import GgufFile, open_file
from faser.text.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # what SentencePiece writes for a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# The expression that splits a text before merging, by tokenizer.ggml.pre. None: GPT-2's own, built into ByteLevel. It
# is used for smollm too, as in transformers. llama.cpp also splits around each digit, which changes only the ids of
# white space before a number and of numerals beyond ASCII, because no merge has a digit.
SPLITS = {
    **dict.fromkeys(("gpt-2", "default", "smollm")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
}


@dataclass(frozen=True)
class GgufVocabulary:
    """The lists of a tokenizer, one entry per token; `merges` and `scores` may be empty."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @property
    def used_ids(self) -> dict[str, int]:
        """Without the padding up to the size of the embedding."""
        return {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind != _UNUSED
        }


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that the metadata describe."""
    header = open_file(path)
    vocabulary = read_vocabulary(header)
    kind = header.text("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise header.fields.refuse(f"tokenizer.ggml.model={kind!r}", f"expected {' or '.join(builders)}")
    try:
        backend = builders[kind](header, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{header.path}: not a usable tokenizer ({error}); convert the model again") from error
    backend.add_special_tokens(_special_tokens(header, vocabulary))
    backend.add_tokens([AddedToken(token, normalized=False) for token in _tokens_of_type(vocabulary, _USER_DEFINED)])
    _add_bos(backend, header, vocabulary)
    return Tokenizer(backend)


def chat_template(path: str | Path) -> str | None:
    """The Jinja template of the file; None if it has none."""
    template = open_file(path).metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def read_vocabulary(header: GgufFile) -> GgufVocabulary:
    tokens = header.array("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError(f"{header.path}: no tokenizer in it (tokenizer.ggml.tokens); fetch a file with one")
    types = header.array("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    scores = header.array("tokenizer.ggml.scores", float)
    if len(types) != len(tokens) or len(scores) not in (0, len(tokens)):
        raise ModelError(
            f"{header.path}: {len(tokens)} tokens with {len(types)} types and {len(scores)} scores; "
            "expected as many of each: convert the model again"
        )
    return GgufVocabulary(tokens, types, header.array("tokenizer.ggml.merges", str), scores)


def _byte_level(header: GgufFile, vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes spelled as letters, merged within the parts of a split text."""
    name = header.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise header.fields.refuse(f"tokenizer.ggml.pre={name!r}", f"expected one of {', '.join(SPLITS)}")
    split = SPLITS[name]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=_merge_pairs(header, vocabulary.merges)))
    spell: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        spell = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), spell])
    backend.pre_tokenizer = spell
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(header: GgufFile, vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's kind: characters merged by score; characters without a token become bytes."""
    add_space = header.fields.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _merge_pairs(header, vocabulary.merges) if vocabulary.merges else _merges_by_score(header, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if add_space else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if add_space else steps)
    return backend


def _merge_pairs(header: GgufFile, merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(f"{header.path}: the merge {' '.join(wrong)!r}: expected two tokens; convert the model again")
    return pairs  # type: ignore[return-value]


def _merges_by_score(header: GgufFile, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, ordered by the score of the third, highest first.

    Equal scores: longer left parts first, then lower ids of the token, of the left and of the right part.
    """
    if not vocabulary.scores:
        raise ModelError(f"{header.path}: neither merges nor scores of tokens; expected one: convert the model again")
    ids, found = vocabulary.ids, []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids]
        found += [(-score, -len(left), -len(right), left, right) for _, _, left, right in sorted(known)]
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3])]


def _special_tokens(header: GgufFile, vocabulary: GgufVocabulary) -> list[AddedToken]:
    """Control tokens, and tokens with a role in the metadata."""
    roles = (f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding"))
    ids = [_token_id(header, key, vocabulary) for key in roles]
    named = [vocabulary.tokens[index] for index in ids if index is not None]
    tokens = dict.fromkeys([*_tokens_of_type(vocabulary, _CONTROL), *named])
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def _tokens_of_type(vocabulary: GgufVocabulary, wanted: int) -> list[str]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return [token for token, kind in pairs if kind == wanted and token]


def _token_id(header: GgufFile, key: str, vocabulary: GgufVocabulary) -> int | None:
    index = optional_id(header.fields, key)
    if index is not None and index >= len(vocabulary.tokens):
        raise header.fields.wrong(key, index, f"less than {len(vocabulary.tokens)}, the number of tokens")
    return index


def _add_bos(backend: tokenizers.Tokenizer, header: GgufFile, vocabulary: GgufVocabulary) -> None:
    """Begin every text with the begin token if the file says so; without a word, where llama.cpp does."""
    is_llama3 = SPLITS.get(header.text("tokenizer.ggml.pre")) == _LLAMA3_SPLIT
    default = header.text("tokenizer.ggml.model") == "llama" or is_llama3
    bos_id = _token_id(header, "tokenizer.ggml.bos_token_id", vocabulary)
    if bos_id is not None and header.fields.flag("tokenizer.ggml.add_bos_token", default):
        bos = vocabulary.tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )
