"""One stage of a model whose layers are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.spent_time import SpentTime


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """Some of the layers, with the ranks that have those before and behind them; None: there are none. The last stage
    makes the logits."""

    model: Decoder
    group: Group
    before: int | None
    behind: int | None
    dtype: torch.dtype
    device: torch.device
    wait: SpentTime

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Run a step through these layers, with the hidden states of the stage before; the next one gets theirs."""
        came: Tensor | None = None
        if self.before is not None:
            shape = (len(token_ids), self.model.spec.hidden)
            with self.wait.spending():
                came = self.group.receive(
                    torch.empty(shape, dtype=self.dtype, device=self.device), self.before
                )
        hidden = self.model.forward(token_ids, inputs, caches, plans, came)
        if self.behind is not None:
            with self.wait.spending():
                self.group.send(hidden, self.behind)
        return hidden

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.model.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the logits."""
        return self.model.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the logits."""
        return self.model.argmax(hidden)
