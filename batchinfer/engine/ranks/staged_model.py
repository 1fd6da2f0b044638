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
    """Receives hidden states from the previous pipeline stage, and sends hidden states to the next one.

    Attributes:
        group: The ranks of the engine.
        previous: The rank of the previous stage, or None in the first stage.
        following: The rank of the next stage, or None in the last stage.
        states: The buffer of received hidden states, [max tokens, hidden].
        wait: The time that the host waited for other stages so far. It is only meaningful on a CPU.
    """

    group: Group
    previous: int | None
    following: int | None
    # Fixed memory, because captured layers read it. Alternating engines share it: a rank's steps run sequentially
    states: Tensor
    wait: SpentTime

    @property
    def is_first(self) -> bool:
        """True for the first pipeline stage."""
        return self.previous is None

    @property
    def is_last(self) -> bool:
        """True for the last pipeline stage."""
        return self.following is None

    def receive(self, tokens: int) -> None:
        """Receive the hidden states of `tokens` tokens from the previous stage into the buffer `states`.

        In the first stage, nothing is done.
        """
        if self.previous is not None:
            with self.wait.measure():
                self.group.receive(self.states[:tokens], self.previous)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage. In the last stage, nothing is done.

        Args:
            hidden: [T, hidden], the hidden states of T tokens.
        """
        if self.following is not None:
            with self.wait.measure():
                self.group.send(hidden, self.following)


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """The layers of a pipeline stage, which a runner runs like a whole model.

    Attributes:
        model: The decoder with the layers of the stage. In the first stage it reads token ids, in other stages the
            received hidden states.
        stage_io: Transfers hidden states between stages.
    """

    model: Decoder
    stage_io: PipelineStageIO

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Run a step through the layers of the stage.

        Args:
            token_ids: [T], the tokens of the step. Only the first stage reads them.
            inputs: The attention inputs per cache group.
            caches: The KV cache of each layer with attention.
            plans: The attention plan of each cache group.

        Returns:
            The hidden states after the stage's last layer, [T, hidden].
        """
        return self.model.forward(token_ids, inputs, caches, plans, self._received(token_ids))

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Sequence[AttentionInputs], caches: Sequence[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a step through the layers of the stage as a generator that pauses before each layer's attention.

        Args:
            token_ids: [T], the tokens of the step. Only the first stage reads them.
            inputs: The attention inputs per cache group.
            caches: The KV cache of each layer with attention.

        Yields:
            The attention that the caller must launch. The caller passes the result of attention to `send()`.

        Returns:
            The hidden states after the stage's last layer, [T, hidden].
        """
        return self.model.forward_split_at_attention(token_ids, inputs, caches, self._received(token_ids))

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the buffers through which captured pieces and attention exchange tensors.

        Args:
            tokens: The number of tokens of the largest step.
        """
        return self.model.static_buffers(tokens)

    def _received(self, token_ids: Tensor) -> Tensor | None:
        return None if self.stage_io.is_first else self.stage_io.states[: len(token_ids)]

    def states(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the last stage after the model's final norm.

        Args:
            hidden: [n, hidden], the hidden states before the norm.
        """
        return self.model.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [n, vocab], for hidden states of the last stage, [n, hidden]."""
        return self.model.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the token with the highest logit, int64 [n], for hidden states of the last stage, [n, hidden]."""
        return self.model.argmax(hidden)
