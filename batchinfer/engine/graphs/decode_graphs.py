"""CUDA graphs of decode steps, captured once and replayed: the host launches one graph instead of hundreds of kernels.

A graph reads its inputs where they lay when it was captured, and repeats the launches of the capture. So a step is
padded to one of a few batch sizes, its inputs are copied to that size's own tensors, and attention is planned for
contexts of up to a bound. Padding rows have no context; their keys go to a block that no sequence uses.

A step that verifies drafts has several tokens of a sequence, and graphs of its own for up to 2, 4 and 8 of them. Its
tokens lie one after the other, however many each sequence has, and are padded together: all but attention sees nothing
of sequences.
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

from batchinfer.engine.graphs.graph_capture import Capture, Captured, NotCaptured
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

MOST_GRAPHS = 512  # each keeps a few MiB, and none is ever freed
MOST_DRAFTED = 128  # of them, those of steps with drafts
# From so many rows on graphs share the memory of their results: of fewer, it is less than what the copy takes is worth
SETTLED_ROWS = 64

Forward = Callable[[Tensor, Seq[AttentionInputs], Seq[AttentionPlan]], Tensor]


@runtime_checkable
class GraphOps(AdvancingOps, Protocol):
    """Operators that can plan the attention of a graph."""

    def plan_captured(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: frozenset[int | None],
        longest: int,
        beside: AttentionPlan | None = None,
        before: FixedPlan | None = None,
        queries: int = 1,
    ) -> FixedPlan:
        """Plans up to `queries` queries of each sequence, for a graph that stays valid while contexts grow up to
        `longest` tokens.

        `beside`: as for `Ops.plan_attention`. `before`: a plan for the same sequences in the same order, of one
        query each, with a token less each, on the same tensors; what they share is the same.
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
        known = self.size == size and size.queries == 1 and batch.follows
        same_rows = (
            self.batch.table_rows is batch.table_rows
        )  # and not those of another engine, whose turn it was
        return known and same_rows and [n + 1 for n in self.batch.context_lens] == batch.context_lens


