"""A head with a layer of its own, as the model of a runner."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.heads.layer_head import LayerHead
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class HeadModel:
    """Its tokens are those behind the ones at their positions, whose states lie at their slots. What it gives behind
    the last token that is known takes the place of the next token's state, which the head's model has not computed yet:
    so it runs on behind its own proposals."""

    def __init__(self, head: LayerHead, kept: SlotStates) -> None:
        self._head, self._kept = head, kept

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

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the head's last norm."""
        return self._head.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the head's logits."""
        return self._head.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the head's logits."""
        return self._head.argmax(hidden)
