"""Logits of a model that ranks compute together, against those of one that computes it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.core.errors import CannotSplit
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.parallel.place import Portion, RankPlace
from batchinfer.models.parallel.sharded import sharded
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.batchinfer.models.paged import run_paged
from tests.batchinfer.models.parallel.parts import load_part, run_sharded, run_stages
from tests.batchinfer.models.test_logits import prompts_of
from tests.checkpoints import FAMILIES, make_checkpoint

LENGTHS = (1, 2, 17, 63)
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
NORMS_ALL_HEADS = ("olmo2",)


def made(folder: Path, family: str, **options: Any) -> Checkpoint:
    make_checkpoint(folder, family, **options)
    return inspect_checkpoint(folder)


def alone(checkpoint: Checkpoint, ops: Ops, **how: Any) -> list[torch.Tensor]:
    load = {key: how.pop(key) for key in ("quantization", "dtype") if key in how}
    decoder = load_part(checkpoint, ops, RankPlace(), **load)
    prompts = prompts_of(checkpoint.spec.vocab, LENGTHS)
    return run_paged(decoder, ops, prompts, dtype=load.get("dtype", torch.float32), **how)


def compiled(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Ops:
    attention = checkpoint.spec.attention
    return CpuOps(CompiledOperators(), attention.group, attention.cache.latent, dtype)


def check_close(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for rank in found:
        for got, want in zip(rank, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NORMS_ALL_HEADS])
def test_tensor_ranks(tmp_path: Path, family: str, size: int) -> None:
    """4 ranks and 2 KV heads: two ranks have the same ones."""
    checkpoint = made(tmp_path, family, vocab=261)
    prompts = prompts_of(261, LENGTHS)
    found = run_sharded(checkpoint, TorchOps, size, prompts, chunk=20, block_size=8)
    check_close(found, alone(checkpoint, TorchOps(), chunk=20, block_size=8))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", MOE)
def test_expert_ranks(tmp_path: Path, family: str, exact: bool) -> None:
    """All but the experts is on both ranks; sums in the order of one process have its bits."""
    checkpoint = made(tmp_path, family)
    ops = lambda: compiled(checkpoint)  # noqa: E731
    found = run_sharded(
        checkpoint, ops, 2, prompts_of(260, LENGTHS), tensor=False, experts=True, exact=exact, chunk=20
    )
    wanted = alone(checkpoint, ops(), chunk=20)
    check_close(found, wanted)
    if exact:
        assert all(torch.equal(a, b) for rank in found for a, b in zip(rank, wanted, strict=True))


@pytest.mark.parametrize("family", MOE)
def test_experts_beside_tensor_ranks(tmp_path: Path, family: str) -> None:
    checkpoint = made(tmp_path, family)
    found = run_sharded(checkpoint, TorchOps, 4, prompts_of(260, LENGTHS), experts=True)
    check_close(found, alone(checkpoint, TorchOps()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_have_the_bits_of_one_model(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype
) -> None:
    checkpoint = made(tmp_path, family, tied=tied, num_hidden_layers=3)
    ops = compiled(checkpoint, dtype)
    prompts = prompts_of(260, LENGTHS)
    found = run_stages(checkpoint, ops, [(0, 1), (1, 2), (2, 3)], prompts, chunk=20, dtype=dtype)
    for got, want in zip(found, alone(checkpoint, ops, chunk=20, dtype=dtype), strict=True):
        assert torch.equal(got, want)


def test_norms_of_all_heads_are_refused(tmp_path: Path) -> None:
    spec = made(tmp_path, "olmo2").spec
    with pytest.raises(CannotSplit, match="norms all query heads"):
        sharded(spec, RankPlace(Portion(0, 2)))
