"""CUDA graphs of decode steps, captured once and replayed: the host launches one graph instead of hundreds of kernels.

A graph reads its inputs where they lay when it was captured, and repeats the launches of the capture. So a step is
padded to one of a few batch sizes, its inputs are copied to that size's own tensors, and attention is planned for
contexts of up to a bound. Padding rows have no context; their keys go to a block that no sequence uses.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from batchinfer.engine.graphs.graph_capture import Capture, Captured
from batchinfer.engine.kv.cache_layout import CacheGroup
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.device_tables import DeviceTables, GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphInputs, GraphSize
from batchinfer.engine.tensors.graph_sizes import LATER_FIRST, batch_sizes, context_bound
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, FixedPlan

_log = logging.getLogger(__name__)

MOST_GRAPHS = 512  # each keeps a few MiB, and none is ever freed

Forward = Callable[[Tensor, Seq[AttentionInputs], Seq[AttentionPlan]], Tensor]


@runtime_checkable
class GraphOps(Protocol):
    """Operators that can plan the attention of a graph."""

    def plan_captured(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: frozenset[int | None],
        longest: int,
        beside: AttentionPlan | None = None,
        before: FixedPlan | None = None,
    ) -> FixedPlan:
        """Plans single queries, for a graph that stays valid while contexts grow up to `longest` tokens.

        `beside`: as for `Ops.plan_attention`. `before`: a plan for the same sequences in the same order, with a token
        less each, on the same tensors; what they share is the same.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    plans: list[FixedPlan]  # that the graph reads, of each cache group
    captured: Captured


@dataclass(frozen=True, slots=True, eq=False)
class _Replayed:
    """The step that was run last as a graph."""

    batch: HostBatch
    size: GraphSize
    graph: _Graph

    def precedes(self, batch: HostBatch, size: GraphSize) -> bool:
        """Whether the step runs the same sequences in the same order, one token further, on the same tensors. Then no
        table has changed but for appended blocks: a sequence that was preempted would have run in a step between."""
        known = self.size == size and batch.follows
        return known and [n + 1 for n in self.batch.context_lens] == batch.context_lens


