"""What sequences share behind their last common whole block: found among prompts, and copied. Ints only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from batchinfer.core.request import common_prefix
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.sequence import Sequence, SharedPart


class Copy(NamedTuple):
    """Places [first, end) of a sequence's block come from another one's, in the layers of a cache group."""

    sequence: Sequence
    group: int
    source: int
    target: int
    first: int
    end: int


class SortedPrompts:
    """Sequences by their prompts, so that what has most in common with another stands next to it."""

    def __init__(self) -> None:
        self._sorted: dict[bool, list[Sequence]] = {False: [], True: []}  # by whether they are rotated later

    def add(self, sequence: Sequence) -> None:
        alike = self._alike(sequence)
        # behind its equals: mostly the oldest one is removed first, and looked for from the front
        alike.insert(bisect_right(alike, _text(sequence), key=_text), sequence)

    def remove(self, sequence: Sequence) -> None:
        alike = self._alike(sequence)
        place = bisect_left(alike, _text(sequence), key=_text)
        while alike[place] is not sequence:  # prompts may be equal
            place += 1
        del alike[place]

    def neighbours(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those between which it stands, or would stand."""
        alike = self._alike(sequence)
        place = bisect_left(alike, _text(sequence), key=_text)
        yield from alike[max(0, place - 1) : place + 1]

    def _alike(self, sequence: Sequence) -> list[Sequence]:
        return self._sorted[bool(sequence.rotated_from)]


