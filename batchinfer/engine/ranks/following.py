"""The following ranks, which run the forward passes of steps that the leading rank schedules and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.core.samples import ExpertTokens, RankUse
from batchinfer.engine.ranks.token_transfer import TokenTransfer
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.schedule.step_plan import RankStep, SamplingPlan
from batchinfer.engine.tensors.device_memory import out_of_memory_errors
from batchinfer.machine.memory import peak_memory
from batchinfer.models.parallel.group import SpentTime


@dataclass(frozen=True, slots=True)
class RankAccount:
    """The memory of a rank, and the time that it spends in communication."""

    rank: int
    stage: int
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    before_bytes: int | None  # resident memory of the process before loading; None: unknown
    wait: SpentTime | None = None  # waiting for other stages; None: one stage, or not timed
    sums: SpentTime | None = None  # see `RankGroups`
    # Returns the tokens routed to each expert of its layers so far; waits for the device
    read_loads: Callable[[], ExpertTokens] = dict

    def use(self, waited_s: float = 0.0) -> RankUse:
        """Return the memory and time used so far.

        Args:
            waited_s: Seconds for which the rank has waited for steps.
        """
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
    """A following rank of an engine, or of several engines that take turns. It must get every step, in order."""

    passed: Sequence[TokenTransfer]  # per engine, with its runner
    has_head: bool  # True if the rank has a shard of the head that computes logits
    account: RankAccount

    @torch.inference_mode()
    def run(self, step: RankStep) -> None:
        """Run a step's forward pass, and this rank's part of computing logits. Raises torch.OutOfMemoryError."""
        passed, plan = self.passed[step.turn], step.plan
        runner = passed.runner
        with out_of_memory_errors():
            passed.before_step(plan)
            hidden, sampling, _ = runner.forward(plan)
            if plan.sampled_rows and self.has_head:
                _make_logits(runner, hidden, sampling)
            passed.after_step(plan)


def _make_logits(runner: ModelRunner, hidden: Tensor, plan: SamplingPlan) -> None:
    """Call the head exactly as `Sampler.next_tokens` does on the leading rank: each call is a collective.

    The calls depend only on the plan: the leading rank reads masks after it has the logits.
    """
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
