"""Manages the blocks of the KV cache: references, cached contents and eviction. Tensors belong to the runner."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest


class Reservations:
    """Records which waiting sequences reserve which block contents, so that cached blocks are kept for them.

    A content is a digest of the tokens of a block and of all tokens before. A sequence is identified by its number in
    the order of arrival.
    """

    def __init__(self) -> None:
        self.arrivals: dict[bytes, list[int]] = {}  # ascending

    def __contains__(self, content: bytes) -> bool:
        return content in self.arrivals

    def add(self, contents: Iterable[bytes], arrival: int) -> None:
        """Reserve block contents for a waiting sequence.

        Args:
            contents: Digests of the tokens of a block and of all tokens before.
            arrival: The number of the sequence in the order of arrival.
        """
        for content in contents:
            arrivals = self.arrivals.setdefault(content, [])
            if arrivals and arrival < arrivals[-1]:
                insort(arrivals, arrival)  # a preempted sequence waits again
            else:
                arrivals.append(arrival)

    def remove(self, content: bytes, arrival: int) -> bool:
        """Remove a sequence's reservation of a block content.

        Args:
            content: The digest of the content.
            arrival: The number of the sequence in the order of arrival.

        Returns:
            True if no other sequence reserves the content.
        """
        arrivals = self.arrivals[content]
        del arrivals[bisect_left(arrivals, arrival)]
        if not arrivals:
            del self.arrivals[content]
        return not arrivals

    def count(self, content: bytes | None) -> int:
        """Return the number of waiting sequences that reserve a block content. For None, the result is 0."""
        return len(self.arrivals.get(content, ())) if content is not None else 0

    def first(self, content: bytes) -> int | None:
        """Return the earliest waiting sequence that reserves a block content, or None if no sequence does.

        Args:
            content: The digest of the content.

        Returns:
            The number of the sequence in the order of arrival.
        """
        arrivals = self.arrivals.get(content)
        return arrivals[0] if arrivals else None


class BlockPool:
    """The blocks of a KV cache, their references, and the contents that stay cached for waiting sequences.

    Blocks are numbered from 0. A block is in one of three states: used (block tables refer to it), cached (no table
    refers to it, but a waiting sequence reserves its content) or free. A content is a digest of the tokens of a block
    and of all tokens before.

    A waiting sequence reserves the contents of the blocks that it can share or copy from. If no block is free, the
    cached block that is needed last is evicted.

    Each cache group may have a block with the same content. A reservation applies to the blocks of all groups.

    Args:
        blocks: The number of blocks.
        block_size: The number of tokens per block.
        groups: The number of cache groups.
    """

    def __init__(self, blocks: int, block_size: int, groups: int = 1) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens: both must be at least 1")
        self.total = blocks
        self.block_size = block_size
        self.shared = 0  # sum of references of used blocks beyond the first
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._pinned: set[int] = set()  # blocks that a step will read, so they are neither freed nor cached
        self._cached: dict[int, None] = {}  # in the order of their release, so children before parents
        self._content: dict[int, tuple[int, bytes]] = {}  # block → group, digest
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(groups)]  # digest → block, per group
        self._reserved, self._partial = Reservations(), Reservations()

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can return: free and cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """The number of blocks that are neither free nor cached: used by block tables, or pinned for a step."""
        return self.total - self.available

    @property
    def cached(self) -> int:
        """The number of blocks that no block table refers to and that are kept for waiting sequences."""
        return len(self._cached)

    @property
    def pinned(self) -> int:
        """The number of blocks that no block table refers to, but that the next step will read.

        They are neither freed nor cached.
        """
        return sum(not self._references[block] for block in self._pinned)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """Return the number of the block with a content, or None if there is no such block.

        Args:
            digest: The content: a digest of the tokens of a block and of all tokens before.
            group: The index of the cache group.
        """
        return self._block_of[group].get(digest)

    def users(self, block: int) -> int:
        """Return the number of block tables that contain a block."""
        return self._references[block]

    def is_expected(self, content: bytes) -> bool:
        """Return True if a block with a content exists, or if a waiting sequence reserves the content.

        Args:
            content: A digest of the tokens of a block and of all tokens before.
        """
        return content in self._block_of[0] or content in self._partial or content in self._reserved

    def reserve(self, digests: Iterable[bytes], arrival: int, partial: bool = False) -> None:
        """Reserve block contents for a waiting sequence: blocks with these contents stay in the cache.

        Args:
            digests: The contents: digests of the tokens of a block and of all tokens before. Blocks with these
                contents need not exist yet.
            arrival: The number of the sequence in the order of arrival. A smaller number is admitted earlier.
            partial: True if the sequence will copy the first tokens of the blocks instead of sharing them.
        """
        (self._partial if partial else self._reserved).add(digests, arrival)

    def unreserve(self, digests: Iterable[bytes], arrival: int, partial: bool = False) -> None:
        """Remove reservations that were made by `reserve` with the same arguments.

        Cached blocks that no other sequence reserves are freed.

        Args:
            digests: The contents: digests of the tokens of a block and of all tokens before.
            arrival: The number of the sequence in the order of arrival.
            partial: True if the sequence reserved the contents to copy the first tokens of the blocks.
        """
        reserved = self._partial if partial else self._reserved
        for digest in digests:
            if (
                reserved.remove(digest, arrival)
                and digest not in self._partial
                and digest not in self._reserved
            ):
                self._free_cached(digest)

    def pin(self, blocks: Iterable[int]) -> list[int]:
        """Protect cached blocks from being freed or evicted, because a step will read them.

        Args:
            blocks: Blocks that the step reads. Blocks that are used by a block table need no protection and are
                skipped.

        Returns:
            The blocks that are pinned now.
        """
        idle = [block for block in blocks if block in self._cached]
        for block in idle:
            del self._cached[block]
            self._pinned.add(block)
        return idle

    def unpin(self, blocks: Iterable[int]) -> None:
        """Undo `pin` for some blocks.

        A block that no block table refers to is cached if its content is reserved, else freed.
        """
        for block in blocks:
            self._pinned.discard(block)
            if not self._references[block]:
                self._keep_or_free(block, None)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which another block table contains. They must be used or cached."""
        for block in blocks:
            self._cached.pop(block, None)
            self.shared += self._references[block] > 0
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each and without content. Cached blocks are evicted if needed.

        Raises:
            IndexError: If fewer than `count` blocks are free or cached.
        """
        missing = count - len(self._free)
        if missing > 0:
            self._evict(missing)
        allocated = [self._free.pop() for _ in range(count)]
        for block in allocated:
            self._references[block] = 1
        return allocated

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a block table whose sequence has ended, last block first.

        A block without further references is cached if its content is reserved, else freed.
        """
        references, contents, free = self._references, self._content, self._free
        wanted, copied = self._reserved.arrivals, self._partial.arrivals
        # Last block first, so that later blocks are evicted before their prefix. `drop` takes twice the time
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                self.shared -= 1
            elif block in self._pinned:
                continue
            elif block not in contents:
                free.append(block)
            elif contents[block][1] in wanted or contents[block][1] in copied:
                self._cached[block] = None
            else:
                self._free_block(block)

    def drop(self, block: int, beyond: bytes | None = None) -> None:
        """Remove a reference from a block.

        A block without further references is cached if its content is reserved, else freed.

        Args:
            block: The number of the block.
            beyond: The content of a later cached block, or None. A sequence that also reserves `beyond` does not need
                this block, so its reservation is not counted.
        """
        self._references[block] -= 1
        if self._references[block]:
            self.shared -= 1
        elif block not in self._pinned:
            self._keep_or_free(block, beyond)

    def _keep_or_free(self, block: int, beyond: bytes | None) -> None:
        if self._is_wanted(block, beyond):
            self._cached[block] = None
        else:
            self._free_block(block)

    def register(self, block: int, digest: bytes, group: int = 0) -> None:
        """Register the content of a used block, so that `find` returns the block.

        Nothing happens if another block of the group has this content, or if the block has a content already.

        Args:
            block: The number of the block.
            digest: The content: a digest of the tokens of the block and of all tokens before.
            group: The index of the cache group.
        """
        if digest not in self._block_of[group] and block not in self._content:
            self._block_of[group][digest] = block
            self._content[block] = group, digest

    def _is_wanted(self, block: int, beyond: bytes | None) -> bool:
        if block not in self._content:
            return False
        content = self._content[block][1]
        # A sequence that reserves `beyond` reserves this content, too
        return content in self._partial or self._reserved.count(content) > self._reserved.count(beyond)

    def _free_cached(self, content: bytes) -> int:
        found = (group.get(content) for group in self._block_of)
        blocks = [block for block in found if block is not None and block in self._cached]
        for block in blocks:
            del self._cached[block]
            self._free_block(block)
        return len(blocks)

    def _evict(self, count: int) -> None:
        # Blocks of other groups with the same content are freed, too, because a sequence needs the blocks of all
        # groups. `nlargest` returns the first of equal blocks, which is the child.
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
        """Check, in tests, that the references, contents and reservations of all blocks agree with the sequences.

        Args:
            tables: The block tables of all running sequences, without freed entries.
            reservations: By the arrival number of each waiting sequence, the contents that it should reserve.
            partial: By the arrival number of each waiting sequence, the contents that it should reserve as partial
                blocks.

        Raises:
            AssertionError: If the states, references or contents of blocks are inconsistent.
        """
        uses = Counter(block for table in tables for block in table)
        used = {b for b, count in enumerate(self._references) if count}
        assert uses == {b: self._references[b] for b in used}, "reference counts differ from the tables"
        assert self.shared == sum(self._references) - len(used), "the count of shared blocks is off"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(used) + len(free) + len(cached) + self.pinned == self.total, (
            "free + used + cached differs from the total"
        )
        assert used | free | cached | self._pinned == set(range(self.total)), "a block is in two states"
        assert not free & set(self._content), "a free block has content"
        found = {(g, h): b for g, group in enumerate(self._block_of) for h, b in group.items()}
        assert {content: b for b, content in self._content.items()} == found, "hashes and blocks disagree"
        wanted, copied = _arrivals_of(reservations or {}), _arrivals_of(partial or {})
        assert wanted == self._reserved.arrivals, "reservations differ from what waits"
        assert copied == self._partial.arrivals, "reserved partial blocks differ from what waits"
        kept = {*wanted, *copied}
        assert all(b in self._content and self._content[b][1] in kept for b in cached), (
            "a cached block is not reserved"
        )


def _arrivals_of(reservations: Mapping[int, Sequence[bytes]]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for arrival, contents in sorted(reservations.items()):
        for content in contents:
            found.setdefault(content, []).append(arrival)
    return found
