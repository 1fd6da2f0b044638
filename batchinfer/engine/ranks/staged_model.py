"""One stage of a model whose layers are divided among ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.decoder.attention import AttentionBoundary, StaticBuffers
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.parallel.group import Group, SpentTime


@dataclass(frozen=True, slots=True, eq=False)
class StageBorders:
    """The ranks before and behind one; None: there are none. What comes lies in `states`, (most tokens, hidden), where
    it stays until the next step: captured layers read it there. All steps of a rank, whichever of the engines that take
    turns they are of, run one after the other, and have it in common."""

    group: Group
    before: int | None
    behind: int | None
    states: Tensor
    wait: SpentTime  # of the host, on a CPU; a GPU's does not wait

    @property
    def begins(self) -> bool:
        """Whether no stage is before it."""
        return self.before is None

    @property
    def ends(self) -> bool:
        """Whether no stage is behind it."""
        return self.behind is None

    def receive(self, tokens: int) -> None:
        """Fill the first rows of `states`."""
        if self.before is not None:
            with self.wait.measure():
                self.group.receive(self.states[:tokens], self.before)

    def hand_on(self, hidden: Tensor) -> None:
        """Send these rows to the stage behind."""
        if self.behind is not None:
            with self.wait.measure():
                self.group.send(hidden, self.behind)


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """Some of the layers. Their input is what has come over the borders, unless they begin with the embedding. The last
    stage makes the logits."""

    model: Decoder
    borders: StageBorders

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Run a step through these layers."""
        return self.model.forward(token_ids, inputs, caches, plans, self._came(token_ids))

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Sequence[AttentionInputs], caches: Sequence[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a step through these layers, yielding before each attention."""
        return self.model.forward_split_at_attention(token_ids, inputs, caches, self._came(token_ids))

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the decoder's buffers of steps of up to `tokens` tokens."""
        return self.model.static_buffers(tokens)

    def _came(self, token_ids: Tensor) -> Tensor | None:
        """Return the rows of as many tokens; those of padding tokens, of which nobody sends any, hold old ones."""
        return None if self.borders.begins else self.borders.states[: len(token_ids)]

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.model.states(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the logits."""
        return self.model.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the logits."""
        return self.model.argmax(hidden)
