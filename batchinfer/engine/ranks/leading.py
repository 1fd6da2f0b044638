"""The leading rank, which schedules and samples, and sends each step to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.ranks.rank_groups import RankGroups
from batchinfer.engine.ranks.token_transfer import TokenTransfer
from batchinfer.engine.runner.model_runner import ModelRunner, RunnerOutput
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.schedule.step_plan import PlanWants, RankStep, States, StepPlan, TokenScores
from batchinfer.engine.tensors.device_memory import out_of_memory_errors
from batchinfer_kernels.cost import ModelCost


class PendingStep:
    """A step that runs on this rank when its results are first requested: other engines' steps can be sent first."""

    def __init__(self, run: Callable[[], Launched]) -> None:
        self._run = run

    @cached_property
    def _ran(self) -> Launched:
        return self._run()

    @property
    def padded_tokens(self) -> int:
        """Return the number of query positions computed only as padding."""
        return self._ran.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        """Return how the step was launched, or None on a CPU."""
        return self._ran.launch

    @property
    def collective_s(self) -> float | None:
        """Return the seconds spent in collectives, or None if they are not timed."""
        return self._ran.collective_s

    def tokens(self) -> list[list[int]]:
        """Return the next tokens of each chunk that samples."""
        return self._ran.tokens()

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of chunks that request them."""
        return self._ran.logprobs()

    def states(self) -> Mapping[int, States]:
        """Return the hidden states that chunks request, by the chunk's index in the step."""
        return self._ran.states()

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the plan's scored tokens."""
        return self._ran.scores()

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return, per chunk with a mask, which tokens replaced a forbidden most likely token."""
        return self._ran.barred()


class LeadingRunner:
    """Runs steps together with the other ranks. It sends each plan to them first.

    With pipeline stages on a CPU, this rank (which has the last stage) defers a step until its results are requested.
    """

    def __init__(
        self,
        turn: int,
        runner: ModelRunner,
        rank_groups: RankGroups,
        send_step: Callable[[RankStep], None],
        cost: ModelCost,
    ) -> None:
        """Create the runner of one engine.

        Args:
            turn: Number of the engine among the engines that take turns.
            runner: Runs this rank's shard of the model.
            rank_groups: The ranks of the engine.
            send_step: Sends a step to the other ranks.
            cost: The cost of the whole model.
        """
        self._turn, self._runner, self._send_step = turn, runner, send_step
        self._passed = TokenTransfer(runner, rank_groups)
        self._pends = rank_groups.division.stages > 1 and not runner.looks_ahead
        self.cost, self._sums = cost, rank_groups.sums

    @property
    def layout(self) -> CacheLayout:
        """Return the layout of the cache groups, which is the same on every rank."""
        return self._runner.layout

    @property
    def wants(self) -> PlanWants:
        """Return which optional parts of plans the ranks read."""
        return self._runner.wants

    @property
    def looks_ahead(self) -> bool:
        """Return True if a step may be launched before the tokens of the previous step are known."""
        return self._runner.looks_ahead

    @property
    def most_tokens(self) -> int | None:
        """Return the runner's limit: None, as a rank that runs out of memory ends the engine."""
        return self._runner.most_tokens

    def launch(self, plan: StepPlan) -> Launched:
        """Run the step on all ranks."""
        self._send_step(RankStep(self._turn, plan))
        return PendingStep(partial(self._run, plan)) if self._pends else self._run(plan)

    def _run(self, plan: StepPlan) -> Launched:
        spent = 0.0 if self._sums is None else self._sums.seconds
        with out_of_memory_errors():
            self._passed.before_step(plan)
            launched = self._runner.launch(plan)
            self._passed.after_step(plan)
        if self._sums is None or not isinstance(launched, RunnerOutput):
            return launched
        return replace(launched, collective_s=self._sums.seconds - spent)
