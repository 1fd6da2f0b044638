"""Tests experts that are placed by load, hot ones on several ranks: bits equal one process's, and reads are
minimal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from batchinfer.machine.links import link_between
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.layers import Experts
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.parallel.expert_placement import ExpertPlacement, Shares
from batchinfer.models.parallel.group import SingleRankGroup
from batchinfer.models.parallel.shard import ModelShard, Portion
from batchinfer.models.parallel.shard_spec import rank_traffic, shard_spec
from batchinfer.models.parallel.sharded_ops import HeldExperts
from batchinfer.models.spec.parameters import layer_parameters, parameter_count
from batchinfer.models.spec.spec import ExpertsSpec
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.routing import Routing
from tests.batchinfer.models.parallel.parts import run_sharded
from tests.batchinfer.models.parallel.test_sharded_logits import (
    LENGTHS,
    QUANTIZED,
    alone,
    check_close,
    check_equal,
    compiled,
)
from tests.batchinfer.models.parallel.test_sliced_reading import read_all, store
from tests.batchinfer.models.test_logits import prompts_of
from tests.checkpoints import make_checkpoint

SIZES = {"qwen3_moe": {"moe_intermediate_size": 64}}


def placement_of(checkpoint: Checkpoint, ranks: int = 2) -> ExpertPlacement:
    """Return every other expert per rank, in a different order per layer; the first expert is on all ranks,
    and the second one also on the last rank."""

    def shares(layer: int, experts: int) -> Shares:
        own = [
            {(number + layer) % experts for number in range(rank, experts, ranks)} for rank in range(ranks)
        ]
        for share in own:
            share.add(layer % experts)
        own[-1].add((1 + layer) % experts)
        return tuple(tuple(sorted(share)) for share in own)

    layers = [layer.feed_forward for layer in checkpoint.spec.layers]
    return ExpertPlacement(
        tuple(
            shares(index, fed.routing.experts) if isinstance(fed, ExpertsSpec) else ()
            for index, fed in enumerate(layers)
        )
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_placed_experts_have_the_bits_of_one_process(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    """Any rank may compute a token's expert, with any chunks."""
    make_checkpoint(tmp_path, family, **QUANTIZED, **SIZES.get(family, {}))
    checkpoint = inspect_checkpoint(tmp_path)
    prompts, how = prompts_of(260, LENGTHS), {"quantization": quantization, "chunk": 20}
    placement = placement_of(checkpoint)
    found = run_sharded(
        checkpoint, compiled, 2, prompts, tensor=False, experts=True, exact=True, placement=placement, **how
    )
    check_equal(found, alone(checkpoint, compiled(checkpoint.spec), **how))


def test_tensor_ranks_have_placed_experts_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", num_local_experts=4)
    checkpoint = inspect_checkpoint(tmp_path)
    prompts = prompts_of(260, LENGTHS)
    placed = placement_of(checkpoint)
    found = run_sharded(checkpoint, compiled, 2, prompts, experts=True, placement=placed)
    check_close(found, alone(checkpoint, compiled(checkpoint.spec)))


@pytest.mark.parametrize("form", ["plain", "mxfp4", "awq"])
def test_a_rank_reads_only_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    if form == "plain":
        make_checkpoint(tmp_path, "gpt_oss")
        stored = inspect_checkpoint(tmp_path)
    else:
        stored, _ = store(tmp_path, form, monkeypatch)
    held = stored.for_quantization(stored.stored_quantization)
    placement = placement_of(held, 3)
    every, own = read_all(held, ModelShard()), 0
    for rank in range(3):
        place = ModelShard(experts=Portion(rank, 3), placement=placement)
        spec, count = shard_spec(held.spec, place), read_all(held, place)
        for layer, shares in zip(spec.layers, placement.layers, strict=True):
            names = {name.split(".")[1] for name in layer_parameters(layer) if name.startswith("expert.")}
            assert names == {str(number) for number in (shares[rank] if shares else ())}
        if form == "plain":
            assert count == 4 * parameter_count(spec)
        assert count < every
        own += count
    assert own > every  # repeated experts, and weights that all ranks have


def test_the_placement_of_experts_does_not_change_the_traffic(tmp_path: Path) -> None:
    """Grouping experts that the same tokens choose saves nothing (docs/measurements/layouts.md)."""
    make_checkpoint(tmp_path, "mixtral", num_local_experts=4)
    checkpoint = inspect_checkpoint(tmp_path)
    places = [ModelShard(experts=Portion(1, 2), placement=one) for one in (None, placement_of(checkpoint))]
    ranges, placed = (
        rank_traffic(shard_spec(checkpoint.spec, place), 2, only_experts=True) for place in places
    )
    assert ranges == placed
    link, states = link_between("NVIDIA H100 80GB HBM3"), 1024 * 4096 * 2  # of Qwen3-235B-A22B
    assert round(link.all_reduce_s(states, 8) * 1e6) == 71
    assert round(link.all_reduce_s(states, 8) * 94e3, 1) == 6.7
    others = 7 * (1 - math.comb(112, 8) / math.comb(128, 8))  # ranks with one of a token's 8 of 128 experts
    assert round(others, 1) == 4.7
    sent = others * states / 8  # by each rank, and the same back
    assert round(2 * sent / 1e6, 1) == 9.8
    assert round(2e6 * 7 * link.send_s(sent / 7)) == 57


class Counting(Experts):
    """Returns ones for each row, and counts the rows."""

    skips = True

    def __init__(self, experts: int) -> None:
        self.loads = torch.zeros(experts + 1, dtype=torch.int64)

    def __call__(self, x: torch.Tensor, choice: Choice, counted: torch.Tensor | None = None) -> torch.Tensor:
        self.loads += torch.bincount(choice.experts.flatten(), minlength=len(self.loads))
        return torch.ones_like(x)


def test_copies_take_turns_by_the_places_of_tokens() -> None:
    """Each token belongs to one rank; three ranks have expert 1, one has expert 0."""
    choice = Choice(torch.tensor([[1]] * 9 + [[0]] * 2), torch.ones(11, 1))
    placement, found = ExpertPlacement((((0, 1), (1,), (1,)),)), []
    for rank in range(3):
        held = placement.held(0, rank)
        spec, inner = ExpertsSpec(Routing(2, 1), 8, "silu", held=held), Counting(len(held))
        experts = HeldExperts(inner, TorchOps(), spec, SingleRankGroup(), exact=False)
        experts(torch.zeros(11, 4), choice)
        assert experts.loads.tolist() == [2, 9]
        found.append(inner.loads.tolist())
    assert found == [[2, 3, 6], [3, 8], [3, 8]]  # the last count is of rows that are other ranks'
