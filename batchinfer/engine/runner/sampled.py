"""The results of sampling a step, and their assignment to chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.runner.row_scores import RowScores
from batchinfer.engine.schedule.draft_tree import find_child, parents_from_bits
from batchinfer.engine.schedule.step_plan import Ints, States, StepPlan
from batchinfer.engine.tensors.staging import upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Log-probabilities of the next tokens, for the n rows that request them."""

    rows: list[int]  # (n,)
    likeliest: list[int]  # (n,): how many of the likeliest tokens each row requests
    chosen: Tensor  # (n,) float32: of the chosen token
    top: Tensor  # (n, max(likeliest)) float32
    top_ids: Tensor  # (n, max(likeliest)) int64

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, for the copy to the host."""
        return [self.chosen, self.top, self.top_ids]

    def of_rows(
        self, chosen: NDArray[Any], top: NDArray[Any], top_ids: NDArray[Any], first: int = 0
    ) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row number.

        Args:
            chosen: `self.chosen` on the host.
            top: `self.top` on the host.
            top_ids: `self.top_ids` on the host.
            first: Added to each row number: the first row of the micro-batch.
        """
        ids = top_ids.astype(np.int32)
        found: dict[int, TokenLogprobs] = {}
        for at, (row, most) in enumerate(zip(self.rows, self.likeliest, strict=True)):
            one = slice(at, at + 1)
            found[first + row] = TokenLogprobs(chosen[one], top[one, :most], ids[one, :most])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """The n masked rows, and whether the mask forbade the most likely token of each."""

    rows: list[int]  # (n,)
    barred: Tensor  # (n,) bool

    def of_rows(self, barred: NDArray[Any], first: int = 0) -> dict[int, bool]:
        """Return `barred`, which is `self.barred` on the host, by row number plus `first`."""
        return {first + row: one for row, one in zip(self.rows, barred.tolist(), strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class RowStates:
    """Requested hidden states after the final norm, or their sums per chunk."""

    chunks: list[int]  # (n,), ascending: the chunk of each state, counted among chunks that request states
    states: Tensor  # (n, hidden): states in float32, sums in float64

    def of_chunks(self, states: NDArray[Any]) -> dict[int, States]:
        """Return `states`, which is `self.states` on the host, by chunk: (n, hidden) each."""
        numbers, firsts = np.unique(np.array(self.chunks, np.int64), return_index=True)
        ends = [*firsts[1:].tolist(), len(self.chunks)]
        spans = zip(numbers.tolist(), firsts.tolist(), ends, strict=True)
        return {chunk: states[first:end] for chunk, first, end in spans}


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of sampling a step, on the device. None: no row requests them."""

    tokens: Tensor  # (rows,) int64; NO_TOKEN for logits that are not finite. (0,) if rows get no tokens
    logprobs: RowLogprobs | None = None
    masked: Masked | None = None
    states: RowStates | None = None
    scores: RowScores | None = None


def rows_of_chunks(tokens: list[int], plan: StepPlan) -> list[Sequence[int]] | None:
    """Verify drafts: return the rows whose sampled tokens each chunk accepts.

    A chunk accepts the tokens of its rows up to and including the first that differs from the next draft. In a draft
    tree it follows the path of accepted nodes.

    Returns:
        The rows of each chunk that has sampled rows; None if each chunk has exactly one or no tokens are chosen.
    """
    counts = plan.sampled_counts
    if counts is None or not plan.sampling.chooses:
        return None
    assert plan.sampled is not None, "a plan with drafts lists its sampled rows"
    chosen = plan.sampled if plan.sampling.chosen is None else plan.sampled[plan.sampling.chosen]
    following = plan.tokens[np.minimum(chosen + 1, len(plan.tokens) - 1)].tolist()
    bits = None if plan.tree_bits is None else plan.tree_bits.view(np.uint32)[chosen].tolist()
    found: list[Sequence[int]] = []
    for first, end in pairwise([0, *accumulate(counts)]):
        if bits is not None and first + 1 < end and bits[first + 1]:
            found.append(_path(tokens[first:end], following[first : end - 1], bits[first + 1 : end], first))
            continue
        last = next((row for row in range(first, end - 1) if tokens[row] != following[row]), end - 1)
        found.append(range(first, last + 1))
    return found


def _path(tokens: list[int], drafts: list[int], bits: list[int], first: int) -> list[int]:
    """Return the rows on the path of accepted nodes of a draft tree.

    Args:
        tokens: The tokens sampled after the last known token and after each draft.
        drafts: The draft tokens, in tree order.
        bits: The ancestor bits of each draft; see `ancestor_bits`.
        first: The row of the last known token.
    """
    parents = parents_from_bits(bits)
    rows, node = [first], find_child(drafts, parents, -1, tokens[0])
    while node is not None:
        rows.append(first + 1 + node)
        node = find_child(drafts, parents, node, tokens[1 + node])
    return rows


def tokens_of_chunks(tokens: list[int], plan: StepPlan, rows: list[Sequence[int]] | None) -> list[list[int]]:
    """Return the tokens of each chunk that has sampled rows.

    Args:
        tokens: The token of each sampled row.
        plan: The step's plan.
        rows: The result of `rows_of_chunks`.
    """
    counts = plan.sampled_counts
    if not plan.sampling.chooses:
        return [[] for _ in range(plan.sampled_rows if counts is None else len(counts))]
    if rows is None:
        return [[token] for token in tokens]
    return [[tokens[row] for row in own] for own in rows]


def barred_of_chunks(
    found: Mapping[int, bool], rows: list[Sequence[int]] | None
) -> Mapping[int, Sequence[bool]]:
    """Return, per chunk with masked rows, which of its tokens replaced a forbidden most likely token.

    Args:
        found: The results by row; see `Masked.of_rows`.
        rows: The result of `rows_of_chunks`.
    """
    if rows is None:
        return {chunk: (one,) for chunk, one in found.items()}
    return {
        place: [found.get(row, False) for row in own]
        for place, own in enumerate(rows)
        if any(row in found for row in own)
    }


def logprobs_of_chunks(
    found: Mapping[int, TokenLogprobs], rows: list[Sequence[int]] | None
) -> Mapping[int, TokenLogprobs]:
    """Return the log-probabilities of each chunk's tokens.

    Args:
        found: The log-probabilities by row.
        rows: The result of `rows_of_chunks`.
    """
    return found if rows is None else {chunk: _concatenate(own) for chunk, own in _by_chunk(found, rows)}


def states_of_chunks(parts: Iterable[Mapping[int, States]], plan: StepPlan) -> Mapping[int, States]:
    """Concatenate the hidden states of each chunk, (n, hidden), or add up its sums, (1, hidden).

    Args:
        parts: The states of each micro-batch, by chunk.
        plan: The step's plan.
    """
    found: dict[int, States] = {}
    for part in parts:
        for chunk, states in part.items():
            if chunk not in found:
                found[chunk] = states
            elif plan.sampling.summed:
                found[chunk] = found[chunk] + states
            else:
                found[chunk] = np.concatenate([found[chunk], states])
    return found


def _by_chunk(found: Mapping[int, T], rows: list[Sequence[int]]) -> Iterator[tuple[int, list[T]]]:
    """Yield each chunk that has values in `found`, with the values of its rows."""
    for chunk, which in enumerate(rows):
        own = [found[row] for row in which if row in found]
        if own:
            yield chunk, own


def _concatenate(found: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        np.concatenate([one.chosen for one in found]),
        np.concatenate([one.top for one in found]),
        np.concatenate([one.top_ids for one in found]),
    )


@dataclass(slots=True)
class DeviceTokens:
    """The tokens that the previous step sampled, on the device; the host may not have them yet."""

    tokens: Tensor | None = None  # (n,) int64

    def of(self, places: Ints | None, device: torch.device) -> Tensor:
        """Return the tokens at the given indices, or all if `places` is None.

        NO_TOKEN becomes 0: its sequence has ended, and the results of its further steps are dropped.
        """
        assert self.tokens is not None, "the previous step sampled no tokens"
        if places is None:  # the usual case
            return self.tokens.clamp_min(0)
        (index,) = upload([places.astype(np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)
