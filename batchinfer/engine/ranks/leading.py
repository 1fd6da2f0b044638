"""The rank that leads: it schedules and samples, and tells the others what to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.ranks.passing_on import PassedTokens
from batchinfer.engine.runner.model_runner import ModelRunner, RunnerOutput
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.schedule.step_plan import PlanWants, RankStep, States, StepPlan, TokenScores
from batchinfer.engine.tensors.device_memory import lack_of_memory
from batchinfer_kernels.cost import ModelCost


class PendingStep:
    """Waits to be asked: meanwhile this rank does what comes before in other batches."""

    def __init__(self, run: Callable[[], Launched]) -> None:
        self._run = run

    @cached_property
    def _ran(self) -> Launched:
        return self._run()

    @property
    def padded_tokens(self) -> int:
        """Query positions computed only as padding."""
        return self._ran.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        """The way in which it was launched."""
        return self._ran.launch

    @property
    def collective_s(self) -> float | None:
        """The seconds that collectives took."""
        return self._ran.collective_s

    def tokens(self) -> list[list[int]]:
        """Run the last stage; the next tokens of each chunk that samples."""
        return self._ran.tokens()

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of each chunk that asks."""
        return self._ran.logprobs()

    def states(self) -> Mapping[int, States]:
        """Return the hidden states that each chunk asks for."""
        return self._ran.states()

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the tokens that the plan names."""
        return self._ran.scores()

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return which tokens of chunks that have a mask it gave in the place of the most likely ones."""
        return self._ran.barred()


class LeadingRunner:
    """Runs steps together with the other ranks, which get each plan before it is run here. Where the layers are divided
    into stages, of which this rank has the last, and the host waits for what it computes, as on a CPU, a step is run
    here only when its results are asked for."""

    def __init__(
        self,
        turn: int,
        runner: ModelRunner,
        company: Company,
        tell: Callable[[RankStep], None],
        cost: ModelCost,
    ) -> None:
        """turn: which of the engines on these ranks it is for; cost: of the whole model, of which `runner` has a
        part."""
        self._turn, self._runner, self._tell = turn, runner, tell
        self._passed = PassedTokens(runner, company)
        self._pends = company.division.stages > 1 and not runner.looks_ahead
        self.cost, self._sums = cost, company.sums

    @property
    def layout(self) -> CacheLayout:
        """The cache groups, which are those of every rank."""
        return self._runner.layout

    @property
    def wants(self) -> PlanWants:
        """The parts of plans that every rank reads."""
        return self._runner.wants

    @property
    def looks_ahead(self) -> bool:
        """Whether the ranks' devices work while the next step is prepared."""
        return self._runner.looks_ahead

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a step: any number. A rank without memory for a step ends the group."""
        return self._runner.most_tokens

    def launch(self, plan: StepPlan) -> Launched:
        """Have all ranks run the step."""
        self._tell(RankStep(self._turn, plan))
        return PendingStep(partial(self._run, plan)) if self._pends else self._run(plan)

    def _run(self, plan: StepPlan) -> Launched:
        spent = 0.0 if self._sums is None else self._sums.seconds
        with lack_of_memory():
            self._passed.ahead_of(plan)
            launched = self._runner.launch(plan)
            self._passed.behind(plan)
        if self._sums is None or not isinstance(launched, RunnerOutput):
            return launched
        return replace(launched, collective_s=self._sums.seconds - spent)
