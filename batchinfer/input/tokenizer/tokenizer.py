"""A checkpoint's own tokenizer: the Rust one, with its special tokens, chat template and fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from batchinfer.input.tokenizer.slow_tokenizer import wrong_tokenizer
from batchinfer.input.tokenizer.token_texts import TokenTexts
from batchinfer.input.tokenizer.tokenizer_files import MAX_TOKENS
from batchinfer.input.tokenizer.tokenizer_source import (
    FAST,
    GgufTokenizer,
    TemplateSource,
    TokenizerFolder,
    source_of,
)

_PROBE = "a"  # a text that shows what the tokenizer puts around texts
_SHOWN = 80  # characters of a token that a message quotes
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Load it with `Tokenizer.load(checkpoint folder or GGUF file)`.

    `rust` is the `tokenizers.Tokenizer` itself. `specials` maps the text of each special token to its id.
    `named` holds bos_token, eos_token and so on as the chat template sees them.
    `template` is None when the checkpoint has no chat template and none is given in its place. `definition` is the JSON
    that makes `rust` again.
    """

    def __init__(
        self,
        folder: Path,
        definition: str,
        template: TemplateSource | None = None,
        source: TokenizerFolder | GgufTokenizer | None = None,
    ) -> None:
        self.folder = folder
        self._source = source or source_of(folder)
        self.rust = _from_json(folder, definition)
        self.definition = definition
        added = self.rust.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values() if token.special}
        self.specials = {token.content: number for number, token in added.items() if token.special}
        config = self._source.config
        self.named = {
            name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None
        }
        self._inputs = config.get("model_input_names")
        self.template = template or self._source.template()
        self._given_template = template
        self.special_pattern = _any_of(self.specials)

    @classmethod
    def load(cls, folder: Path, template: TemplateSource | None = None) -> Tokenizer:
        """`template`: a chat template that takes the place of the checkpoint's.

        Raises JobFileError when the folder has no tokenizer, or one that cannot be read, SecurityRefusal when one of
        its files is no regular file.
        """
        source = source_of(folder)
        found = cls(folder, source.definition(), template, source)
        _check_ids(found)
        return found

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, None when the checkpoint has none."""
        return None if self.template is None else self.template.text

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this: the vocabulary with its added tokens."""
        return max(self.rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def gives_types(self) -> bool:
        """Whether models are told the types of tokens: unless the checkpoint lists what they are told, without them."""
        return not isinstance(self._inputs, list) or "token_type_ids" in self._inputs

    @property
    def tells_the_day(self) -> bool:
        """Whether the chat template writes the day on which it is rendered into the prompt."""
        return "strftime_now" in (self.chat_template or "")

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer's files or keys, the chat template among them, and the one given in its place."""
        digest = hashlib.sha256()
        for part in self._source.content():
            digest.update(part)
        if self._given_template is not None:
            text = self._given_template.text.encode("utf-8", "surrogatepass")
            digest.update(f"given template:{len(text)}:".encode() + text)
        return digest.hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens and the one that ended it left out."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """`decode` of many rows at once."""
        ends, known = self._text_ends, [_ints(ids) for ids in rows]
        if ends:
            known = [ids[:-1] if ids and ids[-1] in ends else ids for ids in known]
        return list(self.rust.decode_batch(known, skip_special_tokens=True))

    def decode_shown(self, rows: Iterable[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """`decode_batch`, in which the special tokens `shown` are not left out."""
        hidden = (frozenset(self.specials.values()) | self._text_ends) - shown
        known = [[token for token in _ints(ids) if token not in hidden] for ids in rows]
        return list(self.rust.decode_batch(known, skip_special_tokens=False))

    @cached_property
    def _text_ends(self) -> frozenset[int]:
        """Tokens that end an answer and would be decoded, as the tokenizer does not call them special: some
        checkpoints' `<|im_end|>`."""
        named = self.rust.token_to_id(self.named.get("eos_token", ""))
        ends = [named, *self._source.ends()]
        return frozenset(one for one in ends if isinstance(one, int) and one not in self.specials.values())

    @cached_property
    def single(self) -> TokenTexts:
        """Return the texts and bytes of single tokens."""
        return TokenTexts(self.rust, self.specials.values())

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special ones included."""
        return self.single.texts(ids)

    def segments(self) -> SegmentEncoder:
        """Encodes texts in which some special-token literals are to stay plain text."""
        return SegmentEncoder(self.definition, self._added, self.specials, self.special_pattern)


class SegmentEncoder:
    """Encodes a rendered text piece by piece: its special tokens by id, what lies between as plain text.

    The pieces are those that the tokenizer itself would cut: it, too, splits at special tokens first.
    """

    def __init__(
        self, definition: str, added: dict[str, Any], specials: dict[str, int], pattern: re.Pattern[str]
    ) -> None:
        self._added = added
        self._specials = specials
        self._pattern = pattern
        self._first = _plain(json.loads(definition), inner=False)
        self._inner = _plain(json.loads(definition), inner=True)

    def encode(self, text: str, masks: dict[str, str], add_special: bool = False) -> list[int]:
        """Token ids of `text` in which each mask stands for a literal that is to be plain text. `add_special`: with
        what the tokenizer itself puts around a text, such as its BOS."""
        ids = self._encoded(text, masks)
        before, behind = self.around if add_special else ([], [])
        return [*before, *ids, *behind]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The token ids that the tokenizer puts before and behind a text."""
        plain = self._first.encode(_PROBE, add_special_tokens=False).ids
        whole = self._first.encode(_PROBE, add_special_tokens=True).ids
        starts = range(len(whole) - len(plain) + 1)
        at = next(start for start in starts if whole[start : start + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def _encoded(self, text: str, masks: dict[str, str]) -> list[int]:
        ids: list[int] = []
        pieces = self._pattern.split(text)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._specials[piece])
                continue
            piece = self._stripped(pieces, index)
            for mask, literal in masks.items():
                piece = piece.replace(mask, literal)
            if piece:
                encoder = self._inner if index else self._first
                ids += encoder.encode(piece, add_special_tokens=False).ids
        return ids

    def _stripped(self, pieces: list[str], index: int) -> str:
        """Return whether special tokens swallow the white space next to them."""
        piece = pieces[index]
        if index and self._added[pieces[index - 1]].rstrip:
            piece = piece.lstrip()
        if index + 1 < len(pieces) and self._added[pieces[index + 1]].lstrip:
            piece = piece.rstrip()
        return piece


def _plain(definition: dict[str, Any], inner: bool) -> Any:
    """A copy that reads special tokens as text; `inner`: for pieces that do not begin the text."""
    pre = definition.get("pre_tokenizer") or {}
    for part in [pre, *pre.get("pretokenizers", [])]:
        if inner and part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
    rust = tokenizers.Tokenizer.from_str(json.dumps(definition))
    rust.no_padding()
    rust.no_truncation()
    rust.encode_special_tokens = True
    return rust


def _from_json(folder: Path, definition: str) -> Any:
    try:
        rust = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
        raise wrong_tokenizer(folder, f"{FAST} cannot be read as a tokenizer: {error}") from None
    _check_size(folder, rust)
    rust.no_padding()
    rust.no_truncation()
    return rust


def _check_size(folder: Path, rust: Any) -> None:
    """Raises JobFileError for more tokens than processes have memory for."""
    tokens = rust.get_vocab_size(with_added_tokens=True)
    if tokens > MAX_TOKENS:
        raise wrong_tokenizer(
            folder,
            f"{FAST} has {tokens:,} tokens; at most {MAX_TOKENS:,} are supported",
            "use another model",
        )


def _check_ids(tokenizer: Tokenizer) -> None:
    """Raises JobFileError for an id so high that tables of all tokens take more than processes have memory for."""
    if tokenizer.vocab_size <= MAX_TOKENS:
        return
    vocabulary = tokenizer.rust.get_vocab(with_added_tokens=True)
    token = max(vocabulary, key=vocabulary.__getitem__)
    text = f"{FAST} gives the token {token[:_SHOWN]!r} the id {vocabulary[token]:,}; ids must be below {MAX_TOKENS:,}"
    raise wrong_tokenizer(tokenizer.folder, text)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in literals if text), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _ints(ids: Sequence[int]) -> list[int]:
    if isinstance(ids, list):
        return ids
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
