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
    """How a step was launched on a GPU."""

    mode: LaunchMode  # of several micro-batches, the mode with the most work for the host
    capture_s: float | None = None  # seconds spent capturing graphs for the step; None: unknown
    graph_bytes: int | None = None  # device memory that these graphs took; None: unknown


class Launched(Protocol):
    """A step that was launched and may still be running.

    All results wait for the device. Their keys are the indices of chunks among the chunks that sample.
    """

    @property
    def padded_tokens(self) -> int:
        """Return the number of query positions computed only as padding."""

    @property
    def launch(self) -> StepLaunch | None:
        """Return how the step was launched, or None on a CPU."""

    @property
    def collective_s(self) -> float | None:
        """Return the seconds spent in collectives, or None if there are none or they are not timed."""

    def tokens(self) -> list[list[int]]:
        """Return the next tokens of each chunk that samples, in order; a list may be empty.

        If the runner looks ahead, each sequence without a barrier gets exactly one token. Tokens beyond the number of
        drafts plus one have no K and V yet: the next step computes them. NO_TOKEN marks logits that are not finite.
        """

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of the tokens of each chunk that requests them."""

    def states(self) -> Mapping[int, States]:
        """Return the requested hidden states after the final norm: (n, hidden), or their sum, (1, hidden)."""

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the tokens in the plan's `scored`, in the same order."""

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return for each chunk with a mask which of its tokens replaced a most likely token that the mask forbade.

        A chunk may be missing if its argmax was accepted without filling its mask.
        """


class Runner(Protocol):
    """Runs the steps of an engine in order."""

    @property
    def cost(self) -> ModelCost:
        """Return the cost model of its model's steps."""

    @property
    def layout(self) -> CacheLayout:
        """Return the layout of the cache groups. Plans contain a block table for each group."""

    @property
    def wants(self) -> PlanWants:
        """Return which optional parts of plans the runner reads."""

    @property
    def looks_ahead(self) -> bool:
        """Return True if a step may be launched before the tokens of the previous step are known."""

    @property
    def most_tokens(self) -> int | None:
        """Return the current limit of tokens per step after running out of memory, or None for no limit."""

    def launch(self, plan: StepPlan) -> Launched:
        """Run or launch a step. A runner must get every plan of an engine, in order."""
