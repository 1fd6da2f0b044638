"""Tokenizers in GGUF files produce the same tokens as the original ones."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from batchinfer.core.errors import JobFileError
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import CHAT_TEMPLATE, make_tokenizer
from tests.gguf_files import add_key, tokenizer_keys

TEXTS = [
    "Hello, world! It's 12345 o'clock; we'LL see.",
    "  two spaces\n\n\ttabs and\r\nlines  ",
    "Größe naïve Å東京 と 12 ٣٤ हिन्दी 🤗🤗 x_y/z\n/a",
    "HTTPServer don'T iPhone McDonald ǅ ﬁ e\u0301",
    "",
    "a",
]
CORPUS = [f"{text} the theme of these {n} tests, and that's it\n\n" for n in range(40) for text in TEXTS]
# The patterns as the models' own tokenizer.json have them
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
DIGITS = pre_tokenizers.Digits(individual_digits=True)
PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (LLAMA3,), "dbrx": (LLAMA3,), "qwen2": (QWEN2,), "tekken": (TEKKEN,), "gpt-4o": (GPT4O,), "gpt-2": (),
    "smollm": (), "deepseek-coder": DEEPSEEK_CODER,
}  # fmt: skip
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def write(file: Path, keys: dict[str, Any], arch: str = "llama") -> Path:
    writer = GGUFWriter(file, arch)
    for key, value in keys.items():
        if value is not None:
            add_key(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def trained(pre: str) -> RustTokenizer:
    """Return a tokenizer as the model's tokenizer.json would define it."""
    rust = RustTokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    patterns = PATTERNS[pre]
    splitters: list[Any] = [DIGITS] if pre == "smollm" else []
    splitters += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    splitters += [DIGITS] if pre.startswith("deepseek") else []
    splitters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    rust.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    rust.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        rust.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in SPECIAL])
    rust.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return rust


class Wrapped:
    """The attributes of a tokenizer that `tokenizer_keys` reads."""

    def __init__(self, rust: RustTokenizer) -> None:
        self.backend_tokenizer = rust
        self.added_tokens_decoder = rust.get_added_tokens_decoder()
        self.get_vocab = rust.get_vocab
        self.bos_token_id, self.eos_token_id = (rust.token_to_id(each) for each in SPECIAL[:2])
        self.chat_template = CHAT_TEMPLATE


@pytest.mark.parametrize("pre", PATTERNS)
def test_bytes_are_merged_as_by_the_models_own_tokenizer(tmp_path: Path, pre: str) -> None:
    own = trained(pre)
    found = Tokenizer.load(write(tmp_path / "x.gguf", tokenizer_keys(Wrapped(own), pre=pre)))
    texts = [*TEXTS, f"<|im_start|>user\n<think>{TEXTS[0]}<|im_end|>", "<|im_end", *CORPUS[:3]]
    for text in texts:
        ids = own.encode(text, add_special_tokens=False).ids
        assert found.rust.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids) == own.decode(ids, skip_special_tokens=True)
    assert set(found.specials) == set(SPECIAL)


def test_deepseeks_words_are_of_the_letters_that_its_tokenizer_lists(tmp_path: Path) -> None:
    # Outside the ranges that are always split: Georgian, Cherokee and others are within those of CJK
    listed = "µÀöøƺƼƿǄʓʕʯͰͿΆҊԯԱՖꙀꚀꜢꞇꞋꞎꭰꮿﬀﬗ𐐀𐑏𐒰𐳲𑢠𞥃"
    others = "ƻʔʰͺՠֈꞐꟺꬰꭨ𐕰𖹀𝐀𝟋𝼀東가1_"
    file = write(tmp_path / "x.gguf", tokenizer_keys(Wrapped(trained("gpt-2")), pre="deepseek-llm"))
    splitter = Tokenizer.load(file).rust.pre_tokenizer

    def parts(text: str) -> int:
        return len(splitter.pre_tokenize_str(text))

    assert [letter for letter in listed if parts(f"é{letter}é") != 1] == []
    assert [letter for letter in others if parts(f"é{letter}é") != 3] == []
    assert [parts(text) for text in ("ႳႴ", "Ⴓⴤ", "Ჰბ")] == [1, 2, 2]
    # Letters, punctuation and line breaks include the space before them, digits and other characters do not
    texts = ("a b", "a ,.。‘b", "a 12", "՛  1", "東京 가", "a\r\n", "a   b", "a   ")
    assert [parts(text) for text in texts] == [2, 4, 4, 2, 3, 3, 3, 2]


def test_a_gguf_file_gives_the_same_tokenizer_as_a_folder(tmp_path: Path) -> None:
    fast = make_tokenizer(tmp_path / "folder")
    keys = tokenizer_keys(fast)
    file = write(tmp_path / "x.gguf", keys)
    found, folder = Tokenizer.load(file), Tokenizer.load(tmp_path / "folder")
    for name in ("chat_template", "specials", "vocab_size"):
        assert getattr(found, name) == getattr(folder, name)
    assert (found.named["bos_token"], found.named["eos_token"]) == ("<|bos|>", "<|im_end|>")
    again = Tokenizer.load(write(tmp_path / "y.gguf", keys))
    other = Tokenizer.load(write(tmp_path / "z.gguf", {**keys, "tokenizer.chat_template": "x"}))
    assert found.fingerprint == again.fingerprint != other.fingerprint
    (tmp_path / "folder/x.gguf").write_bytes(b"GGUF")  # ignored if there is a tokenizer.json
    assert Tokenizer.load(tmp_path / "folder").fingerprint == folder.fingerprint


