"""Converts a checkpoint's tokenizer for llguidance, which needs the bytes of each token and the end tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from llguidance import LLTokenizer
from numpy.typing import NDArray

BITS = 32  # bits per word of a mask, see batchinfer_kernels.mask
_END = "<|no token of this model ends an answer|>"
_BYTE = "<0x41>"  # the token of the byte "A" in vocabularies with byte fallback


class NoGrammars(ValueError):
    """Raised for a tokenizer that does not support constraints, because its tokens cannot be read as bytes."""


@dataclass(frozen=True)
class GrammarTokenizer:
    """A model's tokenizer in the form that llguidance needs to compute token masks.

    Args:
        library: llguidance's tokenizer.
        vocab: The number of token ids of the model. The tokenizer may have more or fewer.
        end: The id of an artificial end token, which llguidance needs if the model has no end token. The model never
            generates it. None if the model has end tokens.
        drops_space: True if decoding removes a space at the start of an answer.
    """

    library: LLTokenizer
    vocab: int
    end: int | None
    drops_space: bool

    @classmethod
    def of(cls, definition: str, eos: Collection[int], vocab: int) -> GrammarTokenizer:
        """Convert a model's tokenizer. Raises NoGrammars if llguidance does not support it.

        Args:
            definition: The tokenizer as the text of a tokenizer.json.
            eos: The ids of the model's end tokens; may be empty.
            vocab: The number of token ids of the model.
        """
        made, ends = _prepare(definition), sorted(eos)
        if not ends:  # llguidance would choose a token of text
            ends = [tokenizers.Tokenizer.from_str(definition).get_vocab_size(with_added_tokens=True)]
            made["added_tokens"] = [*made["added_tokens"], _special(ends[0])]
        try:
            library = LLTokenizer(json.dumps(made), eos_token=ends)
        except ValueError as error:
            raise _no_grammars(error) from None
        return cls(library, vocab, None if eos else ends[0], _drops_space(made["decoder"]))

    @property
    def words(self) -> int:
        """The number of 32-bit words in a mask, with one bit per token id."""
        return -(-self.library.vocab_size // BITS)

    @cached_property
    def given(self) -> NDArray[np.int32] | None:
        """The mask (one bit per token id) of the tokens that the model can generate.

        None if it can generate all tokens.
        """
        if self.end is None and self.library.vocab_size <= self.vocab:
            return None
        return self._mask([t for t in range(self.library.vocab_size) if self.gives(t)])

    @cached_property
    def first(self) -> NDArray[np.int32] | None:
        """The mask (one bit per token id) of the tokens that an answer may begin with, or None for all tokens.

        A token that begins with a space is excluded if decoding would remove the space.
        """
        if not self.drops_space:
            return None
        return self._mask([t for t in range(self.library.vocab_size) if not self._spaced(t)])

    def gives(self, token: int) -> bool:
        """Return True if the model can generate the token: its logits include the token's id."""
        return token < self.vocab and token != self.end

    def asks_one(self, token: int, begun: bool) -> bool:
        """Return True if llguidance's own check of a single token shows whether the token may come next.

        If False, it may allow tokens that are excluded here. The caller must then compute the mask of all tokens.

        Args:
            token: The token id.
            begun: True if the answer already has a token.
        """
        return token < self.library.vocab_size and self.given is None and (begun or not self.drops_space)

    def begins(self, token: int) -> bool:
        """Return True if this token may be the first token of an answer: decoding would not remove a space from it."""
        return not (self.drops_space and self._spaced(token))

    def _spaced(self, token: int) -> bool:
        return self.library.decode_bytes([token]).startswith(b" ")

    def _mask(self, tokens: list[int]) -> NDArray[np.int32]:
        bits = np.zeros(self.words * BITS, np.uint8)
        bits[tokens] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def grammar_problem(definition: str) -> str | None:
    """Return why llguidance does not support a tokenizer for constraints, or None if it does.

    Args:
        definition: The tokenizer as the text of a tokenizer.json. Its vocabulary is not read, which saves time.
    """
    try:
        made = _prepare(definition)
        made |= {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
        LLTokenizer(json.dumps(made))
    except NoGrammars as error:
        return str(error)
    except ValueError as error:
        return str(_no_grammars(error))
    return None


def _prepare(definition: str) -> dict[str, Any]:
    # llguidance encodes the text that a grammar forces, so the tokenizer must not change it first
    made: dict[str, Any] = json.loads(definition)
    decoder, pieces = made.get("decoder") or {}, made["model"].get("vocab") or {}
    bytes_are_read = any(f'"{kind}"' in json.dumps(decoder) for kind in ("ByteFallback", "ByteLevel"))
    if not bytes_are_read and _BYTE in (pieces if isinstance(pieces, dict) else dict(pieces)):
        raise NoGrammars("the tokenizer has tokens for bytes, and its decoder writes their names as text")
    return {
        **made,
        "added_tokens": made.get("added_tokens") or [],
        "padding": None,
        "truncation": None,
        "normalizer": {"type": "Sequence", "normalizers": _spaces(made.get("normalizer") or {})},
        "pre_tokenizer": _without_prefix(made.get("pre_tokenizer")),
        "decoder": _supported_decoder(decoder),
    }


def _spaces(normalizer: dict[str, Any]) -> list[dict[str, Any]]:
    if normalizer.get("type") == "Sequence":
        return [step for part in normalizer["normalizers"] for step in _spaces(part)]
    kept = normalizer.get("type") == "Replace" and normalizer["pattern"] == {"String": " "}
    return [normalizer] if kept else []


def _without_prefix(pre_tokenizer: Any) -> Any:
    # llguidance removes the corresponding option of Metaspace itself
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    inner = [_without_prefix(part) for part in pre_tokenizer.get("pretokenizers", [])]
    return {
        **pre_tokenizer,
        **({"pretokenizers": inner} if inner else {}),
        **({"add_prefix_space": False} if "add_prefix_space" in pre_tokenizer else {}),
    }


def _supported_decoder(decoder: dict[str, Any]) -> dict[str, Any]:
    """Replace a Metaspace decoder of a tokenizer.json by equivalent decoders that llguidance supports."""
    if decoder.get("type") == "Sequence":
        return {**decoder, "decoders": [_supported_decoder(part) for part in decoder["decoders"]]}
    if decoder.get("type") != "Metaspace":
        return decoder
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if decoder.get("prepend_scheme") != "never":
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _drops_space(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return any(map(_drops_space, decoder["decoders"]))
    return decoder.get("type") == "Strip" and decoder["content"] == " " and decoder["start"] > 0


def _special(token: int) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": _END, "special": True, **plain}


def _no_grammars(error: ValueError) -> NoGrammars:
    return NoGrammars(
        f"llguidance cannot read the tokenizer, only byte-level and SentencePiece ones: {error}"
    )
