"""One pipeline stage of a model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.decoder.attention import AttentionBoundary, StaticBuffers
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.parallel.group import Group, SpentTime


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStageIO:
    """Transfers hidden states from the previous stage and to the next stage.

    `states` is a fixed buffer, because captured layers read it. Steps of a rank run sequentially, so all engines that
    take turns share the buffer.
    """

    group: Group
    previous: int | None  # rank of the previous stage; None: this is the first
    following: int | None  # rank of the next stage; None: this is the last
    states: Tensor  # (max tokens, hidden): received hidden states
    wait: SpentTime  # time that the host waits for other stages; only meaningful on a CPU

    @property
    def is_first(self) -> bool:
        """Return True if this is the first stage."""
        return self.previous is None

    @property
    def is_last(self) -> bool:
        """Return True if this is the last stage."""
        return self.following is None

    def receive(self, tokens: int) -> None:
        """Receive hidden states into the first `tokens` rows of `states`."""
        if self.previous is not None:
            with self.wait.measure():
                self.group.receive(self.states[:tokens], self.previous)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states, (T, hidden), to the next stage."""
        if self.following is not None:
            with self.wait.measure():
                self.group.send(hidden, self.following)


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """The layers of one stage. They read received hidden states, or token ids in the first stage."""

    model: Decoder
    stage_io: PipelineStageIO

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Run a step through these layers."""
        return self.model.forward(token_ids, inputs, caches, plans, self._received(token_ids))

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Sequence[AttentionInputs], caches: Sequence[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a step through these layers, yielding before each attention."""
        return self.model.forward_split_at_attention(token_ids, inputs, caches, self._received(token_ids))

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the decoder's buffers for steps of up to `tokens` tokens."""
        return self.model.static_buffers(tokens)

    def _received(self, token_ids: Tensor) -> Tensor | None:
        """Return the received states of a step, or None in the first stage. Rows of padding tokens are stale."""
        return None if self.stage_io.is_first else self.stage_io.states[: len(token_ids)]

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.model.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits."""
        return self.model.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the argmax of the logits."""
        return self.model.argmax(hidden)
