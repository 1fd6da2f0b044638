"""Multi-step decoding with graphs: replays a decode graph, and the device prepares each next step without the host."""

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
    """Operators that prepare the next decode step on the device."""

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Write the inputs of the next step; see batchinfer_kernels.advance_rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedReplays:
    """The further steps of a multi-step launch, after a replayed step of the same n rows."""

    ops: AdvancingOps
    captured: Captured
    plans: Seq[FixedPlan]  # the plans that the graph reads, one per cache group
    inputs: GraphInputs  # the inputs that the graph reads
    tables: Seq[Tensor]  # the block tables for all steps, one per cache group
    firsts: Tensor  # (n,) int32: context lengths of the first step
    repeats: Tensor  # (n,) int32: number of steps in which each row has a token

    def run(self, step: int, tokens: Tensor) -> RanStep:
        """Run a further step.

        Args:
            step: The number of the step. The replayed step is number 0.
            tokens: (n,) int64, the tokens that the previous step sampled.
        """
        size, (token_ids, positions, *slots) = self.inputs.size, self.inputs.lines.tensors
        rest: tuple[Tensor | None, ...] = (token_ids, positions)
        each = zip(self.plans, self.tables, slots, strict=False)  # adapters follow the slots
        for plan, table, own in each:
            kept = StepRows(table, size.block_size, own, plan.contexts, *rest)
            self.ops.advance_rows(tokens, step, self.firsts, self.repeats, kept)
            rest = (None, None)
        self.captured.replay()
        rows, hidden = len(tokens), self.captured.result
        return RanStep(hidden, hidden[:rows], size.rows - rows)
