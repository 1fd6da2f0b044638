"""The ranks that follow: they run the steps that the leading rank schedules, and sample nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.engine.ranks.account import RankAccount
from batchinfer.engine.ranks.passing_on import PassedTokens
from batchinfer.engine.ranks.rank_step import RankStep
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.schedule.step_plan import SamplingPlan
from batchinfer.engine.tensors.device_memory import lack_of_memory


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank's part of an engine, or of several that take turns. It gets every step of each, in order."""

    passed: Sequence[PassedTokens]  # of each engine, with its runner
    has_head: bool  # whether it has a part of what makes logits
    account: RankAccount

    @torch.inference_mode()
    def run(self, step: RankStep) -> None:
        """Run a step's forward pass, and this rank's part of making logits. Raises torch.OutOfMemoryError."""
        passed, plan = self.passed[step.turn], step.plan
        runner = passed.runner
        with lack_of_memory():
            passed.ahead_of(plan)
            hidden, sampling, _ = runner.forward(plan)
            if plan.sampled_rows and self.has_head:
                _make_logits(runner, hidden, sampling)
            passed.behind(plan)


def _make_logits(runner: ModelRunner, hidden: Tensor, plan: SamplingPlan) -> None:
    """Call the end of the model as `Sampler.next_tokens` does: each call is one of all ranks that have a part of it.
    What the leading rank calls follows from the plan, as its masks are read after the logits are there."""
    head = runner.model
    if plan.scored is not None:
        row_scores(head.logits, hidden, plan.scored)
    if not plan.chooses:
        return
    if plan.chosen is not None:
        hidden = hidden[torch.from_numpy(plan.chosen).to(hidden.device, torch.int64)]
    if runner.sampler.tries_argmax(plan):
        head.argmax(hidden)
    else:
        head.logits(hidden)
