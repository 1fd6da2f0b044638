"""Which block of the KV cache belongs to whom. Ints only: the tensors are the runner's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks. A block is used (count > 0), cached (count 0, content findable by hash) or free.

    Cached blocks are taken again last-used-last when no free one is left, children before their parents.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens: both must be at least 1")
        self.total = blocks
        self.block_size = block_size
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, if one does."""
        return self._block_of.get(digest)

    def is_idle(self, block: int) -> bool:
        """Cached but used by nobody: acquiring it costs one available block."""
        return self._references[block] == 0

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more user for each of these blocks, found by `find`."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def allocate(self) -> int:
        """A block with one user and no content. Raises IndexError when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        else:
            raise IndexError("no KV block is available")
        self._references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each. Last blocks first, so that a prefix outlives what was built on it."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Make a used block findable. The first block with a content keeps it; another stays private."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free + used + cached = total and the counts equal the block tables' uses."""
        uses = Counter(block for table in tables for block in table)
        assert [uses[b] for b in range(self.total)] == self._references, (
            "reference counts differ from the tables"
        )
        used = {b for b, count in enumerate(self._references) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(used) + len(free) + len(cached) == self.total, (
            "free + used + cached differs from the total"
        )
        assert used | free | cached == set(range(self.total)), "a block is in two states"
        assert cached <= set(self._hash_of), "a cached block has no content"
        assert not free & set(self._hash_of), "a free block has content"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hashes and blocks disagree"
