"""A tokenizer is kept in files of its own beside the weights, or in the GGUF file of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from batchinfer.core.gguf.files import GgufModel, read_gguf
from batchinfer.core.gguf.vocabulary import PREFIX, Vocabulary, vocabulary_of
from batchinfer.input.tokenizer.gguf_tokenizer import definition_of
from batchinfer.input.tokenizer.slow_tokenizer import converted, wrong_tokenizer
from batchinfer.input.tokenizer.tokenizer_files import held, read_bytes, read_object, read_text

FAST = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_IN_CONFIG = f"{CONFIG} (chat_template)"
_SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_STATING_ENDS = ("generation_config.json", "config.json")
FILES = (FAST, CONFIG, _TEMPLATE, "special_tokens_map.json", "added_tokens.json", *_SLOW)
_IN_GGUF = f"{PREFIX}chat_template"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template, and the file that holds it, as messages name it."""

    text: str
    file: str


class TokenizerFolder:
    """A tokenizer in files of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def definition(self) -> str:
        """Return the JSON that makes the tokenizer. Raises JobFileError, SecurityRefusal."""
        there = [name for name in (*FILES, *_STATING_ENDS) if held(self._folder / name)]
        if FAST in there:
            return read_text(self._folder / FAST)
        if any(name in there for name in _SLOW):
            return converted(self._folder)
        raise wrong_tokenizer(self._folder, f"{self._folder} has no tokenizer; {FAST} is needed")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The values that tokenizer_config.json states."""
        return read_object(self._folder / CONFIG)

    def template(self) -> TemplateSource | None:
        """Return the chat template, None where there is none."""
        path = self._folder / _TEMPLATE
        if held(path):
            return TemplateSource(read_text(path), _TEMPLATE)
        found = self.config.get("chat_template")
        if isinstance(found, list):  # several, each with a name
            defaults = [
                entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"
            ]
            found = defaults[-1].get("template") if defaults else None
        return TemplateSource(found, _IN_CONFIG) if isinstance(found, str) else None

    def ends(self) -> list[Any]:
        """Return what is stated as the ids of the tokens that end an answer."""
        said = (read_object(self._folder / name).get("eos_token_id") for name in _STATING_ENDS)
        stated: Any = next((ids for ids in said if ids is not None), [])
        return stated if isinstance(stated, list) else [stated]

    def content(self) -> Iterator[bytes]:
        """Yield everything that the tokenizer depends on."""
        for name in FILES:
            path = self._folder / name
            if held(path):
                yield f"{name}:{path.stat().st_size}:".encode()
                yield read_bytes(path)


class GgufTokenizer:
    """A tokenizer that a GGUF file holds."""

    def __init__(self, model: GgufModel, vocabulary: Vocabulary) -> None:
        self._model = model
        self._vocabulary = vocabulary

    def definition(self) -> str:
        """Return the JSON that makes the tokenizer. Raises JobFileError."""
        return definition_of(self._model, self._vocabulary)

    @property
    def config(self) -> Mapping[str, Any]:
        """The texts of named tokens, as tokenizer_config.json has them."""
        keys = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
        names = ("bos_token", "eos_token", "sep_token", "mask_token", *keys)
        return {name: self._vocabulary.token(keys.get(name, f"{name}_id")) for name in names}

    def template(self) -> TemplateSource | None:
        """Return the chat template, None where there is none."""
        found = self._model.metadata.get(_IN_GGUF)
        return TemplateSource(found, f"{self._model.name} ({_IN_GGUF})") if isinstance(found, str) else None

    def ends(self) -> list[Any]:
        """Return the ids of the tokens that end an answer."""
        return self._vocabulary.ends

    def content(self) -> Iterator[bytes]:
        """Yield everything that the tokenizer depends on."""
        stated = {key: value for key, value in self._model.metadata.items() if key.startswith(PREFIX)}
        architecture = self._model.metadata.get("general.architecture")
        yield json.dumps([architecture, stated], sort_keys=True).encode()


def source_of(path: Path) -> TokenizerFolder | GgufTokenizer:
    """Return where the tokenizer of the model at `path` is kept. A tokenizer.json in a folder is preferred to what a
    GGUF file in it holds. Raises JobFileError, SecurityRefusal."""
    if path.is_dir() and held(path / FAST):
        return TokenizerFolder(path)
    model = read_gguf(path)
    if model is None:
        return TokenizerFolder(path)
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        hint = f"name a folder with the file and with the {FAST} of the model's original release"
        raise wrong_tokenizer(path, f"{model.name} holds no tokenizer (tokenizer.ggml.tokens)", hint)
    return GgufTokenizer(model, vocabulary)
