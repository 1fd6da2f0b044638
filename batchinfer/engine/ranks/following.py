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
    """Reports the memory of a rank, and the time that the rank spends in communication.

    Attributes:
        rank: The number of the rank.
        stage: The index of the rank's pipeline stage.
        weight_bytes: The number of bytes of the rank's weights.
        kv_bytes: The number of bytes of the rank's KV cache.
        read_bytes: The number of bytes that the rank read from the checkpoint.
        before_bytes: The resident memory of the process before loading, or None if unknown.
        wait: The time spent waiting for other pipeline stages so far. None: there is one stage, or the time is not
            measured.
        sums: The time spent in collectives so far. None: the rank has no collectives, or they are not timed.
        read_loads: Returns the number of tokens that were routed so far to each expert of the rank's layers. The call
            waits for the device.
    """

    rank: int
    stage: int
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    before_bytes: int | None
    wait: SpentTime | None = None
    sums: SpentTime | None = None
    read_loads: Callable[[], ExpertTokens] = dict

    def use(self, waited_s: float = 0.0) -> RankUse:
        """Return the memory and the communication time of the rank up to now.

        Args:
            waited_s: The seconds that the rank waited for the leading rank to send steps. They are added to its
                waiting time.
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
    """Runs the leading rank's steps in another rank of the same engine.

    It must get every step of the leading rank, in order. With pipeline stages, several engines may alternate on the
    rank.

    Attributes:
        transfers: For each engine, its runner with the transfer of sampled tokens.
        has_head: True if the rank has a shard of the output layer, which computes logits.
        account: Reports the memory and time of the rank.
    """

    transfers: Sequence[TokenTransfer]
    has_head: bool
    account: RankAccount

    @torch.inference_mode()
    def run(self, step: RankStep) -> None:
        """Run this rank's part of a step, and exchange the results with the other ranks of the engine.

        The leading rank gets the logits and samples the tokens.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
        """
        transfer, plan = self.transfers[step.turn], step.plan
        runner = transfer.runner
        with out_of_memory_errors():
            transfer.before_step(plan)
            hidden, sampling, _ = runner.forward(plan)
            if plan.sampled_rows and self.has_head:
                _make_logits(runner, hidden, sampling)
            transfer.after_step(plan)


def _make_logits(runner: ModelRunner, hidden: Tensor, plan: SamplingPlan) -> None:
    # Must call the same collectives as `Sampler.next_tokens` on the leading rank. They depend only on the plan: the
    # leading rank reads masks after it has the logits.
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
