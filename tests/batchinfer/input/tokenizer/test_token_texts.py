"""Single tokens as text and bytes: byte-level, byte fallback, special tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Rust

from batchinfer.input.tokenizer.token_texts import TokenTexts
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.batchinfer.store.index.ingest_kit import byte_bpe, checkpoint

TEXT = "the quick brown fox says  hello, é漢🙂\n\tto you"


def test_the_bytes_of_a_texts_tokens_are_its_bytes() -> None:
    rust = byte_bpe()
    tokens = TokenTexts(rust, [])
    ids = rust.encode(TEXT).ids
    assert b"".join(map(tokens.bytes_of, ids)).decode() == TEXT
    assert any("\ufffd" in text for text in tokens.texts(ids)), "no token is a part of a character"
    whole = [text for text in tokens.texts(ids) if "\ufffd" not in text]
    assert all(text in TEXT for text in whole)
    assert [tokens.bytes_of(token)[0] for token in rust.encode("\u0100\xad").ids] != []


def sentencepiece() -> Rust:
    """Return a tokenizer as in Llama 2: spaces belong to tokens, and a text's first space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", "<0xE6>", "<0xBC>", "<0xA2>", "▁the", "▁a", "a", "b", "▁", "x"]
    rust = Rust(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return rust


def test_a_words_space_stays_where_decoders_strip_it() -> None:
    rust = sentencepiece()
    tokens = TokenTexts(rust, [1, 2])
    assert rust.decode([6]) == "the"
    assert tokens.texts([6, 7, 9, 10, 2, 6]) == [" the", " a", "b", " ", "</s>", " the"]
    assert tokens.texts([3, 4, 5]) == ["\ufffd"] * 3
    assert b"".join(map(tokens.bytes_of, (6, 3, 4, 5))).decode() == " the漢"
    assert tokens.bytes_of(2) == b"</s>"


def test_ids_that_only_the_model_has_are_no_text() -> None:
    """A model's head may have more rows than the vocabulary."""
    tokens = TokenTexts(sentencepiece(), [])
    assert tokens.texts([500]) == [""]
    assert tokens.bytes_of(500) == b""


def test_a_vocabulary_without_letters(tmp_path: Path) -> None:
    rust = Rust(models.WordLevel({"12": 0, "34": 1, "<unk>": 2}, unk_token="<unk>"))
    assert TokenTexts(rust, []).texts([0, 1]) == ["12", "34"]


def test_a_checkpoints_special_tokens_show(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    assert tokenizer.token_texts([tokenizer.specials["<|im_end|>"]]) == ["<|im_end|>"]
    assert tokenizer.single.specials == frozenset(tokenizer.specials.values())
