"""CUDA graphs of decode steps: captured once and replayed, so the host launches one graph instead of many kernels.

A graph repeats the launches of its capture on the same tensors. So a step is padded to one of a few batch sizes, its
inputs are copied to the tensors of that size, and attention is planned for contexts up to a bound. Padding rows have no
context, and their keys are written to a block that no sequence uses.

Steps that verify drafts have separate graphs for up to 2, 4 and 8 tokens per sequence. The tokens of all sequences are
concatenated and padded together, because only attention depends on sequences.
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

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.graphs.graph_capture import Capture, CapturedFunction, NotCaptured
from batchinfer.engine.graphs.repeated_replays import AdvancingOps, RepeatedReplays
from batchinfer.engine.kv.cache_layout import CacheGroup
from batchinfer.engine.schedule.step_plan import Ints
from batchinfer.engine.tensors.batch import HostBatch, RanStep
from batchinfer.engine.tensors.device_tables import DeviceTables, GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphInputs, GraphSize
from batchinfer.engine.tensors.graph_sizes import (
    CAPTURE_AT_USE,
    DRAFT_PARTS,
    DRAFT_QUERIES,
    GraphSteps,
    batch_sizes,
    context_bound,
)
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, FixedPlan

_log = logging.getLogger(__name__)

MOST_GRAPHS = 512  # maximum number of graphs. Each keeps a few MiB until the end of the process
MOST_DRAFTED = 128  # maximum number of graphs of steps with drafts
# Minimum number of rows for which graphs copy their results to shared memory. Below, the copy costs more than it saves
SHARED_RESULT_ROWS = 64

Forward = Callable[[Tensor, Seq[AttentionInputs], Seq[AttentionPlan]], Tensor]


@runtime_checkable
class GraphOps(AdvancingOps, Protocol):
    """Operators that can plan attention for a CUDA graph and advance the inputs of the graph by one decode step."""

    def plan_captured(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: frozenset[int | None],
        longest: int,
        other_group: AttentionPlan | None = None,
        before: FixedPlan | None = None,
        queries: int = 1,
    ) -> FixedPlan:
        """Return a plan of attention kernels for a CUDA graph, valid while contexts grow up to `longest` tokens.

        Args:
            inputs: The step's attention inputs of one cache group.
            block_size: The number of tokens per KV cache block.
            windows: The sliding windows of the layers that use the plan; None for a layer that sees all keys.
            longest: The maximum context length in tokens.
            other_group: The plan of another cache group for the same step. The parts of that plan that do not depend
                on block tables are reused. None: they are computed.
            before: The plan of the previous decode step of the same sequences in the same order, on the same tensors.
                None: there was no such step.
            queries: The maximum number of new tokens per sequence.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    plans: list[FixedPlan]  # the plans that the graph reads, one per cache group
    captured: CapturedFunction


@dataclass(frozen=True, slots=True, eq=False)
class _Replayed:
    batch: HostBatch
    size: GraphSize
    graph: _Graph

    def precedes(self, batch: HostBatch, size: GraphSize) -> bool:
        """Return True if the step `batch` directly continues this step: same sequences, same order, one token later.

        Both steps must also use the tensors of the same graph size.
        """
        # Block tables have only grown then: a preempted sequence would be missing in a step between
        same_size = self.size == size and size.queries == 1 and batch.follows
        # False for a step of another alternating engine
        same_rows = self.batch.table_rows is batch.table_rows
        return same_size and same_rows and [n + 1 for n in self.batch.context_lens] == batch.context_lens


