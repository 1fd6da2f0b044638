"""Runs: a few rows that follow one another, with one digest. Where a run ends follows from the content of its rows, so
that runs of rows that did not change are recognised behind rows that were inserted, too, and none of their rows has to
be looked at. (Content-defined chunking: A. Muthitacharoen et al., A Low-bandwidth Network File System, 2001.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.data.input.digests.row_digest import DIGEST_BYTES
from batchinfer.data.input.rows import Values

_MEAN_BITS = 3  # a run has eight rows on average: where 1% of the rows changed, 15% are looked at one by one
_MOST = 64  # rows of a run
_MIX = np.uint32(0x9E3779B1)  # the golden ratio's bits: spreads what lies in the low ones over the high ones

Numbers = NDArray[np.int64]


def _byte_weights() -> NDArray[np.uint32]:
    """Return a number for each byte, always the same."""
    words = b"".join(blake2b(bytes([byte]), digest_size=4, person=b"runs").digest() for byte in range(256))
    return np.frombuffer(words, "<u4")


_WEIGHTS = _byte_weights()


class RunsOfRows(NamedTuple):
    """The runs that some rows are, one behind the other: their digests, end to end, and how many rows each has."""

    digests: bytes
    sizes: NDArray[np.int32]


NO_RUNS = RunsOfRows(b"", np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class OpenedRuns:
    """The rows of some runs: `sizes` says how many each has, and `digests` are those of the rows, end to end."""

    rows: Sequence[Values | RowError]
    sizes: Numbers
    digests: bytes


class Runs(Protocol):
    """The runs of a chunk. `digests` are theirs, end to end."""

    @property
    def digests(self) -> bytes: ...

    def opened(self, which: Numbers) -> OpenedRuns:
        """Read the rows of these runs, whose numbers ascend."""


@dataclass(frozen=True, slots=True)
class OneRun:
    """Rows that were read already, as one run that is never recognised."""

    rows: Sequence[Values | RowError]
    row_digests: bytes

    @property
    def digests(self) -> bytes:
        return bytes(DIGEST_BYTES)

    def opened(self, which: Numbers) -> OpenedRuns:
        """Return all rows."""
        return OpenedRuns(self.rows, np.array([len(self.rows)], np.int64), self.row_digests)


def weights(data: Any, starts: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return a number for each stretch of bytes, that follows from them alone. The stretches begin at `starts`, where
    the one before ends; the last one ends with the data. Those without bytes have 0."""
    own = np.zeros(len(starts), np.uint32)
    ends = np.append(starts[1:], len(data))
    there = np.flatnonzero(ends > starts)
    if len(there):
        spread = _WEIGHTS[np.frombuffer(data, np.uint8)]
        own[there] = np.add.reduceat(spread[: int(ends[-1])], starts[there])
    return own


def run_ends(rows: NDArray[np.uint32]) -> Numbers:
    """Return where the runs of these rows end, which have these weights: behind each eighth row by chance, and behind
    64 rows at the latest."""
    if not len(rows):
        return np.zeros(0, np.int64)
    last = (rows * _MIX) >> np.uint32(32 - _MEAN_BITS) == 0
    last[-1] = True
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    long = np.flatnonzero(ends - starts > _MOST)
    between = [np.arange(starts[at] + _MOST, ends[at], _MOST) for at in long.tolist()]
    return np.sort(np.concatenate([ends, *between])).astype(np.int64)


def run_digests(runs: Iterable[Iterable[Any]], reading: object) -> bytes:
    """Return the digests of runs, end to end, whose bytes come in pieces: where these end has to follow from them.
    `reading` is what else decides how rows are read."""
    seeded = blake2b(repr(reading).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"run")
    found = []
    for pieces in runs:
        one = seeded.copy()
        one.update(b"\n")  # ends the seed
        for piece in pieces:
            one.update(piece)
        found.append(one.digest())
    return b"".join(found)
