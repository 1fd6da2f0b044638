"""The continuations of a scoring request, and the branches in which an engine scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenIds, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A path through the trie of continuations, which runs as one sequence.

    It shares the prefix of earlier branches, and requests logits only at positions that no earlier branch has. At
    position `first + i`, it scores the tokens `targets[starts[i]:starts[i + 1]]`.
    """

    tokens: TokenIds  # (n,): the context, then the path without its last token
    first: int  # the first position whose logits are needed
    starts: NDArray[np.int64]  # (n - first + 1,)
    targets: TokenIds  # (m,)
    slots: NDArray[np.int64]  # (m,): the index of each target among the tokens of all continuations

    @classmethod
    def of_prompt(cls, prompt: TokenIds) -> Branch:
        """Return the branch that scores every token of a prompt except the first, given the tokens before it.

        The last token is part of `tokens`, as the whole prompt runs, but its logits are not used.
        """
        count = len(prompt) - 1
        every = np.arange(count + 1)
        return cls(prompt, 0, np.append(every, count), prompt[1:], every[:-1])

    def asked(self, start: int, end: int) -> slice:
        """Return the slice of `targets` that are scored at the positions [start, end)."""
        low, high = (min(max(at, self.first), len(self.tokens)) - self.first for at in (start, end))
        return slice(int(self.starts[low]), int(self.starts[high]))

    def positions(self, start: int, end: int) -> TokenIds:
        """Return the position of each target that is scored at the positions [start, end)."""
        counts = np.diff(self.starts)
        every = np.repeat(np.arange(self.first, len(self.tokens), dtype=np.int32), counts)
        return every[self.asked(start, end)]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """A context, and alternative continuations whose tokens are scored.

    The prompt of the request is the context followed by all continuations; `SamplingParams.scored` has their lengths.
    """

    context: TokenIds  # (n,), n >= 1
    each: tuple[TokenIds, ...]  # at least one token each

    @classmethod
    def of(cls, prompt: TokenIds, lengths: Sequence[int]) -> Continuations:
        """Split the prompt of a request. Raises ValueError for a length below 1 or an empty context."""
        ends = np.cumsum([len(prompt) - sum(lengths), *lengths])
        if ends[0] < 1 or min(lengths) < 1:
            raise ValueError(
                f"continuations of {lengths} tokens after a context of {ends[0]}: all must be at least 1"
            )
        return cls(prompt[: ends[0]], tuple(np.split(prompt, ends)[1:-1]))

    def branches(self) -> list[Branch]:
        """Return branches that score all continuations and compute each node of their trie once.

        A node's logits are requested by the first continuation in lexical order that passes through the node.
        """
        order = sorted(range(len(self.each)), key=lambda number: self.each[number].tolist())
        slots = np.cumsum([0, *map(len, self.each)]).tolist()
        path: list[_Asked] = []  # the nodes of the previous continuation
        # Continuations, with the nodes that they are the first to reach
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
    """The tokens that are scored at a node."""

    targets: list[int]
    slots: list[int]  # the index of each target among the tokens of all continuations


def longest_sequence(prompt_tokens: int, lengths: Sequence[int]) -> int:
    """Return the number of positions that a scoring request needs: the context and its longest continuation.

    The last token of a continuation needs no position: only the logits before it are used.
    """
    return prompt_tokens - sum(lengths) + max(lengths) - 1 if lengths else prompt_tokens
