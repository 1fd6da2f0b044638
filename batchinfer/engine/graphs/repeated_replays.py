"""Replays the graph of a decode step again and again: between two replays the device moves its rows on by itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from batchinfer.engine.graphs.graph_capture import Captured
from batchinfer.engine.tensors.batch import RanStep
from batchinfer.engine.tensors.graph_inputs import GraphInputs
from batchinfer.models.ops.attention import FixedPlan
from batchinfer_kernels.advance_rows import StepRows


class AdvancingOps(Protocol):
    """Operators that move the rows of a decode step on."""

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Write what the next step reads; see batchinfer_kernels.advance_rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedReplays:
    """The steps behind one that was replayed, of the same n rows."""

    ops: AdvancingOps
    captured: Captured
    plans: Seq[FixedPlan]  # that the graph reads, of each cache group
    held: GraphInputs  # that it reads
    tables: Seq[Tensor]  # of each cache group, with the blocks of all steps
    firsts: Tensor  # (n,) int32: contexts of the first step
    repeats: Tensor  # (n,) int32: in how many of the steps each row has a token

    def run(self, step: int, tokens: Tensor) -> RanStep:
        """Run step number `step`, that which was replayed being number 0, with what the one before has sampled. tokens:
        (n,) int64."""
        size, (token_ids, positions, *slots) = self.held.size, self.held.lines.tensors
        rest: tuple[Tensor | None, ...] = (token_ids, positions)
        each = zip(self.plans, self.tables, slots, strict=False)  # adapters lie behind the slots
        for plan, table, own in each:
            kept = StepRows(table, size.block_size, own, plan.contexts, *rest)
            self.ops.advance_rows(tokens, step, self.firsts, self.repeats, kept)
            rest = (None, None)
        self.captured.replay()
        rows, hidden = len(tokens), self.captured.result
        return RanStep(hidden, hidden[:rows], size.rows - rows)
