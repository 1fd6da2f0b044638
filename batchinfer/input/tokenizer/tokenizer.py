"""The tokenizer of a checkpoint, with its special tokens, chat template and fingerprint."""

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

_PROBE = "a"  # a text that is encoded to find the tokens that are added around texts
_SHOWN = 80  # maximum characters of a token in a message
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a checkpoint. It encodes texts and decodes token ids.

    Use `Tokenizer.load(checkpoint folder or GGUF file)`.

    Attributes:
        rust: The `tokenizers.Tokenizer`.
        definition: The text of the tokenizer.json from which `rust` was made.
        specials: The ids of special tokens by their texts.
        named: The texts of bos_token, eos_token and so on, as the chat template sees them.
        template: The chat template, or None.
        special_pattern: Matches the texts of special tokens.
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
        """Load the tokenizer of a checkpoint.

        Args:
            folder: The folder of the checkpoint, or a GGUF file.
            template: A chat template that replaces the one of the checkpoint, or None.

        Raises:
            JobFileError: There is no tokenizer, or it cannot be read.
            SecurityRefusal: One of its files is not a regular file.
        """
        source = source_of(folder)
        found = cls(folder, source.definition(), template, source)
        _check_ids(found)
        return found

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, or None."""
        return None if self.template is None else self.template.text

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids including added tokens: the highest id plus 1."""
        return max(self.rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def gives_types(self) -> bool:
        """True if the model takes token types (segments), or if the checkpoint does not list the model's inputs."""
        return not isinstance(self._inputs, list) or "token_type_ids" in self._inputs

    @property
    def may_write_date(self) -> bool:
        """True if the chat template may write the current date into prompts: it contains `strftime_now`."""
        return "strftime_now" in (self.chat_template or "")

    @property
    def fingerprint(self) -> str:
        """The sha256 of all that determines the tokens of prompts: the tokenizer's files or keys, and the template."""
        digest = hashlib.sha256()
        for part in self._source.content():
            digest.update(part)
        if self._given_template is not None:
            text = self._given_template.text.encode("utf-8", "surrogatepass")
            digest.update(f"given template:{len(text)}:".encode() + text)
        return digest.hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode an answer to text, without special tokens and without the token that ended the answer.

        Args:
            ids: The token ids of the answer.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Decode several answers to texts, each as `decode` does.

        Args:
            rows: The token ids of each answer.
        """
        ends, answers = self._text_ends, [_ints(ids) for ids in rows]
        if ends:
            answers = [ids[:-1] if ids and ids[-1] in ends else ids for ids in answers]
        return list(self.rust.decode_batch(answers, skip_special_tokens=True))

    def decode_shown(self, rows: Iterable[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """Decode several answers to texts, without special tokens except those in `shown`.

        Args:
            rows: The token ids of each answer.
            shown: The ids of special tokens to keep.
        """
        hidden = (frozenset(self.specials.values()) | self._text_ends) - shown
        visible = [[token for token in _ints(ids) if token not in hidden] for ids in rows]
        return list(self.rust.decode_batch(visible, skip_special_tokens=False))

    @cached_property
    def _text_ends(self) -> frozenset[int]:
        # Some checkpoints do not mark a token that ends answers, such as `<|im_end|>`, as special
        named = self.rust.token_to_id(self.named.get("eos_token", ""))
        ends = [named, *self._source.ends()]
        return frozenset(one for one in ends if isinstance(one, int) and one not in self.specials.values())

    @cached_property
    def single(self) -> TokenTexts:
        """The TokenTexts of the tokenizer, which decodes single tokens."""
        return TokenTexts(self.rust, self.specials.values())

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, including special tokens."""
        return self.single.texts(ids)

    def segments(self) -> SegmentEncoder:
        """Return an encoder that encodes texts of rows as plain text, even if they look like special tokens."""
        return SegmentEncoder(self.definition, self._added, self.specials, self.special_pattern)


class SegmentEncoder:
    """Encodes prompts in which some texts look like special tokens, but must be encoded as plain text.

    Placeholders have replaced these texts in the prompt.

    Args:
        definition: The tokenizer as the text of a tokenizer.json.
        added: The special tokens as objects of `tokenizers`, by text.
        specials: The ids of the special tokens by text.
        pattern: Matches the special tokens.
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
        """Return the token ids of a prompt.

        Args:
            text: The rendered prompt.
            masks: Texts that look like special tokens, by the placeholder that replaces each in `text`. They are
                encoded as plain text.
            add_special: True to add the tokens that the tokenizer puts around a text, such as BOS.
        """
        ids = self._encoded(text, masks)
        before, behind = self.surrounding_ids if add_special else ([], [])
        return [*before, *ids, *behind]

    @cached_property
    def surrounding_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before a text and after it: (ids before, ids after)."""
        plain = self._first.encode(_PROBE, add_special_tokens=False).ids
        whole = self._first.encode(_PROBE, add_special_tokens=True).ids
        starts = range(len(whole) - len(plain) + 1)
        at = next(start for start in starts if whole[start : start + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def _encoded(self, text: str, masks: dict[str, str]) -> list[int]:
        # The tokenizer, too, splits texts at special tokens, so all other texts get the same tokens
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
        # Special tokens may absorb the white space next to them
        piece = pieces[index]
        if index and self._added[pieces[index - 1]].rstrip:
            piece = piece.lstrip()
        if index + 1 < len(pieces) and self._added[pieces[index + 1]].lstrip:
            piece = piece.rstrip()
        return piece


def _plain(definition: dict[str, Any], inner: bool) -> Any:
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
    tokens = rust.get_vocab_size(with_added_tokens=True)
    if tokens > MAX_TOKENS:
        raise wrong_tokenizer(
            folder,
            f"{FAST} has {tokens:,} tokens; at most {MAX_TOKENS:,} are supported",
            "use another model",
        )


def _check_ids(tokenizer: Tokenizer) -> None:
    # Tables of all tokens have an entry for each id up to the highest
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
