"""The texts and bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from string import ascii_letters
from typing import Any

_INCOMPLETE = "\ufffd"  # the decoded text of an incomplete character
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token of a vocabulary with byte fallback


class TokenTexts:
    """Decodes single tokens to texts or bytes, with a cache.

    Args:
        rust: The `tokenizers.Tokenizer`.
        specials: The ids of its special tokens.
    """

    def __init__(self, rust: Any, specials: Iterable[int]) -> None:
        self._rust = rust
        self.specials = frozenset(specials)
        # Tokens are decoded after a letter, since decoders strip a space at the beginning of a text
        letters = (rust.token_to_id(letter) for letter in ascii_letters)
        self._before: list[int] = next(([token] for token in letters if token is not None), [])
        self._prefix = self._decoded([self._before])[0]
        self._cached: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If a token is a part of a character, its text contains U+FFFD."""
        new = [token for token in ids if token not in self._cached]
        for token, text in zip(new, self._decoded([[*self._before, t] for t in new]), strict=True):
            self._cached[token] = self._own(token, text)
        return [self._cached[token] for token in ids]

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token. They may be a part of a character."""
        (text,) = self.texts([token])
        piece = self._rust.id_to_token(token) or ""
        if _INCOMPLETE not in text:
            return text.encode()
        if fallback := _BYTE.fullmatch(piece):
            return bytes.fromhex(fallback[1])
        table = _byte_letters()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else text.encode()

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of consecutive tokens, without special tokens."""
        return str(self._rust.decode(list(ids), skip_special_tokens=True))

    def _own(self, token: int, text: str) -> str:
        if token in self.specials:
            return str(self._rust.id_to_token(token))
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        return self._decoded([[token]])[0]

    def _decoded(self, rows: list[list[int]]) -> list[str]:
        return list(self._rust.decode_batch(rows, skip_special_tokens=False))


@cache
def _byte_letters() -> dict[str, int]:
    # Byte-level vocabularies (Radford et al., 2019) write printable bytes as themselves, others as letters from U+0100
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}