class PromptIndex:
    """The prompts that are in the engine. The one that was added last stays: the next one may follow once it has
    ended."""

    def __init__(self) -> None:
        self._prompts = SortedPrompts()
        self._newest: Sequence | None = None
        self._newest_ended = False

    def add(self, sequence: Sequence) -> None:
        if self._newest is not None and self._newest_ended:
            self._prompts.remove(self._newest)
        self._prompts.add(sequence)
        self._newest, self._newest_ended = sequence, False

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or was dropped."""
        if sequence is self._newest:
            self._newest_ended = True
        else:
            self._prompts.remove(sequence)

    def neighbours(self, sequence: Sequence) -> Iterator[Sequence]:
        """As of `SortedPrompts`."""
        return self._prompts.neighbours(sequence)


def _text(sequence: Sequence) -> bytes:
    """By which prompts are sorted: those with more bytes in common have more tokens in common."""
    return sequence.request.prompt.tobytes()


class SharedParts:
    """Finds for each sequence the block whose beginning it can take over, and has it kept until then.

    A sequence shares most with a neighbour in the order of prompts. Those that share the same tokens take them from
    one block, which is kept for all of them. `least`: tokens that it pays to copy; None: none.
    """

    def __init__(self, tables: BlockTables, least: int | None) -> None:
        self._tables, self._pool = tables, tables.pool
        self._least = least
        self._prompts = PromptIndex()
        self._running = SortedPrompts()  # those that hold blocks
        self._held: list[
            int
        ] = []  # blocks that are copied from and that nobody uses, until the step is launched
        self._newly_held: list[int] = []  # of these, by the newest `take`
        self._copied: dict[int, list[tuple[int, int, int]]] = {}  # in this step: block → (source, first, end)

    def add(self, sequence: Sequence) -> None:
        """A sequence that is going to wait: what it may take over, of those that came before it."""
        if self._least is not None:
            sequence.part = self._best(sequence)
            self._prompts.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or was dropped."""
        if self._least is not None:
            self._prompts.remove(sequence)

    def reserve(self, part: SharedPart | None, turn: int) -> None:
        """Keep a part for the sequence with this turn, which waits."""
        if part is not None:
            part.turns.append(turn)
            self._pool.reserve_part(part.content, turn)

    def unreserve(self, part: SharedPart | None, turn: int) -> None:
        """The sequence was admitted or dropped."""
        if part is not None:
            part.turns.remove(turn)
            self._pool.unreserve_part(part.content, turn)

    def behind(self, sequence: Sequence, tokens: int) -> SharedPart | None:
        """The part of it that begins the block in which its first `tokens` tokens end."""
        size = self._pool.block_size
        index, rest = divmod(tokens, size)
        if self._least is None or rest < self._least:
            return None
        return SharedPart(sequence.content(index, size), index, rest)

    def found(self, sequence: Sequence, blocks: int) -> int:
        """Tokens that it could take over behind so many whole blocks."""
        part = sequence.part
        if part is None or part.index != blocks or self._blocks(part, sequence) is None:
            return 0
        return part.tokens

    def take(self, sequence: Sequence) -> list[int]:
        """The blocks, one for each cache group, from whose beginning it goes on behind the whole blocks that it shares;
        none if they are not there. They stay as they are until `launched`."""
        if sequence.part is None or not self.found(sequence, len(sequence.tables[0])):
            return []
        blocks = self._blocks(sequence.part, sequence) or []
        self._newly_held = self._pool.hold(blocks)
        self._held = [*self._held, *self._newly_held]
        sequence.computed += sequence.part.tokens
        return blocks

    def give_back(self, sequence: Sequence) -> None:
        """Undo the newest `take`, which found blocks."""
        assert sequence.part is not None
        sequence.computed -= sequence.part.tokens
        self._held = self._held[: len(self._held) - len(self._newly_held)]
        self._pool.let_go(self._newly_held)

    def admitted(self, sequence: Sequence) -> None:
        """It takes its part over, or runs it: where the cache has lost the block that others wait for, they take over
        from this one's."""
        if self._least is None:
            return
        part = sequence.part
        if part is not None and part.turns and self._blocks(part, sequence) is None:
            self._move(part, sequence)
        self._running.add(sequence)

    def released(self, sequence: Sequence) -> None:
        """It was admitted, and has given its blocks back."""
        if self._least is not None:
            self._running.remove(sequence)

    def copies(self, sequence: Sequence, sources: list[int]) -> Iterator[Copy]:
        """What fills the beginning of its first block of its own. What was itself copied in this step comes from where
        it was copied, so that copies may run side by side."""
        assert sequence.part is not None
        index, tokens = sequence.part.index, sequence.part.tokens
        for group, source in enumerate(sources):
            target = sequence.tables[group][index]
            pieces = list(self._pieces(source, tokens))
            self._copied[target] = pieces
            yield from (Copy(sequence, group, *piece[:1], target, *piece[1:]) for piece in pieces)

    def launched(self) -> None:
        """The step is launched: who writes to a block from now on does so when it has been copied."""
        self._pool.let_go(self._held)
        self._held, self._copied = [], {}

    def _pieces(self, source: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        done = 0
        for origin, first, end in self._copied.get(source, ()):
            if first < tokens:
                yield origin, first, min(end, tokens)
                done = min(end, tokens)
        if done < tokens:
            yield source, done, tokens

    def _best(self, sequence: Sequence) -> SharedPart | None:
        most = min(sequence.prompt_length, len(sequence) - 1)  # the last token always runs
        shared = [
            (min(most, common_prefix(sequence.request.prompt, other.request.prompt)), other)
            for other in self._prompts.neighbours(sequence)
        ]
        if not shared:
            return None
        tokens, other = max(shared, key=lambda found: found[0])
        part, theirs = self.behind(other, tokens), other.part
        if part is None or theirs is None or (theirs.index, theirs.tokens) != (part.index, part.tokens):
            return part
        if not self._pool.expects(theirs.content):
            self._move(theirs, other)
        return theirs  # both take it over from the same block

    def _move(self, part: SharedPart, sequence: Sequence) -> None:
        """Those that wait for the part take it over from this sequence's block."""
        before, part.content = part.content, sequence.content(part.index, self._pool.block_size)
        for turn in part.turns:
            self._pool.unreserve_part(before, turn)
            self._pool.reserve_part(part.content, turn)

    def _blocks(self, part: SharedPart, sequence: Sequence) -> list[int] | None:
        """Those from which a sequence takes its part over, one of each cache group: they hold its content, or begin
        with it and are in use."""
        groups = range(self._tables.sizes.tables)
        found = [block for group in groups if (block := self._pool.find(part.content, group)) is not None]
        if len(found) == len(groups):
            return found
        holder = next(
            (one for one in self._running.neighbours(sequence) if self._holds(one, part, sequence)), None
        )
        return None if holder is None else [table[part.index] for table in holder.tables]

    def _holds(self, holder: Sequence, part: SharedPart, sequence: Sequence) -> bool:
        """Whether it has in its blocks what the sequence takes over."""
        tokens = part.index * self._pool.block_size + part.tokens
        if holder is sequence or tokens > holder.computed or max(holder.left) > part.index:
            return False
        return tokens <= common_prefix(sequence.request.prompt, holder.request.prompt)
