"""Steps of prompts for tests of prefill attention."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import triton

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.step_tables import StepTables
from tests.kernels.gpu.gluon_stand_in import Launcher

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
BLOCK, DIM = 8, 64
SHAPE = AttentionShape(torch.float16, 4, 2, DIM)


class Counted(Launcher):
    """Runs a Gluon kernel and counts the runs."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return super().__getitem__(grid)


def step(lens: list[int], contexts: list[int], seed: int = 0) -> AttentionInputs:
    """Return inputs of a step with random blocks; tables are padded with block 0."""
    counts = [-(-context // BLOCK) for context in contexts]
    blocks = list(range(1, 1 + sum(counts)))
    random.Random(seed).shuffle(blocks)
    tables = np.zeros((len(lens), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [blocks.pop() for _ in range(count)]
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    on_device = torch.from_numpy(tables).to(DEVICE)
    return AttentionInputs(nothing, nothing, on_device, lens, contexts, StepTables.of(tables))


def filled(
    ops: Ops, inputs: AttentionInputs, shape: AttentionShape = SHAPE
) -> tuple[torch.Tensor, LayerCache]:
    """Return random queries and a random cache."""
    torch.manual_seed(1)
    blocks = 2 + sum(-(-context // BLOCK) for context in inputs.context_lens)
    cache = ops.allocate_cache(CacheSpec(shape.kv_heads, shape.head_dim), blocks, BLOCK, shape.dtype, DEVICE)
    cache.k.normal_()
    cache.v.normal_()
    q = torch.randn(sum(inputs.query_lens), shape.q_heads, shape.head_dim, device=DEVICE)
    return q.to(shape.dtype), cache