class DecodeGraphs:
    """Captures graphs of `forward` when a step first needs one, and replays them.

    `largest`: the largest step that is captured; `tables`: room for it; `groups`: of the KV cache. After a capture that
    ran out of memory nothing more is captured; what was, is replayed.
    """

    def __init__(
        self,
        forward: Forward,
        ops: GraphOps,
        largest: GraphSize,
        groups: tuple[CacheGroup, ...],
        tables: GraphTables,
        capture: Capture,
    ) -> None:
        self._forward, self._ops, self._largest, self._groups = forward, ops, largest, groups
        self._tables, self._capture = tables, capture
        self.sizes = batch_sizes(largest.rows)
        self._inputs: dict[GraphSize, GraphInputs] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._replayed: _Replayed | None = None
        self._seen: Counter[Hashable] = Counter()  # steps of kinds that have no graph
        self._first = 1  # which step of a kind is captured
        self._refused = False
        self.capture_s = 0.0  # seconds that captures took, those for which there was no memory included

    def end_warm_up(self) -> None:
        """Capture a kind of step from now on when it comes for the third time: a capture takes as long as many
        steps, and some kinds never come again."""
        self._first = LATER_FIRST

    @property
    def captured(self) -> int:
        """How many graphs were captured."""
        return len(self._graphs)

    @property
    def replayed(self) -> bool:
        """Whether the step that was run last was replayed, and not launched for want of a graph."""
        return self._replayed is not None

    def interrupt(self) -> None:
        """Note that a step was run without a graph: the next one does not follow the one that was replayed last."""
        self._replayed = None

    def covers(self, batch: HostBatch) -> bool:
        """Whether the step can be run as a graph."""
        largest, longest = self._largest, max(batch.context_lens)
        useless = self._refused and not self._graphs
        if useless or not batch.is_decode or longest > largest.longest:
            return False
        width = largest.blocks(context_bound(longest, largest.longest))
        return len(batch.query_lens) <= largest.rows and batch.tables[0].width <= width

    def run(
        self,
        batch: HostBatch,
        tables: DeviceTables,
        fill_in: Callable[[Tensor], None],
        or_else: bool = False,
    ) -> tuple[Tensor, int] | None:
        """Run a step that is covered → (hidden states of its rows, number of padding rows). Its kind may have no graph
        yet: then its operators are launched, or, where it can be run in another way (`or_else`), None is returned.

        `tables`: brought up to date. `fill_in` writes token ids that only the device knows. The result is valid until
        the next step is launched.
        Raises torch.OutOfMemoryError when the step's graph cannot be captured; nothing is from then on.
        """
        rows, last = len(batch.query_lens), self._replayed
        size = self._size(batch)
        before = last.graph.plans if last and last.precedes(batch, size) else None
        held = self._hold(batch, size)
        fill_in(held.token_ids)
        inputs = held.inputs(batch, self._tables.fill(size, batch.tables, tables))
        plans = self._plans(inputs, size.longest, before)
        key = (size, *[plan.sizes for plan in plans])
        if not self._is_worth_it(key):
            self._replayed = None
            if or_else:
                return None
            return self._forward(held.token_ids, inputs, plans)[:rows], size.rows - rows
        graph = self._graph(key, held.token_ids, inputs, plans)
        if graph.plans is not plans:
            for old, new in zip(graph.plans, plans, strict=True):
                old.refill(new)
        graph.captured.replay()
        self._replayed = _Replayed(batch, size, graph)
        return graph.captured.result[:rows], size.rows - rows

    def _is_worth_it(self, key: Hashable) -> bool:
        """Whether a step of this kind is replayed, after a capture if it has no graph yet."""
        if key in self._graphs:
            return True
        self._seen[key] += 1
        may = not self._refused and len(self._graphs) < MOST_GRAPHS
        return may and self._seen[key] >= self._first

    def _size(self, batch: HostBatch) -> GraphSize:
        """Return the smallest size that holds the step."""
        rows = self.sizes[bisect_left(self.sizes, len(batch.query_lens))]
        longest = context_bound(max(batch.context_lens), self._largest.longest)
        return replace(self._largest, rows=rows, longest=longest, adapted=batch.adapters is not None)

    def _hold(self, batch: HostBatch, size: GraphSize) -> GraphInputs:
        """Put the step on the device."""
        held = self._inputs.get(size)
        if held is None:
            held = self._inputs[size] = GraphInputs.of(batch, size, self._tables.device)
        else:
            held.refill(batch)
        return held

    def _plans(
        self, inputs: list[AttentionInputs], longest: int, before: list[FixedPlan] | None
    ) -> list[FixedPlan]:
        plans: list[FixedPlan] = []
        for at, (group, own) in enumerate(zip(self._groups, inputs, strict=True)):
            plan = self._ops.plan_captured(
                own,
                self._largest.block_size,
                group.windows,
                longest,
                beside=plans[-1] if plans else None,
                before=before[at] if before else None,
            )
            plans.append(plan)
        return plans

    def _graph(
        self, key: Hashable, token_ids: Tensor, inputs: list[AttentionInputs], plans: list[FixedPlan]
    ) -> _Graph:
        if key not in self._graphs:
            began = time.perf_counter()
            try:
                captured = self._capture(lambda: self._forward(token_ids, inputs, plans))
            except torch.OutOfMemoryError:
                self._refused = True
                _log.warning(
                    "too little GPU memory to capture decode steps of %s rows as graphs: no more graphs are captured, "
                    "and steps without one run slower; lower engine.kv_memory to leave room for them",
                    len(inputs[0].query_lens),
                )
                raise
            finally:
                self.capture_s += time.perf_counter() - began
            self._graphs[key] = _Graph(plans, captured)
        return self._graphs[key]
