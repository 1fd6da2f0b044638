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
        mode: The launch mode. Of several micro-batches, the mode with the most work for the host.
        capture_s: The seconds spent capturing CUDA graphs for the step, or None if unknown.
        graph_bytes: The device memory that these graphs took, or None if unknown.
    """

    mode: LaunchMode
    capture_s: float | None = None
    graph_bytes: int | None = None


class Launched(Protocol):
    """A step that was launched and may still be running. The methods wait for the device."""

    @property
    def padded_tokens(self) -> int:
        """The number of query positions that were computed only as padding."""

    @property
    def launch(self) -> StepLaunch | None:
        """How the step was launched on a GPU, or None on a CPU."""

    @property
    def collective_s(self) -> float | None:
        """The seconds spent in collectives, or None if there are none or they are not timed."""

    def tokens(self) -> list[list[int]]:
        """Return the next tokens of each chunk after which tokens are sampled, in order. A list may be empty.

        If the runner looks ahead, each sequence that does not wait for its newest tokens gets exactly one token. Tokens
        beyond the number of drafts plus one have no keys and values yet: the next step computes them. NO_TOKEN marks
        logits that are not finite.
        """

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of new tokens, for sequences that request them.

        The keys are the indices of chunks among chunks with sampled tokens.
        """

    def states(self) -> Mapping[int, States]:
        """Return the requested hidden states after the final norm, [n, hidden], or their sum, [1, hidden].

        The keys are the indices of chunks among the chunks that request hidden states.
        """

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the given tokens that the plan scores, in the order of the plan."""

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return for each new token whether the mask forbade the most likely token, for sequences with a mask.

        The keys are the indices of chunks among chunks with sampled tokens. A chunk may be missing if its most likely
        token was accepted without computing its mask.
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
        """The optional parts of plans that the runner reads."""

    @property
    def looks_ahead(self) -> bool:
        """True if a step may be launched before the tokens of the previous step are known."""

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens per step after the device ran out of memory, or None for no limit."""

    def launch(self, plan: StepPlan) -> Launched:
        """Run a step, or launch it without waiting. A runner must get every plan of an engine, in order."""
