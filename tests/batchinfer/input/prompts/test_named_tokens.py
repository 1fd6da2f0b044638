"""Banned texts include each of their tokenizations: with and without a leading space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.parameters.named_tokens import NamedTokens
from batchinfer.input.rows import RowProblem
from tests.batchinfer.store.index.ingest_kit import byte_bpe

BPE = byte_bpe()


def found(*words: str, vocab: int = 1 << 20, rust: Any = BPE) -> set[tuple[int, ...]]:
    tokenizer: Any = SimpleNamespace(rust=rust)
    return set(NamedTokens(tokenizer, vocab).add_tokens(SamplingParams(bad_words=words)).bad_tokens)


def ids(text: str) -> tuple[int, ...]:
    return tuple(BPE.encode(text, add_special_tokens=False).ids)


def test_a_word_is_banned_with_and_without_a_leading_space() -> None:
    assert found("the") == {ids("the"), ids(" the")}
    assert len(ids(" the")) == 1, "one token, which does not start with the token of the bare word"
    assert found(" the", "\n", "the") == {ids("the"), ids(" the"), ids("\n")}


def test_parameters_without_texts_are_the_same_object() -> None:
    named, params = NamedTokens(SimpleNamespace(rust=None), 9), SamplingParams(allowed_token_ids=(8,))  # type: ignore[arg-type]
    assert named.add_tokens(params) is params


def test_texts_whose_tokens_the_model_lacks_are_refused() -> None:
    with pytest.raises(RowProblem, match=r"bad_words: token id .* the model knows ids below 3"):
        found("the", vocab=3)
    nothing = SimpleNamespace(encode=lambda *_, **__: SimpleNamespace(ids=[]))
    with pytest.raises(RowProblem, match="bad_words: a text has no tokens"):
        found("the", rust=nothing)