class DecodeGraphs:
    """Captures graphs of `forward` when a step first needs one, and replays them.

    `largest`: the largest step that is captured; `drafted`: the same of steps with drafts, None where there are none;
    `tables`: room for both; `groups`: of the KV cache. After a capture that ran out of memory, or failed, nothing more
    is captured; what was, is replayed.
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
        self._seen: Counter[Hashable] = Counter()  # steps of kinds that have no graph
        self._first = 1  # which step of a kind is captured
        self._refused = False
        self.capture_s = 0.0  # seconds that captures took, those for which there was no memory included

    def end_warm_up(self) -> None:
        """Capture a kind of step from now on when it comes for the third time: a capture takes as long as many
        steps, and some kinds never come again."""
        self._first = CAPTURE_AT_USE

    @property
    def steps(self) -> GraphSteps:
        """The steps of which there are graphs, or may be."""
        return GraphSteps(self._largest.rows, self._drafted.rows if self._drafted else 0)

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
        largest, longest = self._largest_of(batch), max(batch.context_lens)
        useless = self._refused and not self._graphs
        if useless or largest is None or longest > largest.longest:
            return False
        width = largest.blocks(context_bound(longest, largest.longest))
        return len(batch.token_ids) <= largest.rows and batch.tables[0].width <= width

    def _largest_of(self, batch: HostBatch) -> GraphSize | None:
        """Return the largest captured step of this kind; None: such steps are not captured."""
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
        """Run a step that is covered. Its kind may have no graph yet: then its operators are launched, or, where it can
        be run in another way (`or_else`), None is returned.

        `tables`: brought up to date. `fill_in` writes token ids that only the device knows.
        Raises torch.OutOfMemoryError when there is no memory for the step's graph, and NotCaptured when it cannot be
        captured for another reason; nothing is from then on.
        """
        rows, last = len(batch.token_ids), self._replayed
        size = self._size(batch)
        before = last.graph.plans if last and last.precedes(batch, size) else None
        held = self._hold(batch, size)
        fill_in(held.token_ids)
        inputs = held.inputs(batch, self._tables.fill(size, batch.tables, tables))
        plans = self._plans(inputs, size, before)
        key = (size, *[plan.sizes for plan in plans])
        if not self._is_worth_it(key, plain=size.queries == 1):
            self._replayed = None
            if or_else:
                return None
            return _ran(self._forward(held.token_ids, inputs, plans), batch, size.rows - rows)
        graph = self._graph(key, held, inputs, plans)
        if graph.plans is not plans:
            for old, new in zip(graph.plans, plans, strict=True):
                old.refill(new)
        graph.captured.replay()
        self._replayed = _Replayed(batch, size, graph)
        return _ran(graph.captured.result, batch, size.rows - rows)

    def replays(self, repeats: Ints) -> RepeatedReplays | None:
        """Return what runs the steps behind the one that was run last, all of which have to follow: each row decodes as
        many tokens as `repeats`, (n,), says of it, the last step's included. None where that was not replayed as a
        whole, or some of them need other graphs or plans."""
        last = self._replayed
        if last is None or last.size.queries > 1 or len(last.batch.context_lens) != len(repeats):
            return None
        firsts, padding = np.array(last.batch.context_lens, np.int32), [0] * (last.size.rows - len(repeats))
        contexts = (firsts + repeats - 1).tolist()
        plans = last.graph.plans
        if max(contexts) > last.size.longest or not all(plan.serves(contexts + padding) for plan in plans):
            return None
        self._replayed = replace(last, batch=replace(last.batch, context_lens=contexts))
        held, views = self._inputs[last.size], self._tables.views(last.size)
        each = upload([firsts, repeats], self._tables.device)
        return RepeatedReplays(self._ops, last.graph.captured, plans, held, views, *each)

    def _is_worth_it(self, key: Hashable, plain: bool) -> bool:
        """Whether a step of this kind is replayed, after a capture if it has no graph yet."""
        if key in self._graphs:
            return True
        self._seen[key] += 1
        may = not self._refused and len(self._graphs) < MOST_GRAPHS
        return may and self._seen[key] >= self._first and (plain or self._drafted_graphs < MOST_DRAFTED)

    def _size(self, batch: HostBatch) -> GraphSize:
        """Return the smallest size that holds the step."""
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

    def _hold(self, batch: HostBatch, size: GraphSize) -> GraphInputs:
        """Put the step on the device."""
        held = self._inputs.get(size)
        if held is None:
            held = self._inputs[size] = GraphInputs.of(batch, size, self._tables.device)
        else:
            held.refill(batch)
        return held

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
                beside=plans[-1] if plans else None,
                before=before[at] if before else None,
                queries=size.queries,
            )
            plans.append(plan)
        return plans

    def _graph(
        self, key: Hashable, held: GraphInputs, inputs: list[AttentionInputs], plans: list[FixedPlan]
    ) -> _Graph:
        if key not in self._graphs:
            token_ids, size = held.token_ids, held.size
            for plan in plans:
                plan.place()  # in the stream in which steps overwrite it, which is not the one of captures
            began = time.perf_counter()
            try:
                captured = self._capture(
                    lambda: self._results.settled(self._forward(token_ids, inputs, plans))
                )
            except torch.OutOfMemoryError:
                self._refused = True
                _log.warning(
                    "too little GPU memory to capture decode steps of %s rows as graphs: no more graphs are captured, "
                    "and steps without one run slower; lower engine.kv_memory to leave room for them",
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
    """Where graphs of many rows leave their results, which are read before the next one runs. Each would otherwise keep
    memory of its own for as long as it can be replayed: hundreds of MiB, of all sizes together."""

    def __init__(self, most_rows: int) -> None:
        self._most, self._held = most_rows, None  # type: int, Tensor | None

    def settled(self, hidden: Tensor) -> Tensor:
        """Return hidden states, (rows, hidden), moved to where those of all graphs lie if they are of many rows."""
        if len(hidden) < SETTLED_ROWS:
            return hidden
        if self._held is None:  # in the run before the first capture
            self._held = hidden.new_empty(self._most, hidden.shape[1])
        return self._held[: len(hidden)].copy_(hidden)


def _ran(hidden: Tensor, batch: HostBatch, padded: int) -> RanStep:
    """Return the step whose rows, padding included, have these hidden states."""
    if len(batch.sampled_rows) == len(batch.token_ids):
        return RanStep(hidden, hidden[: len(batch.token_ids)], padded)
    (rows,) = upload([batch.sampled_rows], hidden.device)
    return RanStep(hidden, hidden.index_select(0, rows), padded)
