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
        """Write the inputs of the next decode step into the tensors that a CUDA graph reads.

        Args:
            tokens: int64 [n], the tokens that the previous step sampled.
            step: The number of the next step. The first step of the multi-step launch is number 0.
            firsts: int32 [n], the context lengths of the first step.
            repeats: int32 [n], the number of steps in which each sequence has a token.
            kept: The tensors to write, and the block table from which slots are computed.
        """


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedReplays:
    """The further steps of a multi-step launch, which replay the CUDA graph of the first step.

    All steps have the same n sequences.

    Attributes:
        ops: The operators that prepare the next step on the device.
        captured: The graph of a step.
        plans: The attention plans that the graph reads, one per cache group.
        inputs: The input tensors that the graph reads.
        tables: The block tables for all steps, one per cache group.
        firsts: int32 [n], the context lengths of the first step.
        repeats: int32 [n], the number of steps in which each sequence has a token.
    """

    ops: AdvancingOps
    captured: Captured
    plans: Seq[FixedPlan]
    inputs: GraphInputs
    tables: Seq[Tensor]
    firsts: Tensor
    repeats: Tensor

    def run(self, step: int, tokens: Tensor) -> RanStep:
        """Run a further decode step and return its hidden states.

        Args:
            step: The number of the step. The first step of the multi-step launch is number 0.
            tokens: int64 [n], the tokens that the previous step sampled.
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
