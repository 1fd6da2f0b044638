"""The results of sampling a step: tokens, which the next step may need on the device, log-probabilities and masks."""

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
from batchinfer.engine.schedule.draft_tree import child_with, parents_of
from batchinfer.engine.schedule.step_plan import Ints, States, StepPlan
from batchinfer.engine.tensors.staging import upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Log-probabilities of the next tokens of those rows that ask for them."""

    rows: list[int]  # (n,)
    likeliest: list[int]  # (n,): how many each of them asks for
    chosen: Tensor  # (n,) float32
    top: Tensor  # (n, the most that any of them asks for) float32
    top_ids: Tensor  # of the same shape, int64

    @property
    def tensors(self) -> list[Tensor]:
        return [self.chosen, self.top, self.top_ids]

    def of_rows(
        self, chosen: NDArray[Any], top: NDArray[Any], top_ids: NDArray[Any], first: int = 0
    ) -> dict[int, TokenLogprobs]:
        """Give each row, whose number is `first` more, the log-probabilities of its token, with as many of the
        likeliest ones as it asks for. The arrays hold what `tensors` do."""
        ids = top_ids.astype(np.int32)
        found: dict[int, TokenLogprobs] = {}
        for at, (row, most) in enumerate(zip(self.rows, self.likeliest, strict=True)):
            one = slice(at, at + 1)
            found[first + row] = TokenLogprobs(chosen[one], top[one, :most], ids[one, :most])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Rows whose tokens were masked, and whether that kept each from its most likely token."""

    rows: list[int]
    barred: Tensor  # (n,) bool

    def of_rows(self, barred: NDArray[Any], first: int = 0) -> dict[int, bool]:
        """Give each row, whose number is `first` more, what `barred` says on the host."""
        return {first + row: one for row, one in zip(self.rows, barred.tolist(), strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class RowStates:
    """Hidden states of those rows that ask for them, behind the final norm, or their sums by chunk."""

    chunks: list[int]  # (n,), ascending: of those that ask for states
    states: Tensor  # (n, hidden) float32; sums in float64

    def of_chunks(self, states: NDArray[Any]) -> dict[int, States]:
        """Give each chunk its own of the host's `states`, (any, hidden)."""
        numbers, firsts = np.unique(np.array(self.chunks, np.int64), return_index=True)
        ends = [*firsts[1:].tolist(), len(self.chunks)]
        spans = zip(numbers.tolist(), firsts.tolist(), ends, strict=True)
        return {chunk: states[first:end] for chunk, first, end in spans}


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of sampling, on the device where the logits were."""

    tokens: Tensor  # (rows,) int64; NO_TOKEN where a row's logits are not finite. (0,): none are chosen
    logprobs: RowLogprobs | None = None  # None: no row asks
    masked: Masked | None = None  # None: no row is
    states: RowStates | None = None  # None: no row asks
    scores: RowScores | None = None  # None: no row asks


def rows_of_chunks(tokens: list[int], plan: StepPlan) -> list[Sequence[int]] | None:
    """Return the rows whose tokens each chunk gets that has rows, where some have several; None: each has one, or none
    is chosen. A chunk with drafts gets the tokens of its rows up to the first that is not the draft behind it, or none
    of those behind it in a tree."""
    counts = plan.sampled_counts
    if counts is None or not plan.sampling.chooses:
        return None
    assert plan.sampled is not None, "rows of drafts are named"
    chosen = plan.sampled if plan.sampling.chosen is None else plan.sampled[plan.sampling.chosen]
    behind = plan.tokens[np.minimum(chosen + 1, len(plan.tokens) - 1)].tolist()
    bits = None if plan.tree_bits is None else plan.tree_bits.view(np.uint32)[chosen].tolist()
    found: list[Sequence[int]] = []
    for first, end in pairwise([0, *accumulate(counts)]):
        if bits is not None and first + 1 < end and bits[first + 1]:
            found.append(_path(tokens[first:end], behind[first : end - 1], bits[first + 1 : end], first))
            continue
        last = next((row for row in range(first, end - 1) if tokens[row] != behind[row]), end - 1)
        found.append(range(first, last + 1))
    return found


def _path(tokens: list[int], drafts: list[int], bits: list[int], first: int) -> list[int]:
    """Return the rows of a tree, from its first one on, whose tokens are right one behind the other. tokens: those
    behind the last known one and behind each of the drafts, with the bits of these."""
    parents = parents_of(bits)
    rows, node = [first], child_with(drafts, parents, -1, tokens[0])
    while node is not None:
        rows.append(first + 1 + node)
        node = child_with(drafts, parents, node, tokens[1 + node])
    return rows


def tokens_of_chunks(tokens: list[int], plan: StepPlan, rows: list[Sequence[int]] | None) -> list[list[int]]:
    """Divide the tokens of a step's rows among its chunks that have rows, those of `rows_of_chunks`."""
    counts = plan.sampled_counts
    if not plan.sampling.chooses:
        return [[] for _ in range(plan.sampled_rows if counts is None else len(counts))]
    if rows is None:
        return [[token] for token in tokens]
    return [[tokens[row] for row in own] for own in rows]


def barred_of_chunks(
    found: Mapping[int, bool], rows: list[Sequence[int]] | None
) -> Mapping[int, Sequence[bool]]:
    """Say of each chunk of which some row's is `found` which of the tokens that it got, those of `rows`, a mask gave it
    in the place of the most likely one."""
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
    """Put the log-probabilities of the tokens that each chunk got together."""
    return found if rows is None else {chunk: _joined(own) for chunk, own in _by_chunk(found, rows)}


def states_of_chunks(parts: Iterable[Mapping[int, States]], plan: StepPlan) -> Mapping[int, States]:
    """Put the hidden states of each chunk that asks for them together, (any, hidden); or, where they are summed, add up
    its sums, (1, hidden). `parts`: of each micro-batch."""
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
    """Yield what the rows of each chunk have, of chunks of which some have any."""
    for chunk, which in enumerate(rows):
        own = [found[row] for row in which if row in found]
        if own:
            yield chunk, own


def _joined(found: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        np.concatenate([one.chosen for one in found]),
        np.concatenate([one.top for one in found]),
        np.concatenate([one.top_ids for one in found]),
    )


@dataclass(slots=True)
class DeviceTokens:
    """The tokens of the step before, which the host may not know yet."""

    tokens: Tensor | None = None  # (n,) int64

    def of(self, places: Ints | None, device: torch.device) -> Tensor:
        """Return the tokens at these places, or all. Token 0 stands for none, where a row's logits were not finite: the
        sequence has ended, and what it runs on with is dropped."""
        assert self.tokens is not None, "a token is awaited of a step that sampled none"
        if places is None:  # nearly always
            return self.tokens.clamp_min(0)
        (index,) = upload([places.astype(np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)
