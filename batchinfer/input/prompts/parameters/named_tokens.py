"""The tokens that sampling parameters name by id or by text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.tokenizer import Tokenizer

_MOST_WORDS = 4096  # maximum number of cached words


class NamedTokens:
    """Checks that token ids in sampling parameters exist, and encodes the texts in `bad_words`.

    Args:
        tokenizer: The tokenizer of the checkpoint.
        vocab_size: The number of token ids of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._last: tuple[SamplingParams, SamplingParams] | None = None  # rows usually share parameters
        self._words: dict[str, tuple[tuple[int, ...], ...]] = {}

    def add_tokens(self, params: SamplingParams) -> SamplingParams:
        """Check the token ids in the parameters, and return the parameters with the tokens of their `bad_words`.

        Raises:
            RowProblem: The model has no token with such an id.
        """
        if self._last is None or params is not self._last[0]:
            self._last = params, self._found(params)
        return self._last[1]

    def _found(self, params: SamplingParams) -> SamplingParams:
        self._check("logit_bias", (token for token, _ in params.logit_bias))
        self._check("allowed_token_ids", params.allowed_token_ids)
        if not params.bad_words:
            return params
        tokens = dict.fromkeys(ids for word in params.bad_words for ids in self._of_word(word))
        return replace(params, bad_tokens=tuple(tokens))

    def _check(self, name: str, ids: Iterable[int]) -> None:
        if (most := max(ids, default=0)) >= self._vocab_size:
            message = f"{name}: token id {most}; the model knows ids below {self._vocab_size}"
            raise RowProblem("token_id_out_of_range", message)

    def _of_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        # A word has other tokens at the start of a text than after a space
        if word not in self._words:
            if len(self._words) >= _MOST_WORDS:
                self._words.clear()
            texts = [word] if word[0].isspace() else [word, f" {word}"]
            self._words[word] = tuple(map(self._encoded, texts))
        return self._words[word]

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.rust.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise RowProblem("bad_parameter", "bad_words: a text has no tokens; leave it out")
        self._check("bad_words", ids)
        return ids
