"""The chunks of a segment of the kept index: digest, number of rows and worker's reply, without tokens.

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
    """A chunk of an input file whose prepared rows a run keeps for the next run of the job.

    A chunk without a digest has no stored reply and must be prepared again.

    Attributes:
        digest: The digest of the chunk, from `chunk_digest`, or "".
        rows: Its number of rows.
        at: The byte offset of the worker's reply to this chunk in replies.bin.
        size: The size of the reply in bytes.
        replies: File descriptor of replies.bin.
    """

    digest: str
    rows: int
    at: int
    size: int
    replies: int

    def read(self) -> bytes:
        """Return the stored bytes of the chunk's prepared rows, as a worker packed them."""
        return os.pread(self.replies, self.size, self.at)


def chunk_digest(chunk: InputChunk) -> str:
    """Return a hex digest of an input chunk's bytes, its position in the file and how it is read."""
    header, data = chunk.pack()
    found = sha256(repr(replace(header, bytes_read=0)).encode("utf-8", "surrogatepass"))
    found.update(data)
    return found.hexdigest()


def kept_chunks(lines: bytes, replies: int) -> list[KeptChunk]:
    """Return the chunks of a segment of the kept index. Raises ValueError for damaged lines.

    Args:
        lines: The content of chunks.jsonl.
        replies: File descriptor of replies.bin.
    """
    found = []
    for line in lines.splitlines():
        digest, rows, at, size = json.loads(line)
        found.append(KeptChunk(digest, rows, at, size, replies))
    return found


class KeptWriter:
    """Writes the files of a segment of the kept index. Call `finish` to keep them, and `close` in any case."""

    def __init__(self, kept: Path, ops: FileOps) -> None:
        self._folder = new_folder(kept, ops)
        self._files = {name: DurableFile(self._folder / name, ops) for name in NAMES}

    def append(self, digest: str, rows: int, reply: bytes) -> None:
        """Write a chunk: its digest, its number of rows, and the worker's reply. Raises StorageError."""
        replies = self._files[REPLIES]
        line = [digest, rows, replies.tell(), len(reply)]
        replies.write(reply)
        self._files[CHUNKS].write(json.dumps(line).encode() + b"\n")

    @property
    def folder(self) -> str:
        """Return the name of the folder with the files of the segment that is written."""
        return self._folder.name

    def finish(self, facts: SegmentFacts) -> dict[str, Digest]:
        """Complete the files of the segment, and return their digests by file name.

        The files are only used once a marker names the segment. Raises StorageError.
        """
        self._files[FACTS].write(facts.to_json())
        return {name: file.commit() for name, file in self._files.items()}

    def close(self) -> None:
        """Discard the files of the segment that were not finished."""
        for file in self._files.values():
            file.close()
