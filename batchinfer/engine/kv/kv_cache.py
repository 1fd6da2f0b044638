"""Manages the blocks of the KV cache: who uses them, which are kept. Ints only: the runner has the tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest


class Reservations:
    """Maps each content to the arrivals of the sequences that reserve it; a smaller arrival comes earlier."""

    def __init__(self) -> None:
        self.arrivals: dict[bytes, list[int]] = {}  # ascending

    def __contains__(self, content: bytes) -> bool:
        return content in self.arrivals

    def add(self, contents: Iterable[bytes], arrival: int) -> None:
        for content in contents:
            arrivals = self.arrivals.setdefault(content, [])
            if arrivals and arrival < arrivals[-1]:
                insort(arrivals, arrival)  # a preempted sequence is back
            else:
                arrivals.append(arrival)

    def remove(self, content: bytes, arrival: int) -> bool:
        """Remove a reservation. Whether nobody else reserves the content."""
        arrivals = self.arrivals[content]
        del arrivals[bisect_left(arrivals, arrival)]
        if not arrivals:
            del self.arrivals[content]
        return not arrivals

    def count(self, content: bytes | None) -> int:
        """How many sequences reserve it."""
        return len(self.arrivals.get(content, ())) if content is not None else 0

    def first(self, content: bytes) -> int | None:
        """Return the first arrival that reserves the content."""
        arrivals = self.arrivals.get(content)
        return arrivals[0] if arrivals else None


class BlockPool:
    """Counts the references to blocks. A block is used (count > 0), cached (count 0, but reserved) or free.

    A waiting sequence reserves the contents that it could share (`reserve`), by its arrival in the queue. A block that
    nobody uses is kept exactly while its content is reserved. When no free block is left, cached ones give way:
    the one whose next user is farthest away first, children before their parents. A sequence that will copy the
    beginning of a block reserves its content as a partial one.

    Blocks of several cache groups may have the same content: K and V of the same tokens, in other layers. A
    reservation is for all of them.
    """

    def __init__(self, blocks: int, block_size: int, groups: int = 1) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens: both must be at least 1")
        self.total = blocks
        self.block_size = block_size
        self.shared = 0  # users of used blocks beyond the first of each
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        # Blocks that are to be read, and so neither free nor cached if nobody uses them
        self._held: set[int] = set()
        self._cached: dict[int, None] = {}  # in the order in which they fell idle, so children before parents
        self._content: dict[int, tuple[int, bytes]] = {}  # block → group, digest
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(groups)]  # of each group
        self._reserved, self._partial = Reservations(), Reservations()

    @property
    def available(self) -> int:
        """How many blocks `allocate` can still give."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        """How many blocks are kept for waiting sequences."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """How many blocks are held back that nobody uses."""
        return sum(not self._references[block] for block in self._held)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """Return the block of this group that holds this content, if one does."""
        return self._block_of[group].get(digest)

    def users(self, block: int) -> int:
        """How many block tables hold it."""
        return self._references[block]

    def expects(self, content: bytes) -> bool:
        """Whether a block holds this content, or somebody waits for one that will."""
        return content in self._block_of[0] or content in self._partial or content in self._reserved

    def reserve(self, digests: Iterable[bytes], arrival: int, partial: bool = False) -> None:
        """Keep these contents, once computed, for the sequence with this arrival; a smaller arrival comes earlier.

        `partial`: the sequence will copy the beginnings of the blocks.
        """
        (self._partial if partial else self._reserved).add(digests, arrival)

    def unreserve(self, digests: Iterable[bytes], arrival: int, partial: bool = False) -> None:
        """Remove a reservation: the sequence was admitted or dropped. Frees blocks that are not used or reserved."""
        reserved = self._partial if partial else self._reserved
        for digest in digests:
            if (
                reserved.remove(digest, arrival)
                and digest not in self._partial
                and digest not in self._reserved
            ):
                self._free_cached(digest)

    def hold(self, blocks: Iterable[int]) -> list[int]:
        """Hold back the blocks that nobody uses until `let_go`, as a step will read them. Return those that were not
        held before."""
        idle = [block for block in blocks if block in self._cached]
        for block in idle:
            del self._cached[block]
            self._held.add(block)
        return idle

    def let_go(self, blocks: Iterable[int]) -> None:
        """Undo `hold`: a block without users is cached or free again."""
        for block in blocks:
            self._held.discard(block)
            if not self._references[block]:
                self._keep_or_free(block, None)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, which `find` returned."""
        for block in blocks:
            self._cached.pop(block, None)
            self.shared += self._references[block] > 0
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take blocks with one user and no content. Raises IndexError when there are too few."""
        missing = count - len(self._free)
        if missing > 0:
            self._evict(missing)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each, last blocks first, so that a prefix is kept longer than what follows it.

        As `drop` does, in half of its time: a row of many tokens may end with every step.
        """
        references, contents, free = self._references, self._content, self._free
        wanted, copied = self._reserved.arrivals, self._partial.arrivals
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                self.shared -= 1
            elif block in self._held:
                continue
            elif block not in contents:
                free.append(block)
            elif contents[block][1] in wanted or contents[block][1] in copied:
                self._cached[block] = None
            else:
                self._free_block(block)

    def drop(self, block: int, beyond: bytes | None = None) -> None:
        """Remove a user. `beyond`: a computed content behind which no window reaches back to this block, so that it is
        of no use to those who reserve that, too.
        """
        self._references[block] -= 1
        if self._references[block]:
            self.shared -= 1
        elif block not in self._held:
            self._keep_or_free(block, beyond)

    def _keep_or_free(self, block: int, beyond: bytes | None) -> None:
        if self._is_wanted(block, beyond):
            self._cached[block] = None
        else:
            self._free_block(block)

    def register(self, block: int, digest: bytes, group: int = 0) -> None:
        """Make a used block findable by its content. Only a group's first block with a content becomes findable."""
        if digest not in self._block_of[group] and block not in self._content:
            self._block_of[group][digest] = block
            self._content[block] = group, digest

    def _is_wanted(self, block: int, beyond: bytes | None) -> bool:
        if block not in self._content:
            return False
        content = self._content[block][1]
        # who reserves what is beyond reserves this one, too
        return content in self._partial or self._reserved.count(content) > self._reserved.count(beyond)

    def _free_cached(self, content: bytes) -> int:
        """Free the blocks that are kept for a content, of all groups; how many there are."""
        found = (group.get(content) for group in self._block_of)
        blocks = [block for block in found if block is not None and block in self._cached]
        for block in blocks:
            del self._cached[block]
            self._free_block(block)
        return len(blocks)

    def _evict(self, count: int) -> None:
        """Free the cached blocks whose next use is farthest away; `nlargest` takes the first of equals: the child. What
        one group has lost is of no use to the others."""
        if count > len(self._cached):
            raise IndexError(f"{count} KV blocks are missing and {len(self._cached)} can be evicted")
        for block in nlargest(count, self._cached, key=self._next_arrival):
            if count > 0 and block in self._cached:
                count -= self._free_cached(self._content[block][1])

    def _next_arrival(self, block: int) -> int:
        content = self._content[block][1]
        arrivals = (self._reserved.first(content), self._partial.first(content))
        return min(arrival for arrival in arrivals if arrival is not None)

    def _free_block(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._block_of[content[0]][content[1]]
        self._free.append(block)

    def check_integrity(
        self,
        tables: Iterable[Sequence[int]],
        reservations: Mapping[int, Sequence[bytes]] | None = None,
        partial: Mapping[int, Sequence[bytes]] | None = None,
    ) -> None:
        """Raises AssertionError unless free + used + cached = total, the counts equal the block tables' uses, and
        exactly what `reservations` and `partial` (arrival → contents) name is kept.
        """
        uses = Counter(block for table in tables for block in table)
        used = {b for b, count in enumerate(self._references) if count}
        assert uses == {b: self._references[b] for b in used}, "reference counts differ from the tables"
        assert self.shared == sum(self._references) - len(used), "the count of shared blocks is off"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(used) + len(free) + len(cached) + self.held == self.total, (
            "free + used + cached differs from the total"
        )
        assert used | free | cached | self._held == set(range(self.total)), "a block is in two states"
        assert not free & set(self._content), "a free block has content"
        found = {(g, h): b for g, group in enumerate(self._block_of) for h, b in group.items()}
        assert {content: b for b, content in self._content.items()} == found, "hashes and blocks disagree"
        wanted, copied = _arrivals_of(reservations or {}), _arrivals_of(partial or {})
        assert wanted == self._reserved.arrivals, "reservations differ from what waits"
        assert copied == self._partial.arrivals, "reserved partial blocks differ from what waits"
        kept = {*wanted, *copied}
        assert all(b in self._content and self._content[b][1] in kept for b in cached), (
            "a block is kept for nobody"
        )


def _arrivals_of(reservations: Mapping[int, Sequence[bytes]]) -> dict[bytes, list[int]]:
    """Map each content to the arrivals that reserve it, ascending."""
    found: dict[bytes, list[int]] = {}
    for arrival, contents in sorted(reservations.items()):
        for content in contents:
            found.setdefault(content, []).append(arrival)
    return found
