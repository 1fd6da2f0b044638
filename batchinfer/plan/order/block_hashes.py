"""Hashes by which prompts are compared block by block: that of a block covers all tokens up to its end.

The engine has a hash of its own (`Sequence.block_hash`), which decides whose K and V are reused: where it is equal for
different tokens, answers are wrong. Here it would cost a worse order alone, and a cryptographic hash takes 15 times as
long (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenIds

BLOCK = 16  # tokens; a KV block has as many unless the job says otherwise
HASH_BYTES = 8
_PIECE = 1 << 18  # tokens that are hashed together: so that little memory is held besides their hashes

Hashes = NDArray[np.uint64]


def block_hashes(prompts: Sequence[TokenIds], roots: Hashes | None = None) -> list[bytes]:
    """Return the chain of each prompt: 8 bytes for each of its whole blocks, but for one that its last token ends, as
    that token always runs.

    Two prompts begin with the same n blocks just if the first n hashes of their chains are equal, so that sorted
    chains have those that begin alike next to each other. `roots`: the number of each prompt's content root; prompts
    whose roots differ have no hash in common. Two different beginnings have the same hash with a
    probability of about 2⁻⁶⁴; what comes of it is a worse order, and no wrong answer.
    """
    given = np.broadcast_to(np.uint64(0), len(prompts)) if roots is None else roots
    return [
        chain for start, end in _pieces(prompts) for chain in _chains(prompts[start:end], given[start:end])
    ]


def shared_blocks(chains: Iterable[bytes], before: bytes = b"") -> NDArray[np.int32]:
    """Return how many blocks each chain shares with the one before it. `before`: the one before the first."""
    held = [before, *chains]
    lengths = np.array([len(chain) // HASH_BYTES for chain in held])
    hashes = np.frombuffer(b"".join(held), np.uint64)
    starts = np.cumsum(lengths) - lengths
    common = np.minimum(lengths[1:], lengths[:-1])
    first = np.cumsum(common) - common
    inside = np.arange(common.sum()) - np.repeat(first, common)
    differ = hashes[np.repeat(starts[1:], common) + inside] != hashes[np.repeat(starts[:-1], common) + inside]
    return _leading(differ, inside, np.repeat(np.arange(len(common)), common), common)


def _leading(
    differ: NDArray[np.bool_], inside: NDArray[np.int64], pair: NDArray[np.int64], common: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return for each pair the place of the first difference, or how much was compared if there is none."""
    found = common.astype(np.int32)
    places = np.flatnonzero(differ)[::-1]  # the first of a pair comes last and stays
    found[pair[places]] = inside[places]
    return found


def _pieces(prompts: Sequence[TokenIds]) -> Iterator[tuple[int, int]]:
    """Yield stretches of prompts in turn, of as many as have about _PIECE tokens."""
    ends = np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64) // _PIECE
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(prompts)]
    yield from ((start, end) for start, end in pairwise(cuts) if start < end)


def _chains(prompts: Sequence[TokenIds], roots: Hashes) -> Iterator[bytes]:
    counts = np.array([max(0, len(prompt) - 1) // BLOCK for prompt in prompts], np.int64)
    whole = [prompt[: count * BLOCK] for prompt, count in zip(prompts, counts.tolist(), strict=True)]
    blocks = np.concatenate(whole).astype(np.uint64).reshape(-1, BLOCK)
    ends = np.cumsum(counts)
    level = np.arange(len(blocks)) - np.repeat(ends - counts, counts)
    weights = _weights(BLOCK + int(counts.max(initial=0)))
    sums = np.zeros(len(blocks) + 1, np.uint64)
    np.cumsum((blocks @ weights[:BLOCK]) * weights[BLOCK:][level], out=sums[1:])
    hashes = (sums[1:] - np.repeat(sums[ends - counts] - roots, counts)).tobytes()
    edges = [0, *(ends * HASH_BYTES).tolist()]
    return (hashes[start:end] for start, end in pairwise(edges))


def _weights(count: int) -> Hashes:
    """Odd numbers without a pattern (SplitMix64): Steele, Lea and Flood, OOPSLA 2014."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
