"""The order within a window by the prompts' tokens, where the ladder of prefix columns is too coarse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from batchinfer.request import TokenIds

STEP = 16  # tokens; a KV block has as many unless the job says otherwise, and less cannot be shared


def prefix_order(prompts: Sequence[TokenIds]) -> list[int]:
    """Indices of the prompts, those that share a prefix brought together behind the first of them.

    The planner sees prefixes of 16, 32, 64, … tokens: two documents that begin with the same 64 tokens of
    instructions and end before the 128th look like one to it, and their questions are interleaved. Groups keep the
    place of their first member, so an order that starts long work first still does, and a group that goes on in the
    next window stays at the border.
    """
    order: list[int] = []
    stack = [(list(range(len(prompts))), 0)]
    while stack:
        rows, least = stack.pop()
        if len(rows) < 3:
            order += rows
            continue
        depth = _shared(prompts, rows, least)
        groups: dict[bytes | int, list[int]] = {}
        for row in rows:
            piece = prompts[row][depth : depth + STEP]
            groups.setdefault(piece.tobytes() if len(piece) == STEP else row, []).append(row)
        stack.extend((group, depth + STEP) for group in reversed(groups.values()))
    return order


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def shared_with_next(prompts: Iterable[TokenIds]) -> list[int]:
    """For each prompt but the last, the tokens that it has in common with the one after it."""
    before: TokenIds | None = None
    shared = []
    for prompt in prompts:
        if before is not None:
            shared.append(common_prefix(before, prompt))
        before = prompt
    return shared


def _shared(prompts: Sequence[TokenIds], rows: list[int], least: int) -> int:
    """Tokens that all these rows begin with, in whole steps; known to be `least` at least."""
    first, shared = prompts[rows[0]][least:], len(prompts[rows[0]]) - least
    for row in rows[1:]:
        if shared < STEP:
            return least
        shared = common_prefix(first[:shared], prompts[row][least:])
    return least + shared // STEP * STEP
