"""The continuations of a request, and the branches by which an engine scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenIds, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A path through the trie of continuations that runs as a sequence of its own: it shares what it has in common with
    the branches before it, and is asked for logits at the positions that none of them has.

    The tokens that are scored at position `first + i` are `targets[starts[i]:starts[i + 1]]`: those that may follow
    there. `slots` says which token of all continuations each of them is.
    """

    tokens: TokenIds  # (n,): the context, then the path without its last token, behind which nothing is asked
    first: int  # the first position whose logits are asked for
    starts: NDArray[np.int64]  # (n - first + 1,)
    targets: TokenIds  # (m,)
    slots: NDArray[np.int64]  # (m,)

    @classmethod
    def of_prompt(cls, prompt: TokenIds) -> Branch:
        """Return the branch that scores each token of a prompt but the first behind those before it. A prompt runs as a
        whole, its last token too, behind which nothing is asked here."""
        count = len(prompt) - 1
        every = np.arange(count + 1)
        return cls(prompt, 0, np.append(every, count), prompt[1:], every[:-1])

    def asked(self, start: int, end: int) -> slice:
        """Return which targets are scored at the positions [start, end)."""
        low, high = (min(max(at, self.first), len(self.tokens)) - self.first for at in (start, end))
        return slice(int(self.starts[low]), int(self.starts[high]))

    def positions(self, start: int, end: int) -> TokenIds:
        """Return the position of each of these targets."""
        counts = np.diff(self.starts)
        every = np.repeat(np.arange(self.first, len(self.tokens), dtype=np.int32), counts)
        return every[self.asked(start, end)]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """A context, and the continuations whose tokens are scored behind it.

    A request holds them as one prompt: the context, then each continuation. `SamplingParams.scored` has their lengths.
    """

    context: TokenIds  # (n,), n >= 1
    each: tuple[TokenIds, ...]  # one token of each at least

    @classmethod
    def of(cls, prompt: TokenIds, lengths: Sequence[int]) -> Continuations:
        """Divide the prompt of a request. Raises ValueError for lengths below 1, or a prompt without any context."""
        ends = np.cumsum([len(prompt) - sum(lengths), *lengths])
        if ends[0] < 1 or min(lengths) < 1:
            raise ValueError(f"continuations of {lengths} tokens behind {ends[0]}: all must be 1 at least")
        return cls(prompt[: ends[0]], tuple(np.split(prompt, ends)[1:-1]))

    def branches(self) -> list[Branch]:
        """Return the branches that score all continuations, each position of their trie once.

        In lexical order each continuation shares its beginning with the one before it, or with none. The logits of a
        node belong to the first continuation that passes through it.
        """
        order = sorted(range(len(self.each)), key=lambda number: self.each[number].tolist())
        slots = np.cumsum([0, *map(len, self.each)]).tolist()
        path: list[_Asked] = []  # of each node of the continuation before: what is asked there
        # A continuation, and the nodes that it is the first to reach
        owned: list[tuple[int, list[_Asked]]] = []
        before: TokenIds = self.each[order[0]][:0]
        for number in order:
            own = self.each[number]
            del path[common_prefix(before, own) + 1 :]
            fresh = [_Asked([], []) for _ in range(len(own) - len(path))]
            path += fresh
            if fresh:
                owned.append((number, fresh))
            for depth, token in enumerate(own.tolist()):
                path[depth].targets.append(token)
                path[depth].slots.append(slots[number] + depth)
            before = own
        return [self._branch(number, nodes) for number, nodes in owned]

    def _branch(self, number: int, nodes: Sequence[_Asked]) -> Branch:
        tokens = np.concatenate([self.context, self.each[number][:-1]]).astype(np.int32)
        return Branch(
            tokens,
            len(tokens) - len(nodes),
            np.cumsum([0, *(len(node.targets) for node in nodes)]),
            np.array([token for node in nodes for token in node.targets], np.int32),
            np.array([slot for node in nodes for slot in node.slots], np.int64),
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The tokens that are scored at a node, and which of all continuations' they are."""

    targets: list[int]
    slots: list[int]


def longest_sequence(prompt_tokens: int, lengths: Sequence[int]) -> int:
    """Return the positions that a request with such a prompt takes. Its continuations stand at the same place, and the
    last token of each is only looked up in what the model says before it."""
    return prompt_tokens - sum(lengths) + max(lengths) - 1 if lengths else prompt_tokens
