"""Finds and copies the tokens that prompts share behind their last common whole block. Ints only."""

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
    """The beginning of a block that several sequences have in common."""

    content: bytes  # of the block from which the beginning is copied
    index: int  # of the block in each sequence's table
    tokens: int  # how many they have in common
    arrivals: list[int] = field(default_factory=list)  # of the sequences that wait to copy it


class Copy(NamedTuple):
    """Copies slots [first, end) from a block to a sequence's own, in the layers of a cache group."""

    sequence: Sequence
    group: int
    source: int
    target: int
    first: int
    end: int


class SortedPrompts:
    """Sequences sorted by their prompts: each stands next to the one with which it has most in common. Those of
    different content roots have nothing in common, and are sorted apart."""

    def __init__(self) -> None:
        self._sorted: dict[bytes, list[Sequence]] = {}  # by content root

    def insert(self, sequence: Sequence) -> None:
        alike = self._sorted.setdefault(sequence.content_root, [])
        # behind its equals: mostly the oldest one is removed first, and looked for from the front
        alike.insert(bisect_right(alike, _text(sequence), key=_text), sequence)

    def remove(self, sequence: Sequence) -> None:
        alike = self._sorted[sequence.content_root]
        place = bisect_left(alike, _text(sequence), key=_text)
        while alike[place] is not sequence:  # prompts may be equal
            place += 1
        del alike[place]
        if not alike:
            del self._sorted[sequence.content_root]

    def neighbours(self, sequence: Sequence) -> Iterator[Sequence]:
        """Return the sequences between which this one stands, or would stand."""
        alike = self._sorted.get(sequence.content_root, [])
        place = bisect_left(alike, _text(sequence), key=_text)
        yield from alike[max(0, place - 1) : place + 1]


def _text(sequence: Sequence) -> bytes:
    """Return the key that prompts are sorted by: with more bytes in common they have more tokens in common."""
    return sequence.request.prompt.tobytes()


