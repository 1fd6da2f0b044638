"""The protocol of runners, which run an engine's steps. Imports no torch, for the simulator's runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import LaunchMode
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.schedule.step_plan import PlanWants, States, StepPlan, TokenScores
from batchinfer_kernels.cost import ModelCost


class StepLaunch(NamedTuple):
    """How a step was launched on a GPU.

    Attributes:
        mode: The launch mode. If micro-batches have different modes, the mode that takes the host longest.
        capture_s: The seconds spent capturing CUDA graphs for the step, or None if unknown.
        graph_bytes: The bytes of device memory that the captured graphs took, or None if unknown.
    """

    mode: LaunchMode
    capture_s: float | None = None
    graph_bytes: int | None = None


class LaunchedStep(Protocol):
    """A step that was launched and may still be running. Its methods wait for the results."""

    @property
    def padded_tokens(self) -> int:
        """The number of positions that were computed only because the step was padded."""

    @property
    def launch(self) -> StepLaunch | None:
        """How the step was launched on a GPU, or None on a CPU."""

    @property
    def collective_s(self) -> float | None:
        """The seconds spent in collectives, or None if there are none or they are not timed."""

    # If the runner looks ahead, each sequence that does not wait for its newest tokens gets exactly one token.
    # A sequence with d drafts may get more than d + 1 tokens. The further ones have no keys and values yet.
    def tokens(self) -> list[list[int]]:
        """Return a list of sampled tokens for each sequence that gets tokens, in the order of the step's plan.

        A list may be empty, and may have several tokens if the sequence has drafts. NO_TOKEN is returned if logits are
        not finite.
        """

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of the sampled tokens, for sequences that request them.

        A key is the index of a sequence among all sequences that get tokens.
        """

    def states(self) -> Mapping[int, States]:
        """Return the hidden states after the final norm, for sequences that request them.

        Returns:
            [n, hidden], or their sum, [1, hidden]. A key is the index of a sequence among the sequences that request
            hidden states of this step.
        """

    def scores(self) -> TokenScores:
        """Return the log-probabilities of given tokens (continuations or prompts), in the order of the step's plan."""

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return for each sampled token True if the token mask forbade the most likely token.

        A key is the index of a sequence among all sequences that get tokens. Only sequences whose mask was computed
        have a value.
        """


class Runner(Protocol):
    """Runs the steps of an engine in order."""

    @property
    def cost(self) -> ModelCost:
        """The FLOPs and bytes of the model's operators."""

    @property
    def layout(self) -> CacheLayout:
        """The layout of the KV cache. Plans contain a block table for each of its cache groups."""

    @property
    def wants(self) -> PlanWants:
        """The optional parts of step plans that the runner needs."""

    @property
    def looks_ahead(self) -> bool:
        """True if a step may be launched before the tokens of the previous step are known."""

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens per step after the device ran out of memory, or None for no limit."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run a step, or launch it without waiting for its results.

        A runner must get every plan of an engine, in order, because a plan omits what has not changed.

        Args:
            plan: The plan of the step.
        """
