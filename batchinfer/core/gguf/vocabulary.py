"""Reads the vocabulary of a GGUF model from its `tokenizer.` keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from batchinfer.core.errors import JobFileError
from batchinfer.core.gguf.files import GgufModel
from batchinfer.core.gguf.header import wrong_gguf

PREFIX = "tokenizer."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
Item = TypeVar("Item")
# Further end-of-generation tokens, by the same texts as in llama.cpp. A file declares only one, which may not be the
# token that ends a turn of a chat
_ENDS = frozenset([
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<EOT>", "<|return|>", "<|call|>",
])  # fmt: skip
_NO_END = "<|end|>"  # not an end if the vocabulary has both tokens of _CHANNELS: there it ends only a message
_CHANNELS = frozenset(["<|return|>", "<|call|>"])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary in the metadata of a GGUF model.

    Args:
        kind: The kind of tokenizer (tokenizer.ggml.model).
        pre: The rule by which texts are split before merging (tokenizer.ggml.pre). None: not stated.
        tokens: The text of each token by id.
        types: The type of each token by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED or others.
        scores: The score of each token by id; [] if not stated.
        merges: The merges of a BPE tokenizer; [] if not stated.
        stated: The values of all keys that begin with "tokenizer.ggml.", by key without this prefix.
    """

    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    stated: Mapping[str, Any]

    def token(self, key: str) -> str | None:
        """Return the text of a special token; None if the metadata has none.

        Args:
            key: The metadata key with the token's id, without "tokenizer.ggml.", such as "eos_token_id".
        """
        number = self.stated.get(key)
        return self.tokens[number] if type(number) is int and 0 <= number < len(self.tokens) else None

    @property
    def ends(self) -> list[int]:
        """Return the ids of the tokens that end an answer.

        The tokens that the metadata names come first, then further ones that end answers in llama.cpp.
        """
        stated = [self.stated.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        found = [each for each in stated if type(each) is int and 0 <= each < len(self.tokens)]
        special = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind == CONTROL}
        known = _ENDS & special
        if known >= _CHANNELS:
            known -= {_NO_END}
        numbers = {token: number for number, token in enumerate(self.tokens) if token in known}
        return [*dict.fromkeys([*found, *sorted(numbers.values())])]


def vocabulary_of(model: GgufModel) -> Vocabulary | None:
    """Return the vocabulary in the metadata of a GGUF model; None if there is none.

    Raises:
        JobFileError: The vocabulary is invalid.
    """
    start = f"{PREFIX}ggml."
    stated = {k.removeprefix(start): value for k, value in model.metadata.items() if k.startswith(start)}
    if "tokens" not in stated:
        return None
    tokens = _listed(model, stated, "tokens", str)
    types = _listed(model, stated, "token_type", int) or [NORMAL] * len(tokens)
    scores = _listed(model, stated, "scores", float)
    for name, found in (("token_type", types), ("scores", scores)):
        if found and len(found) != len(tokens):
            raise _wrong(model, name, f"has {len(found)} entries; wanted {len(tokens)}, one for each token")
    kind, pre = stated.get("model"), stated.get("pre")
    if not isinstance(kind, str) or not isinstance(pre, str | None):
        raise _wrong(model, "model and pre", f"are {kind!r} and {pre!r}; wanted texts")
    return Vocabulary(kind, pre, tokens, types, scores, _listed(model, stated, "merges", str), stated)


def _listed(model: GgufModel, stated: Mapping[str, Any], key: str, item: Callable[[Any], Item]) -> list[Item]:
    found = stated.get(key, [])
    kinds = (int, float) if item is float else (item,)
    if not isinstance(found, list) or not all(type(each) in kinds for each in found):
        raise _wrong(model, key, "must be a list with elements of the right type")
    return found


def _wrong(model: GgufModel, key: str, what: str) -> JobFileError:
    return wrong_gguf(model.path, f"{model.name}: tokenizer.ggml.{key} {what}")
