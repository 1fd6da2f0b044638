"""The digests of the files that an engine reads, which must be equal on this machine and on all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from batchinfer.engine.config import LoadConfig
from batchinfer.models.files.fingerprint import file_sha256

_READ = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")
_NAMED = 5  # largest number of files in a message


def folders_of(load: LoadConfig, tokenizer: Path | None) -> list[Path]:
    """Return the folders and files that an engine reads: model, adapters, draft model, draft heads and tokenizer.

    Args:
        load: How the engine loads its weights.
        tokenizer: Folder of the tokenizer, or None.
    """
    found = [load.model, *(path for _, path in load.adapters)]
    found += [] if load.draft_model is None else [load.draft_model.model]
    found += [] if load.heads is None else [load.heads]
    return list(dict.fromkeys([*found, *([] if tokenizer is None else [tokenizer])]))


def digests(path: Path, cache: MutableMapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each model file in a folder, or of a single file, by file name.

    Args:
        path: The folder or the file.
        cache: Known digests of files, for `file_sha256`. New digests are added.

    Raises:
        OSError: A file cannot be read.
    """
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _READ)
    return {one.name: file_sha256(one, cache, lambda _: None) for one in files if one.is_file()}


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return a text that names the files that differ between this machine and a node, or "" if all are equal.

    Args:
        expected: SHA-256 by file name on this machine.
        found: SHA-256 by file name on the node.
    """
    names = [*_differing(expected, found)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _differing(expected: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*expected, *found}):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is missing on the machine of the run"
        elif expected[name] != found[name]:
            yield f"{name} differs"
