"""The continuations of a scoring request, and the branches in which an engine scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenIds, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One of the sequences that an engine runs, in order, to score the continuations of a request.

    The logits of the position `first + i` score the tokens `targets[starts[i]:starts[i + 1]]`. These are the tokens of
    all continuations that have the same tokens up to this position. Later branches do not score them again.

    Args:
        tokens: (n,), the tokens to run: the context, then a continuation without its last token.
        first: The first position whose logits are needed. Earlier branches use the logits of the positions before it.
        starts: (n - first + 1,), for each position from `first` on, the index in `targets` at which its tokens start.
        targets: (m,), the tokens to score.
        slots: (m,), the index of each target in the concatenation of all continuations.
    """

    tokens: TokenIds
    first: int
    starts: NDArray[np.int64]
    targets: TokenIds
    slots: NDArray[np.int64]

    @classmethod
    def of_prompt(cls, prompt: TokenIds) -> Branch:
        """Return the branch that scores every token of a prompt except the first, given the tokens before it.

        The whole prompt is run, its last token included, but the logits of the last token are not used.
        """
        count = len(prompt) - 1
        every = np.arange(count + 1)
        return cls(prompt, 0, np.append(every, count), prompt[1:], every[:-1])

    def asked(self, start: int, end: int) -> slice:
        """Return the slice of `targets` with the tokens that the logits of the positions [start, end) score."""
        low, high = (min(max(at, self.first), len(self.tokens)) - self.first for at in (start, end))
        return slice(int(self.starts[low]), int(self.starts[high]))

    def positions(self, start: int, end: int) -> TokenIds:
        """Return for each token that `asked` selects the position whose logits score it."""
        counts = np.diff(self.starts)
        every = np.repeat(np.arange(self.first, len(self.tokens), dtype=np.int32), counts)
        return every[self.asked(start, end)]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """A context, and alternative continuations after it, whose tokens a scoring request scores.

    The prompt of the request is the context followed by all continuations; `SamplingParams.scored` has the
    continuations' lengths.

    Args:
        context: (n,), the tokens of the context, at least one.
        each: The continuations, of at least one token each.
    """

    context: TokenIds
    each: tuple[TokenIds, ...]

    @classmethod
    def of(cls, prompt: TokenIds, lengths: Sequence[int]) -> Continuations:
        """Split the prompt of a scoring request into context and continuations.

        Args:
            prompt: The context followed by all continuations.
            lengths: The number of tokens of each continuation.

        Raises:
            ValueError: A length is below 1, or the context is empty.
        """
        ends = np.cumsum([len(prompt) - sum(lengths), *lengths])
        if ends[0] < 1 or min(lengths) < 1:
            raise ValueError(
                f"continuations of {lengths} tokens after a context of {ends[0]}: all must be at least 1"
            )
        return cls(prompt[: ends[0]], tuple(np.split(prompt, ends)[1:-1]))

    def branches(self) -> list[Branch]:
        """Return the sequences to run to score all continuations. Common prefixes of continuations are computed once.

        A continuation with which another continuation begins needs no sequence of its own.
        """
        # In lexical order, continuations with a common prefix are neighbours
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
    targets: list[int]
    slots: list[int]


def longest_sequence(prompt_tokens: int, lengths: Sequence[int]) -> int:
    """Return the number of tokens of the longest sequence that an engine runs for a request's prompt.

    For a scoring request, this is the context and the longest continuation without its last token, whose logits are not
    needed.

    Args:
        prompt_tokens: The number of tokens of the prompt, continuations included.
        lengths: The number of tokens of each continuation. Empty: the request is no scoring request.
    """
    return prompt_tokens - sum(lengths) + max(lengths) - 1 if lengths else prompt_tokens
