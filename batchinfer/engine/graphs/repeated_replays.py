"""Multi-step decoding with graphs: replays a decode graph, and the device prepares each next step without the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from batchinfer.engine.graphs.graph_capture import CapturedFunction
from batchinfer.engine.tensors.batch import RanStep
from batchinfer.engine.tensors.graph_inputs import GraphInputs
from batchinfer.models.ops.attention import FixedPlan
from batchinfer_kernels.advance_rows import StepRows


class AdvancingOps(Protocol):
    """Operators with which the device itself prepares the inputs of the next decode step."""

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Write the inputs of the next decode step into the tensors that a CUDA graph reads.

        Args:
            tokens: int64 [n], the tokens that the previous step sampled.
            step: The index of the next step within the multi-step launch; the first step has the index 0.
            firsts: int32 [n], the context lengths of the first step.
            repeats: int32 [n], the number of steps in which each sequence gets a token.
            kept: The tensors to write, and the block table from which KV cache slots are computed.
        """


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedReplays:
    """The second and later steps of a multi-step launch, which replay the CUDA graph of the first step.

    All steps have the same n sequences.

    Attributes:
        ops: The operators that prepare the next step on the device.
        captured: The graph of the first step.
        plans: The attention plans that the graph reads, one per cache group.
        inputs: The input tensors that the graph reads.
        tables: The block tables, one per cache group, with the blocks that all steps need.
        firsts: int32 [n], the context lengths of the first step.
        repeats: int32 [n], the number of steps in which each sequence gets a token.
    """

    ops: AdvancingOps
    captured: CapturedFunction
    plans: Seq[FixedPlan]
    inputs: GraphInputs
    tables: Seq[Tensor]
    firsts: Tensor
    repeats: Tensor

    def run(self, step: int, tokens: Tensor) -> RanStep:
        """Run the second or a later step of the launch and return its hidden states.

        Args:
            step: The index of the step within the multi-step launch; the first step has the index 0.
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
