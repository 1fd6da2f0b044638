"""How a step is cut when memory does not last for all of it at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.engine.scheduler import Chunk

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pieces:
    """How many tokens run at once at most, and with them how many rows; None: whatever a step holds. It only ever
    falls."""

    most_tokens: int | None = None

    def cut(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """The chunks in the same order, those that are too long in several parts. A later piece finds in the cache what
        an earlier one wrote, so that the step comes to the same; only a chunk's last part samples.
        """
        if self.most_tokens is None:
            return [chunks]
        pieces: list[list[Chunk]] = [[]]
        room = self.most_tokens
        for chunk in _parts(chunks, self.most_tokens):
            if chunk.length > room:
                pieces.append([])
                room = self.most_tokens
            pieces[-1].append(chunk)
            room -= chunk.length
        return pieces

    def shrink(self, piece: list[Chunk]) -> None:
        """Memory did not last for this, of two tokens at least: half as many at once from now on."""
        tokens = sum(c.length for c in piece)
        self.most_tokens = tokens // 2
        _log.warning(
            "the device had no memory for %d tokens of %d rows at once: at most %d are run from here on; lower "
            "engine.kv_memory, engine.max_num_batched_tokens or engine.max_num_seqs",
            tokens,
            len(piece),
            self.most_tokens,
        )


def _parts(chunks: list[Chunk], most: int) -> Iterator[Chunk]:
    for sequence, first, length in chunks:
        for start in range(first, first + length, most):
            yield Chunk(sequence, start, min(most, first + length - start))
