"""Tokens on their way from the rank that samples to the others' devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.step_plan import StepPlan


@dataclass(slots=True, eq=False)
class PassedTokens:
    """The tokens of the steps of one engine, which rank 0 samples. Where a plan awaits those of the step before, they
    are sent, ahead of its step, to the devices that read them: those of all ranks, or of the first stage alone.

    With stages, rank 0 has launched steps of other engines by then. It sends the tokens as soon as they are there, in a
    stream of their own, and these steps do not wait until somebody takes them.
    """

    runner: ModelRunner
    company: Company
    _rows: int = 0  # that the newest step with any has sampled
    _sampled: torch.cuda.Event | None = None  # on rank 0: when it had; None: its device has no streams
    _beside: list[torch.cuda.Stream] = field(default_factory=list)  # one, once it is needed

    def ahead_of(self, plan: StepPlan) -> None:
        """Have the tokens that the plan awaits where they are read."""
        runner, rank = self.runner, self.company.rank
        if plan.awaited is None or not isinstance(runner, DeviceRunner):
            return
        if rank == 0:
            tokens = runner.device_tokens.tokens
            assert tokens is not None, "rank 0 has sampled"
            self._send(tokens)
        elif runner.borders.begins:
            runner.device_tokens.tokens = self._received(runner.device)

    def behind(self, plan: StepPlan) -> None:
        """Note what a step has sampled, once it was launched."""
        if not plan.sampled_rows or not plan.sampling.chooses:
            return
        self._rows = plan.sampling.choosing(plan.sampled_rows)
        if self._staged and self.company.rank == 0 and self.runner.device.type == "cuda":
            self._sampled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sampled.record()

    @property
    def _staged(self) -> bool:
        return self.company.division.stages > 1

    def _received(self, device: torch.device) -> Tensor:
        tokens, group = torch.empty(self._rows, dtype=torch.int64, device=device), self.company.everyone
        return group.receive(tokens, 0) if self._staged else group.broadcast(tokens, 0)

    def _send(self, tokens: Tensor) -> None:
        group, division = self.company.everyone, self.company.division
        if not self._staged:
            group.broadcast(tokens, 0)
            return
        with self._in_stream(tokens):
            for rank in range(1, division.ranks):
                if division.stage(rank) == 0:
                    group.send(tokens, rank)

    @contextmanager
    def _in_stream(self, tokens: Tensor) -> Iterator[None]:
        """Go on in a stream that waits for the step with these tokens, and for no later one."""
        if self._sampled is None:
            yield
            return
        if not self._beside:
            self._beside.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        (beside,) = self._beside
        beside.wait_event(self._sampled)
        tokens.record_stream(beside)
        with torch.cuda.stream(beside):
            yield
