"""The rank that leads: it schedules and samples, and tells the others what to run."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.ranks.passing_on import pass_on
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.step_plan import PlanWants, StepPlan
from batchinfer.models.parallel.group import Group
from batchinfer_kernels.cost import ModelCost


class LeadingRunner:
    """Runs steps together with the other ranks, which get each plan before it is run here."""

    def __init__(
        self, runner: ModelRunner, group: Group, tell: Callable[[StepPlan], None], cost: ModelCost
    ) -> None:
        """cost: of the whole model, of which `runner` has a part."""
        self._runner, self._group, self._tell, self.cost = runner, group, tell, cost

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
        self._tell(plan)
        launched = self._runner.launch(plan)
        pass_on(self._runner, self._group, plan)
        return launched
