"""The chunks of a segment: the digest, the number of rows and the worker's reply of each, without tokens.

chunks.jsonl  one line per chunk
replies.bin   the concatenated replies (render_reply.py)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from batchinfer.filesystem.durable import Digest, DurableFile, FileOps
from batchinfer.input.chunk import InputChunk
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.files import CHUNKS, FACTS, NAMES, REPLIES, new_folder


@dataclass(frozen=True, slots=True)
class KeptChunk:
    """A chunk of the kept index. A chunk without a digest has no reply and must be prepared again.

    Args:
        digest: The digest of the chunk, from `chunk_digest`.
        rows: Its number of rows.
        at: The offset of its reply in bytes.
        size: The size of its reply in bytes.
        replies: File descriptor of replies.bin.
    """

    digest: str
    rows: int
    at: int
    size: int
    replies: int

    def read(self) -> bytes:
        """Return the reply."""
        return os.pread(self.replies, self.size, self.at)


def chunk_digest(chunk: InputChunk) -> str:
    """Return a digest of a chunk's bytes, its position in the file and how it is read."""
    header, data = chunk.pack()
    found = sha256(repr(replace(header, bytes_read=0)).encode("utf-8", "surrogatepass"))
    found.update(data)
    return found.hexdigest()


def kept_chunks(lines: bytes, replies: int) -> list[KeptChunk]:
    """Return the chunks of a segment. Raises ValueError for damaged lines."""
    found = []
    for line in lines.splitlines():
        digest, rows, at, size = json.loads(line)
        found.append(KeptChunk(digest, rows, at, size, replies))
    return found


class KeptWriter:
    """Writes the files of a segment. Call `finish` to keep them, and `close` in any case."""

    def __init__(self, kept: Path, ops: FileOps) -> None:
        self._folder = new_folder(kept, ops)
        self._files = {name: DurableFile(self._folder / name, ops) for name in NAMES}

    def append(self, digest: str, rows: int, reply: bytes) -> None:
        """Write a chunk. Raises StorageError."""
        replies = self._files[REPLIES]
        line = [digest, rows, replies.tell(), len(reply)]
        replies.write(reply)
        self._files[CHUNKS].write(json.dumps(line).encode() + b"\n")

    @property
    def folder(self) -> str:
        """Return the name of the segment's folder."""
        return self._folder.name

    def finish(self, facts: SegmentFacts) -> dict[str, Digest]:
        """Complete the files, and return their digests.

        The files are only used once a marker names the segment. Raises StorageError.
        """
        self._files[FACTS].write(facts.to_json())
        return {name: file.commit() for name, file in self._files.items()}

    def close(self) -> None:
        """Discard unfinished files."""
        for file in self._files.values():
            file.close()