def test_bos_and_eos_are_added_if_the_file_says_so(tmp_path: Path) -> None:
    own = trained("llama-bpe")
    keys = tokenizer_keys(Wrapped(own), pre="llama-bpe")
    bos, eos = (own.token_to_id(each) for each in SPECIAL[:2])
    plain = own.encode("a test", add_special_tokens=False).ids
    for stated, wanted in (
        ({"add_bos_token": False}, plain),
        ({"add_bos_token": None}, [bos, *plain]),  # as llama.cpp has it for this kind
        ({"add_bos_token": True, "add_eos_token": True}, [bos, *plain, eos]),
    ):
        changed = {**keys, **{f"tokenizer.ggml.{key}": value for key, value in stated.items()}}
        found = Tokenizer.load(write(tmp_path / "x.gguf", changed))
        assert found.rust.encode("a test").ids == wanted


def pieces(seed: int = 5) -> tuple[list[str], list[float]]:
    """Return a sentencepiece vocabulary: three specials, bytes, pieces that can be merged, single letters."""
    rng = random.Random(seed)
    letters = ["\u2581", *"abcdeé東"]
    found = [*letters]
    while len(found) < 60:
        piece = rng.choice(found) + rng.choice(found)
        if piece not in found and len(piece) < 7:
            found.append(piece)
    merged = found[len(letters) :]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters, "<|x|>"]
    scores = [0.0] * 259 + [-float(n) for n in range(len(merged))] + [-1000.0] * len(letters) + [0.0]
    return tokens, scores


def merged(text: str, tokens: list[str], scores: list[float], prefixed: bool) -> list[int]:
    """Merge as sentencepiece does: the adjacent pair with the best score first, the leftmost on a tie."""
    known = {token: number for number, token in enumerate(tokens) if 259 <= number < len(tokens) - 1}
    symbols = [*("\u2581" * prefixed + text.replace(" ", "\u2581"))] if text else []
    while True:
        pairs = [
            (scores[known[first + second]], -at)
            for at, (first, second) in enumerate(pairwise(symbols))
            if first + second in known
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        number
        for symbol in symbols
        for number in ([known[symbol]] if symbol in known else [3 + byte for byte in symbol.encode()])
    ]


def piece_keys(**more: Any) -> dict[str, Any]:
    tokens, scores = pieces()
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 3]
    stated = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in stated.items()}


@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_merge_as_in_sentencepiece(tmp_path_factory: pytest.TempPathFactory, prefixed: bool) -> None:
    keys = piece_keys() if prefixed else piece_keys(add_space_prefix=False)
    found = Tokenizer.load(write(tmp_path_factory.mktemp("pieces") / "x.gguf", keys))
    tokens, scores = pieces()

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet="abcdeé東 \nπ🤗", max_size=40))
    def check(text: str) -> None:
        ids = found.rust.encode(text, add_special_tokens=False).ids
        assert ids == merged(text, tokens, scores, prefixed)
        assert found.decode(ids) == text

    check()
    assert found.rust.encode("a").ids[0] == 1
    assert found.rust.encode("a<|x|>", add_special_tokens=False).ids[-1] == len(tokens) - 1
    assert set(found.specials) == {"<unk>", "<s>", "</s>", "<|x|>"}


def test_special_tokens_of_phi_3_take_white_space_along(tmp_path: Path) -> None:
    tokens, scores = pieces()
    x, text = len(tokens) - 1, merged("ab", tokens, scores, True)
    for arch, swallowed in (("phi3", True), ("llama", False)):
        found = Tokenizer.load(write(tmp_path / f"{arch}.gguf", piece_keys(), arch))
        ids = found.rust.encode("<|x|> \n ab", add_special_tokens=False).ids
        assert ids[0] == x
        assert (ids[1:] == text) is swallowed
        assert found.rust.encode("<s> ab", add_special_tokens=False).ids[1:] != text


def test_gemmas_scores_are_not_used(tmp_path: Path) -> None:
    """Gemma's token ids already follow the order of merges."""
    tokens, scores = pieces()
    backwards = [*scores[:259], *reversed(scores[259:])]
    file = write(tmp_path / "x.gguf", piece_keys(add_space_prefix=False, scores=backwards), "gemma2")
    found = Tokenizer.load(file)
    for text in ("abcde cab", "deadbeef", "a bad cab\nfaced a bee", "ééa東e"):
        assert found.rust.encode(text, add_special_tokens=False).ids == merged(text, tokens, scores, False)


@pytest.mark.parametrize(("stated", "text"), [
    ({"pre": None}, "tokenizer.ggml.pre is None; supported are llama-bpe.*put tokenizer.json"),
    ({"pre": "viking"}, "tokenizer.ggml.pre is 'viking'; supported are"),
    ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; supported are llama, gpt2"),
    ({"token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 entries; wanted 260"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list"),
    ({"tokens": None}, r"x\.gguf holds no tokenizer \(tokenizer\.ggml\.tokens\)"),
    ({"model": "llama", "merges": None}, "has neither tokenizer.ggml.scores nor merges"),
    ({"merges": ["a zz"]}, r"x\.gguf: its keys tokenizer\.ggml make no tokenizer: .*Token `zz` out of vocabulary"),
    ({"model": "llama", "merges": ["a"]}, r"x\.gguf: .*Token `` out of vocabulary .*download it again"),
])  # fmt: skip
def test_tokenizers_that_are_not_known_are_refused(tmp_path: Path, stated: dict[str, Any], text: str) -> None:
    keys = tokenizer_keys(make_tokenizer(tmp_path / "folder"))
    file = write(tmp_path / "x.gguf", {**keys, **{f"tokenizer.ggml.{k}": v for k, v in stated.items()}})
    with pytest.raises(JobFileError, match=text):
        Tokenizer.load(file)
