"""The fingerprint of a model: a hash of its weights and its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

CHUNK_BYTES = 4 * 2**20
UNHASHED_KEYS = ("transformers_version", "_name_or_path")  # these do not affect results

Progress = Callable[[int], None]  # called with the number of bytes since the last call


def file_identity(path: Path) -> str:
    """Return a string that changes whenever the content of a file may have changed, as a key for its cached hash.

    It consists of path, size, mtime, ctime and inode.
    """
    real = path.resolve()
    status = real.stat()
    return f"{real}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"


def file_sha256(path: Path, cache: MutableMapping[str, str], progress: Progress) -> str:
    """Return the sha256 of a file's content, in hex.

    Args:
        path: The file.
        cache: Hashes by `file_identity`; a new hash is added.
        progress: Called with the number of bytes that were hashed since the last call.
    """
    identity = file_identity(path)
    if identity in cache:
        progress(path.stat().st_size)
        return cache[identity]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    if file_identity(path) == identity:  # unless the file changed during reading
        cache[identity] = digest.hexdigest()
    return digest.hexdigest()


def model_fingerprint(
    raw_config: dict[str, Any],
    files: Iterable[Path],
    cache: MutableMapping[str, str],
    progress: Progress,
) -> str:
    """Return a hash (sha256, in hex) of a model's configuration and of the contents of its weight files.

    Names of files do not matter.

    Args:
        raw_config: config.json, or {} if the weight files contain the configuration.
        files: The weight files.
        cache: Hashes of files by `file_identity`; missing hashes are added.
        progress: Called with the number of bytes hashed since the last call.
    """
    kept = {key: value for key, value in raw_config.items() if key not in UNHASHED_KEYS}
    hashes = sorted(file_sha256(path, cache, progress) for path in files)
    text = json.dumps({"config": kept, "weights": hashes}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
