"""The vocabulary of a GGUF model, as its tokenizer's keys state it."""

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
# Tokens that end an answer beside the one that the file names. Files name a single one, which is mostly, but not
# always, the one that ends a turn of a chat; llama.cpp knows the others by these texts
_ENDS = frozenset([
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<EOT>", "<|return|>", "<|call|>",
])  # fmt: skip
_NO_END = "<|end|>"  # where it ends a message and not the answer, these do:
_CHANNELS = frozenset(["<|return|>", "<|call|>"])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens in the order of their ids. `kind` is the tokenizer's (`tokenizer.ggml.model`), `pre` how it cuts
    texts before it merges."""

    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    stated: Mapping[str, Any]  # by what stands behind tokenizer.ggml.

    def token(self, key: str) -> str | None:
        """The text of the token whose id `key` states."""
        number = self.stated.get(key)
        return self.tokens[number] if type(number) is int and 0 <= number < len(self.tokens) else None

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end an answer, the stated one first."""
        stated = [self.stated.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        found = [each for each in stated if type(each) is int and 0 <= each < len(self.tokens)]
        special = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind == CONTROL}
        known = _ENDS & special
        if known >= _CHANNELS:
            known -= {_NO_END}
        numbers = {token: number for number, token in enumerate(self.tokens) if token in known}
        return [*dict.fromkeys([*found, *sorted(numbers.values())])]


def vocabulary_of(model: GgufModel) -> Vocabulary | None:
    """Return the vocabulary; None where the file holds none. Raises JobFileError for keys that do not fit each
    other."""
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
        raise _wrong(model, key, "is no list of what it should hold")
    return found


def _wrong(model: GgufModel, key: str, what: str) -> JobFileError:
    return wrong_gguf(model.path, f"{model.name}: tokenizer.ggml.{key} {what}")
