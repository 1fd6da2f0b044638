"""The ranks that follow: they run the steps that the leading rank schedules, and sample nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.engine.ranks.passing_on import pass_on
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.schedule.step_plan import SamplingPlan, StepPlan
from batchinfer.models.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank's part of an engine. It gets every plan, in order."""

    runner: ModelRunner
    group: Group

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> None:
        """Run a step's forward pass, and this rank's part of making logits."""
        hidden, sampling, _ = self.runner.forward(plan)
        if plan.sampled_rows:
            self._make_logits(hidden, sampling)
            pass_on(self.runner, self.group, plan)

    def _make_logits(self, hidden: Tensor, plan: SamplingPlan) -> None:
        """Call the end of the model as `Sampler.next_tokens` does: each call is one of all ranks. What the leading rank
        calls follows from the plan, as its masks are read after the logits are there."""
        head = self.runner.model
        if plan.scored is not None:
            row_scores(head.logits, hidden, plan.scored)
        if not plan.chooses:
            return
        if plan.chosen is not None:
            hidden = hidden[torch.from_numpy(plan.chosen).to(hidden.device, torch.int64)]
        if self.runner.sampler.tries_argmax(plan):
            head.argmax(hidden)
        else:
            head.logits(hidden)
