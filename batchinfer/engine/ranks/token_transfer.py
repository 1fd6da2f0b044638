"""Sends sampled tokens from rank 0 to the devices of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.ranks.rank_groups import RankGroups
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.step_plan import StepPlan


@dataclass(slots=True, eq=False)
class TokenTransfer:
    """Transfers the sampled tokens of one engine from rank 0 to the GPUs of the ranks that read them as input.

    A step may start before the host knows the tokens of the previous step. The receivers are the ranks of the first
    pipeline stage, or all other ranks if there is one stage.

    Attributes:
        runner: Runs the shard of this rank for the engine.
        rank_groups: The ranks of the engine.
    """

    runner: ModelRunner
    rank_groups: RankGroups
    _rows: int = 0  # tokens that the latest sampling step has sampled
    _sampled: torch.cuda.Event | None = None  # on rank 0: when they were sampled; None: no CUDA streams
    _streams: list[torch.cuda.Stream] = field(default_factory=list)  # one stream, created when it is needed

    def before_step(self, plan: StepPlan) -> None:
        """Send or receive the tokens of the previous step, if the next step reads them on the device.

        Args:
            plan: The plan of the next step.
        """
        runner, rank = self.runner, self.rank_groups.rank
        if plan.awaited is None or not isinstance(runner, DeviceRunner):
            return
        if rank == 0:
            tokens = runner.device_tokens.tokens
            assert tokens is not None, "rank 0 has sampled the previous step"
            self._send(tokens)
        elif runner.stage_io.is_first:
            runner.device_tokens.tokens = self._received(runner.device)

    def after_step(self, plan: StepPlan) -> None:
        """Record how many tokens the launched step samples, and on rank 0 the moment when they are sampled.

        Args:
            plan: The plan of the step.
        """
        if not plan.sampled_rows or not plan.sampling.chooses:
            return
        self._rows = plan.sampling.count_chosen_rows(plan.sampled_rows)
        if self._staged and self.rank_groups.rank == 0 and self.runner.device.type == "cuda":
            self._sampled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sampled.record()

    @property
    def _staged(self) -> bool:
        return self.rank_groups.division.stages > 1

    def _received(self, device: torch.device) -> Tensor:
        tokens, group = torch.empty(self._rows, dtype=torch.int64, device=device), self.rank_groups.everyone
        return group.receive(tokens, 0) if self._staged else group.broadcast(tokens, 0)

    def _send(self, tokens: Tensor) -> None:
        group, division = self.rank_groups.everyone, self.rank_groups.division
        if not self._staged:
            group.broadcast(tokens, 0)
            return
        with self._in_stream(tokens):
            for rank in range(1, division.ranks):
                if division.stage(rank) == 0:
                    group.send(tokens, rank)

    @contextmanager
    def _in_stream(self, tokens: Tensor) -> Iterator[None]:
        # Work in this context waits only for the step that sampled the tokens, not for later steps
        if self._sampled is None:
            yield
            return
        # A separate stream, so that other engines' steps on rank 0 do not wait for the receiver
        if not self._streams:
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        (stream,) = self._streams
        stream.wait_event(self._sampled)
        tokens.record_stream(stream)
        with torch.cuda.stream(stream):
            yield
