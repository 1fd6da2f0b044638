"""The ranks that follow: they run the steps that the leading rank schedules, and sample nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.core.samples import ExpertTokens, RankUse
from batchinfer.engine.ranks.passing_on import PassedTokens
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.schedule.step_plan import RankStep, SamplingPlan
from batchinfer.engine.tensors.device_memory import lack_of_memory
from batchinfer.machine.memory import peak_memory
from batchinfer.models.parallel.group import SpentTime


@dataclass(frozen=True, slots=True)
class RankAccount:
    """The account says what a rank of an engine has, and counts what it takes while it works."""

    rank: int
    stage: int
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    before_bytes: int | None  # that the process had in memory before it loaded anything; None: not known
    wait: SpentTime | None = None  # for ranks of other stages; None: there are no stages
    sums: SpentTime | None = None  # see `Company`
    # how many tokens all experts of its layers were given so far; waits for the device
    read_loads: Callable[[], ExpertTokens] = dict

    def use(self, waited_s: float = 0.0) -> RankUse:
        """Return what it came to. waited_s: for which the rank has waited for steps."""
        return RankUse(
            rank=self.rank,
            stage=self.stage,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
            read_bytes=self.read_bytes,
            before_rss_bytes=self.before_bytes,
            peak_rss_bytes=peak_memory(),
            collective_s=None if self.sums is None else self.sums.seconds,
            stage_wait_s=None if self.wait is None else waited_s + self.wait.seconds,
        )


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