class DecodeGraphs:
    """Captures decode steps as CUDA graphs when they are first needed, and replays the graphs.

    Steps are padded to one of a few sizes. After a capture has failed, no further graphs are captured; existing graphs
    are still replayed.

    Args:
        forward: Runs the model and returns the hidden states of all tokens.
        ops: The operators that plan attention.
        largest: The size of the largest decode step to capture.
        groups: The cache groups of the KV cache.
        tables: The device memory from which graphs read block tables.
        capture: Runs a function and captures the kernels that it launches.
        drafted: The size of the largest step with drafts to capture. None: steps with drafts are not captured.
    """

    def __init__(
        self,
        forward: Forward,
        ops: GraphOps,
        largest: GraphSize,
        groups: tuple[CacheGroup, ...],
        tables: GraphTables,
        capture: Capture,
        drafted: GraphSize | None = None,
    ) -> None:
        self._results = _Results(max(largest.rows, drafted.rows if drafted else 0))
        self._forward, self._ops, self._largest, self._groups = forward, ops, largest, groups
        self._drafted = drafted
        self._drafted_sizes = batch_sizes(drafted.rows, DRAFT_PARTS) if drafted else []
        self._drafted_graphs = 0
        self._tables, self._capture = tables, capture
        self.sizes = batch_sizes(largest.rows)
        self._inputs: dict[GraphSize, GraphInputs] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._replayed: _Replayed | None = None
        self._seen: Counter[Hashable] = Counter()  # number of steps per kind without a graph
        self._first = 1  # a kind is captured when it occurs for this time
        self._refused = False  # True after a capture has failed
        self.capture_s = 0.0  # time of all captures in seconds, failed ones included

    def end_warm_up(self) -> None:
        """End the warm-up of the job, so that graphs are captured less readily.

        During the warm-up, a kind of step (a padded size with its attention plan) is captured when it first occurs.
        Afterwards, it is captured when it occurs for the third time.
        """
        self._first = CAPTURE_AT_USE

    @property
    def steps(self) -> GraphSteps:
        """The sizes, in tokens, of the largest captured steps without drafts and with drafts."""
        return GraphSteps(self._largest.rows, self._drafted.rows if self._drafted else 0)

    @property
    def captured(self) -> int:
        """The number of CUDA graphs that were captured."""
        return len(self._graphs)

    @property
    def replayed(self) -> bool:
        """True if the newest step was run by replaying a CUDA graph."""
        return self._replayed is not None

    def interrupt(self) -> None:
        """Record that a step ran without these graphs.

        The next step then does not reuse the plans of the graph that was replayed before.
        """
        self._replayed = None

    def covers(self, batch: HostBatch) -> bool:
        """Return True if `run` accepts the step `batch`.

        The number of its tokens, its context lengths and its kind (with or without drafts) must fit a graph size.
        """
        largest, longest = self._largest_of(batch), max(batch.context_lens)
        useless = self._refused and not self._graphs
        if useless or largest is None or longest > largest.longest:
            return False
        width = largest.blocks(context_bound(longest, largest.longest))
        return len(batch.token_ids) <= largest.rows and batch.tables[0].width <= width

    def _largest_of(self, batch: HostBatch) -> GraphSize | None:
        if batch.is_decode:
            return self._largest
        few = batch.copies is None and max(batch.query_lens) <= DRAFT_QUERIES[-1]
        return self._drafted if few else None

    def run(
        self,
        batch: HostBatch,
        tables: DeviceTables,
        fill_in: Callable[[Tensor], None],
        or_else: bool = False,
    ) -> RanStep | None:
        """Run a step for which `covers` is True, as a CUDA graph if possible.

        Args:
            batch: The inputs of the step.
            tables: The block tables on the device, with all entries that this step needs.
            fill_in: Called with the tensor of the step's token ids, to write the ids that only the device knows.
            or_else: True to return None for a step that has no graph yet and is not captured now. False to launch the
                operators of such a step one by one.

        Returns:
            The hidden states of the step, or None; see `or_else`.

        Raises:
            torch.OutOfMemoryError: If there is no memory for a new graph.
            NotCaptured: If the step cannot be captured for another reason.
        """
        rows, last = len(batch.token_ids), self._replayed
        size = self._size(batch)
        before = last.graph.plans if last and last.precedes(batch, size) else None
        own = self._upload(batch, size)
        fill_in(own.token_ids)
        inputs = own.inputs(batch, self._tables.fill(size, batch.tables, tables))
        plans = self._plans(inputs, size, before)
        key = (size, *[plan.sizes for plan in plans])
        if not self._should_replay(key, plain=size.queries == 1):
            self._replayed = None
            if or_else:
                return None
            return _ran(self._forward(own.token_ids, inputs, plans), batch, size.rows - rows)
        graph = self._graph(key, own, inputs, plans)
        if graph.plans is not plans:
            for old, new in zip(graph.plans, plans, strict=True):
                old.refill(new)
        graph.captured.replay()
        self._replayed = _Replayed(batch, size, graph)
        return _ran(graph.captured.result, batch, size.rows - rows)

    def replays(self, repeats: Ints) -> RepeatedReplays | None:
        """Prepare the further steps of a multi-step launch, which replay the graph of the newest step.

        The caller must run all of these steps.

        Args:
            repeats: [n], the number of decode steps of each of the n sequences, including the newest step.

        Returns:
            The object that runs the further steps. None if the newest step was not replayed as a graph, or if one of
            the further steps needs another graph or another attention plan.
        """
        last = self._replayed
        if last is None or last.size.queries > 1 or len(last.batch.context_lens) != len(repeats):
            return None
        firsts, padding = np.array(last.batch.context_lens, np.int32), [0] * (last.size.rows - len(repeats))
        contexts = (firsts + repeats - 1).tolist()
        plans = last.graph.plans
        if max(contexts) > last.size.longest or not all(plan.serves(contexts + padding) for plan in plans):
            return None
        self._replayed = replace(last, batch=replace(last.batch, context_lens=contexts))
        own, views = self._inputs[last.size], self._tables.views(last.size)
        each = upload([firsts, repeats], self._tables.device)
        return RepeatedReplays(self._ops, last.graph.captured, plans, own, views, *each)

    def _should_replay(self, key: Hashable, plain: bool) -> bool:
        if key in self._graphs:
            return True
        self._seen[key] += 1
        may = not self._refused and len(self._graphs) < MOST_GRAPHS
        return may and self._seen[key] >= self._first and (plain or self._drafted_graphs < MOST_DRAFTED)

    def _size(self, batch: HostBatch) -> GraphSize:
        longest, adapted = (
            context_bound(max(batch.context_lens), self._largest.longest),
            batch.adapters is not None,
        )
        if batch.is_decode:
            queries, sizes = 1, self.sizes
        else:
            most = max(batch.query_lens)
            queries, sizes = next(n for n in DRAFT_QUERIES if n >= most), self._drafted_sizes
        rows = sizes[bisect_left(sizes, len(batch.token_ids))]
        return replace(self._largest, rows=rows, longest=longest, adapted=adapted, queries=queries)

    def _upload(self, batch: HostBatch, size: GraphSize) -> GraphInputs:
        own = self._inputs.get(size)
        if own is None:
            own = self._inputs[size] = GraphInputs.of(batch, size, self._tables.device)
        else:
            own.refill(batch)
        return own

    def _plans(
        self, inputs: list[AttentionInputs], size: GraphSize, before: list[FixedPlan] | None
    ) -> list[FixedPlan]:
        plans: list[FixedPlan] = []
        for at, (group, own) in enumerate(zip(self._groups, inputs, strict=True)):
            plan = self._ops.plan_captured(
                own,
                self._largest.block_size,
                group.windows,
                size.longest,
                other_group=plans[-1] if plans else None,
                before=before[at] if before else None,
                queries=size.queries,
            )
            plans.append(plan)
        return plans

    def _graph(
        self, key: Hashable, own: GraphInputs, inputs: list[AttentionInputs], plans: list[FixedPlan]
    ) -> _Graph:
        if key not in self._graphs:
            token_ids, size = own.token_ids, own.size
            for plan in plans:
                plan.place()  # in the stream of steps, not in the stream of captures, because steps overwrite the plan
            began = time.perf_counter()
            try:
                captured = self._capture(lambda: self._results.place(self._forward(token_ids, inputs, plans)))
            except torch.OutOfMemoryError:
                self._refused = True
                _log.warning(
                    "too little GPU memory to capture decode steps of %s rows as graphs: no further graphs are "
                    "captured, and steps without one run slower; lower engine.kv_memory to leave room for them",
                    size.rows,
                )
                raise
            except NotCaptured as error:
                self._refused = True
                _log.warning("decode steps cannot be captured as graphs, and run slower: %s", error)
                raise
            finally:
                self.capture_s += time.perf_counter() - began
            self._graphs[key] = _Graph(plans, captured)
            self._drafted_graphs += size.queries > 1
        return self._graphs[key]


class _Results:
    """Device memory into which all graphs copy their hidden states. Each result is read before the next graph runs.

    With its own memory per graph, hidden states of all sizes would take hundreds of MiB.
    """

    def __init__(self, most_rows: int) -> None:
        self._most, self._shared = most_rows, None  # type: int, Tensor | None

    def place(self, hidden: Tensor) -> Tensor:
        if len(hidden) < SHARED_RESULT_ROWS:
            return hidden
        if self._shared is None:  # in the warm-up run before the first capture
            self._shared = hidden.new_empty(self._most, hidden.shape[1])
        return self._shared[: len(hidden)].copy_(hidden)


def _ran(hidden: Tensor, batch: HostBatch, padded: int) -> RanStep:
    if len(batch.sampled_rows) == len(batch.token_ids):
        return RanStep(hidden, hidden[: len(batch.token_ids)], padded)
    (rows,) = upload([batch.sampled_rows], hidden.device)
    return RanStep(hidden, hidden.index_select(0, rows), padded)
