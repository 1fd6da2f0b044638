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
from batchinfer.engine.runner.runner import LaunchedStep, StepLaunch
from batchinfer.engine.schedule.step_plan import PlanWants, RankStep, States, StepPlan, TokenScores
from batchinfer.engine.tensors.device_memory import out_of_memory_errors
from batchinfer_kernels.cost import ModelCost


class PendingStep:
    """A step of the leading rank that runs only when its results are first requested.

    Until then, this process can send the steps of other engines to the other ranks.

    Args:
        run: Runs the step.
    """

    def __init__(self, run: Callable[[], LaunchedStep]) -> None:
        self._run = run

    @cached_property
    def _ran(self) -> LaunchedStep:
        return self._run()

    @property
    def padded_tokens(self) -> int:
        """The number of positions that were computed only because the step was padded."""
        return self._ran.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        """How the step was launched on a GPU, or None on a CPU."""
        return self._ran.launch

    @property
    def collective_s(self) -> float | None:
        """The seconds spent in collectives, or None if they are not timed."""
        return self._ran.collective_s

    def tokens(self) -> list[list[int]]:
        """Return a list of sampled tokens for each sequence that gets tokens, in the order of the step's plan."""
        return self._ran.tokens()

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of the sampled tokens, for sequences that request them.

        A key is the index of a sequence among all sequences that get tokens.
        """
        return self._ran.logprobs()

    def states(self) -> Mapping[int, States]:
        """Return the hidden states of sequences that request them.

        A key is the index of a sequence among the sequences that request hidden states of this step.
        """
        return self._ran.states()

    def scores(self) -> TokenScores:
        """Return the log-probabilities of given tokens (of continuations or prompts) that the step's plan asks for."""
        return self._ran.scores()

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return for each sampled token True if the token mask forbade the most likely token.

        A key is the index of a sequence among all sequences that get tokens. Only sequences with a mask have a value.
        """
        return self._ran.barred()


class LeadingRunner:
    """Runs the steps of an engine on the leading rank, and sends each step's plan to the other ranks first.

    With pipeline stages on a CPU, a step runs on the leading rank only when its results are requested.
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
            turn: The index of the engine among the alternating engines; 0 if there is only one.
            runner: Runs this rank's shard of the model.
            rank_groups: The ranks of the engine.
            send_step: Sends a step to the other ranks.
            cost: Computes the FLOPs and memory traffic of a step of the whole model.
        """
        self._turn, self._runner, self._send_step = turn, runner, send_step
        self._passed = TokenTransfer(runner, rank_groups)
        self._pends = rank_groups.division.stages > 1 and not runner.looks_ahead
        self.cost, self._sums = cost, rank_groups.sums

    @property
    def layout(self) -> CacheLayout:
        """The layout of the KV cache. All ranks have the same cache groups."""
        return self._runner.layout

    @property
    def wants(self) -> PlanWants:
        """The optional parts of step plans that the ranks need."""
        return self._runner.wants

    @property
    def looks_ahead(self) -> bool:
        """True if a step may be launched before the tokens of the previous step are known."""
        return self._runner.looks_ahead

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens per step. It is always None, which means no limit."""
        return self._runner.most_tokens

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Send the plan of a step to the other ranks, and launch the step on this rank.

        With pipeline stages on a CPU, the step runs on this rank when its results are requested.
        """
        self._send_step(RankStep(self._turn, plan))
        return PendingStep(partial(self._run, plan)) if self._pends else self._run(plan)

    def _run(self, plan: StepPlan) -> LaunchedStep:
        spent = 0.0 if self._sums is None else self._sums.seconds
        with out_of_memory_errors():
            self._passed.before_step(plan)
            launched = self._runner.launch(plan)
            self._passed.after_step(plan)
        if self._sums is None or not isinstance(launched, RunnerOutput):
            return launched
        return replace(launched, collective_s=self._sums.seconds - spent)
