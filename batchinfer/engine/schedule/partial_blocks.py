"""Shares partial blocks: copies the tokens that prompts have in common after their last common full block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from batchinfer.core.request import common_prefix
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class PartialBlock:
    """The first tokens of a KV cache block that several sequences have in common, so they can be copied.

    Attributes:
        content: The content hash of the block to copy from.
        index: The index of the block in the block table of each sequence.
        tokens: The number of common tokens in the block.
        arrivals: The waiting sequences that will copy the tokens, by their numbers in the order of arrival.
    """

    content: bytes
    index: int
    tokens: int
    arrivals: list[int] = field(default_factory=list)


class Copy(NamedTuple):
    """A copy of keys and values from one KV cache block to another, in all layers of a cache group.

    Attributes:
        sequence: The sequence that needs the copy.
        group: The index of the cache group.
        source: The number of the block to read.
        target: The number of the block to write.
        first: The first slot to copy, counted within the block.
        end: The slot after the last one to copy, counted within the block.
    """

    sequence: Sequence
    group: int
    source: int
    target: int
    first: int
    end: int


class SortedPrompts:
    """Sequences sorted by prompt, to find the sequence with the longest common prefix.

    The sequence with the longest common prefix is a neighbour in this order.
    """

    def __init__(self) -> None:
        self._sorted: dict[bytes, list[Sequence]] = {}  # by content root

    def insert(self, sequence: Sequence) -> None:
        """Insert a sequence into the order."""
        alike = self._sorted.setdefault(sequence.content_root, [])
        # After equal prompts: usually the oldest is removed first, and removal searches from the front
        alike.insert(bisect_right(alike, _text(sequence), key=_text), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was inserted before."""
        alike = self._sorted[sequence.content_root]
        at = bisect_left(alike, _text(sequence), key=_text)
        while alike[at] is not sequence:  # prompts may be equal
            at += 1
        del alike[at]
        if not alike:
            del self._sorted[sequence.content_root]

    def neighbours(self, sequence: Sequence) -> Iterator[Sequence]:
        """Yield the sequences directly before and after the position of a sequence in the order.

        The sequence itself need not have been inserted. If it was, it may be yielded, too.
        """
        alike = self._sorted.get(sequence.content_root, [])
        at = bisect_left(alike, _text(sequence), key=_text)
        yield from alike[max(0, at - 1) : at + 1]


def _text(sequence: Sequence) -> bytes:
    # A longer common prefix in bytes means a longer common prefix in tokens
    return sequence.request.prompt.tobytes()


