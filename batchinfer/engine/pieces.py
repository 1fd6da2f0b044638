"""Cuts a step into pieces that run one after the other when there is no memory to run it at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.engine.scheduler import Chunk

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pieces:
    """The most tokens, and so rows, that run at once; None: no limit. It only ever falls."""

    most_tokens: int | None = None

    def cut(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Cut into pieces, in the same order; a chunk that is too long becomes several. A later piece reads from the
        cache what an earlier one wrote, so the results are the same; only a chunk's last part samples.
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
        """Halve the limit after the device ran out of memory for `piece`, which has two tokens at least."""
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
