"""The protocol of what runs an engine's steps. No torch: the simulator's runner only counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import LaunchMode
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.schedule.step_plan import PlanWants, States, StepPlan, TokenScores
from batchinfer_kernels.cost import ModelCost


class StepLaunch(NamedTuple):
    """The way in which a GPU's step was launched. One that ran in micro-batches, for want of memory, counts as the one
    that the host had most work with."""

    mode: LaunchMode
    capture_s: float | None = None  # capturing graphs for it; None: not known
    graph_bytes: int | None = None  # of the device's memory, that these graphs took; None: not known


class Launched(Protocol):
    """An in-flight step: launched, and perhaps still running. Chunks are named by their place among those that
    sample."""

    @property
    def padded_tokens(self) -> int:
        """Query positions computed only as padding."""

    @property
    def launch(self) -> StepLaunch | None:
        """The way in which it was launched; None: on a CPU."""

    @property
    def collective_s(self) -> float | None:
        """The seconds that collectives took, once the step was run; None: there are none, or nobody waits for them."""

    def tokens(self) -> list[list[int]]:
        """The next tokens of each chunk that samples, in order: any number of them, or none. Waits for the device.

        Where the runner looks ahead, a sequence without a barrier gets exactly one. Tokens beyond the chunk's drafts
        and one more are run by the next step. NO_TOKEN stands for logits that are not finite.
        """

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """The log-probabilities of the tokens of each chunk that asks, chosen or given. Waits for the device."""

    def states(self) -> Mapping[int, States]:
        """The hidden states that each chunk asks for, (any, hidden), behind the final norm, or their sum, (1, hidden).
        Waits for the device."""

    def scores(self) -> TokenScores:
        """The log-probabilities of the tokens that the plan's `scored` names, in its order. Waits for the device."""

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Say of each chunk with a mask which of its tokens that gave in the place of the most likely ones. It waits
        for the device.

        A chunk whose argmax was allowed without a look at its mask may be left out.
        """


class Runner(Protocol):
    """Runs steps, one after the other."""

    @property
    def cost(self) -> ModelCost:
        """The costs of its model's steps."""

    @property
    def layout(self) -> CacheLayout:
        """The cache groups, whose block tables plans have."""

    @property
    def wants(self) -> PlanWants:
        """The parts of plans that it reads."""

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the one before it are known."""

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a step for which there is memory, after one ran out of it; None: any number that the
        scheduler may choose. It falls, and rises again when memory may be back."""

    def launch(self, plan: StepPlan) -> Launched:
        """Run a step, or begin to. A runner gets every plan of an engine, in order."""
