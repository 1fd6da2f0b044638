"""Tokens on their way from the rank that samples to the others' devices."""

from __future__ import annotations

import torch

from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.models.parallel.group import Group


def pass_on(runner: ModelRunner, group: Group, plan: StepPlan) -> None:
    """Have all ranks know a step's tokens, where the next plan may name them without saying what they are. The rank 0
    has sampled them."""
    if not isinstance(runner, DeviceRunner) or not plan.sampled_rows or not plan.sampling.chooses:
        return
    if group.rank:
        rows = plan.sampling.choosing(plan.sampled_rows)
        runner.device_tokens.tokens = torch.empty(rows, dtype=torch.int64, device=runner.device)
    tokens = runner.device_tokens.tokens
    assert tokens is not None, "rank 0 has sampled"
    runner.device_tokens.tokens = group.broadcast(tokens, 0)
