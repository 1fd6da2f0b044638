"""The sources of a tokenizer: files next to the weights, or the keys of a GGUF file."""

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
from batchinfer.input.tokenizer.slow_tokenizer import convert_in_child, wrong_tokenizer
from batchinfer.input.tokenizer.tokenizer_files import file_exists, read_bytes, read_object, read_text

FAST = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_IN_CONFIG = f"{CONFIG} (chat_template)"
_SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_FILES_WITH_ENDS = ("generation_config.json", "config.json")
FILES = (FAST, CONFIG, _TEMPLATE, "special_tokens_map.json", "added_tokens.json", *_SLOW)
_IN_GGUF = f"{PREFIX}chat_template"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template, and the name of its file for messages."""

    text: str
    file: str


class TokenizerFolder:
    """A tokenizer whose files are in the folder of a checkpoint. It has the same methods as GgufTokenizer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def definition(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json. Raises JobFileError or SecurityRefusal."""
        present = [name for name in (*FILES, *_FILES_WITH_ENDS) if file_exists(self._folder / name)]
        if FAST in present:
            return read_text(self._folder / FAST)
        if any(name in present for name in _SLOW):
            return convert_in_child(self._folder)
        raise wrong_tokenizer(self._folder, f"{self._folder} has no tokenizer; {FAST} is needed")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The JSON object in tokenizer_config.json; {} without the file."""
        return read_object(self._folder / CONFIG)

    def template(self) -> TemplateSource | None:
        """Return the chat template of the checkpoint, or None."""
        path = self._folder / _TEMPLATE
        if file_exists(path):
            return TemplateSource(read_text(path), _TEMPLATE)
        found = self.config.get("chat_template")
        if isinstance(found, list):  # several named templates
            defaults = [
                entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"
            ]
            found = defaults[-1].get("template") if defaults else None
        return TemplateSource(found, _IN_CONFIG) if isinstance(found, str) else None

    def ends(self) -> list[Any]:
        """Return the configured ids of the tokens that end an answer. The values are not checked."""
        settings = (read_object(self._folder / name).get("eos_token_id") for name in _FILES_WITH_ENDS)
        stated: Any = next((ids for ids in settings if ids is not None), [])
        return stated if isinstance(stated, list) else [stated]

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of all files that the tokenizer depends on, for its fingerprint."""
        for name in FILES:
            path = self._folder / name
            if file_exists(path):
                yield f"{name}:{path.stat().st_size}:".encode()
                yield read_bytes(path)


class GgufTokenizer:
    """A tokenizer that is stored in the metadata (keys) of a GGUF file.

    Args:
        model: The GGUF file.
        vocabulary: Its tokens, scores and merges.
    """

    def __init__(self, model: GgufModel, vocabulary: Vocabulary) -> None:
        self._model = model
        self._vocabulary = vocabulary

    def definition(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json. Raises JobFileError."""
        return definition_of(self._model, self._vocabulary)

    @property
    def config(self) -> Mapping[str, Any]:
        """The texts of BOS, EOS and so on, by their names in a tokenizer_config.json."""
        keys = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
        names = ("bos_token", "eos_token", "sep_token", "mask_token", *keys)
        return {name: self._vocabulary.token(keys.get(name, f"{name}_id")) for name in names}

    def template(self) -> TemplateSource | None:
        """Return the chat template in the GGUF file, or None."""
        found = self._model.metadata.get(_IN_GGUF)
        return TemplateSource(found, f"{self._model.name} ({_IN_GGUF})") if isinstance(found, str) else None

    def ends(self) -> list[Any]:
        """Return the ids of the tokens that end an answer."""
        return self._vocabulary.ends

    def content(self) -> Iterator[bytes]:
        """Yield the metadata that the tokenizer depends on, as JSON bytes, for its fingerprint."""
        stated = {key: value for key, value in self._model.metadata.items() if key.startswith(PREFIX)}
        architecture = self._model.metadata.get("general.architecture")
        yield json.dumps([architecture, stated], sort_keys=True).encode()


def source_of(path: Path) -> TokenizerFolder | GgufTokenizer:
    """Find out where a model's tokenizer is: in files of a folder, or in a GGUF file.

    If a folder has both, its tokenizer.json is used.

    Args:
        path: The folder of the checkpoint, or a GGUF file.

    Raises:
        JobFileError: The GGUF file has no tokenizer.
        SecurityRefusal: A file is not a regular file.
    """
    if path.is_dir() and file_exists(path / FAST):
        return TokenizerFolder(path)
    model = read_gguf(path)
    if model is None:
        return TokenizerFolder(path)
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        hint = f"name a folder with the file and with the {FAST} of the model's original release"
        raise wrong_tokenizer(path, f"{model.name} holds no tokenizer (tokenizer.ggml.tokens)", hint)
    return GgufTokenizer(model, vocabulary)
