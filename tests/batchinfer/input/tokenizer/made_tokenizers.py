"""Tokenizers of each kind found in checkpoints, with small vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

LETTERS = 'abcdefghijklmnopqrstuvwxyzINTS0123456789{}[]":,.- _'
WORDS = ["no", "es", "yes", '": "', "true", "▁yes", "▁no", "▁▁"]


def byte_level(specials: tuple[str, ...] = ("<s>", "</s>", "<|end|>"), **parts: Any) -> Tokenizer:
    """Return a tokenizer with all bytes, three words, and special tokens from 259 on. `parts` are set on it."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", "yes", "Ġyes"]
    merges = [("y", "e"), ("ye", "s"), ("Ġ", "yes")]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, value in parts.items():
        setattr(made, name, value)
    made.add_special_tokens(list(specials))
    return made


def padded() -> Tokenizer:
    """Return a tokenizer that pads or truncates to four tokens, as some saved checkpoints do."""
    made = byte_level()
    made.enable_padding(pad_id=259, pad_token="<s>", length=4)
    made.enable_truncation(4)
    return made


def pieces(with_bytes: bool) -> list[str]:
    """Return the pieces: <unk>, <s>, </s>, optionally bytes, letters, words."""
    letters = [letter.replace(" ", "▁") for letter in LETTERS]
    named = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    return ["<unk>", "<s>", "</s>", *named, *letters, *WORDS]


def sentence_pieces(decoder: Any, with_bytes: bool = True) -> Tokenizer:
    """Return a Unigram model as SentencePiece builds it."""
    scored = [(piece, -float(at) / 10) for at, piece in enumerate(pieces(with_bytes))]
    made = Tokenizer(models.Unigram(scored, 0, with_bytes))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoder
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def llama() -> Tokenizer:
    """Return a BPE in SentencePiece style: the normalizer adds the leading space, and bytes are tokens."""
    vocabulary = {piece: at for at, piece in enumerate(pieces(True))}
    merges = [("n", "o"), ("e", "s"), ("y", "es"), ("▁", "yes"), ("▁", "no"), ("▁", "▁")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = steps(strip=True)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def steps(strip: bool) -> Any:
    """Return the decoder of Llama, or of Gemma, which keeps a leading space."""
    made = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*made, *([decoders.Strip(" ", 1, 0)] if strip else [])])


def with_gaps() -> Tokenizer:
    """Return a tokenizer with unused ids below its highest id."""
    vocabulary = {piece: at for at, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE({**vocabulary, "yes": 300}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return made


def words() -> Tokenizer:
    """Return a tokenizer of whole words. It cannot encode other texts."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "yes": 2, "no": 3}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    return made


KINDS: dict[str, tuple[Callable[[], Tokenizer], tuple[int, ...]]] = {
    "bytes": (byte_level, (260,)),
    "bytes, several ends": (byte_level, (259, 260, 261)),
    "bytes, no end": (byte_level, ()),
    "bytes, no specials": (lambda: byte_level(()), ()),
    "bytes, an end that is text": (byte_level, (ord("!") - 33,)),
    "bytes, NFC": (lambda: byte_level(normalizer=normalizers.NFC()), (260,)),
    "bytes, a space before": (lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        (260,)),
    "bytes, padded": (padded, (260,)),
    "gaps": (with_gaps, (257,)),
    "gaps, an end beyond": (with_gaps, (301,)),
    "Llama": (llama, (2,)),
    "Llama, no end": (llama, ()),
    "Gemma": (lambda: sentence_pieces(steps(strip=False)), (2,)),
    "Metaspace": (lambda: sentence_pieces(decoders.Metaspace(), with_bytes=False), (2,)),
    "Metaspace, no space before": (lambda: sentence_pieces(decoders.Metaspace(prepend_scheme="never"),
        with_bytes=False), (2,)),
    "Metaspace and bytes": (lambda: sentence_pieces(decoders.Sequence([decoders.ByteFallback(),
        decoders.Metaspace()])), (2,)),
}  # fmt: skip
UNREADABLE: dict[str, Callable[[], Tokenizer]] = {
    "words": words,
    "Metaspace beside bytes": lambda: sentence_pieces(decoders.Metaspace()),
}
