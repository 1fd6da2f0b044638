"""The chunks of a segment: for each its digest, its rows, and the reply of the worker that prepared it, without tokens.

chunks.jsonl  a line for each chunk
replies.bin   the replies (render_reply.py), end to end
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
    """A chunk of `rows` rows, whose reply has `size` bytes from `at` of the open file `replies`. Without a digest it
    has no reply, and must be read again."""

    digest: str
    rows: int
    at: int
    size: int
    replies: int

    def read(self) -> bytes:
        """Return the reply."""
        return os.pread(self.replies, self.size, self.at)


def chunk_digest(chunk: InputChunk) -> str:
    """Return a digest of the bytes of a chunk, of its place in its file, and of how it is read."""
    header, data = chunk.pack()
    found = sha256(repr(replace(header, bytes_read=0)).encode("utf-8", "surrogatepass"))
    found.update(data)
    return found.hexdigest()


def kept_chunks(lines: bytes, replies: int) -> list[KeptChunk]:
    """Return the chunks of a segment. Raises ValueError for lines that are not as they were written."""
    found = []
    for line in lines.splitlines():
        digest, rows, at, size = json.loads(line)
        found.append(KeptChunk(digest, rows, at, size, replies))
    return found


class KeptWriter:
    """Writes the files of a segment. Call `finish` at the end, or nothing is kept, and `close` in any case."""

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
        """Complete the files, and return their digests. The files count once a marker names the segment. Raises
        StorageError."""
        self._files[FACTS].write(facts.to_json())
        return {name: file.commit() for name, file in self._files.items()}

    def close(self) -> None:
        """Give up what was not finished."""
        for file in self._files.values():
            file.close()
