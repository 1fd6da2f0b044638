"""Tests how the ranks of an engine connect, the part of each rank, and that their steps equal a single
process's."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistBackendError

from batchinfer.core.errors import CannotSplit, Unavailable
from batchinfer.engine.ranks import rank_groups
from batchinfer.engine.ranks.division import Division
from batchinfer.engine.ranks.rank_groups import _warm_up_groups
from batchinfer.engine.ranks.shards import check_division, rank_shard, stage_spans
from batchinfer.machine.spawning import Child
from batchinfer.models.parallel.group import SingleRankGroup
from batchinfer.models.parallel.shard import ModelShard, Portion
from batchinfer.models.spec.parameters import layer_parameters
from batchinfer.models.spec.spec import ExpertsSpec
from batchinfer.pipeline.workers.ranks.rendezvous import RendezvousFile
from batchinfer_kernels.routing import Routing
from tests.model_costs import llama_spec
from tests.thread_ranks import ThreadGroup, groups_of, of_ranks

CPU = torch.device("cpu")
LISTENS = "0A"  # a state in /proc/net/tcp
LOOPBACK = "0100007F"


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 3), (2, 2)])
def test_who_sends_tokens_has_sent_a_word(tensor: int, stages: int) -> None:
    division, words = Division(tensor, stages), dict[tuple[int, int], int]()

    class Counting(ThreadGroup):
        def send(self, x: torch.Tensor, to: int) -> None:
            words[self.rank, to] = words.get((self.rank, to), 0) + 1
            super().send(x, to)

    def meet(group: ThreadGroup) -> None:
        everyone = Counting(group.rank, group.exchange)
        _warm_up_groups(group.rank, division, (everyone, SingleRankGroup()), CPU)

    of_ranks(groups_of(division.ranks), meet)
    first = [rank for rank in range(1, division.ranks) if division.stage(rank) == 0]
    assert words == ({(0, rank): 1 for rank in first} if stages > 1 else {})


def test_different_gpus_do_not_form_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {0: [132, 9, 0], 1: [114, 9, 0]}

    def meet(group: ThreadGroup) -> str:
        with pytest.raises(Unavailable, match=r"different GPUs .*\[114, 9, 0\]") as found:
            _warm_up_groups(
                group.rank, Division(2, 1), (group, SingleRankGroup()), torch.device(CPU.type, group.rank)
            )
        return str(found.value)

    monkeypatch.setattr(rank_groups, "_kind", lambda device: torch.tensor(kinds[device.index]))
    monkeypatch.setattr(torch, "ones", lambda *size, **named: torch.zeros(1, dtype=torch.int64))
    assert len({*of_ranks(groups_of(2), meet)}) == 1


def test_the_error_of_gpus_that_cannot_connect_names_the_remedy() -> None:
    class Broken(SingleRankGroup):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            raise DistBackendError("NCCL error: unhandled system error")

    with pytest.raises(Unavailable, match=r"unhandled system error; a container needs .*--shm-size"):
        _warm_up_groups(0, Division(2, 1), (Broken(), SingleRankGroup()), CPU)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_each_rank_has_one_seat_and_neighbours_are_mutual(tensor: int, stages: int, experts: int) -> None:
    division = Division(tensor, stages, experts=experts)
    every = range(division.ranks)
    seats = {(division.stage(rank), division.peer(rank)) for rank in every}
    assert seats == {(stage, part) for stage in range(stages) for part in range(tensor * experts)}
    assert division.ranks == len(seats)
    assert division.stage(0) == stages - 1
    for rank in every:
        behind = division.neighbour(rank, 1)
        if behind is None:
            assert division.stage(rank) == stages - 1
            continue
        assert division.stage(behind) == division.stage(rank) + 1
        assert division.peer(behind) == division.peer(rank)
        assert division.neighbour(behind, -1) == rank


def test_stages_cover_the_layers_in_order_and_the_one_with_the_head_has_fewer() -> None:
    spec = llama_spec(12, 64, 128, 4, 2, 16, vocab=100)
    for stages in (1, 2, 3, 5, 12):
        spans = stage_spans(spec, stages)
        assert [at for first, end in spans for at in range(first, end)] == list(range(12))
        assert len(spans) == stages
    layer = sum(map(prod, layer_parameters(spec.layers[0]).values()))
    heavy = replace(spec, vocab=4 * layer // spec.hidden)  # the head weighs four layers
    assert stage_spans(heavy, 2) == [(0, 8), (8, 12)]
    with pytest.raises(CannotSplit, match="at most 12"):
        stage_spans(spec, 13)


def test_the_error_of_an_impossible_division_names_possible_ones() -> None:
    spec = llama_spec(3, 64, 128, 4, 2, 16, vocab=100)
    with pytest.raises(CannotSplit, match=r"can be divided among 1, 2"):
        check_division(spec, Division(tensor=3))
    check_division(spec, Division(tensor=2, stages=3))
    assert rank_shard(0, Division(), spec).is_whole


def test_ranks_have_whole_experts_if_they_divide_evenly() -> None:
    spec = llama_spec(2, 64, 128, 4, 2, 16, vocab=100)
    for count, experts in ((6, Portion(1, 2)), (5, None)):
        routed = ExpertsSpec(Routing(count, 2), 128, "silu")
        model = replace(spec, layers=tuple(replace(layer, feed_forward=routed) for layer in spec.layers))
        assert rank_shard(1, Division(tensor=2), model) == ModelShard(Portion(1, 2), experts)
        check_division(model, Division(tensor=2))


def test_expert_ranks_have_equal_shares_and_all_other_weights() -> None:
    spec = llama_spec(3, 64, 128, 4, 2, 16, vocab=100)
    routed = ExpertsSpec(Routing(6, 2), 128, "silu")
    model = replace(spec, layers=tuple(replace(layer, feed_forward=routed) for layer in spec.layers))
    assert rank_shard(4, Division(stages=2, experts=3), model) == ModelShard(
        experts=Portion(1, 3), layers=(0, 2)
    )
    check_division(model, Division(stages=3, experts=2))
    with pytest.raises(CannotSplit, match=r"engine.expert_parallel_size can be 1, 2, 3, 6$"):
        check_division(model, Division(experts=4))
    with pytest.raises(CannotSplit, match=r"engine.expert_parallel_size can be 1$"):
        check_division(spec, Division(experts=2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ranks_listen_only_on_loopback() -> None:
    rendezvous = RendezvousFile(Division(tensor=2))
    task = f"{__name__}:listening"
    children = [Child(task, rendezvous.rank_config(rank), files=rendezvous.files) for rank in (0, 1)]
    try:
        found = [child.connection.recv() for child in children]
    finally:
        for child in children:
            child.close()
    assert all(found), "gloo listens somewhere"
    assert {address for addresses in found for address in addresses} == {LOOPBACK}


def listening(rank_config: object, connection: object) -> None:
    """Connect to the other rank, and send the addresses on which this process listens."""
    import torch

    from batchinfer.engine.ranks.rank_groups import join_ranks

    rank_groups = join_ranks(rank_config, torch.device("cpu"))  # type: ignore[arg-type]
    rank_groups.everyone.all_reduce(torch.ones(1))
    own = {
        os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()
    }
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    connection.send(found)  # type: ignore[attr-defined]
    connection.recv()  # type: ignore[attr-defined]
