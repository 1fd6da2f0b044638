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
    """A chunk of an input file whose prepared rows an earlier run kept, so that they can be reused.

    Attributes:
        digest: The digest of the chunk, from `chunk_digest`. "": it has no stored reply and must be prepared
            again.
        rows: Number of rows of the chunk.
        at: The byte offset of the stored reply in replies.bin. The reply of a render worker has the prepared
            rows.
        size: The size of the reply in bytes.
        replies: File descriptor of replies.bin.
    """

    digest: str
    rows: int
    at: int
    size: int
    replies: int

    def read(self) -> bytes:
        """Return the stored bytes of the chunk's prepared rows, as a worker serialised them."""
        return os.pread(self.replies, self.size, self.at)


def chunk_digest(chunk: InputChunk) -> str:
    """Return a hex digest of an input chunk: its bytes, its position in the file, and how it is read.

    A chunk with the same digest gives the same prepared rows.
    """
    header, data = chunk.serialize()
    found = sha256(repr(replace(header, bytes_read=0)).encode("utf-8", "surrogatepass"))
    found.update(data)
    return found.hexdigest()


def kept_chunks(lines: bytes, replies: int) -> list[KeptChunk]:
    """Return the kept chunks of a segment of the kept index. Raises ValueError if `lines` are damaged.

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
    """Writes the files of a new segment of the kept index.

    `finish` completes the files. Call `close` in any case: without `finish`, it discards them.
    """

    def __init__(self, kept: Path, ops: FileOps) -> None:
        self._folder = new_folder(kept, ops)
        self._files = {name: DurableFile(self._folder / name, ops) for name in NAMES}

    def append(self, digest: str, rows: int, reply: bytes) -> None:
        """Add an input chunk to the segment. Raises StorageError.

        Args:
            digest: The digest of the chunk, or "" if its rows cannot be reused.
            rows: Number of rows.
            reply: The render worker's reply, which has the prepared rows.
        """
        replies = self._files[REPLIES]
        line = [digest, rows, replies.tell(), len(reply)]
        replies.write(reply)
        self._files[CHUNKS].write(json.dumps(line).encode() + b"\n")

    @property
    def folder(self) -> str:
        """Return the name of the segment's folder in the kept index."""
        return self._folder.name

    def finish(self, facts: SegmentFacts) -> dict[str, Digest]:
        """Complete the files of the segment, and return their sizes and digests by file name.

        They are only used by later runs once kept.json names the segment.

        Args:
            facts: The totals over the rows of the segment, which are written as well.

        Raises:
            StorageError: A file cannot be written.
        """
        self._files[FACTS].write(facts.to_json())
        return {name: file.commit() for name, file in self._files.items()}

    def close(self) -> None:
        """Discard the files of the segment, unless `finish` completed them."""
        for file in self._files.values():
            file.close()
