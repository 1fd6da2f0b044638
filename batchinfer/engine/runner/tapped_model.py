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
    """A draft head that a runner can run like a model.

    At each position, the head reads the next token and a stored hidden state: the target model's, or the head's
    own output if the target model has not computed the position yet.

    Args:
        head: The draft head.
        kept: The hidden states per KV cache slot.
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
        """Run the draft head for a step, and return its output states, [T, width].

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The attention inputs of the head's only cache group.
            caches: The KV cache of the head.
            plans: The attention plan of the cache group.
        """
        (own,), (cache,), (plan,) = inputs, caches, plans
        return self._head.forward(token_ids, self._kept.read(own.slots), own, cache, plan)

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Store the head's output as input of the next position of each sequence.

        Args:
            hidden: [n, width], the output at the last token of each of n sequences.
            plan: Ignored.
            host: The inputs of the step.
        """
        size, (tables,) = self._kept.block_size, host.tables
        chunks = np.searchsorted(np.cumsum(host.query_lens), host.sampled_rows, side="right")
        block, place = np.divmod(np.array(host.context_lens)[chunks], size)
        (slots,) = upload([tables.array()[chunks, block].astype(np.int64) * size + place], hidden.device)
        self._kept.write(slots, hidden)


def choose_copy(ops: Ops) -> CopyParts:
    """Return the function that copies the first slots of partial blocks.

    It is a GPU kernel for GPU operators, else a function in torch.
    """
    if not isinstance(ops, GraphOps):
        return copy_parts_reference
    from batchinfer_kernels.gpu.copy_parts import copy_parts

    return copy_parts


@dataclass(frozen=True, slots=True, eq=False)
class TappedModel:
    """A decoder that also stores, per KV cache slot, the hidden states that a draft head reads.

    Attributes:
        decoder: The target model.
        head: The draft head.
        tapped: The indices of the layers whose inputs the head reads.
        kept: The hidden states per KV cache slot.
        group: The index of the cache group by whose slots the hidden states are stored. The group keeps all tokens.
        copy_parts: Copies the first slots of blocks to other blocks.
    """

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
        """Run the decoder for a step, and store the states that the draft head reads.

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The attention inputs of each cache group.
            caches: The KV cache of each layer with attention.
            plans: The attention plan of each cache group.

        Returns:
            The hidden states after the last layer, [T, hidden].
        """
        taps = Taps(self.tapped)
        hidden = self.decoder.forward(token_ids, inputs, caches, plans, taps=taps)
        self._keep(taps, hidden, inputs)
        self.copy(inputs)
        return hidden

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run the decoder for a step as a generator that pauses before each layer's attention.

        The states that the draft head reads are stored for the step's tokens. After the last piece, the caller must
        call `copy` to store them for copied partial blocks, too.

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The attention inputs of each cache group.
            caches: The KV cache of each layer with attention.

        Yields:
            The attention that the caller must launch. The caller passes the result of attention to `send()`.

        Returns:
            The hidden states after the last layer, [T, hidden].
        """
        taps = Taps(self.tapped)
        hidden = yield from self.decoder.forward_split_at_attention(token_ids, inputs, caches, taps=taps)
        self._keep(taps, hidden, inputs)
        return hidden

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the buffers through which captured pieces and attention exchange tensors.

        Args:
            tokens: The number of tokens of the largest step.
        """
        return self.decoder.static_buffers(tokens)

    def copy(self, inputs: Seq[AttentionInputs]) -> None:
        """Copy the hidden states that the draft head reads, for the partial blocks that the step copies.

        It must be called after the states of the step's tokens were written.

        Args:
            inputs: The step's attention inputs of each cache group.
        """
        parts, places = inputs[self.group].parts, self.kept.as_cache
        if parts is not None:
            self.copy_parts(places, places, parts)

    def move(self, moves: Seq[Tensor]) -> None:
        """Copy the hidden states that the draft head reads from KV cache slots to other slots.

        Args:
            moves: [n, 2] per cache group, the slots to copy from and to.
        """
        places = self.kept.as_cache
        move_slots_reference(places, places, moves[self.group])

    def states(self, hidden: Tensor) -> Tensor:
        """Return hidden states, [n, hidden], after the decoder's final norm."""
        return self.decoder.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the decoder's logits, [n, vocab], for hidden states, [n, hidden]."""
        return self.decoder.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the decoder's token with the highest logit, int64 [n], for hidden states, [n, hidden]."""
        return self.decoder.argmax(hidden)

    def _keep(self, taps: Taps, hidden: Tensor, inputs: Seq[AttentionInputs]) -> None:
        self.kept.write(inputs[self.group].slots, self.head.input_states(taps.states, hidden))
