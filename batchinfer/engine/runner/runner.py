"""The protocol of what runs an engine's steps. No torch: the simulator's runner only counts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import LaunchMode
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.cost import ModelCost, StepShape


class StepLaunch(NamedTuple):
    """The way in which a GPU's step was launched. One that ran in micro-batches, for want of memory, counts as the one
    that the host had most work with."""

    mode: LaunchMode
    capture_s: float | None = None  # capturing graphs for it; None: not known
    graph_bytes: int | None = None  # of the device's memory, that these graphs took; None: not known


class Launched(Protocol):
    """An in-flight step: launched, and perhaps still running."""

    @property
    def padded_tokens(self) -> int:
        """Query positions computed only as padding."""

    @property
    def launch(self) -> StepLaunch | None:
        """The way in which it was launched; None: on a CPU."""

    def tokens(self) -> list[list[int]]:
        """The next tokens of each chunk that samples, in order: any number of them, or none. Waits for the device.

        Where the runner looks ahead, a sequence without a barrier gets exactly one. Tokens beyond the chunk's drafts
        and one more are run by the next step. NO_TOKEN stands for logits that are not finite.
        """

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        """The log-probabilities of every token that `tokens` gives, for each sequence that asks. Waits for the device.

        They are given by sequence, not by place: what a step computes in addition to tokens may also be for chunks that
        sample none.
        """


class Runner(Protocol):
    """Runs steps, one after the other."""

    @property
    def cost(self) -> ModelCost:
        """The costs of its model's steps."""

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the one before it are known."""

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a step for which there is memory, after one ran out of it; None: any number that the
        scheduler may choose. It falls, and rises again when memory may be back."""

    def needs_tokens(self, sequence: Sequence) -> bool:
        """Whether a step of this sequence needs the token before on the host, so that no step may look ahead of it."""

    def launch(self, chunks: list[Chunk], copies: Seq[Copy] = ()) -> Launched:
        """Run the chunks, or begin to; in each layer the copies are made before anything is attended to."""

    def step_shape(self, chunks: list[Chunk], sampled: int, shared: int, copied: int = 0) -> StepShape:
        """The least work and memory traffic of these chunks, which sample `sampled` tokens, meet `shared` blocks of
        others among them again (see Scheduler.shared_blocks), and take over `copied` tokens."""
