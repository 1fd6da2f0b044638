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
    """The log-probabilities of newly sampled tokens in n rows of a micro-batch, on the device.

    Attributes:
        rows: [n], the index of each row among the micro-batch's rows that get tokens. Other rows request no
            log-probabilities.
        likeliest: [n], the number of most likely tokens that each row requests.
        chosen: float32 [n], the log-probability of the chosen token.
        top: float32 [n, max(likeliest)], the log-probabilities of the most likely tokens.
        top_ids: int64 [n, max(likeliest)], the ids of the most likely tokens.
    """

    rows: list[int]
    likeliest: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors `chosen`, `top` and `top_ids`, for the copy to the host."""
        return [self.chosen, self.top, self.top_ids]

    def of_rows(
        self, chosen: NDArray[Any], top: NDArray[Any], top_ids: NDArray[Any], first: int = 0
    ) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities of each row, by the index of the row among all rows of the step that get tokens.

        Args:
            chosen: `self.chosen`, copied to the host.
            top: `self.top`, copied to the host.
            top_ids: `self.top_ids`, copied to the host.
            first: The number of rows that get tokens in earlier micro-batches of the step.
        """
        ids = top_ids.astype(np.int32)
        found: dict[int, TokenLogprobs] = {}
        for at, (row, most) in enumerate(zip(self.rows, self.likeliest, strict=True)):
            one = slice(at, at + 1)
            found[first + row] = TokenLogprobs(chosen[one], top[one, :most], ids[one, :most])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """The n rows of a micro-batch that have token masks, on the device.

    Attributes:
        rows: [n], the index of each row among the micro-batch's rows that get tokens.
        barred: bool [n], True if the mask forbade the row's most likely token.
    """

    rows: list[int]
    barred: Tensor

    def of_rows(self, barred: NDArray[Any], first: int = 0) -> dict[int, bool]:
        """Return True for each row whose mask forbade the most likely token, else False.

        A key is the index of a row among all rows of the step that get tokens. Only rows with a mask have a value.

        Args:
            barred: `self.barred`, copied to the host.
            first: The number of rows that get tokens in earlier micro-batches of the step.
        """
        return {first + row: one for row, one in zip(self.rows, barred.tolist(), strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class RowStates:
    """Hidden states after the final norm, or their sums, for the chunks of a step that request them, on the device.

    A chunk is the range of tokens that a step runs for one sequence.

    Attributes:
        chunks: [n], the index of each state's chunk among the chunks that request states, ascending.
        states: [n, hidden], states in float32, or sums in float64.
    """

    chunks: list[int]
    states: Tensor

    def of_chunks(self, states: NDArray[Any]) -> dict[int, States]:
        """Return the requested hidden states of each chunk, [m, hidden].

        A key is the index of a chunk among the chunks that request hidden states.

        Args:
            states: `self.states`, copied to the host.
        """
        numbers, firsts = np.unique(np.array(self.chunks, np.int64), return_index=True)
        ends = [*firsts[1:].tolist(), len(self.chunks)]
        spans = zip(numbers.tolist(), firsts.tolist(), ends, strict=True)
        return {chunk: states[first:end] for chunk, first, end in spans}


@dataclass(frozen=True, slots=True, eq=False)
class SamplingResult:
    """The results of sampling a step or micro-batch, on the device. Results that no row requests are None.

    Attributes:
        tokens: int64 [rows], the sampled tokens; NO_TOKEN if logits are not finite. Empty if no row gets a token.
        logprobs: The log-probabilities of the sampled tokens.
        masked: The rows with token masks, and whether the mask forbade the most likely token.
        states: The requested hidden states.
        scores: The log-probabilities of given tokens, such as the tokens of prompts.
    """

    tokens: Tensor
    logprobs: RowLogprobs | None = None
    masked: MaskedRows | None = None
    states: RowStates | None = None
    scores: RowScores | None = None


def rows_of_chunks(tokens: list[int], plan: StepPlan) -> list[Sequence[int]] | None:
    """Verify the drafts of a step: return which sampled tokens become tokens of the sequences.

    A chunk is the range of tokens that a step runs for one sequence. A row is a token of the step after which a token
    was sampled. In a chunk with drafts, the first row is the last known token of the sequence, and each draft is a
    further row. The accepted rows are the last known token and the accepted drafts. The tokens sampled after them
    become tokens of the sequence.

    Args:
        tokens: The token that was sampled for each row of the step.
        plan: The plan of the step.

    Returns:
        For each chunk with rows, the accepted rows. None if each chunk has exactly one row, or if no tokens are
        sampled.
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
        tokens: The tokens that were sampled after the sequence's last known token and after each draft.
        drafts: The draft tokens, in the order of the tree's nodes.
        bits: For each draft, a bit set of the draft and its ancestors.
        first: The row of the sequence's last known token.
    """
    parents = parents_from_bits(bits)
    rows, node = [first], find_child(drafts, parents, -1, tokens[0])
    while node is not None:
        rows.append(first + 1 + node)
        node = find_child(drafts, parents, node, tokens[1 + node])
    return rows


def tokens_of_chunks(tokens: list[int], plan: StepPlan, rows: list[Sequence[int]] | None) -> list[list[int]]:
    """Return the new tokens of each sequence that gets tokens in a step.

    A chunk is the range of tokens that a step runs for one sequence. A row is a token of the step after which a token
    was sampled.

    Args:
        tokens: The token that was sampled for each row of the step.
        plan: The plan of the step.
        rows: The accepted rows of each chunk, as `rows_of_chunks` returns them. None: each chunk has one row.
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
    """For the new tokens of each chunk with a mask, return True where the mask forbade the most likely token.

    A chunk is the range of tokens that a step runs for one sequence. A row is a token of the step after which a token
    was sampled.

    Args:
        found: By row, True if the mask forbade the most likely token. Rows without a mask are missing.
        rows: The accepted rows of each chunk, as `rows_of_chunks` returns them. None: each chunk has one row.

    Returns:
        The values by the index of the chunk. Chunks without masks are missing.
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
    """Return the log-probabilities of the new tokens of each chunk, by the index of the chunk.

    A chunk is the range of tokens that a step runs for one sequence. A row is a token of the step after which a token
    was sampled.

    Args:
        found: The log-probabilities by row.
        rows: The accepted rows of each chunk, as `rows_of_chunks` returns them. None: each chunk has one row.
    """
    return found if rows is None else {chunk: _concatenate(own) for chunk, own in _by_chunk(found, rows)}


def states_of_chunks(parts: Iterable[Mapping[int, States]], plan: StepPlan) -> Mapping[int, States]:
    """Combine the hidden states that the micro-batches of a step computed.

    A chunk, the range of tokens that the step runs for one sequence, may be divided among micro-batches. Its states
    are concatenated. If the plan asks for sums, they are added.

    Args:
        parts: The states of each micro-batch, by the index of the chunk.
        plan: The plan of the step.

    Returns:
        By the index of the chunk: [n, hidden], or [1, hidden] for sums.
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
    """The tokens that the previous step sampled, on the device. The host may not have them yet.

    Attributes:
        tokens: int64 [n], or None if no step has sampled.
    """

    tokens: Tensor | None = None

    def of(self, places: Ints | None, device: torch.device) -> Tensor:
        """Return tokens of the previous step as input of the next step, int64 [n]. NO_TOKEN is replaced by 0.

        Args:
            places: The indices of the tokens to return. None: all tokens.
            device: The device of the tokens.
        """
        assert self.tokens is not None, "the previous step sampled no tokens"
        if places is None:  # the usual case
            return self.tokens.clamp_min(0)
        (index,) = upload([places.astype(np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)
