"""The inputs of one step: numpy arrays on the host and tensors on the device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.schedule.step_plan import AwaitedTokens, Ints, Longs, SamplingPlan
from batchinfer.models.ops.attention import AttentionInputs
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The inputs of a step as arrays on the host: the T tokens of S sequences, concatenated.

    Attributes:
        token_ids: [T], the token ids.
        positions: [T], the row of the rotary tables for each token.
        slots: [T] per cache group, the KV cache slot of each token.
        tables: The block tables of the sequences, per cache group.
        keeps_all: For each cache group, True if it has no sliding window.
        sampled_rows: [n], the indices of the tokens that have an output, such as a sampled token.
        sampling: The outputs of the n sampled rows, and how tokens are chosen.
        query_lens: [S], the number of tokens that each sequence runs.
        context_lens: [S], the length of each sequence in the KV cache, the tokens of this step included.
        copies: [m, 6], copies of partial blocks: index of the sequence, cache group, source block, target block, first
            slot, end. None: nothing is copied.
        awaited: The tokens that only the device knows, because the previous step samples them. None: no token.
        follows: True if the previous step ran the same sequences in the same order.
        token_types: [T], the token types. None: all are 0.
        adapters: [T], the adapter slot of each token, 0 for none. None: no token has an adapter.
        tree: The keys that each token attends to. None: there are no draft trees.
    """

    token_ids: Longs
    positions: Longs
    slots: list[Longs]
    tables: list[StepTables]
    keeps_all: list[bool]
    sampled_rows: Longs
    sampling: SamplingPlan
    query_lens: list[int]
    context_lens: list[int]
    copies: Ints | None = None
    awaited: AwaitedTokens | None = None
    follows: bool = False
    token_types: Longs | None = None
    adapters: Longs | None = None
    tree: TreeMask | None = None

    @property
    def is_decode(self) -> bool:
        """True if each sequence runs one token that has an output, and there are neither copies nor draft trees."""
        tokens = len(self.token_ids)
        single = len(self.sampled_rows) == tokens == len(self.query_lens)
        return single and self.copies is None and self.tree is None

    @property
    def table_rows(self) -> Longs:
        """The row of each sequence in the arrays of block tables, [S]."""
        # Steps that run the same sequences have the same array object, so it can be compared by identity
        return self.tables[0].rows

    @property
    def parts(self) -> list[Longs]:
        """The copies of partial blocks, as an array per cache group; an empty list if nothing is copied.

        Each array is [n, 4]: source block, target block, first slot, end.
        """
        if self.copies is None:
            return []
        fields = self.copies.astype(np.int64)
        return [fields[fields[:, 1] == group, 2:] for group in range(len(self.slots))]

    def inputs(
        self,
        tables: Seq[Tensor],
        positions: Tensor,
        slots: Seq[Tensor],
        parts: Seq[Tensor],
        token_types: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> list[AttentionInputs]:
        """Return the attention inputs of each cache group, made of device tensors with this object's arrays.

        Args:
            tables: [S, max blocks] per cache group, the block tables of the S sequences.
            positions: [T], the positions of the T tokens.
            slots: [T] per cache group, the KV cache slots.
            parts: [n, 4] per cache group, the copies of partial blocks. Empty without copies.
            token_types: [T], the token types. None: all are 0.
            adapters: [T], the adapter slots of the tokens. None: no token has an adapter.
        """
        assert (token_types is None) == (self.token_types is None), "token types are missing"
        assert (adapters is None) == (self.adapters is None), "adapters are missing"
        copied_parts: Seq[Tensor | None] = parts or [None] * len(slots)
        each = zip(slots, tables, self.tables, self.keeps_all, copied_parts, strict=True)
        return [
            AttentionInputs(
                positions,
                own,
                table,
                self.query_lens,
                self.context_lens,
                host,
                keeps_all=keeps_all,
                parts=copied,
                token_types=token_types,
                adapters=adapters,
                tree=self.tree,
            )
            for own, table, host, keeps_all, copied in each
        ]

    def later(self, ahead: Ints, block_size: int) -> HostBatch:
        """Return the inputs of a later decode step of the same launch. The device knows the step's input tokens.

        Args:
            ahead: [S], the number of tokens by which each sequence is longer than in this step. Its block table must
                have the blocks of these tokens already.
            block_size: The number of tokens per block.
        """
        contexts = np.array(self.context_lens) + ahead
        at, inside = np.divmod(contexts - 1, block_size)
        return replace(
            self,
            positions=self.positions + ahead,
            slots=[own.kept[own.rows, at].astype(np.int64) * block_size + inside for own in self.tables],
            sampling=self.sampling.later(ahead),
            context_lens=contexts.tolist(),
            awaited=AwaitedTokens(None, None),
            follows=True,
        )

    def part(self, first: int, end: int) -> HostBatch:
        """Return the micro-batch that runs the step's tokens with the indices [first, end).

        The copies of a sequence's partial block belong to the micro-batch that runs the sequence's first token.
        """
        ends = list(accumulate(self.query_lens))
        low, high = bisect_right(ends, first), bisect_left(ends, end) + 1
        begins = [
            stop - length for stop, length in zip(ends[low:high], self.query_lens[low:high], strict=True)
        ]
        spans = [(max(first, at), min(end, stop)) for at, stop in zip(begins, ends[low:high], strict=True)]
        context = self.context_lens[low:high]
        own = slice(*np.searchsorted(self.sampled_rows, [first, end]).tolist())
        return replace(
            self,
            token_ids=self.token_ids[first:end],
            positions=self.positions[first:end],
            slots=[slots[first:end] for slots in self.slots],
            tables=[replace(tables, rows=tables.rows[low:high]) for tables in self.tables],
            sampled_rows=self.sampled_rows[own] - first,
            sampling=self.sampling.part(own.start, own.stop),
            query_lens=[stop - start for start, stop in spans],
            context_lens=[
                n - (stop - end) for n, stop, (_, end) in zip(context, ends[low:high], spans, strict=True)
            ],
            copies=self._copies_of([low + at for at, begun in enumerate(begins) if begun >= first], low),
            awaited=_awaited_in(self.awaited, first, end, len(self.token_ids)),
            follows=False,
            token_types=None if self.token_types is None else self.token_types[first:end],
            adapters=self._adapters_of(first, end),
            tree=None if self.tree is None else self.tree.part(first, end),
        )

    def _adapters_of(self, first: int, end: int) -> Longs | None:
        own = None if self.adapters is None else self.adapters[first:end]
        return own if own is not None and own.any() else None

    def _copies_of(self, chunks: list[int], low: int) -> Ints | None:
        if self.copies is None:
            return None
        own = self.copies[np.isin(self.copies[:, 0], chunks)]
        own[:, 0] -= low  # a micro-batch may be split again
        return own if len(own) else None


def _awaited_in(awaited: AwaitedTokens | None, first: int, end: int, tokens: int) -> AwaitedTokens | None:
    if awaited is None:
        return None
    places = np.arange(tokens, dtype=np.int32) if awaited.places is None else awaited.places
    sampled = np.arange(len(places), dtype=np.int32) if awaited.sampled is None else awaited.sampled
    inside = (places >= first) & (places < end)
    return AwaitedTokens(places[inside] - np.int32(first), sampled[inside]) if inside.any() else None


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a step as tensors on the device.

    Attributes:
        token_ids: int64 [T], the token ids.
        inputs: The attention inputs per cache group.
        sampled_rows: int64 [n], the indices of the tokens that have an output, such as a sampled token.
        sampling: The outputs of the n sampled rows, and how tokens are chosen.
    """

    token_ids: Tensor
    inputs: list[AttentionInputs]
    sampled_rows: Tensor
    sampling: SamplingPlan


class RanStep(NamedTuple):
    """The hidden states that a step computed. They are valid until the next step is launched.

    Attributes:
        hidden: [at least T, hidden], the states of the step's T tokens, then of padding tokens.
        sampled: [n, hidden], the states of the tokens that have an output, such as a sampled token.
        padded: The number of padding tokens that were computed.
    """

    hidden: Tensor
    sampled: Tensor
    padded: int


def build_batch(host: HostBatch, device: torch.device) -> Batch:
    """Copy the inputs of a step from the host to a device."""
    tables = [torch.from_numpy(own.array()).to(device) for own in host.tables]

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    slots, parts = list(map(moved, host.slots)), list(map(moved, host.parts))
    types = None if host.token_types is None else moved(host.token_types)
    adapters = None if host.adapters is None else moved(host.adapters)
    inputs = host.inputs(tables, moved(host.positions), slots, parts, types, adapters)
    return Batch(moved(host.token_ids), inputs, moved(host.sampled_rows), host.sampling)
