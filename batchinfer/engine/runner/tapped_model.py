"""A decoder that keeps hidden states for a draft head (EAGLE, MTP), and the head as the model of its own runner.

The states are stored per slot, in the same blocks as the decoder's K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from batchinfer.engine.graphs.decode_graphs import GraphOps
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.decoder.attention import AttentionBoundary, StaticBuffers
from batchinfer.models.decoder.decoder import Decoder, Taps
from batchinfer.models.heads.layer_head import LayerHead
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.draft_tree import move_slots_reference

# Copies the first slots of partial blocks; see batchinfer_kernels.copy_parts
CopyParts = Callable[[Tensor, Tensor, Tensor], None]


class HeadModel:
    """A draft head as the model of a runner.

    Its input at a position is the state kept for that position and the token that follows. The target model has not
    computed the states of draft tokens yet: the head's own output takes their place (`take`).
    """

    def __init__(self, head: LayerHead, kept: SlotStates) -> None:
        self._head, self._kept = head, kept
        self.states, self.logits, self.argmax = head.states, head.logits, head.argmax

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step: token ids (T,) → states (T, width)."""
        (own,), (cache,), (plan,) = inputs, caches, plans
        return self._head.forward(token_ids, self._kept.read(own.slots), own, cache, plan)

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Store the head's output at the last token of each row, (n, width), as the state of the next position."""
        size, (tables,) = self._kept.block_size, host.tables
        chunks = np.searchsorted(np.cumsum(host.query_lens), host.sampled_rows, side="right")
        block, place = np.divmod(np.array(host.context_lens)[chunks], size)
        (slots,) = upload([tables.array()[chunks, block].astype(np.int64) * size + place], hidden.device)
        self._kept.write(slots, hidden)


def choose_copy(ops: Ops) -> CopyParts:
    """Return the function that copies states: the GPU kernel for operators that can be captured, else the reference."""
    if not isinstance(ops, GraphOps):
        return copy_parts_reference
    from batchinfer_kernels.gpu.copy_parts import copy_parts

    return copy_parts


@dataclass(frozen=True, slots=True, eq=False)
class TappedModel:
    """A decoder that also keeps the states that a draft head reads."""

    decoder: Decoder
    head: LayerHead
    tapped: tuple[int, ...]  # layers whose inputs the head reads
    kept: SlotStates
    group: int  # the cache group whose slots the states use; it keeps all tokens
    copy_parts: CopyParts

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step like `Decoder.forward`, and keep the states of its tokens."""
        taps = Taps(self.tapped)
        hidden = self.decoder.forward(token_ids, inputs, caches, plans, taps=taps)
        self._keep(taps, hidden, inputs)
        self.copy(inputs)
        return hidden

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a step like `Decoder.forward_split_at_attention`, and keep the states of its tokens.

        The states of partial blocks are not copied, as the captured pieces depend only on the number of tokens; the
        caller calls `copy`.
        """
        taps = Taps(self.tapped)
        hidden = yield from self.decoder.forward_split_at_attention(token_ids, inputs, caches, taps=taps)
        self._keep(taps, hidden, inputs)
        return hidden

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the decoder's buffers for steps of up to `tokens` tokens."""
        return self.decoder.static_buffers(tokens)

    def copy(self, inputs: Seq[AttentionInputs]) -> None:
        """Copy the states of partial blocks whose K and V the step copies. Call it after the step's own writes."""
        parts, places = inputs[self.group].parts, self.kept.places
        if parts is not None:
            self.copy_parts(places, places, parts)

    def move(self, moves: Seq[Tensor]) -> None:
        """Move states in the same way as K and V.

        Args:
            moves: Per cache group, (n, 2): slots to copy from and to.
        """
        places = self.kept.places
        move_slots_reference(places, places, moves[self.group])

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm."""
        return self.decoder.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the decoder's logits."""
        return self.decoder.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the argmax of the decoder's logits."""
        return self.decoder.argmax(hidden)

    def _keep(self, taps: Taps, hidden: Tensor, inputs: Seq[AttentionInputs]) -> None:
        self.kept.write(inputs[self.group].slots, self.head.input_states(taps.states, hidden))
