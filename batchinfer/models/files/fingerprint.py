"""The fingerprint identifies a model: a hash of its weights and its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

CHUNK_BYTES = 4 * 2**20
UNHASHED_KEYS = ("transformers_version", "_name_or_path")  # who saved it, not what it computes

Progress = Callable[[int], None]  # gets the number of bytes done since it was last called


def file_identity(path: Path) -> str:
    """Path, size, mtime, ctime and inode as one string: what must be unchanged for a cached hash to hold."""
    real = path.resolve()
    status = real.stat()
    return f"{real}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"


def file_sha256(path: Path, cache: MutableMapping[str, str], progress: Progress) -> str:
    """The file's sha256 in hex, from `cache` (by `file_identity`) when it is there; put there otherwise."""
    identity = file_identity(path)
    if identity in cache:
        progress(path.stat().st_size)
        return cache[identity]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    if file_identity(path) == identity:  # else it changed while it was read: nothing to remember
        cache[identity] = digest.hexdigest()
    return digest.hexdigest()


def model_fingerprint(
    raw_config: dict[str, Any],
    files: Iterable[Path],
    cache: MutableMapping[str, str],
    progress: Progress,
) -> str:
    """sha256 in hex over the configuration's content and every weight file's content; names do not count."""
    kept = {key: value for key, value in raw_config.items() if key not in UNHASHED_KEYS}
    hashes = sorted(file_sha256(path, cache, progress) for path in files)
    text = json.dumps({"config": kept, "weights": hashes}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
