"""The chunks of a kept index: of each its digest, its rows, and what was made of them, without tokens.

chunks.jsonl  a line for each chunk
replies.bin   what was made of the chunks (render_reply.py), end to end
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from batchinfer.data.input.chunk import InputChunk
from batchinfer.data.kept.rows import Marks, Numbers, iter_pieces


@dataclass(frozen=True, slots=True)
class KeptReply:
    """A chunk, and what was made of it: `size` bytes from `at` of the open file `replies`. `first` is the number of its
    first row in its stretch, and `first_of_all` that among the rows of all stretches."""

    digest: str
    first: int
    first_of_all: int
    rows: int
    at: int
    size: int
    replies: int

    def read(self) -> bytes:
        """Return what was made of it."""
        return b"".join(iter_pieces(self.replies, self.at, self.size))


def chunk_digest(chunk: InputChunk) -> str:
    """Return a digest of the bytes of a chunk, of its place in its file, and of how it is read."""
    header, data = chunk.packed()
    found = sha256(repr(replace(header, bytes_read=0)).encode("utf-8", "surrogatepass"))
    found.update(data)
    return found.hexdigest()


class KeptChunks:
    """The chunks of a stretch, of which those are used again whose rows are all `usable`, or error rows."""

    def __init__(self, lines: bytes, replies: int, before: int) -> None:
        """before: rows of the stretches before. Raises ValueError for lines that are not as they were written."""
        self._all: list[KeptReply] = []
        first = 0
        for line in lines.splitlines():
            digest, rows, at, size = json.loads(line)
            self._all.append(KeptReply(digest, first, before + first, rows, at, size, replies))
            first += rows
        self._usable: list[bool] = []
        self._by_digest: dict[str, KeptReply] = {}

    def choose(self, needs_tokens: Marks) -> None:
        """Use the chunks without any row that needs tokens."""
        before: Numbers = np.concatenate([np.zeros(1, np.int64), np.cumsum(needs_tokens, dtype=np.int64)])
        firsts = np.array([one.first for one in self._all], np.int64)
        ends = firsts + np.array([one.rows for one in self._all], np.int64)
        self._usable = (before[ends] == before[firsts]).tolist()
        chosen = zip(self._all, self._usable, strict=True)
        self._by_digest = {one.digest: one for one, usable in chosen if usable and one.digest}

    def find(self, digest: str) -> KeptReply | None:
        """Return a chunk that can be used again."""
        return self._by_digest.get(digest)

    def run(self, first: int, count: int) -> list[KeptReply] | None:
        """Return so many chunks that follow one another; None where one of them cannot be used again."""
        chosen = slice(first, first + count)
        whole = all(self._usable[chosen]) and all(one.digest for one in self._all[chosen])
        return self._all[chosen] if whole else None
