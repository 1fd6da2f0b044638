"""The state that a runner keeps between step plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.schedule.step_plan import Ints, Longs, SamplingPlan, StepPlan
from batchinfer.engine.tensors.adapter_slots import AdapterSlots
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.table_rows import TableRows
from batchinfer_kernels.draft_tree import TreeMask


@dataclass(slots=True)
class StepState:
    """Converts step plans to the complete inputs of steps.

    A plan omits what has not changed since the previous plan, so this object stores the state after the newest plan.

    Attributes:
        first_block: The number of the first KV cache block that the engine uses. It is added to the block numbers of
            plans, which begin at 0.
        tables: The block tables of the running sequences.
        adapters: Assigns LoRA adapters to slots on the device.
    """

    first_block: int = 0
    tables: TableRows = field(init=False)
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    _rows: Longs = field(default_factory=lambda: np.zeros(0, np.int64))
    _rope_offsets: Ints | None = None
    _second_segments: Ints | None = None
    _adapters: Longs | None = None
    _each: Longs = field(default_factory=lambda: np.zeros(0, np.int64))  # 0, 1, …: the index of each row
    _drawn: SamplingPlan | None = None  # the latest plan that draws tokens

    def __post_init__(self) -> None:
        self.tables = TableRows(self.first_block)

    def batch(self, plan: StepPlan, layout: CacheLayout) -> HostBatch:
        """Return the complete inputs of a step as arrays on the host. It must be called once per plan, in order.

        Args:
            plan: The plan of the step.
            layout: The layout of the KV cache.
        """
        if plan.rows is not None:
            self._rows, self._rope_offsets = plan.rows.astype(np.int64), plan.rope_offsets
            self._second_segments = plan.second_segments
            self._adapters = None if plan.adapters is None else self.adapters.of(plan.adapters)
            self._each = np.arange(len(self._rows))
        tables = self.tables.take(plan.tables, self._rows)
        starts, lengths = plan.starts.astype(np.int64), plan.lengths
        if lengths is None:
            row_of, positions, query_lens = self._each, starts, [1] * len(starts)
            contexts = starts + 1
        else:
            query_lens, contexts = lengths.tolist(), starts + lengths
            row_of = np.repeat(self._each, lengths)
            positions = np.arange(len(row_of)) + (contexts - np.cumsum(lengths))[row_of]
        at, inside = np.divmod(positions, layout.block_size)
        tree = None if plan.tree_bits is None else _tree(positions, plan.tree_bits)
        # Nodes of a draft tree have consecutive slots, but the rotary position after their parent's
        places = positions if tree is None else tree.last + tree.depths
        offsets, segments, adapters = self._rope_offsets, self._second_segments, self._adapters
        return HostBatch(
            token_ids=plan.tokens.astype(np.int64),
            positions=places if offsets is None else places + offsets[row_of],
            slots=[
                own.kept[own.rows[row_of], at].astype(np.int64) * layout.block_size + inside for own in tables
            ],
            tables=tables,
            keeps_all=[group.keeps is None for group in layout.groups],
            sampled_rows=self._each if plan.sampled is None else plan.sampled.astype(np.int64),
            sampling=self._with_draws(plan.sampling),
            query_lens=query_lens,
            context_lens=contexts.tolist(),
            copies=self._placed(plan.copies),
            awaited=plan.awaited,
            follows=plan.rows is None,
            token_types=None if segments is None else _types(positions, segments[row_of]),
            adapters=None if adapters is None else adapters[row_of],
            tree=tree,
        )

    def _placed(self, copies: Ints | None) -> Ints | None:
        if copies is None or not self.first_block:
            return copies
        return copies + np.array([0, 0, self.first_block, self.first_block, 0, 0], np.int32)

    def _with_draws(self, sampling: SamplingPlan) -> SamplingPlan:
        drawn = sampling.drawn
        if drawn is None:
            return sampling
        if drawn.fixed is None:
            assert self._drawn is not None, "no earlier plan has sampling arguments"
            assert self._drawn.drawn is not None
            sampling = replace(sampling, drawn=replace(drawn, fixed=self._drawn.drawn.fixed))
        self._drawn = sampling
        return sampling


def _tree(positions: Longs, bits: Ints) -> TreeMask:
    """Return the attention mask of a step with draft trees.

    A node attends to all keys up to the last token before its tree, to its ancestors and to itself.

    Args:
        positions: [T], the position of each of the T tokens in its sequence.
        bits: [T], for each node, a bit set of the node and its ancestors; 0 for other tokens.
    """
    nodes = bits != 0
    before = np.where(nodes, -1, positions)
    # The index of the last token that is not a node: for nodes, the token before their tree
    last = np.maximum.accumulate(np.where(nodes, -1, np.arange(len(bits))))
    return TreeMask(before[last], bits)


def _types(positions: Longs, second: Ints) -> Longs:
    return ((second > 0) & (positions >= second)).astype(np.int64)
