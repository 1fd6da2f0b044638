"""Builds a tokenizer from the vocabulary of a GGUF file: sentencepiece tokens, or byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from batchinfer.core.errors import JobFileError
from batchinfer.core.gguf.files import GgufModel
from batchinfer.core.gguf.header import wrong_gguf
from batchinfer.core.gguf.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

BYTES, PIECES = "gpt2", "llama"  # values of tokenizer.ggml.model
_SHOWN = 200  # maximum characters of a library's error in a message, since it may quote a token of any length
_SPACE = "\u2581"
_KEEPING = (
    "<unk>",
    "<s>",
    "<|endoftext|>",
)  # Phi-3's special tokens that do not absorb white space after them
_HINT = (
    "put tokenizer.json of the model's original release into a folder with the GGUF file, and name the folder in "
    "model.path"
)
_ENDINGS, _SYMBOLS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class SplitRules:
    """The rules of a BPE tokenizer for splitting texts into parts, before it merges the bytes of each part to tokens.

    Args:
        patterns: The split patterns; each one splits the parts of the previous one. (): the pattern of GPT-2.
        digits: True if each digit becomes a part of its own, after the patterns were applied.
        whole: True if a part that is a token becomes that token, without applying merges.
        begins: True if texts begin with BOS, unless the GGUF file states otherwise.
        composed: True if texts are normalised to NFC first.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}"
_TEKKEN = rf"{_WORDS % ('', '')}|\p{{N}}|{_PATHS}"
_GPT4O = rf"{_WORDS % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_PATHS}"
# Cased letters of the Unicode version of 2018, without some scripts and mathematical letters
_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{a7ff}"
    r"\x{ab30}-\x{ab6f}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]"
)
_CJK, _LINE_ENDS = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+", r"[\r\n]"
_MARKS = r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]"
_DEEPSEEK = (_LINE_ENDS, rf"\s?{_CASED}+", rf"\s?{_MARKS}+", r"\s+$", _CJK)
_DEEPSEEK_CODER = (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CJK)
# By tokenizer.ggml.pre; the patterns come from the tokenizer.json of the models
SPLIT_RULES: Mapping[str, SplitRules] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        SplitRules((_LLAMA3,), whole=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), SplitRules((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), SplitRules((_QWEN2,), composed=True)),
    "stablelm2": SplitRules((_QWEN2,)),
    "tekken": SplitRules((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), SplitRules((_GPT4O,))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4"), SplitRules()),
    "deepseek-llm": SplitRules(_DEEPSEEK, digits=True),
    "deepseek-coder": SplitRules(_DEEPSEEK_CODER, digits=True),
    **dict.fromkeys(("smollm", "command-r", "starcoder", "refact"), SplitRules(digits=True)),
}


def definition_of(model: GgufModel, vocabulary: Vocabulary) -> str:
    """Convert the tokenizer of a GGUF file to the text of a tokenizer.json.

    An unknown kind of tokenizer is an error, since a similar kind might encode texts differently.

    Args:
        model: The GGUF file.
        vocabulary: Its tokens, scores and merges.

    Raises:
        JobFileError: The kind of tokenizer is unknown, or the vocabulary is invalid.
    """
    try:
        return _definition(model, vocabulary)
    except JobFileError:
        raise
    except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
        text = f"{model.name}: its keys tokenizer.ggml make no tokenizer: {str(error)[:_SHOWN]}"
        raise wrong_gguf(
            model.path, text, hint=f"the file may be damaged: download it again, or {_HINT}"
        ) from None


def _definition(model: GgufModel, vocabulary: Vocabulary) -> str:
    if vocabulary.kind == PIECES:
        rust, begins = _pieces(model, vocabulary), True
    elif vocabulary.kind == BYTES:
        rules = _rules(model, vocabulary)
        rust, begins = _bytes(vocabulary, rules), rules.begins
    else:
        raise _wrong(model, "model", vocabulary.kind, (PIECES, BYTES))
    _add_tokens(rust, vocabulary, swallowing=vocabulary.kind == PIECES and _architecture(model) == "phi3")
    around = _around(vocabulary, begins)
    if around is not None:
        rust.post_processor = around
    return str(rust.to_str())


