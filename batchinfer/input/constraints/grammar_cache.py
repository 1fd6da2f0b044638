"""A cache of compiled grammars, limited to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from batchinfer.core.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHE_BYTES = 512 << 20  # size of the cache in bytes; running sequences keep further grammars
# Memory with a vocabulary of 49,152 tokens, in MB: compiled + growth by masks over 2,000 steps
#   six properties                  0.1 + 1.7     an object of any kind            0.1 + 2.4
#   400 enums of 20, text 0.09 MB   3.4 + 0.1     1,500 enums of 40, text 0.65 MB  18.8 + 0.5
#   a regex at the limit of states  0.5 + 13      30,000 alternatives, 0.23 MB      3.1 + 0.7
#   a grammar with a sequence of 40,000 literals, text 0.16 MB                      23  + 1
GRAMMAR_BYTES = 2 << 20
_BYTES_A_CHAR = 40
_BYTES_A_CHAR_OF_LARK = 150


class GrammarCache:
    """A least-recently-used cache of compiled constraints, with a limit on their total size.

    Sizes are estimated, since llguidance reports none.

    Args:
        most: The maximum size in bytes. The newest constraint is kept even if it is larger.
    """

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, params: SamplingParams) -> LLMatcher | None:
        """Return the compiled constraint of `params`, or None if it is not cached."""
        digest = params.constraint_digest
        if digest not in self._kept:
            return None
        self._kept.move_to_end(digest)
        return self._kept[digest][0]

    def add(self, params: SamplingParams, compiled: LLMatcher) -> None:
        """Cache the compiled constraint of `params`, and evict the least recently used ones if the cache is full."""
        size = estimated_bytes(params)
        self._kept[params.constraint_digest] = compiled, size
        self.bytes += size
        while self.bytes > self._most and len(self._kept) > 1:
            _, (_, freed) = self._kept.popitem(last=False)
            self.bytes -= freed


def estimated_bytes(params: SamplingParams) -> int:
    """Estimate the memory in bytes of the compiled constraint of `params`, including its masks. Usually too high."""
    if params.grammar is not None:
        return GRAMMAR_BYTES + _BYTES_A_CHAR_OF_LARK * len(params.grammar)
    text = params.json_schema or params.tool_call or params.regex or "".join(params.choice)
    return GRAMMAR_BYTES + _BYTES_A_CHAR * len(text)