class PartialBlocks:
    """Finds for each sequence the block whose beginning it can copy, and has the pool keep it until then.

    A sequence shares most with a neighbour in the order of prompts. Sequences that share the same tokens copy them from
    one block, which is kept for all of them. `least`: the fewest tokens that it pays to copy; None: none are copied.
    """

    def __init__(self, tables: BlockTables, least: int | None) -> None:
        self._tables, self._pool = tables, tables.pool
        self._least = least
        self._prompts = SortedPrompts()  # of the sequences in the engine, and of the newest one after its end
        self._newest: Sequence | None = None
        self._newest_ended = False
        self._holders = SortedPrompts()  # sequences that hold blocks
        self._wanted: dict[Sequence, PartialBlock] = {}  # what each sequence copies, or has copied
        # Blocks that are copied from and that nobody uses, until the step is launched
        self._held: list[int] = []
        self._newly_held: list[int] = []  # of these, the ones of the newest `acquire`
        self._copied: dict[int, list[tuple[int, int, int]]] = {}  # in this step: block → (source, first, end)

    def insert(self, sequence: Sequence) -> None:
        """Take in a sequence that is going to wait, and choose what it copies of those that came before it."""
        if self._least is not None:
            wanted = self._best(sequence)
            if wanted is not None:
                self._wanted[sequence] = wanted
            if self._newest is not None and self._newest_ended:
                self._prompts.remove(self._newest)
            self._prompts.insert(sequence)
            self._newest, self._newest_ended = sequence, False

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was dropped, the newest one once the next is inserted: that may have much
        in common with it."""
        if self._least is None:
            return
        self._wanted.pop(sequence, None)
        if sequence is self._newest:
            self._newest_ended = True
        else:
            self._prompts.remove(sequence)

    def wanted(self, sequence: Sequence) -> PartialBlock | None:
        """Return the partial block that the sequence copies."""
        return self._wanted.get(sequence)

    def reserve(self, block: PartialBlock | None, arrival: int) -> None:
        """Keep a partial block for the sequence with this arrival, which waits."""
        if block is not None:
            block.arrivals.append(arrival)
            self._pool.reserve([block.content], arrival, partial=True)

    def unreserve(self, block: PartialBlock | None, arrival: int) -> None:
        """Undo `reserve`, as the sequence was admitted or dropped."""
        if block is not None:
            block.arrivals.remove(arrival)
            self._pool.unreserve([block.content], arrival, partial=True)

    def after(self, sequence: Sequence, tokens: int) -> PartialBlock | None:
        """Return the beginning of the sequence's block in which its first `tokens` tokens end."""
        size = self._pool.block_size
        index, rest = divmod(tokens, size)
        if self._least is None or rest < self._least:
            return None
        return PartialBlock(sequence.content(index, size), index, rest)

    def match(self, sequence: Sequence, blocks: int) -> int:
        """Count the tokens that the sequence can copy behind this many whole blocks."""
        wanted = self._wanted.get(sequence)
        if wanted is None or wanted.index != blocks or self._sources(wanted, sequence) is None:
            return 0
        return wanted.tokens

    def acquire(self, sequence: Sequence) -> list[int]:
        """Hold the blocks, one for each cache group, from which the sequence copies behind the whole blocks that it
        shares; none if they are not there. They stay as they are until `launched`."""
        wanted = self._wanted.get(sequence)
        if wanted is None or not self.match(sequence, len(sequence.tables[0])):
            return []
        blocks = self._sources(wanted, sequence) or []
        self._newly_held = self._pool.hold(blocks)
        self._held = [*self._held, *self._newly_held]
        return blocks

    def release(self) -> None:
        """Undo the newest `acquire`, which found blocks."""
        self._held = self._held[: len(self._held) - len(self._newly_held)]
        self._pool.let_go(self._newly_held)

    def admitted(self, sequence: Sequence) -> None:
        """Note that the sequence holds blocks. Where the cache has lost the block that others wait to copy from, they
        copy from this sequence's."""
        if self._least is None:
            return
        wanted = self._wanted.get(sequence)
        if wanted is not None and wanted.arrivals and self._sources(wanted, sequence) is None:
            self._redirect(wanted, sequence)
        self._holders.insert(sequence)

    def released(self, sequence: Sequence) -> None:
        """Note that an admitted sequence has given its blocks back."""
        if self._least is not None:
            self._holders.remove(sequence)

    def copies(self, sequence: Sequence, sources: list[int]) -> Iterator[Copy]:
        """Make the copies that fill the beginning of the first block of its own. Slots that were copied in this step,
        too, are copied from where they came from, so that copies may run side by side."""
        wanted = self._wanted[sequence]
        for group, source in enumerate(sources):
            target = sequence.tables[group][wanted.index]
            ranges = list(self._ranges(source, wanted.tokens))
            self._copied[target] = ranges
            for origin, first, end in ranges:
                yield Copy(sequence, group, origin, target, first, end)

    def launched(self) -> None:
        """The step is launched: who writes to a block from now on does so when it has been copied."""
        self._pool.let_go(self._held)
        self._held, self._copied = [], {}

    def _ranges(self, source: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """The (block, first slot, end) from which the first `tokens` slots of `source` come."""
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
        if not self._pool.expects(theirs.content):
            self._redirect(theirs, other)
        return theirs  # both copy it from the same block

    def _redirect(self, block: PartialBlock, sequence: Sequence) -> None:
        """Let the sequences that wait to copy a partial block copy it from this sequence's."""
        before, block.content = block.content, sequence.content(block.index, self._pool.block_size)
        for arrival in block.arrivals:
            self._pool.unreserve([before], arrival, partial=True)
            self._pool.reserve([block.content], arrival, partial=True)

    def _sources(self, wanted: PartialBlock, sequence: Sequence) -> list[int] | None:
        """Return the blocks to copy from, one of each cache group: they hold the content, or begin with it and are in
        use."""
        groups = range(self._tables.sizes.tables)
        found = [block for group in groups if (block := self._pool.find(wanted.content, group)) is not None]
        if len(found) == len(groups):
            return found
        neighbours = self._holders.neighbours(sequence)
        holder = next((one for one in neighbours if self._holds(one, wanted, sequence)), None)
        return None if holder is None else [table[wanted.index] for table in holder.tables]

    def _holds(self, holder: Sequence, wanted: PartialBlock, sequence: Sequence) -> bool:
        """Whether the holder has in its blocks what the sequence copies."""
        tokens = wanted.index * self._pool.block_size + wanted.tokens
        if holder is sequence or tokens > holder.computed or max(holder.freed) > wanted.index:
            return False
        return tokens <= common_prefix(sequence.request.prompt, holder.request.prompt)