class PartialBlocks:
    """Finds blocks whose first tokens waiting sequences can copy, and keeps the blocks until the tokens are copied.

    If the common prefix of two sequences ends within a block, its tokens in that block are called a partial block. The
    later sequence copies their keys and values.

    Args:
        tables: The block tables of all sequences.
        least: The minimum number of tokens that are worth copying. None: nothing is copied.
    """

    def __init__(self, tables: BlockTables, least: int | None) -> None:
        self._tables, self._pool = tables, tables.pool
        self._least = least
        # All sequences in the engine, and the newest one even if it has ended
        self._prompts = SortedPrompts()
        self._newest: Sequence | None = None
        self._newest_ended = False
        self._holders = SortedPrompts()  # sequences that hold blocks
        # The partial block that each sequence copies or has copied
        self._wanted: dict[Sequence, PartialBlock] = {}
        # Unused blocks that are copied from, until the step is launched
        self._pinned: list[int] = []
        self._newly_pinned: list[int] = []  # pinned by the newest `acquire`
        # In this step: target → (source, first, end)
        self._copied: dict[int, list[tuple[int, int, int]]] = {}

    def insert(self, sequence: Sequence) -> None:
        """Add a waiting sequence, and choose which partial block it copies from an earlier sequence, if any."""
        if self._least is not None:
            wanted = self._best(sequence)
            if wanted is not None:
                self._wanted[sequence] = wanted
            if self._newest is not None and self._newest_ended:
                self._prompts.remove(self._newest)
            self._prompts.insert(sequence)
            self._newest, self._newest_ended = sequence, False

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or was dropped."""
        if self._least is None:
            return
        self._wanted.pop(sequence, None)
        # Kept until the next sequence is inserted, which may have tokens in common with it
        if sequence is self._newest:
            self._newest_ended = True
        else:
            self._prompts.remove(sequence)

    def wanted(self, sequence: Sequence) -> PartialBlock | None:
        """Return the partial block that a sequence will copy or has copied, or None."""
        return self._wanted.get(sequence)

    def reserve(self, block: PartialBlock | None, arrival: int) -> None:
        """Keep a block in the cache until a waiting sequence has copied its first tokens.

        Args:
            block: The partial block that the sequence copies. None: nothing is reserved.
            arrival: The number of the sequence in the order of arrival.
        """
        if block is not None:
            block.arrivals.append(arrival)
            self._pool.reserve([block.content], arrival, partial=True)

    def unreserve(self, block: PartialBlock | None, arrival: int) -> None:
        """Remove a reservation that was made by `reserve` with the same arguments.

        Args:
            block: The partial block. None: nothing is removed.
            arrival: The number of the sequence, which was admitted or dropped, in the order of arrival.
        """
        if block is not None:
            block.arrivals.remove(arrival)
            self._pool.unreserve([block.content], arrival, partial=True)

    def after(self, sequence: Sequence, tokens: int) -> PartialBlock | None:
        """Return the partial block at the end of a sequence's first `tokens` tokens.

        It consists of the tokens after the last full block.

        Returns:
            None if the tokens end with a full block, or if there are too few tokens after it to be worth copying.
        """
        size = self._pool.block_size
        index, rest = divmod(tokens, size)
        if self._least is None or rest < self._least:
            return None
        return PartialBlock(sequence.content(index, size), index, rest)

    def match(self, sequence: Sequence, blocks: int) -> int:
        """Return the number of tokens that a waiting sequence can copy now, after the full blocks that it shares.

        Args:
            sequence: The waiting sequence.
            blocks: The number of full blocks that the sequence shares.
        """
        wanted = self._wanted.get(sequence)
        if wanted is None or wanted.index != blocks or self._sources(wanted, sequence) is None:
            return 0
        return wanted.tokens

    def acquire(self, sequence: Sequence) -> list[int]:
        """Pin the blocks from which a sequence copies the tokens after its shared full blocks.

        Until `record_launch` or `release` is called, the blocks are neither freed nor evicted.

        Returns:
            One block per cache group, or an empty list if the sequence has nothing to copy.
        """
        wanted = self._wanted.get(sequence)
        if wanted is None or not self.match(sequence, len(sequence.tables[0])):
            return []
        blocks = self._sources(wanted, sequence) or []
        self._newly_pinned = self._pool.pin(blocks)
        self._pinned = [*self._pinned, *self._newly_pinned]
        return blocks

    def release(self) -> None:
        """Unpin the blocks that the newest call of `acquire` returned, because the sequence was not admitted."""
        self._pinned = self._pinned[: len(self._pinned) - len(self._newly_pinned)]
        self._pool.unpin(self._newly_pinned)

    def record_admission(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted and holds blocks now, from which other sequences may copy."""
        if self._least is None:
            return
        wanted = self._wanted.get(sequence)
        if wanted is not None and wanted.arrivals and self._sources(wanted, sequence) is None:
            self._redirect(wanted, sequence)
        self._holders.insert(sequence)

    def record_release(self, sequence: Sequence) -> None:
        """Record that a sequence has released its blocks."""
        if self._least is not None:
            self._holders.remove(sequence)

    def copies(self, sequence: Sequence, sources: list[int]) -> Iterator[Copy]:
        """Yield the copies of keys and values for a sequence's partial block.

        They write to the first block that the sequence does not share. The copies of a step can run in any order.

        Args:
            sequence: The admitted sequence.
            sources: The block to read in each cache group, as `acquire` returned it.
        """
        wanted = self._wanted[sequence]
        for group, source in enumerate(sources):
            target = sequence.tables[group][wanted.index]
            # A source slot that another copy of the step writes is replaced by its origin, so the order does not
            # matter
            ranges = list(self._ranges(source, wanted.tokens))
            self._copied[target] = ranges
            for origin, first, end in ranges:
                yield Copy(sequence, group, origin, target, first, end)

    def record_launch(self) -> None:
        """Unpin all blocks, because the step with the copies was launched. Later steps run after the copies."""
        self._pool.unpin(self._pinned)
        self._pinned, self._copied = [], {}

    def _ranges(self, source: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        done = 0
        for origin, first, end in self._copied.get(source, ()):
            if first < tokens:
                yield origin, first, min(end, tokens)
                done = min(end, tokens)
        if done < tokens:
            yield source, done, tokens

    def _best(self, sequence: Sequence) -> PartialBlock | None:
        most = min(sequence.prompt_length, sequence.most_cached)
        shared = [
            (min(most, common_prefix(sequence.request.prompt, other.request.prompt)), other)
            for other in self._prompts.neighbours(sequence)
        ]
        if not shared:
            return None
        tokens, other = max(shared, key=lambda found: found[0])
        own, theirs = self.after(other, tokens), self._wanted.get(other)
        if own is None or theirs is None or (theirs.index, theirs.tokens) != (own.index, own.tokens):
            return own
        if not self._pool.is_expected(theirs.content):
            self._redirect(theirs, other)
        return theirs  # both copy it from the same block

    def _redirect(self, block: PartialBlock, sequence: Sequence) -> None:
        before, block.content = block.content, sequence.content(block.index, self._pool.block_size)
        for arrival in block.arrivals:
            self._pool.unreserve([before], arrival, partial=True)
            self._pool.reserve([block.content], arrival, partial=True)

    def _sources(self, wanted: PartialBlock, sequence: Sequence) -> list[int] | None:
        # These are blocks with the content of `wanted`, else blocks of a running sequence that begin with its tokens
        groups = range(self._tables.sizes.tables)
        found = [block for group in groups if (block := self._pool.find(wanted.content, group)) is not None]
        if len(found) == len(groups):
            return found
        neighbours = self._holders.neighbours(sequence)
        holder = next((one for one in neighbours if self._has_content(one, wanted, sequence)), None)
        return None if holder is None else [table[wanted.index] for table in holder.tables]

    def _has_content(self, holder: Sequence, wanted: PartialBlock, sequence: Sequence) -> bool:
        tokens = wanted.index * self._pool.block_size + wanted.tokens
        if holder is sequence or tokens > holder.computed or max(holder.freed) > wanted.index:
            return False
        return tokens <= common_prefix(sequence.request.prompt, holder.request.prompt)
