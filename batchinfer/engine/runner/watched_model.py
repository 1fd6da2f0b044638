"""A decoder and a head that reads its states: each is the model of a runner.

A step of the decoder leaves what the head reads of its tokens in the blocks of the KV cache.
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

# Copies the beginnings of blocks; see batchinfer_kernels.copy_parts
CopyParts = Callable[[Tensor, Tensor, Tensor], None]


class HeadModel:
    """Its tokens are those behind the ones at their positions, whose states lie at their slots. What it gives behind
    the last token that is known takes the place of the next token's state, which the head's model has not computed yet:
    so it runs on behind its own proposals."""

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
        """Run a step: (T,) → (T, width)."""
        (own,), (cache,), (plan,) = inputs, caches, plans
        return self._head.forward(token_ids, self._kept.read(own.slots), own, cache, plan)

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Keep what a step gave behind the last tokens of rows, (n, width), as the states of the next ones."""
        size, (tables,) = self._kept.block_size, host.tables
        chunks = np.searchsorted(np.cumsum(host.query_lens), host.sampled_rows, side="right")
        block, place = np.divmod(np.array(host.context_lens)[chunks], size)
        (slots,) = upload([tables.array()[chunks, block].astype(np.int64) * size + place], hidden.device)
        self._kept.write(slots, hidden)


def copying(ops: Ops) -> CopyParts:
    """Return what copies states: the kernel where the host must not wait for the device."""
    if not isinstance(ops, GraphOps):
        return copy_parts_reference
    from batchinfer_kernels.gpu.copy_parts import copy_parts

    return copy_parts


@dataclass(frozen=True, slots=True, eq=False)
class WatchedModel:
    """A decoder, and a head that reads the inputs of its `tapped` layers. States lie where the K and V of cache group
    `group` do, which keeps all tokens."""

    decoder: Decoder
    head: LayerHead
    tapped: tuple[int, ...]
    kept: SlotStates
    group: int
    copy_parts: CopyParts

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step, as the decoder does, and keep the states of its tokens."""
        taps = Taps(self.tapped)
        hidden = self.decoder.forward(token_ids, inputs, caches, plans, taps=taps)
        self._keep(taps, hidden, inputs)
        self.copy(inputs)
        return hidden

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a step, as the decoder does, and keep the states of its tokens. What the step copies is not copied: it is
        no part of what depends on the number of tokens alone; see `copy`."""
        taps = Taps(self.tapped)
        hidden = yield from self.decoder.forward_split_at_attention(token_ids, inputs, caches, taps=taps)
        self._keep(taps, hidden, inputs)
        return hidden

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the decoder's buffers of steps of up to `tokens` tokens."""
        return self.decoder.static_buffers(tokens)

    def copy(self, inputs: Seq[AttentionInputs]) -> None:
        """Copy the states of those beginnings of blocks whose K and V a step copies, once it has written its own."""
        parts, places = inputs[self.group].parts, self.kept.places
        if parts is not None:
            self.copy_parts(places, places, parts)

    def move(self, moves: Seq[Tensor]) -> None:
        """Move the states of tokens whose K and V a step moves: of each cache group the slots, (n, 2)."""
        places = self.kept.places
        move_slots_reference(places, places, moves[self.group])

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm."""
        return self.decoder.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the decoder's logits."""
        return self.decoder.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the decoder's logits."""
        return self.decoder.argmax(hidden)

    def _keep(self, taps: Taps, hidden: Tensor, inputs: Seq[AttentionInputs]) -> None:
        self.kept.write(inputs[self.group].slots, self.head.input_states(taps.states, hidden))
