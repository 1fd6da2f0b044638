"""A decoder whose steps leave what a head reads of its tokens in the blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.taps import Taps
from batchinfer.models.heads.layer_head import LayerHead
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class WatchedModel:
    """A decoder, and a head that reads the inputs of its `tapped` layers. States lie where the K and V of cache group
    `group` do, which keeps all tokens."""

    decoder: Decoder
    head: LayerHead
    tapped: tuple[int, ...]
    kept: SlotStates
    group: int

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step, as the decoder does, and keep the states of its tokens."""
        taps, own = Taps(self.tapped), inputs[self.group]
        hidden = self.decoder.forward(token_ids, inputs, caches, plans, taps=taps)
        self.kept.write(own.slots, self.head.kept(taps.states, hidden))
        if own.parts is not None:
            self.kept.copy(own.parts)
        return hidden

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm."""
        return self.decoder.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the decoder's logits."""
        return self.decoder.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the decoder's logits."""
        return self.decoder.argmax(hidden)