def _architecture(model: GgufModel) -> str:
    return str(model.metadata.get("general.architecture"))


def _wrong(model: GgufModel, key: str, found: object, wanted: Iterable[str]) -> JobFileError:
    text = f"{model.name}: tokenizer.ggml.{key} is {found!r}; supported are {', '.join(wanted)}"
    return wrong_gguf(model.path, text, hint=_HINT)


def _rules(model: GgufModel, vocabulary: Vocabulary) -> SplitRules:
    found = SPLIT_RULES.get(vocabulary.pre or "")
    if found is None:
        raise _wrong(model, "pre", vocabulary.pre, SPLIT_RULES)
    return found


def _numbered(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: number for number, token in reversed([*enumerate(vocabulary.tokens)])}


def _bytes(vocabulary: Vocabulary, rules: SplitRules) -> RustTokenizer:
    merges = [(first, second) for first, _, second in (one.partition(" ") for one in vocabulary.merges)]
    rust = RustTokenizer(models.BPE(_numbered(vocabulary), merges, ignore_merges=rules.whole))
    if rules.composed:
        rust.normalizer = normalizers.NFC()
    splitters: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns
    ]
    if rules.digits:
        splitters.append(pre_tokenizers.Digits(individual_digits=True))
    splitters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.patterns))
    rust.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    rust.decoder = decoders.ByteLevel()
    return rust


def _pieces(model: GgufModel, vocabulary: Vocabulary) -> RustTokenizer:
    prefixed = vocabulary.stated.get("add_space_prefix", True)
    merges = [_pair(one) for one in vocabulary.merges] or _merges(model, vocabulary)
    unknown = vocabulary.token("unknown_token_id")
    rust = RustTokenizer(
        models.BPE(_numbered(vocabulary), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = [normalizers.Replace(" ", _SPACE)]
    rust.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaced] if prefixed else spaced)
    read = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)] if prefixed else read)
    return rust


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _merges(model: GgufModel, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    # Gemma's tokens are in the order of their merges, and their scores are not, so their ids are used as scores
    if not vocabulary.scores:
        raise wrong_gguf(model.path, f"{model.name} has neither tokenizer.ggml.scores nor merges", hint=_HINT)
    by_id = _architecture(model).startswith("gemma")
    plain = {
        token: -float(number) if by_id else vocabulary.scores[number]
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    found = [
        (-score, -at, at - len(token), token[:at], token[at:])
        for token, score in plain.items()
        for at in range(1, len(token))
        if token[:at] in plain and token[at:] in plain
    ]
    return [(first, second) for *_, first, second in sorted(found, key=lambda each: each[:3])]


def _add_tokens(rust: RustTokenizer, vocabulary: Vocabulary, swallowing: bool) -> None:
    def added(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        found = zip(vocabulary.tokens, vocabulary.types, strict=True)
        return [
            AddedToken(token, normalized=False, special=special, rstrip=swallowing and token not in _KEEPING)
            for token, kind in found
            if kind in kinds and token
        ]

    rust.add_special_tokens(added((CONTROL, UNKNOWN), special=True))
    rust.add_tokens(added((USER_DEFINED,), special=False))


def _around(vocabulary: Vocabulary, begins: bool) -> Any:
    first = vocabulary.token("bos_token_id") if vocabulary.stated.get("add_bos_token", begins) else None
    last = vocabulary.token("eos_token_id") if vocabulary.stated.get("add_eos_token", False) else None
    if first is None and last is None:
        return None
    before, behind = ([first] if first else []), ([last] if last else [])
    ids = {token: vocabulary.tokens.index(token) for token in (*before, *behind)}
    return processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[
            *before,
            "$A",
            *behind,
            *(f"{token}:1" for token in before),
            "$B:1",
            *(f"{t}:1" for t in behind),
        ],
        special_tokens=[*ids.items()],
    )
