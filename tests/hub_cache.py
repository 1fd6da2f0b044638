"""A Hugging Face cache in the layout of huggingface_hub, made from a checkpoint folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_into_cache(
    cache: Path, checkpoint: Path, repo: str = "org/tiny", ref: str = "main", commit: str = COMMIT
) -> Path:
    """Return the snapshot folder of `checkpoint` in `cache`, with links to blobs that have the files'
    content."""
    entry = cache / f"models--{repo.replace('/', '--')}"
    snapshot = entry / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir(exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        blob = entry / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (entry / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (entry / "refs" / ref).write_text(commit)
    return snapshot
