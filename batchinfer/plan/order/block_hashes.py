"""Hashes by which prompts are compared block by block: that of a block covers all tokens up to its end.

The engine has a hash of its own (`Sequence.block_hash`), which decides whose K and V are reused: where it is equal for
different tokens, answers are wrong. Here it would cost a worse order alone, and a cryptographic hash takes 15 times as
long (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints
from batchinfer.core.request import TokenIds

BLOCK = 16  # tokens; a KV block has as many unless the job says otherwise
HASH_BYTES = 8

Hashes = NDArray[np.uint64]
_NONE: Hashes = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """The chain of a prompt is the hashes of its whole blocks, but for one that its last token ends, as that token
    always runs.

    Two prompts begin with the same n blocks just if the first n hashes of their chains are equal, so that sorted
    chains have those that begin alike next to each other. Two different beginnings have the same hash with a
    probability of about 2⁻⁶⁴; what comes of it is a worse order, and no wrong answer.
    """

    hashes: Hashes  # of all prompts, end to end
    lengths: NDArray[np.int64]  # of each prompt's chain

    @property
    def ends(self) -> NDArray[np.int64]:
        """Return the place behind each chain."""
        return np.cumsum(self.lengths)

    def last(self) -> Chains:
        """Return the last chain alone, or none."""
        return Chains(self.hashes[len(self.hashes) - int(self.lengths[-1:].sum()) :], self.lengths[-1:])

    def behind(self, before: Chains) -> Chains:
        """Return these chains behind others."""
        return Chains(
            np.append(before.hashes, self.hashes),
            np.append(before.lengths, self.lengths),
        )


NO_CHAIN = Chains(_NONE, np.zeros(1, np.int64))  # of a prompt without a whole block


def chain_lengths(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return how many hashes the chains of prompts of so many tokens have."""
    return np.maximum(0, counts.astype(np.int64) - 1) // BLOCK


def block_hashes(
    tokens: TokenIds, starts: NDArray[np.int64], counts: NDArray[np.integer], roots: Hashes | None = None
) -> Chains:
    """Return the chains of prompts, which begin at these places among the tokens and have so many each.

    `roots`: the number of each prompt's content root; prompts whose roots differ have no hash in common.
    """
    chains = Chains(_NONE, chain_lengths(counts))
    begins = chains.ends - chains.lengths
    level = np.arange(chains.lengths.sum()) - np.repeat(begins, chains.lengths)
    if not len(level):
        return chains
    at = np.repeat(starts, chains.lengths) + level * BLOCK
    blocks = np.lib.stride_tricks.sliding_window_view(tokens, BLOCK)[at].astype(np.uint64)
    weights = _weights(BLOCK + int(level.max()) + 1)
    sums = np.zeros(len(blocks) + 1, np.uint64)
    np.cumsum((blocks @ weights[:BLOCK]) * weights[BLOCK:][level], out=sums[1:])
    before = sums[begins] if roots is None else sums[begins] - roots
    return Chains(sums[1:] - np.repeat(before, chains.lengths), chains.lengths)


def chains_to_arrow(chains: Chains) -> pa.Array:
    """Return chains as values of bytes. Values of hashes that are equal are equal; how they sort does not matter."""
    ends = np.append(0, chains.ends * HASH_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(chains.hashes)]
    return pa.Array.from_buffers(pa.binary(), len(chains.lengths), buffers)


def chains_from_arrow(values: pa.Array) -> Chains:
    """Return the chains of a column, however a database gives it back."""
    values = values.cast(pa.binary())
    ends = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4) // HASH_BYTES
    data = values.buffers()[2]
    hashes = (
        np.frombuffer(data, np.uint64, int(ends[-1] - ends[0]), int(ends[0]) * HASH_BYTES) if data else _NONE
    )
    return Chains(hashes, np.diff(ends).astype(np.int64))


def shared_blocks(chains: Chains) -> Ints:
    """Return how many blocks each chain but the first shares with the one before it."""
    lengths, starts = chains.lengths, chains.ends - chains.lengths
    common = np.minimum(lengths[1:], lengths[:-1])
    first = np.cumsum(common) - common
    inside = np.arange(common.sum()) - np.repeat(first, common)
    pair = np.repeat(np.arange(len(common)), common)
    differ = chains.hashes[starts[1:][pair] + inside] != chains.hashes[starts[:-1][pair] + inside]
    found = common.astype(np.int32)
    places = np.flatnonzero(differ)[::-1]  # the first of a pair comes last and stays
    found[pair[places]] = inside[places]
    return found


def _weights(count: int) -> Hashes:
    """Odd numbers without a pattern (SplitMix64): Steele, Lea and Flood, OOPSLA 2014."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
