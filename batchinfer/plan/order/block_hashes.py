"""Hashes prompts block by block, to compare them. The hash of a block covers all prompt tokens up to its end.

The engine uses a cryptographic hash (`Sequence.block_hash`), because a collision there gives wrong answers. Here a
collision only worsens the order, and a cryptographic hash takes 15 times as long (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints
from batchinfer.core.request import TokenIds

BLOCK = 16  # tokens; the default size of a KV-cache block
HASH_BYTES = 8

Hashes = NDArray[np.uint64]
_NONE: Hashes = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """The hashes of the token blocks of several prompts.

    A hash covers a block and all tokens before it, so two prompts with the same first n hashes share their first n
    blocks. Only full blocks before the last token of a prompt have hashes.

    Attributes:
        hashes: The hashes of all prompts, concatenated.
        lengths: Number of hashes of each prompt.
    """

    hashes: Hashes
    lengths: NDArray[np.int64]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Return the position in `hashes` after the last hash of each prompt."""
        return np.cumsum(self.lengths)

    def last(self) -> Chains:
        """Return the hashes of the last prompt as `Chains` of one prompt. Without prompts, the result is empty."""
        return Chains(self.hashes[len(self.hashes) - int(self.lengths[-1:].sum()) :], self.lengths[-1:])

    def prepend(self, before: Chains) -> Chains:
        """Return new `Chains` with the prompts of `before`, followed by the prompts of this object."""
        return Chains(
            np.append(before.hashes, self.hashes),
            np.append(before.lengths, self.lengths),
        )


NO_CHAIN = Chains(_NONE, np.zeros(1, np.int64))  # one empty chain


def chain_lengths(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the number of block hashes of each prompt.

    Args:
        counts: Number of tokens of each prompt.
    """
    return np.maximum(0, counts.astype(np.int64) - 1) // BLOCK


def block_hashes(
    tokens: TokenIds, starts: NDArray[np.int64], counts: NDArray[np.integer], roots: Hashes | None = None
) -> Chains:
    """Compute the block hashes of prompts.

    Args:
        tokens: An array that contains the token ids of all prompts.
        starts: Position in `tokens` of each prompt's first token.
        counts: Number of tokens of each prompt.
        roots: A number per prompt. Prompts with different numbers get different hashes, because they cannot share
            cached blocks. None: all prompts may share.
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
    """Return the hashes as a binary Arrow array with one value per prompt, by which a database can sort the prompts.

    Prompts with equal hashes have equal bytes, and prompts with a common prefix become neighbours. Otherwise the sort
    order is arbitrary.
    """
    ends = np.append(0, chains.ends * HASH_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(chains.hashes)]
    return pa.Array.from_buffers(pa.binary(), len(chains.lengths), buffers)


def chains_from_arrow(values: pa.Array) -> Chains:
    """Return the block hashes from an Arrow array that `chains_to_arrow` made.

    Args:
        values: Array of any of the binary types that a database returns.
    """
    values = values.cast(pa.binary())
    ends = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4) // HASH_BYTES
    data = values.buffers()[2]
    hashes = (
        np.frombuffer(data, np.uint64, int(ends[-1] - ends[0]), int(ends[0]) * HASH_BYTES) if data else _NONE
    )
    return Chains(hashes, np.diff(ends).astype(np.int64))


def shared_blocks(chains: Chains) -> Ints:
    """Return the number of leading block hashes that each prompt has in common with the previous prompt.

    The result has one element less than there are prompts, because the first prompt has no previous one.
    """
    lengths, starts = chains.lengths, chains.ends - chains.lengths
    common = np.minimum(lengths[1:], lengths[:-1])
    first = np.cumsum(common) - common
    inside = np.arange(common.sum()) - np.repeat(first, common)
    pair = np.repeat(np.arange(len(common)), common)
    differ = chains.hashes[starts[1:][pair] + inside] != chains.hashes[starts[:-1][pair] + inside]
    found = common.astype(np.int32)
    places = np.flatnonzero(differ)[::-1]  # reversed, so the first difference of each pair is written last
    found[pair[places]] = inside[places]
    return found


def _weights(count: int) -> Hashes:
    # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); odd, so that multiplication loses no bits
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
